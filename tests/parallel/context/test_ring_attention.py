"""Ring attention on threads equals dense attention, forward and backward, for every mask, length and load
balance.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.collectives.group import Group, World
from meshwright.parallel.context import block_mask
from meshwright.parallel.context.block_mask import CPU_CALL_COST, IntervalMask, KeyIntervals
from meshwright.parallel.context.ring import LoadBalance, ring_sharding
from meshwright.parallel.context.ring_attention import ring_attention
from meshwright.parallel.context.ring_geometry import AttentionRing, ShiftFn
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sequence_sharding import SequenceSharding, TokenRange
from meshwright.testing.ranks import run_on_threads
from tests.parallel.context.dense_attention import MASKS, gap, mask_of, sample, with_gradients

SCALE, EXACT = 0.6, 1e-12
AROUND = {"mask": None, "causal": False}
Ran = tuple[list[torch.Tensor], list[list[torch.Tensor]]]


def shifting(group: Group) -> ShiftFn:
    """Returns what a circle shifts by."""
    return lambda output, tensor: group.shift(output, tensor, action="ring")


def run(
    given: Sequence[torch.Tensor],
    ranks: int,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    balance: str = "zigzag",
    shift: Callable[[Group], ShiftFn] = shifting,
    during: Callable[[World], Any] | None = None,
) -> list[torch.Tensor | None]:
    """The output and the gradients of a ring of so many ranks, put together."""
    sharding, (length, keys) = ring_sharding(balance, ranks), (given[0].shape[2], given[1].shape[2])

    def play(world: World) -> list[torch.Tensor | None]:
        group = world.group(["cp"])
        mine, spans = (
            sharding.token_ranges(length, group.index),
            tuple(sharding.token_ranges(keys, index) for index in range(ranks)),
        )
        circle = AttentionRing(group.index, mine, spans, SCALE, causal, shift(group))
        query, grad = (_of(mine, given[at]) for at in (0, 3))
        own = [
            query.requires_grad_(),
            *(_of(spans[group.index], each).requires_grad_() for each in given[1:3]),
        ]
        mask_rows = None if mask is None else _of(mine, mask.detach()).requires_grad_(mask.requires_grad)
        with during(world) if during else torch.enable_grad():
            out = ring_attention(circle, *own, mask_rows)
            out.backward(grad)
        return [out.detach(), *(each.grad for each in own), None if mask_rows is None else mask_rows.grad]

    parts = run_on_threads(play, Mesh(cp=ranks))
    return [
        _joined(sharding, [part[at] for part in parts], keys if at in (2, 3) else length) for at in range(5)
    ]


def _of(spans: Sequence[TokenRange], tensor: torch.Tensor) -> torch.Tensor:
    """The tokens of one rank, dim 2."""
    return torch.cat([tensor[:, :, :0], *(tensor[:, :, begin:end] for begin, end in spans)], 2)


def _joined(
    sharding: SequenceSharding, parts: Sequence[torch.Tensor | None], length: int
) -> torch.Tensor | None:
    """The parts of all ranks in the order of positions."""
    if parts[0] is None:
        return None
    places = [
        torch.arange(*span)
        for index in range(sharding.num_ranks)
        for span in sharding.token_ranges(length, index)
    ]
    return torch.cat([part for part in parts if part is not None], 2)[:, :, torch.cat(places).argsort()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("length", [19, 24, 3])
def test_a_ring_computes_what_one_device_does(ranks: int, name: str, length: int) -> None:
    given, mask = sample(length), mask_of(name, length)
    if mask is not None and name == "learned":
        mask.requires_grad_()
    true = with_gradients(given, mask, causal=name == "causal", scale=SCALE)
    for balance in get_args(LoadBalance):
        found = run(given, ranks, mask, causal=name == "causal", balance=balance)
        for mine, right in zip(found, true, strict=True):
            assert (mine is None) == (right is None)
            assert mine is None or gap(mine, right) < EXACT


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_keys_and_values_are_sent_without_repetition(groups: int) -> None:
    given, sent = sample(12, groups=groups), list[int]()

    def counting(group: Group) -> ShiftFn:
        def shift(output: torch.Tensor, tensor: torch.Tensor) -> Any:
            sent.append(tensor.numel())
            return group.shift(output, tensor, action="ring")

        return shift

    found = run(given, 3, causal=True, shift=counting)
    assert max(map(gap, found[:4], with_gradients(given, None, causal=True, scale=SCALE)[:4])) < EXACT
    assert set(sent) == {2 * groups * 4 * (5 + 3)}  # rows, heads of keys, tokens of a rank, widths
    assert len(sent) == 3 * (2 + 4)


@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_may_be_of_different_length(causal: bool) -> None:
    given = sample(11, 17)
    found = run(given, 3, causal=causal)
    assert max(map(gap, found[:4], with_gradients(given, None, causal=causal, scale=SCALE)[:4])) < EXACT


@pytest.mark.parametrize("name", ["causal", "window"])
def test_float32_rounds_no_more_than_dense_attention(name: str) -> None:
    given = [each.float() for each in sample(64)]
    said = {"mask": mask_of(name, 64), "causal": name == "causal"}
    true = with_gradients([each.double() for each in given], **said, scale=SCALE)[:4]
    own = with_gradients(given, **said, scale=SCALE)[:4]
    for mine, theirs, right in zip(run(given, 4, **said), own, true, strict=False):
        assert gap(mine.double(), right) < 4 * gap(theirs.double(), right) + 1e-7


def test_bfloat16_is_merged_and_summed_in_float32() -> None:
    given = [each.bfloat16() for each in sample(64)]
    true = with_gradients([each.double() for each in given], None, causal=True, scale=SCALE)[:4]
    found = run(given, 4, causal=True)[:4]
    assert {each.dtype for each in found} == {torch.bfloat16}
    assert max(map(gap, [each.double() for each in found], true)) < 2e-2


class Products(TorchDispatchMode):
    """Counts the pairs of a query and a key that kernels look at, forward and backward,
    as they are called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if "scaled_dot_product" in name:
            back = name.endswith("backward")
            query, key, (causal,) = args[back], args[back + 1], args[7 if back else 4 :][:1] or (False,)
            rows, columns = query.shape[2], key.shape[2]
            pairs = query.shape[0] * (rows * (rows + 1) // 2 if causal else rows * columns)
            self.forward, self.backward = self.forward + pairs * (not back), self.backward + pairs * back
        return func(*args, **(kwargs or {}))


def executed(ranks: int, length: int, samples: int = 1, **said: Any) -> list[int]:
    """The pairs that each rank's kernels look at."""
    counts = {world: Products() for world in range(ranks)}
    run(sample(length, samples=samples), ranks, during=lambda world: counts[world.rank], **said)
    assert all(count.forward == count.backward for count in counts.values())
    return [counts[rank].forward for rank in range(ranks)]


@pytest.mark.parametrize("length", [256, 509])
def test_the_busiest_of_four_ranks_does_hardly_more_than_the_mean(length: int) -> None:
    pairs = executed(4, length, causal=True)
    assert max(pairs) * 4 / sum(pairs) < 1.02
    assert sum(pairs) == length * (length + 1) // 2  # and nothing that is masked


def test_contiguous_shards_give_the_last_rank_seven_quarters_of_the_mean() -> None:
    pairs = executed(4, 512, causal=True, balance="contiguous")
    assert max(pairs) * 4 / sum(pairs) == pytest.approx(1.75, abs=0.01)


def test_fully_masked_blocks_are_not_computed() -> None:
    window, full = (
        sum(executed(4, 96, mask=mask)) for mask in (mask_of("window", 96), torch.ones(1, 1, 96, 96) > 0)
    )
    assert full == 96 * 96
    assert window < 0.7 * full


def documents(length: int, draw: torch.Generator, samples: int = 1) -> torch.Tensor:
    """A mask of documents that begin anywhere, in each row elsewhere."""
    many = int(torch.randint(1, 9, (), generator=draw))
    begins = torch.rand(samples, length, generator=draw).argsort(1)[:, :many]
    number = torch.zeros(samples, length).scatter_(1, begins, 1.0).cumsum(1)
    return (
        (number[:, :, None] == number[:, None]) & torch.ones(length, length, dtype=torch.bool).tril()
    ).unsqueeze(1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("samples", [1, 2])
def test_striped_packed_documents_are_balanced_wherever_they_begin(seed: int, samples: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1500, 2500, (), generator=draw))
    mask = documents(length, draw, samples)
    pairs = executed(4, length, samples=samples, mask=mask, balance="striped")
    assert max(pairs) * 4 / sum(pairs) < 1.05
    assert sum(pairs) < 1.6 * int(mask.sum())


@pytest.mark.parametrize("length", [512, 1021])
def test_striped_causal_masks_and_windows_are_balanced(length: int) -> None:
    causal, window = (
        executed(4, length, **said, balance="striped")
        for said in ({"causal": True}, {"mask": mask_of("window", length)})
    )
    for pairs in (causal, window):
        assert max(pairs) * 4 / sum(pairs) < 1.05
    assert sum(causal) == length * (length + 1) // 2


@pytest.mark.parametrize("balance", get_args(LoadBalance))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_samples_with_different_documents_equal_one_device(ranks: int, balance: str) -> None:
    draw = torch.Generator().manual_seed(ranks)
    for length in (5, 33, 130):
        given, mask = sample(length, samples=3), documents(length, draw, samples=3)
        true = with_gradients(given, mask, causal=False, scale=SCALE)
        found = run(given, ranks, mask, balance=balance)
        assert max(map(gap, found[:4], true[:4])) < EXACT


def test_a_step_of_a_causal_ring_is_one_call_of_the_kernel() -> None:
    length = 512
    for balance in ("zigzag", "striped"):
        sharding = ring_sharding(balance, 4)
        spans = tuple(sharding.token_ranges(length, index) for index in range(4))
        for rank in range(4):
            circle = AttentionRing(rank, spans[rank], spans, SCALE, True, shift=lambda output, tensor: None)
            view = IntervalMask(circle, KeyIntervals.without_mask(circle), CPU_CALL_COST)
            assert [len(view.blocks(other)) for other in range(4)] == [
                3 if other == rank else 1 for other in range(4)
            ]


def test_gradients_that_do_not_return_to_their_rank_are_noticed() -> None:
    def losing(group: Group) -> ShiftFn:
        calls = list[int]()

        def shift(output: torch.Tensor, tensor: torch.Tensor) -> Any:
            calls.append(1)
            if len(calls) < 6:  # of three ranks: two forward, and backward two of keys and one of gradients
                return group.shift(output, tensor, action="ring")
            output.zero_()
            return group.shift(torch.empty_like(output), tensor, action="ring")

        return shift

    given = sample(12)
    true = with_gradients(given, None, causal=False, scale=SCALE)
    found = run(given, 3, shift=losing)
    assert gap(found[1], true[1]) < EXACT
    assert gap(found[2], true[2]) > 0.01
    assert gap(found[3], true[3]) > 0.01


def test_a_causal_diagonal_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rule = block_mask.KeyIntervals.without_mask
    monkeypatch.setattr(
        block_mask.KeyIntervals,
        "without_mask",
        lambda circle: KeyIntervals((true := by_rule(circle)).first, true.end + 1),
    )
    given = sample(24)
    true = with_gradients(given, None, causal=True, scale=SCALE)
    assert gap(run(given, 4, causal=True)[0], true[0]) > 0.01


def test_a_ring_in_the_wrong_direction_is_noticed() -> None:
    given = sample(24)
    true = with_gradients(given, None, causal=True, scale=SCALE)
    backwards = run(
        given,
        3,
        causal=True,
        shift=lambda group: lambda output, tensor: group.shift(output, tensor, offset=2),
    )
    assert gap(backwards[0], true[0]) > 0.01


def test_tensors_passed_on_may_be_overwritten():
    given = sample(7)
    query, key, value = (each.requires_grad_() for each in given[:3])
    own_range = ((0, 7),)

    def play(world: World) -> list[torch.Tensor]:
        circle = AttentionRing(0, own_range, (own_range,), SCALE, True, shifting(world.group(["cp"])))
        out = ring_attention(circle, query, key, value, None)
        handed = out.transpose(1, 2).reshape(out.shape[0], 7, -1)
        return [*torch.autograd.grad(handed.mul_(2).sum(), (query, key, value))]

    (found,) = run_on_threads(play, Mesh())
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=SCALE, enable_gqa=True
    )
    for mine, theirs in zip(found, torch.autograd.grad(2 * out.sum(), (query, key, value)), strict=True):
        assert gap(mine, theirs) < EXACT
