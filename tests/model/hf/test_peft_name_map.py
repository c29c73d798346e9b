"""PEFT models: recognized in their wrapper, built without memory, exact with sharded weights."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, trace
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.blocks.discovery import WHOLE_MODEL, find_blocks
from meshwright.model.hf import peft_name_map as peft_module
from meshwright.model.hf.model_from_config import TextLimits, text_limits
from meshwright.model.hf.peft_name_map import is_adapted, is_adapter_layer, unload_adapters
from meshwright.model.loading.deferred_init import defer_init
from meshwright.model.loading.loader import load_factory, load_model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.model.hf.lora_models import QUIET, adapted, adapted_reading, base, stored_base
from tests.tiny_model import case_of, executor_of, tiny_job, token_samples, verdict_of

pytestmark = QUIET
IN_BASE = "base_model.model.model"
OPTIONS = {
    "plain": {},
    "dropout": {"lora_dropout": 0.3},
    "a trained copy of the head": {"modules_to_save": ["lm_head"]},
    "tied embeddings": {"config": {"tie_word_embeddings": True}},
    "adapters at the embedding and the head": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "trained biases, a narrow base": {
        "bias": "all",
        "config": {"attention_bias": True, "dtype": torch.bfloat16},
    },
    "experts": {"target_modules": ["q_proj"], "config": {"family": "mixtral", "num_local_experts": 4}},
}
STORES = ["whole", 1, 2, 3]


def planned(
    analyzed: AnalyzedModel, ranks: int, store: str | int, micro_batch: int = 0, **changes: object
) -> Plan:
    """The plan over `ranks` ranks, with whole copies or with shards of that stage."""
    job = tiny_job(**changes)
    if store == "whole":
        return make_plan(analyzed, job, Mesh(dp_replicate=ranks), micro_batch=micro_batch)
    return make_plan(
        analyzed,
        job,
        Mesh(dp_shard=ranks),
        (BatchSplit(axis="dp_shard"), ZeRO(stage=int(store))),
        micro_batch,
    )


def test_blocks_are_found_through_the_wrapper():
    module = adapted(modules_to_save=["lm_head"])()
    names = [
        f"{IN_BASE}.embed_tokens",
        *(f"{IN_BASE}.layers.{i}" for i in range(2)),
        f"{IN_BASE}.norm",
        "base_model.model.lm_head",
    ]
    assert list(find_blocks(module)) == names
    inside = adapted(target_modules=["embed_tokens", "lm_head"])()
    assert list(find_blocks(inside)) == names
    assert is_adapter_layer(inside.get_submodule("base_model.model.lm_head"))
    assert text_limits(module) == text_limits(module.get_base_model()) == TextLimits(40, 32)
    assert is_adapted(module)
    assert not is_adapted(module.get_base_model())


def test_a_model_without_a_chain_stays_one_block_when_it_is_adapted():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3)

    assert list(find_blocks(peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["one"])))) == [
        WHOLE_MODEL
    ]


def test_the_base_is_what_is_left_without_the_adapters():
    module = defer_init(adapted({"tie_word_embeddings": True}, modules_to_save=["norm"]), 0).instantiate()
    found, names = unload_adapters(module)
    assert type(found).__name__ == "LlamaForCausalLM"
    assert found.state_dict().keys() == base(tie_word_embeddings=True).state_dict().keys()
    layer = f"{IN_BASE}.layers.1.self_attn"
    assert names[f"{layer}.q_proj.base_layer.weight"] == "model.layers.1.self_attn.q_proj.weight"
    assert names[f"{layer}.k_proj.weight"] == "model.layers.1.self_attn.k_proj.weight"
    assert (
        names[f"{IN_BASE}.norm.original_module.weight"]
        == names[f"{IN_BASE}.norm.modules_to_save.default.weight"]
    )
    assert (
        names["base_model.model.lm_head.weight"]
        == names[f"{IN_BASE}.embed_tokens.weight"]
        == "model.embed_tokens.weight"
    )
    assert not any("lora_" in name for name in names)


def test_adapters_are_initialized_as_by_peft():
    deferred = defer_init(adapted(modules_to_save=["lm_head"]), 7)
    for name, entry in deferred.logical_params.items():
        assert entry.requires_grad == ("lora_" in name or "modules_to_save" in name), name
        value = deferred.initial_value(name)
        if "lora_B" in name:
            assert not value.any(), name
        elif "lora_A" in name:
            bound = 1 / math.sqrt(value.shape[1])  # kaiming with a = sqrt(5)
            assert 0.8 * bound < value.abs().max() <= bound, name
    head = "base_model.model.lm_head"
    assert torch.equal(
        deferred.initial_value(f"{head}.original_module.weight"),
        deferred.initial_value(f"{head}.modules_to_save.default.weight"),
    )


def test_the_base_takes_stored_weights_and_the_adapters_the_seed(tmp_path: Path):
    theirs = stored_base(tmp_path).state_dict()
    deferred = adapted_reading(weights=tmp_path, modules_to_save=["lm_head"]).deferred_init
    _, names = unload_adapters(deferred.instantiate())
    assert set(names.values()) >= set(theirs)
    for name in deferred.logical_params:
        if name in names:
            assert torch.equal(deferred.initial_value(name), theirs[names[name]]), name
        else:
            assert "lora_" in name
    assert deferred.pretrained_source is not None


def test_adapters_that_start_from_values_of_the_base_are_refused_with_stored_weights(tmp_path: Path):
    stored_base(tmp_path)
    assert adapted_reading(use_dora=True).deferred_init.pretrained_source is None
    with pytest.raises(PlanError) as caught:
        adapted_reading(weights=tmp_path, use_dora=True)
    assert len(caught.value.diagnostics) == 2 * 3
    assert "is computed from" in caught.value.diagnostics[0].problem
    assert "no DoRA" in caught.value.diagnostics[0].fix


def test_weights_of_another_base_are_refused(tmp_path: Path):
    stored_base(tmp_path, hidden_size=32)
    with pytest.raises(PlanError, match="stored tensors have another shape than in the model"):
        adapted_reading(weights=tmp_path)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("option", "ranks"), [("plain", 2), ("a trained copy of the head", 2), *((each, 3) for each in OPTIONS)]
)
def test_it_equals_one_device(option: str, ranks: int, store: str | int):
    analyzed = adapted_reading(**OPTIONS[option])
    plan = planned(analyzed, ranks, store, micro_batch=2)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan), steps=2)
    assert verdict.passed, str(verdict)


def test_traced_ranks_send_what_the_program_states():
    analyzed = adapted_reading()
    traced = trace(analyzed, planned(analyzed, 3, 3, precision=PrecisionConfig()))
    assert traced.passed, str(traced)


def test_an_adapter_that_is_summed_on_one_rank_only_is_noticed():
    analyzed = adapted_reading()
    plan = planned(analyzed, 3, 3)
    adapter = next(weight.name for weight in plan.model_spec.trainable if "lora_B" in weight.name)

    def apart(case, world):
        if world.rank == 1:
            own = case.make_trained_module

            def spoiled():
                trained_module = own()
                trained_module.parameters[adapter].register_hook(lambda grad: grad * 1.01)
                return trained_module

            return replace(case, make_trained_module=spoiled)
        return case

    verdict = verdict_of(case_of(analyzed, plan), steps=1, on_rank=apart)
    assert not verdict.passed
    assert verdict.first_difference.quantity in ("gradient", "grad norm")


@pytest.mark.parametrize("store", STORES)
def test_only_adapters_are_summed_stepped_and_given_gradients(store: str | int):
    analyzed = adapted_reading()
    plan = planned(analyzed, 3, store, optimizer=OptimizerConfig("adamw", lr=0.1))
    trained = {weight.name for weight in plan.model_spec.trainable}
    assert all("lora_" in name for name in trained)

    def rank(world: World) -> tuple[set[str], set[str], set[str], dict[str, int]]:
        executor = executor_of(analyzed, plan, world)
        before = bits({name: value.clone() for name, value in executor.gather_parameters().items()})
        for _ in range(2):
            executor.step(
                {key: value[4 * world.rank : 4 * world.rank + 4] for key, value in token_samples().items()}
            )
        after = bits(executor.gather_parameters())
        summed = {
            name
            for action in plan.program.actions("pp0")
            if action.kind == "REDUCE"
            for name in action.tensors
        }
        held = {
            name
            for name, parameter in executor.state.trained_module.parameters.items()
            if parameter.grad is not None
        }
        executor.close()
        return (
            {name for name in after if after[name] != before[name]},
            summed,
            held,
            executor.memory_by_category(),
        )

    reports = run_on_threads(rank, plan.mesh)
    numel, small = plan.model_spec.numel, sum(weight.numel for weight in plan.model_spec.trainable)
    for moved, summed, held, sizes in reports:
        assert moved == trained
        assert summed == trained
        assert not held
        assert sizes["gradients"] + sizes["optimizer_states"] <= 8 * 4 * small + 1000  # those of the adapters
        if store == 3:
            assert (
                8 * numel / 3
                <= sizes["parameters"]
                <= 8 * numel / 3 + 8 * 3 * len(plan.rank_view(0).flat_param_specs)
            )
        else:
            assert sizes["parameters"] >= 8 * numel


@pytest.mark.parametrize("store", ["whole", 3])
def test_a_half_precision_base_stays_so_under_float32_adapters(store: str | int):
    analyzed = adapted_reading(config={"dtype": torch.bfloat16})
    plan = planned(analyzed, 2, store, precision=PrecisionConfig())
    alone = planned(analyzed, 1, "whole", precision=PrecisionConfig())
    widths = {weight.trainable: weight.itemsize("float32") for weight in plan.model_spec.params}
    assert widths == {True: 4, False: 2}

    def losses(plan: Plan) -> Callable[[World], list[float]]:
        def rank(world: World) -> list[float]:
            executor = executor_of(analyzed, plan, world)
            first = world.rank * plan.local_batch
            batch = {key: value[first : first + plan.local_batch] for key, value in token_samples().items()}
            found = [executor.step(batch).loss for _ in range(3)]
            dtypes = {name: value.dtype for name, value in executor.gather_parameters().items()}
            assert all(
                dtypes[w.name] == (torch.float32 if w.trainable else torch.bfloat16)
                for w in plan.model_spec.params
            )
            assert executor.memory_by_category()["parameters"] == state_bytes(plan, world.rank).parameters
            return found

        return rank

    one, *_ = run_on_threads(losses(alone), alone.mesh)
    assert one[2] < one[0]
    for found in run_on_threads(losses(plan), plan.mesh):
        assert found == pytest.approx(
            one, rel=0.01
        )  # bfloat16 has three digits, and rows are added in another order


def test_a_model_whose_adapters_are_frozen_too_is_refused():
    with pytest.raises(PlanError, match=r"none of the \d+ parameters of model is trained"):
        planned(adapted_reading(inference_mode=True), 2, 3)


def test_a_factory_without_peft_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)

    def build() -> nn.Module:
        import peft  # noqa: F401

        raise AssertionError("peft was found")

    (tmp_path / "model.py").write_text("import peft\n\ndef build():\n    return None\n")
    for call in (
        lambda: load_factory(build, 0, "build"),
        lambda: load_model(ModelConfig(f"{tmp_path / 'model.py'}:build"), 0),
        peft_module.import_peft,
    ):
        with pytest.raises(PlanError) as caught:
            call()
        assert caught.value.diagnostics[0].fix == "pip install 'meshwright[adapters]'"


def test_another_module_that_is_missing_has_another_repair():
    def build() -> nn.Module:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    with pytest.raises(PlanError, match="correct the construction"):
        analyze(build, token_samples(2))
