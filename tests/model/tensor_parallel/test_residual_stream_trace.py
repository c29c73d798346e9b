"""The residual stream of a model: which modules pass it on, which need all tokens, and which mix them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model
from meshwright.model.tensor_parallel.residual_stream_trace import tokenwise_problem
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall, ResidualFlow
from tests.model.recording.recorded_functions import record_function
from tests.parallel.tensor.model_families import analyze_family

WORDS, WIDTH = 13, 8


def model_spec_of(family: str) -> tuple[dict[str, ResidualFlow], dict[str, LayerCall]]:
    model_spec = analyze_family(family, 6).model_spec
    return {each.block_call: each for each in model_spec.residual_flows}, {
        call.name: call for call in model_spec.layer_calls
    }


def test_layers_pass_it_to_the_norm_and_the_norm_to_the_head():
    passages, calls = model_spec_of("llama")
    assert [(each.producer, each.consumer) for each in passages.values()] == [
        ("", "model.layers.1"),
        ("model.layers.0", "model.norm"),
        ("model.layers.1", "lm_head"),  # whose glue takes all of it: x[:, 0:]
    ]
    assert all(
        (each.num_tokens, each.hidden_size, each.not_sequence_parallel, each.output_index)
        == (6, 24, "", None)
        for each in passages.values()
    )
    attention, mlp = calls["model.layers.0.self_attn.k_proj"], calls["model.layers.0.mlp.up_proj"]
    assert (attention.outer_module, attention.outer_args) == ("model.layers.0.self_attn", ("hidden_states",))
    assert (mlp.outer_module, mlp.outer_args) == ("model.layers.0.mlp", (0,))
    assert not calls["model.layers.0.self_attn.o_proj"].takes_residual
    assert calls["model.layers.0.input_layernorm"].takes_residual
    assert calls["lm_head"].takes_residual


def test_norms_of_attention_heads_are_not_on_it():
    _, calls = model_spec_of("qwen3")
    assert not calls["model.layers.0.self_attn.q_norm"].takes_residual


def test_glue_that_views_it_ends_it():
    passages, _ = model_spec_of("gpt2")
    assert passages["transformer.ln_f"].consumer == ""


def test_a_module_that_adds_it_after_its_layers_is_no_gate():
    passages, calls = model_spec_of("bert")
    assert (
        calls["bert.encoder.layer.0.attention.self.query"].outer_module
        == "bert.encoder.layer.0.attention.self"
    )
    assert (
        calls["bert.encoder.layer.0.intermediate.dense"].outer_module == "bert.encoder.layer.0.intermediate"
    )
    assert list(passages) == [
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
    ]  # the head beside a norm and a whole layer is none


def test_the_encoder_output_in_a_decoder_is_not_its_stream():
    passages, calls = model_spec_of("t5")
    cross = "decoder.block.0.layer.1.EncDecAttention"
    assert [calls[f"{cross}.{name}"].takes_residual for name in "qkv"] == [True, False, False]
    assert passages["encoder.final_layer_norm"].consumer == ""
    assert passages["decoder.block.0"].producer == ""
    assert passages["decoder.block.0"].output_index == 0


class Pair(nn.Module):
    """A residual pair in one module; `extra` is done with what norms give out."""

    def __init__(self, extra: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.extra(self.norm(x)))))


class Pairs(nn.Module):
    """Embedding, pairs, head; `between` is what glue does behind the first pair."""

    def __init__(
        self, extra: Callable[[torch.Tensor], torch.Tensor], between: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Pair(extra) for _ in range(2))
        self.between = between

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.head(self.layers[1](self.between(self.layers[0](x))))


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def found(extra: Callable = same, between: Callable = same) -> ModelSpec:
    tokens = torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(0))
    sockets = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    model = Pairs(extra, between)
    model_spec = analyze(
        lambda: Model(model, layer_roles=sockets), {"input_ids": tokens, "labels": tokens.roll(1, -1)}
    ).model_spec
    assert all(
        "forward" not in part.__dict__ and not part._forward_hooks for part in model.modules()
    )  # left as it was
    return model_spec


def test_layers_in_a_block_itself_have_no_gate():
    model_spec = found()
    assert [each.consumer for each in model_spec.residual_flows] == ["layers.1", "head"]
    assert {call.outer_module for call in model_spec.layer_calls} == {""}
    assert all(
        call.takes_residual for call in model_spec.layer_calls if call.role in ("colwise", "norm", "lm_head")
    )


@pytest.mark.parametrize(
    ("between", "onward"),
    [
        (lambda x: x, "layers.1"),
        (lambda x: x[:, slice(0, None)], "layers.1"),
        (lambda x: torch.cat((x[:, 1:], x[:, :1]), 1), ""),
        (lambda x: x * 1.0, ""),
        (lambda x: x.shape[1] and x, ""),  # a slice has another length
        (lambda x: x.requires_grad and x.dtype.is_floating_point and x, "layers.1"),
    ],
)
def test_glue_may_only_pass_it_on(between: Callable, onward: str):
    model_spec = found(between=between)
    assert model_spec.residual_flows[0].consumer == onward
    assert model_spec.residual_flows[1].producer == ("layers.0" if onward else "")


@pytest.mark.parametrize(
    ("extra", "mixes"),
    [
        (lambda x: x.float().pow(2) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5), ""),
        (lambda x: x.flip(1), "layers.0 computes 'flip' with it"),
        (lambda x: x * x.abs().amax(1, keepdim=True), "layers.0 takes amax over tokens"),
        (lambda x: x.reshape(-1, WIDTH).view(x.shape), "layers.0 computes 'reshape' with it"),
    ],
)
def test_modules_that_mix_tokens_are_named(extra: Callable, mixes: str):
    assert found(extra).residual_flows[0].not_sequence_parallel == mixes


STREAM, OTHER = torch.rand(3, 5, 4), torch.rand(3, 5, 4)


def reason_not_tokenwise(func: object, *args: object, **kwargs: object) -> str:
    """Returns what is said of `func`, whose first argument is the stream, and so is `OTHER`."""
    call = next(record_function(lambda: func(*args, **kwargs)).calls())
    operands = [each for each in args if isinstance(each, torch.Tensor)]
    pairs = zip(operands, call.inputs, strict=True)
    carried = [record for tensor, record in pairs if tensor is STREAM or tensor is OTHER]
    name = func.__name__.strip("_")
    return tokenwise_problem(name, call.args, call.kwargs, call.inputs, carried, call.outputs[0])


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.Tensor.__add__, (STREAM, OTHER), {}),
        (torch.mul, (STREAM, torch.rand(4)), {}),
        (torch.mul, (STREAM, torch.rand(3, 1, 4)), {}),
        (torch.Tensor.__rsub__, (STREAM, 1.0), {}),
        (torch.Tensor.pow, (STREAM, 2), {}),
        (torch.Tensor.mean, (STREAM, -1), {"keepdim": True}),
        (torch.Tensor.mean, (STREAM,), {"dim": (2,)}),
        (F.layer_norm, (STREAM, (4,)), {}),
        (F.rms_norm, (STREAM,), {"normalized_shape": (4,)}),
        (F.softmax, (STREAM,), {"dim": -1}),
        (F.dropout, (STREAM, 0.0), {}),
    ],
)
def test_tokenwise_operations_are_known(func: object, args: tuple, kwargs: dict):
    assert reason_not_tokenwise(func, *args, **kwargs) == ""


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "message"),
    [
        (torch.mul, (STREAM, torch.rand(5, 4)), {}, "of a tensor of all tokens"),
        (torch.add, (STREAM, torch.rand(3, 5, 1)), {}, "of a tensor of all tokens"),
        (torch.Tensor.mean, (STREAM,), {}, "takes mean over tokens"),
        (torch.Tensor.mean, (STREAM, 1), {}, "takes mean over tokens"),
        (torch.Tensor.sum, (STREAM, (1, 2)), {}, "takes sum over tokens"),
        (F.layer_norm, (STREAM, (5, 4)), {}, "takes layer_norm over tokens"),
        (torch.transpose, (STREAM, 1, 2), {}, "computes 'transpose' with it"),
        (torch.Tensor.reshape, (STREAM, -1, 4), {}, "computes 'reshape' with it"),
        (torch.Tensor.cumsum, (STREAM, 1), {}, "computes 'cumsum' with it"),
        (torch.Tensor.__matmul__, (STREAM, torch.rand(4, 4)), {}, "computes 'matmul' with it"),
    ],
)
def test_other_operations_are_not_tokenwise(func: object, args: tuple, kwargs: dict, message: str):
    assert message in reason_not_tokenwise(func, *args, **kwargs)
