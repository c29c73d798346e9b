"""Values that transformers captures inside a block are outputs of it; any other side channel is refused."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.hf.captured_outputs import capture_marks
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.verifier.parity import TOLERANCE
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


def build_llama() -> nn.Module:
    sizes = {key: value for key, value in SIZES.items() if "router" not in key}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, output_hidden_states=True))


def test_captured_hidden_states_are_outputs_too():
    done = both_ways(
        build_llama,
        {"input_ids": TOKENS},
        total=lambda outputs: sum(state.sin().sum() for state in outputs.hidden_states),
    )
    assert done.error < 1e-14


def test_nothing_is_marked_when_nothing_is_captured():
    assert capture_marks() == ()


@cache
def analyzed(loss: str, family: str = "Mixtral") -> AnalyzedModel:
    """Returns the analysis with that loss; "own" is the one that the model computes itself."""
    if loss == "own":
        return analyze(lambda: build(family), {"input_ids": TOKENS, "labels": TOKENS})
    return analyze(lambda: build(family), EXAMPLE_BATCH, loss=LOSSES[loss])


LOSSES = {
    "stated": Loss(with_auxiliary, USUAL.count),
    "z": Loss(with_z, USUAL.count),
    "without": USUAL,
}


def max_error(loss: str, mesh: Mesh, micro_batch: int = 0) -> float:
    """Returns the largest error of two steps, the second of which has an incomplete batch."""
    model = analyzed(loss)
    batch = {"input_ids": TOKENS, "labels": TOKENS} if loss == "own" else EXAMPLE_BATCH
    plan = make_plan(model, tiny_job(6), mesh, micro_batch=micro_batch)
    verdict = verify(model, plan, [batch, {key: value[:4] for key, value in batch.items()}])
    assert verdict.passed, str(verdict)
    return max(verdict.max_errors.values())


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(tp=3), Mesh(cp=2), Mesh(cp=3), Mesh(pp=2, cp=2)], ids=str)
@pytest.mark.parametrize("loss", ["stated"])
def test_an_auxiliary_loss_equals_one_device_where_the_batch_is_one_part(loss: str, mesh: Mesh):
    assert max_error(loss, mesh) < TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "micro_batch"),
    [(Mesh(dp_replicate=3), 0), (Mesh(cp=3), 0), (Mesh(pp=2, cp=3), 2), (Mesh(dp_shard=2, cp=2), 0)],
    ids=str,
)
@pytest.mark.parametrize("loss", ["z", "without"])
def test_a_sum_over_router_logits_and_a_loss_without_them_run_in_parts(
    loss: str, mesh: Mesh, micro_batch: int
):
    assert max_error(loss, mesh, micro_batch) < TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "micro_batch", "parts", "repair"),
    [
        (Mesh(pp=2), 2, r"data ranks: 1, microbatches: 3", r"micro_batch = 0 \(pp"),
        (Mesh(pp=2, dp_shard=2), 0, r"data ranks: 2, microbatches: 1", r"mesh\.dp_shard = 1 \(pp"),
        (Mesh(dp_replicate=3), 1, r"3, microbatches: 2", r"micro_batch = 0, mesh\.dp_replicate = 1 \(pp"),
    ],
    ids=["microbatches", "data ranks", "both"],
)
def test_an_auxiliary_loss_of_ones_own_is_refused_by_the_plan_that_runs_the_batch_in_parts(
    mesh: Mesh, micro_batch: int, parts: str, repair: str
):
    says = rf"^loss: the loss takes outputs\.aux_loss, .* from the router_logits of its blocks .*{parts}"
    model = analyzed("stated")
    with pytest.raises(PlanError, match=rf"{says}(?s:.*)repair: run the batch in one part: {repair}"):
        make_plan(model, tiny_job(6), mesh, micro_batch=micro_batch)
    make_plan(model, tiny_job(6), Mesh(pp=mesh.pp))


def test_the_repair_without_an_auxiliary_loss_works():
    def silent() -> nn.Module:
        model = build()
        model.config.output_router_logits = False  # as model.overrides.output_router_logits = false does
        return model

    model = analyze(silent, {"input_ids": TOKENS, "labels": TOKENS})
    assert model.num_captured == {}
    make_plan(model, tiny_job(6), Mesh(dp_replicate=3), micro_batch=1)


def test_another_loss_than_that_of_the_analysis_that_takes_an_auxiliary_loss_is_refused():
    model, loss = analyzed("without"), LOSSES["stated"]
    plan = make_plan(model, tiny_job(6), Mesh(dp_replicate=3))
    with pytest.raises(PlanError, match=r"takes outputs\.aux_loss, which the loss of the analysis did not"):
        verify(model, plan, [EXAMPLE_BATCH], loss=loss)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_on_captured_hidden_states_equals_one_device_on_token_shards(place: int, ranks: int):
    """A hook outside of its forward captures the first ones: an input of the first layer."""

    def total(outputs: Any, batch: Any) -> torch.Tensor:
        states = outputs.hidden_states[place]
        return USUAL.total(outputs, batch) + 10 * states.mean(1).square().sum()

    model = analyze(build_llama, EXAMPLE_BATCH, loss=Loss(total, USUAL.count))
    verdict = verify(model, make_plan(model, tiny_job(6), Mesh(cp=ranks)), [EXAMPLE_BATCH] * 2)
    assert verdict.passed, str(verdict)


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
