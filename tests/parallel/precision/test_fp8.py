"""fp8: layers compute what torchao's own conversion computes, to the bit; plans equal their definition on one
device; parameters and what is saved of them are as without it.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn
from tqdm import tqdm

pytest.importorskip("torchao", reason="an extra: pip install meshwright[fp8]")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import tensor_to_scale

from meshwright.api import parallelize, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.runtime.module_patches import ModulePatches
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.precision import fp8
from meshwright.parallel.precision.fp8 import Float8Products, RecipeName, linear_forward
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.training.trainer import Trainer
from tests.parallel.precision.small_llama import (
    AUTOCAST,
    BF16,
    FLOAT32,
    SAMPLES,
    TOKENS,
    analyzed_llama,
    batches,
    llama,
    plan_of,
)

# torch hides it by a filter, which other threads undo
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CPU = torch.device("cpu")
RECIPES = get_args(RecipeName)


@pytest.fixture(autouse=True)
def no_threads_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps Dynamo's progress bar from starting a thread that outlives a test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def trainer_of(*strategies: Strategy, **more: PrecisionConfig | OptimizerConfig) -> Trainer:
    plan = plan_of(Mesh(), *strategies, **more)
    return parallelize(analyzed_llama(), plan, world=single_rank_world(CPU))


def losses(*strategies: Strategy, steps: int = 3, **more: PrecisionConfig | OptimizerConfig) -> list[float]:
    """The losses of steps on one device, all on the same batch."""
    trainer, (batch,) = trainer_of(*strategies, **more), batches(1)
    found = [trainer.step(trainer.local_batch(batch)).loss for _ in range(steps)]
    trainer.close()
    return found


def converted(recipe: RecipeName, dtype: torch.dtype, values: dict[str, torch.Tensor]) -> nn.Module:
    """The conversion by torchao of the model in `dtype`, with the parameters `values`; buffers stay."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = llama()
    model.load_state_dict(values, strict=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("precision", [FLOAT32, BF16], ids=["float32", "bfloat16"])
def test_steps_have_the_bits_of_torchaos_own_conversion(recipe: RecipeName, precision: PrecisionConfig):
    trainer, (batch,) = trainer_of(Float8Products(recipe), precision=precision), batches(1)
    with trainer_of() as before:
        values = {name: each.clone() for name, each in before.executor.gather_parameters().items()}
    model = converted(recipe, getattr(torch, precision.parameters), values)
    masters = {name: nn.Parameter(values[name]) for name, _ in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.1, foreach=False)
    for _ in range(2):
        metrics = trainer.step(trainer.local_batch(batch))
        logits = model(batch["input_ids"]).logits
        total, count = token_cross_entropy().total(SimpleNamespace(logits=logits), batch), TOKENS * SAMPLES
        model.zero_grad()
        (total / count).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name].data)
        assert metrics.loss == total.item() / count
    found = trainer.executor.gather_parameters()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name].to(parameter.dtype), parameter), name
    trainer.close()


ARRANGEMENTS: dict[str, tuple[Mesh, tuple[Strategy, ...], int]] = {
    "microbatches": (Mesh(), (), 4),
    "ddp": (Mesh(dp_replicate=2), (), 0),
    "zero 3": (Mesh(dp_shard=3), (ActivationCheckpointing(),), 2),
    "pipeline": (Mesh(pp=2), (), 4),
    "compiled": (Mesh(), (CompiledBlocks(backend="aot_eager"),), 6),
}


@pytest.mark.parametrize(
    ("arrangement", "recipe"),
    [*((each, "tensorwise") for each in ARRANGEMENTS), ("zero 3", "rowwise"), ("zero 3", fp8.PER_TOKEN)],
)
def test_plans_equal_their_definition_on_one_device(arrangement: str, recipe: RecipeName):
    mesh, more, micro_batch = ARRANGEMENTS[arrangement]
    plan = plan_of(mesh, *more, Float8Products(recipe), micro_batch=micro_batch)
    verdict = verify(analyzed_llama(), plan, batches())
    assert verdict.passed, verdict
    assert verdict.tolerance == 1e-10


def test_a_batch_that_is_not_full_equals_its_definition():
    plan = plan_of(Mesh(dp_replicate=2), Float8Products("tensorwise"), micro_batch=2)
    given = [{name: value[:5] for name, value in each.items()} for each in batches()]
    verdict = verify(analyzed_llama(), plan, given)
    assert verdict.passed, verdict


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_over_other_microbatches_are_seen(recipe: RecipeName, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fp8._Microbatches, "run", lambda self, forward, x: forward(x))
    verdict = verify(analyzed_llama(), plan_of(Mesh(dp_replicate=2), Float8Products(recipe)), batches(1))
    assert not verdict.passed


