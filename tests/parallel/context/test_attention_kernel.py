"""One block of attention: output, log-sum-exp and gradients of torch's kernel and of plain matrix products;
merged blocks equal the whole.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness.cuda_guard import run_with_fake_cuda, why_no_fake_cuda
from meshwright.parallel.context import attention_kernel
from meshwright.parallel.context.attention_kernel import attention, attention_backward
from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs
from tests.parallel.context.dense_attention import MASKS, dense, gap, mask_of, sample, with_gradients

SCALE, LENGTH = 0.6, 13
EXACT = 1e-13  # of float64, over sums of a dozen


def lse_of(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> torch.Tensor:
    """By its definition."""
    scores = SCALE * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.logsumexp(-1)


@pytest.fixture(params=["kernel", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Torch's kernel, or products and a softmax over a few rows of queries at once."""
    if request.param == "plain":
        monkeypatch.setattr(attention_kernel, "_choose_kernel", lambda query, value, mask: "")
        monkeypatch.setattr(attention_kernel, "MAX_SCORES", 4 * LENGTH * 8)
    return request.param


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("groups", "values"), [(4, 5), (2, 3), (1, 7)])
def test_output_lse_and_gradients_are_those_of_the_formula(
    path: str, name: str, groups: int, values: int
) -> None:
    *given, grad = sample(LENGTH, groups=groups, values=values)
    said = {"mask": mask_of(name, LENGTH), "causal": name == "causal", "scale": SCALE}
    out, lse = attention(*given, **said)
    of_mask = torch.zeros_like(said["mask"]) if name == "learned" else None
    found = [out, *attention_backward(grad, *given, out, lse, **said, mask_grad=of_mask)]
    if name == "learned":
        said["mask"].requires_grad_()
    *true, true_of_mask = with_gradients([*given, grad], **said)
    assert max(map(gap, found, true)) < EXACT
    torch.testing.assert_close(lse, lse_of(*given[:2], said["mask"], causal=said["causal"]).detach())
    if of_mask is not None:
        assert gap(of_mask, true_of_mask) < EXACT


def test_a_mask_that_all_heads_and_samples_share_has_its_gradient_summed() -> None:
    *given, grad = sample(LENGTH)
    mask = torch.randn(
        1, 1, 1, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    out, lse = attention(*given, mask=mask.detach(), scale=SCALE)
    of_mask = torch.zeros_like(mask)
    attention_backward(grad, *given, out, lse, mask=mask.detach(), scale=SCALE, mask_grad=of_mask)
    true = with_gradients([*given, grad], mask, causal=False, scale=SCALE)[-1]
    assert gap(of_mask, true) < EXACT


@pytest.mark.parametrize("name", ["none", "padding", "bias"])
def test_blocks_merge_to_the_whole_and_their_gradients_add_up(path: str, name: str) -> None:
    query, key, value, grad = sample(LENGTH)
    mask, cuts = mask_of(name, LENGTH), [(0, 5), (5, 5), (5, 12), (12, 13)]  # one is empty

    def parts() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        return [(key[:, :, a:b], value[:, :, a:b], None if mask is None else mask[..., a:b]) for a, b in cuts]

    out = torch.zeros_like(grad)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=torch.float64)
    for k, v, m in parts():
        out, lse = merge_outputs(out, lse, *attention(query, k, v, mask=m, scale=SCALE))
    true = with_gradients([query, key, value, grad], mask, causal=False, scale=SCALE)
    shares = [attention_backward(grad, query, k, v, out, lse, mask=m, scale=SCALE) for k, v, m in parts()]
    assert gap(out, true[0]) < EXACT
    assert gap(sum(share[0] for share in shares), true[1]) < EXACT
    assert gap(torch.cat([share[1] for share in shares], 2), true[2]) < EXACT
    assert gap(torch.cat([share[2] for share in shares], 2), true[3]) < EXACT


def test_a_query_that_attends_to_nothing_is_zero_and_has_no_weight(path: str) -> None:
    *given, grad = sample(LENGTH)
    mask = mask_of("padding", LENGTH)
    out, lse = attention(*given, mask=mask, scale=SCALE)
    blind = LENGTH // 2
    assert out[1, :, :blind].eq(0).all()
    assert lse[1, :, :blind].eq(float("-inf")).all()
    assert lse[0].isfinite().all()
    found = attention_backward(grad, *given, out, lse, mask=mask, scale=SCALE)
    assert all(each.isfinite().all() for each in found)
    assert found[0][1, :, :blind].eq(0).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_no_queries_and_no_keys_give_nothing(queries: int, keys: int) -> None:
    *given, grad = sample(queries, keys)
    out, lse = attention(*given, scale=SCALE)
    assert out.shape == grad.shape
    assert out.eq(0).all()
    assert lse.eq(float("-inf")).all()
    found = attention_backward(grad, *given, out, lse, scale=SCALE)
    assert [each.shape for each in found] == [each.shape for each in given]
    assert all(each.eq(0).all() for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["none", "causal", "window"])
def test_narrow_dtypes_round_no_more_than_torch_does(dtype: torch.dtype, name: str) -> None:
    exact = sample(32)
    given = [each.to(dtype) for each in exact]
    said = {"mask": mask_of(name, 32), "causal": name == "causal", "scale": SCALE}
    out, lse = attention(*given[:3], **said)
    found = [out, *attention_backward(given[3], *given[:3], out, lse, **said)]
    true = with_gradients([each.double() for each in given], **said)
    assert lse.dtype == torch.float32
    assert {each.dtype for each in found} == {dtype}
    assert max(map(gap, [each.double() for each in found], true)) < 16 * torch.finfo(dtype).eps


