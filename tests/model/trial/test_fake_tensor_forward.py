"""Information from one forward on fake tensors: operations, block calls, writes and parameter users."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.model.blocks.discovery import find_blocks
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.trial.fake_tensor_forward import (
    PROBE_BATCH,
    TrialFindings,
    make_fake,
    param_block_calls,
    read_trial,
    record_trial,
)
from tests.model.block_backward import analyze_model

X = torch.linspace(-1, 1, PROBE_BATCH * 6).view(PROBE_BATCH, 6)


def seen(module: nn.Module, x: torch.Tensor = X, announced: list[str] | None = None) -> TrialFindings:
    told = [] if announced is None else announced
    trial = record_trial(module.train(), find_blocks(module), told.append, lambda: module(x))
    return read_trial(trial.recording)


def test_operations_and_the_stream_of_a_llama_are_those_counted_by_hand():
    width, inner, heads, kv_heads, vocabulary, tokens = 32, 88, 4, 2, 61, 16
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        use_cache=False,
    )
    model_spec = analyze_model(
        lambda: LlamaForCausalLM(config), {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
    ).model_spec
    head = width // heads
    projections = 2 * tokens * width * (heads * head + 2 * kv_heads * head + width)
    attention = 2 * 2 * heads * tokens * tokens * head
    layer = projections + attention + 2 * tokens * 3 * width * inner
    assert model_spec.flops == (0, layer, layer, 0, 2 * tokens * width * vocabulary)
    assert model_spec.output_numel == (tokens * width,) * 4 + (tokens * vocabulary,)
    layer_numel = width * (heads * head + 2 * kv_heads * head + width) + 3 * width * inner + 2 * width
    assert model_spec.numel == 2 * layer_numel + width + 2 * vocabulary * width


def test_block_calls_are_announced_in_order_after_an_empty_one():
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    announced: list[str] = []
    found = seen(module, announced=announced)
    assert announced == ["", "0", "2"]
    assert found.block_calls == ["0", "2"]
    assert found.flops == [2 * 6 * 6, 2 * 6 * 2]
    assert found.output_numel == [6, 2]
    assert not found.writes_in_place


def test_a_model_that_writes_in_place_is_run_again_with_aliases():
    announced: list[str] = []
    found = seen(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), announced=announced)
    assert found.writes_in_place
    assert found.block_calls == ["0", "2"]
    assert announced == ["", "0", "", "0", "2"]


def test_an_error_of_the_models_own_passes_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        seen(nn.Sequential(nn.Linear(6, 6), nn.Linear(5, 2)))


def test_the_users_of_every_parameter_are_read_off_the_graph():
    class Glue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.scale, self.raw, self.idle = (nn.Parameter(torch.ones(6)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> object:
            x = self.layers[0](x) * self.scale
            return self.layers[1](x + self.layers[1].bias), self.raw

    users = seen(Glue()).param_users
    assert users["layers.0.weight"] == {"layers.0"}
    assert users["layers.1.bias"] == {"layers.1", "(root)"}
    assert users["scale"] == users["raw"] == {"(root)"}
    assert users["layers.2.weight"] == users["idle"] == set()


def test_the_block_calls_of_a_parameter_are_those_that_contain_or_use_it():
    block_calls = ("embed", "layer", "layer#2", "head")
    assert param_block_calls(["layer"], set(), block_calls) == ("layer", "layer#2")
    assert param_block_calls(["head"], {"embed"}, block_calls) == ("embed", "head")
    assert param_block_calls(["head"], {"(root)"}, block_calls) == ("head", "(root)")
    assert (
        param_block_calls([], set(), block_calls)
        == param_block_calls(["other"], set(), block_calls)
        == ("(root)",)
    )


def test_buffers_that_the_forward_writes_are_named():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            for name in ("steps", "mean", "table"):
                self.register_buffer(name, torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            return self.linear(x) + self.table

    assert seen(nn.Sequential(Counter(), nn.Linear(6, 6))).written_buffers == ["0.steps", "0.mean"]
    assert "1.num_batches_tracked" in seen(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).written_buffers


def test_a_fake_copy_keeps_ties_and_what_is_frozen_and_holds_nothing():
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
    module[0].weight.requires_grad_()
    module[1].weight = module[0].weight
    module[2].again = module[2].running_mean
    with FakeTensorMode() as mode:
        pass
    make_fake(module, mode)
    assert module[0].weight is module[1].weight
    assert [p.requires_grad for p in (module[0].weight, module[0].bias)] == [True, False]
    assert {type(t).__name__ for t in (*module.buffers(), module[0].bias.data)} == {"FakeTensor"}


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "branch": lambda x: bool(x.sum() > 0),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "new tensor": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
}


@pytest.mark.parametrize("read", READS)
def test_a_forward_that_reads_values_is_recognized(read: str):
    def wrapped(x: torch.Tensor) -> None:
        try:
            READS[read](x)
        except RuntimeError as error:
            raise ValueError("wrapped by the user's code") from error

    for look in (READS[read], wrapped):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(X)
            with pytest.raises((RuntimeError, ValueError)) as caught:
                look(fake)
        assert depends_on_values(caught.value)


def test_ordinary_errors_do_not_look_at_values():
    assert not depends_on_values(TypeError("forward() got an unexpected keyword argument 'labels'"))
    assert not depends_on_values(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_position_table_called_with_a_shape_is_no_layer_use():
    class Positions(nn.Embedding):
        def forward(self, shape: torch.Size) -> torch.Tensor:
            return super().forward(torch.arange(len(shape) - 1))

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.layers = Positions(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.positions(x.shape)
            for layer in self.layers:
                x = layer(x)
            return x

    model_spec = analyze_model(Placed, {"x": X}).model_spec
    assert model_spec.block_calls == ("positions", "layers.0", "layers.1")