def test_scales_of_tokens_do_not_depend_on_the_division_of_the_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fp8._Microbatches, "run", lambda self, forward, x: forward(x))
    plan = plan_of(Mesh(dp_replicate=2), Float8Products(fp8.PER_TOKEN), micro_batch=2)
    verdict = verify(analyzed_llama(), plan, batches())
    assert verdict.passed, verdict


def test_tokens_of_a_sample_may_be_on_several_ranks():
    verdict = verify(analyzed_llama(), plan_of(Mesh(cp=3), Float8Products(fp8.PER_TOKEN)), batches(1))
    assert verdict.passed, verdict


@pytest.mark.parametrize(("dtype", "half_step"), [(torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)])
def test_a_cast_is_off_by_half_a_step_and_by_the_end_of_the_range(dtype: torch.dtype, half_step: float):
    x = torch.cat([torch.linspace(-1, 1, 20001), torch.logspace(-9, 0, 1000)])
    scale = tensor_to_scale(x, dtype)
    cast = hp_tensor_and_scale_to_float8(x, scale, dtype).to_original_precision()
    assert torch.all((cast - x).abs() <= half_step * x.abs() + 2**-10 / 448)
    assert scale == torch.finfo(dtype).max


def test_a_layer_that_a_rank_leaves_out_is_seen(monkeypatch: pytest.MonkeyPatch):
    replace_method = ModulePatches.replace_method

    def leave_out(self: ModulePatches, name: str, function: Callable[..., object]) -> None:
        if name != "model.layers.1.mlp.up_proj":
            replace_method(self, name, function)

    monkeypatch.setattr(ModulePatches, "replace_method", leave_out)
    verdict = verify(analyzed_llama(), plan_of(Mesh(dp_replicate=2), Float8Products()), batches(1))
    assert not verdict.passed


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_float64_products_are_those_of_the_same_float8_values(recipe: RecipeName):
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(4, 5, 32, requires_grad=True)
    wide, wide_x = nn.Linear(32, 48).double(), x.detach().double().requires_grad_()
    wide.load_state_dict(layer.state_dict())
    forward, dy = linear_forward(recipe, emulate=True), torch.randn(4, 5, 48)
    y, wide_y = forward(layer, x), forward(wide, wide_x)
    y.backward(dy)
    wide_y.backward(dy.double())
    pairs = [(y, wide_y), (x.grad, wide_x.grad), (layer.weight.grad, wide.weight.grad)]
    for one, other in pairs:
        assert other.dtype == torch.float64
        assert (one - other).abs().max() <= 2**-21 * other.abs().max()
    exact = layer(x)
    assert 2**-8 < (y - exact).abs().max() / exact.abs().max() < 2**-3


@pytest.mark.parametrize("precision", [AUTOCAST, BF16], ids=["autocast", "parameters"])
def test_compiled_blocks_contain_the_products(precision: PrecisionConfig):
    trainer = trainer_of(Float8Products(), CompiledBlocks(backend="aot_eager"), precision=precision)
    (batch,) = batches(1)
    found = [trainer.step(trainer.local_batch(batch)).loss for _ in range(3)]
    graphs = trainer.executor.state.compiled_graphs
    trainer.close()
    assert not graphs.breaks
    assert graphs.blocks.count("model.layers.0") == 1
    assert "model.layers.1" not in graphs.blocks
    assert found == losses(Float8Products(), precision=precision)
    assert found != losses(precision=precision)


def test_what_is_saved_and_exported_is_as_without():
    saved = []
    for strategies in ((), (Float8Products(),)):
        trainer, (batch,) = trainer_of(*strategies), batches(1)
        trainer.step(trainer.local_batch(batch))
        state = trainer.executor.state_dict()
        saved.append({name: (type(each), each.shape, each.dtype) for name, each in state.items()})
        module = trainer.executor.state.trained_module.module
        assert type(module.get_submodule("model.layers.0.mlp.up_proj")) is nn.Linear
        trainer.close()
        assert "forward" not in vars(module.get_submodule("model.layers.0.mlp.up_proj"))
    assert saved[0] == saved[1]


def test_a_small_llama_learns_as_in_float32():
    exact, *found = (
        losses(*more, steps=30, optimizer=OptimizerConfig("adamw", lr=0.003))
        for more in ((), *((Float8Products(recipe),) for recipe in RECIPES))
    )
    assert exact[-1] < exact[0] - 0.5
    for each in found:
        assert each[-1] == pytest.approx(exact[-1], rel=0.02)
        assert each != exact