def test_the_matmul_path_keeps_no_more_scores_in_memory_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    scores: Callable[..., torch.Tensor] = attention_kernel._scores

    def seen(*given: object) -> torch.Tensor:
        made = scores(*given)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(attention_kernel, "_scores", seen)
    monkeypatch.setattr(attention_kernel, "MAX_SCORES", 1000)
    query, key, value, grad = (each.to(torch.float64) for each in sample(24))
    out, lse = attention_kernel.math_attention(query, key, value, None, True, SCALE)
    attention_kernel.math_attention_backward(grad, query, key, value, out, lse, None, True, SCALE, None)
    assert max(sizes) <= 1000
    assert len(sizes) == 2 * 5


def test_an_lse_of_one_block_in_place_of_all_is_noticed() -> None:
    query, key, value, grad = sample(LENGTH)
    whole = attention(query, key, value, scale=SCALE)
    wrong = attention(query, key[:, :, :6], value[:, :, :6], scale=SCALE)
    true = with_gradients([query, key, value, grad], None, causal=False, scale=SCALE)[2]
    shares = [
        attention_backward(grad, query, key[:, :, :6], value[:, :, :6], *each, scale=SCALE)[1]
        for each in (whole, wrong)
    ]
    assert gap(shares[0], true[:, :, :6]) < EXACT
    assert gap(shares[1], true[:, :, :6]) > 0.01


def test_the_formula_is_what_torch_computes() -> None:
    query, key, value, _ = sample(LENGTH, values=5)
    torch_own = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=SCALE, enable_gqa=True
    )
    assert gap(torch_own, dense(query, key, value, None, causal=True, scale=SCALE)) < EXACT


@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_other_devices_are_called_with_their_own_arguments(masked: bool) -> None:
    given = [each.to("meta", torch.bfloat16) for each in sample(LENGTH)]
    *inputs, grad = given
    if masked:
        mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta")
        out, lse = attention_kernel._efficient(*inputs, mask, False, SCALE)
        found = attention_kernel._efficient_backward(grad, *inputs, out, lse, mask, False, SCALE)
    else:
        out, lse = attention_kernel._flash(*inputs, False, SCALE)
        found = attention_kernel._flash_backward(grad, *inputs, out, lse, False, SCALE)
    assert (out.shape, lse.shape) == (grad.shape, grad.shape[:3])
    assert [each.shape for each in found] == [each.shape for each in inputs]


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, cudnn: bool) -> None:
    """A GPU of `capability`, on which torch can use cuDNN's attention or not."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: cudnn)


@pytest.mark.parametrize(
    ("capability", "cudnn", "dtype", "width", "kernel"),
    [
        ((9, 0), True, torch.bfloat16, 128, "cudnn"),
        ((9, 0), True, torch.float16, 20, "cudnn"),
        ((9, 0), False, torch.bfloat16, 128, "flash"),
        ((9, 0), True, torch.bfloat16, 256, "flash"),
        ((8, 0), True, torch.bfloat16, 128, "flash"),
        ((9, 0), True, torch.float32, 128, "efficient"),
    ],
)
def test_cudnn_is_taken_from_hopper_on_where_torch_can_use_it(
    capability: tuple[int, int],
    cudnn: bool,
    dtype: torch.dtype,
    width: int,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu(monkeypatch, capability, cudnn=cudnn)
    with FakeTensorMode():
        query, value = (torch.empty(1, heads, 6, width, dtype=dtype, device="cuda") for heads in (4, 2))
        assert attention_kernel._choose_kernel(query, value, None) == kernel


ON_CUDNN = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from meshwright.parallel.context import attention_kernel as kernel
from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs

kernel._choose_kernel = lambda query, value, mask: "cudnn"
with FakeTensorMode():
    query, grad = (torch.empty(2, 4, 6, n, dtype=torch.bfloat16, device="cuda") for n in (20, 12))
    key, value = (torch.empty(2, 2, 6, n, dtype=torch.bfloat16, device="cuda") for n in (20, 12))
    out, lse = kernel.attention(query, key, value, causal=True, scale=0.6)
    merged, total = torch.zeros_like(out, dtype=torch.float32), torch.zeros_like(lse)
    merge_outputs(merged[:, :, :6], total[:, :, :6], out, lse)
    found = kernel.attention_backward(grad, query, key, value, out, total, causal=True, scale=0.6)
for each in (out, lse, *found):
    print(tuple(each.shape), each.dtype)
"""


@pytest.mark.skipif(bool(why_no_fake_cuda()), reason=why_no_fake_cuda())
def test_calls_of_cudnn_are_well_formed_and_its_log_sum_exp_can_be_merged() -> None:
    assert run_with_fake_cuda(["-c", ON_CUDNN]).splitlines() == [
        "(2, 4, 6, 12) torch.bfloat16",
        "(2, 4, 6) torch.float32",
        "(2, 4, 6, 20) torch.bfloat16",
        "(2, 2, 6, 20) torch.bfloat16",
        "(2, 2, 6, 12) torch.bfloat16",
    ]


def test_the_memory_efficient_backward_takes_out_and_grad_as_its_kernel_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *given, grad = sample(LENGTH, groups=2, values=3)
    mask, calls = mask_of("padding", LENGTH), []

    def backward(*args: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        calls.append(args)
        return tuple(map(torch.zeros_like, args[1:4]))

    op = SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward)
    monkeypatch.setattr(attention_kernel, "aten", op)
    out, lse = grad.flip(2), torch.zeros(grad.shape[:3])
    attention_kernel._efficient_backward(grad, *given, out, lse, mask, False, SCALE)
    for each, expected in ((calls[0][0], grad), (calls[0][5], out)):  # in memory [B, n, H, e], and no gaps
        assert each.transpose(1, 2).is_contiguous()
        assert torch.equal(each[..., : expected.shape[-1]], expected)
