"""What autograd keeps of an operator, by the table of the module: known formulas of CUDA's kernels."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.api import analyze
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.trial.accelerator_norms import trial_norms

ROWS, WIDTH = 10, 16
HALF = torch.bfloat16


def kept(device_type: str, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> int:
    """Bytes that the function keeps beside `tensors`."""
    own, found = {each.untyped_storage()._cdata for each in tensors}, dict[int, int]()
    alive: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), trial_norms(device_type):
        function(*tensors)
    return sum(nbytes for storage, nbytes in found.items() if storage not in own)


def made(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_an_rms_norm_keeps_one_number_per_row_on_an_accelerator(dtype: torch.dtype):
    with FakeTensorMode():
        given = made(ROWS, WIDTH, dtype=dtype), made(WIDTH, dtype=dtype)
        norm = lambda x, weight: F.rms_norm(x, (WIDTH,), weight)  # noqa: E731
        assert kept("cuda", norm, *given) == 4 * ROWS
        assert kept("cuda", lambda x: F.rms_norm(x, (WIDTH,)), given[0]) == 4 * ROWS
        assert kept("cpu", norm, *given) > 4 * ROWS * WIDTH


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_of_two_dtypes_it_is_the_formula_everywhere():
    with FakeTensorMode():
        given = made(ROWS, WIDTH), made(WIDTH, dtype=torch.float32)
        norm = lambda x, weight: F.rms_norm(x, (WIDTH,), weight)  # noqa: E731
        assert kept("cuda", norm, *given) == kept("cpu", norm, *given)


def test_gradients_have_the_shapes_of_what_they_are_for():
    with FakeTensorMode(), trial_norms("cuda"):
        x, weight = made(2, ROWS, WIDTH), made(WIDTH)
        F.rms_norm(x, (WIDTH,), weight).sum().backward()
        assert [(each.grad.shape, each.grad.dtype) for each in (x, weight)] == [
            (x.shape, HALF),
            (weight.shape, HALF),
        ]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_keeps_its_output_and_a_float32_per_query_as_flash_attention_does(
    kv_heads: int, *, is_causal: bool
):
    batch, heads, queries, width = 2, 4, 40, 16
    with FakeTensorMode():
        given = (
            made(batch, heads, queries, width),
            *(made(batch, kv_heads, queries, width) for _ in "kv"),
        )
        attention = lambda *qkv: F.scaled_dot_product_attention(  # noqa: E731
            *qkv, is_causal=is_causal, enable_gqa=True
        )
        assert kept("cuda", attention, *given) == batch * heads * queries * (2 * width + 4)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_the_memory_of_a_block_is_that_of_the_device():
    loss = Loss(lambda outputs, batch: outputs.sum(), lambda batch: torch.tensor(4.0), targets=())
    analyzed = analyze(Normed, {"x": torch.ones(4, 6)}, loss=loss)
    cpu, cuda = (analyzed.measure_memory(torch.float32, torch.float32, each) for each in ("cpu", "cuda"))
    norm = 0
    assert (cpu.block_calls[norm].block_call, cuda.block_calls[norm].saved_activations.per_sample) == (
        "layers.0.0",
        4,
    )
    assert cpu.block_calls[norm].saved_activations.per_sample >= 4 * 6
