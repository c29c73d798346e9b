"""Values that transformers captures inside a block are outputs of it; any other side channel is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.hf.captured_outputs import capture_marks
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.model.block_backward import Driven, both_ways
from tests.tiny_model import tiny_job

TOKENS = torch.arange(48).view(6, 8) * 7 % 61
EXAMPLE_BATCH = {"input_ids": TOKENS, "labels": TOKENS.roll(-1, 1)}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
SIZES |= {"num_key_value_heads": 2, "use_cache": False, "output_router_logits": True}
FAMILIES = {
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "Olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
}
USUAL = token_cross_entropy()


def build(family: str = "Mixtral") -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def driven(family: str, total: Callable[[Any], torch.Tensor]) -> Driven:
    return both_ways(lambda: build(family), {"input_ids": TOKENS}, total=total)


def with_auxiliary(outputs: Any, batch: Any) -> torch.Tensor:
    return USUAL.total(outputs, batch) + 0.5 * outputs.aux_loss * USUAL.count(batch)


def with_z(outputs: Any, batch: Any) -> torch.Tensor:
    return USUAL.total(outputs, batch) + 0.01 * sum(
        logits.logsumexp(-1).square().sum() for logits in outputs.router_logits
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_auxiliary_loss_reaches_the_routers_through_what_was_captured(family: str):
    done = driven(family, lambda outputs: outputs.logits.sin().sum() + 100 * outputs.aux_loss)
    assert done.error < 1e-14
    assert done.analyzed.num_captured == {"router_logits": 2}
    without = driven(family, lambda outputs: outputs.logits.sin().sum())
    router = next(name for name in done.gradients if "mlp.gate" in name)
    assert not torch.allclose(done.gradients[router], without.gradients[router])


def test_captured_hidden_states_are_outputs_too():
    sizes = {**SIZES, "output_router_logits": False, "output_hidden_states": True}
    config = transformers.LlamaConfig(**{key: value for key, value in sizes.items() if "router" not in key})
    done = both_ways(
        lambda: transformers.LlamaForCausalLM(config),
        {"input_ids": TOKENS},
        total=lambda outputs: sum(state.sin().sum() for state in outputs.hidden_states),
    )
    assert done.error < 1e-14


def test_nothing_is_marked_when_nothing_is_captured():
    assert capture_marks() == ()


def verdict(total: Callable[[Any, Any], torch.Tensor], ranks: int, micro_batch: int = 0) -> bool:
    loss = Loss(total, USUAL.count)
    analyzed = analyze(lambda: Model(build(), loss=loss), EXAMPLE_BATCH, loss=loss)
    plan = make_plan(analyzed, tiny_job(6), Mesh(dp_replicate=ranks), micro_batch=micro_batch)
    return verify(analyzed, plan, [EXAMPLE_BATCH, EXAMPLE_BATCH], loss=loss).passed


def test_a_sum_over_router_logits_trains_exactly_on_three_ranks():
    assert verdict(with_z, 3)


def test_the_models_own_auxiliary_loss_trains_exactly_where_the_batch_is_whole():
    assert verdict(with_auxiliary, 1)


@pytest.mark.parametrize(("ranks", "micro_batch", "parts"), [(3, 0, 3), (1, 2, 3)])
def test_the_models_own_auxiliary_loss_is_refused_on_a_part_of_the_batch(
    ranks: int, micro_batch: int, parts: int
):
    with pytest.raises(
        PlanError,
        match=rf"^loss: the loss adds outputs\.aux_loss, .* router_logits .* in {parts} parts(?s:.*)z-loss",
    ):
        verdict(with_auxiliary, ranks, micro_batch)


def test_a_hook_of_ones_own_is_refused_by_the_name_of_the_block():
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
            self.keep: list[torch.Tensor] = []
            self.layers[1][0].register_forward_hook(self.hook)

        def hook(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
            self.keep.append(output)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.keep.clear()
            for layer in self.layers:
                x = layer(x)
            return x + self.keep[0]

    blocks = ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(PlanError, match=r"a tensor bypasses the outputs of the block 'layers\.1'"):
        analyze(lambda: Model(Hooked(), blocks=blocks), {"x": torch.ones(2, 6)})
