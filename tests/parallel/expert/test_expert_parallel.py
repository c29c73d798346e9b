"""expert_parallel: a mixture of experts on several ranks equals one device, and sends what its law says."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.optimizer_per_param import param_optimizer
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.expert.mixture_model import (
    TOKENS,
    VOCABULARY,
    analyzed_deepseek,
    analyzed_mixtral,
    assert_equals_one_device,
    batch_of,
    expert_strategies,
    mixtral,
    sgd_job,
)
from tests.tiny_model import analyzed_model

BATCHES = [batch_of(12), batch_of(12, 1)]
PLANS = {
    "uneven, 2 microbatches": (mw.Mesh(ep=3), expert_strategies(), 2),
    "zero 3, recomputed": (
        mw.Mesh(dp_shard=3, ep=2),
        expert_strategies(mw.ZeRO(stage=3), mw.ActivationCheckpointing()),
        1,
    ),
    "hsdp": (
        mw.Mesh(dp_replicate=2, dp_shard=2, ep=3),
        expert_strategies(mw.BatchSplit(), mw.ZeRO(stage=2, replicate_axis="dp_replicate")),
        0,
    ),
    "zero 2, experts whole": (mw.Mesh(ep=3), expert_strategies(mw.ZeRO(stage=2)), 2),
    "tp": (mw.Mesh(ep=3, tp=2), None, 0),
    "cp": (mw.Mesh(ep=2, cp=3), None, 0),
    "1f1b": (mw.Mesh(pp=2, ep=3), None, 2),
    "zb_v": (mw.Mesh(pp=2, ep=2), expert_strategies(mw.Pipeline(schedule="zb_v")), 2),
    "naive ddp": (mw.Mesh(dp_shard=2, ep=2), expert_strategies(mw.NaiveDDP(axis="dp_shard")), 0),
}


@pytest.mark.parametrize("name", PLANS)
def test_it_equals_one_device(name: str):
    assert_equals_one_device(*PLANS[name])


def test_pipedream_equals_the_replay_of_its_weight_versions():
    mesh, strategies = mw.Mesh(pp=2, ep=3), expert_strategies(mw.PipeDream())
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(clip=0), mesh, strategies, 1)
    verdict = mw.verify(analyzed_mixtral(), plan, BATCHES)
    assert verdict.passed, str(verdict)


SHARED_PLANS = {
    "uneven": (mw.Mesh(ep=3), expert_strategies(), 2),
    "zero 3, recomputed": (
        mw.Mesh(dp_shard=2, ep=2),
        expert_strategies(mw.ZeRO(stage=3), mw.ActivationCheckpointing()),
        0,
    ),
    "zb_v": (mw.Mesh(pp=2, ep=2), expert_strategies(mw.Pipeline(schedule="zb_v")), 3),
    "tp": (mw.Mesh(ep=2, tp=2), None, 0),
}


@pytest.mark.parametrize("name", SHARED_PLANS)
def test_shared_experts_are_computed_while_sums_return(name: str):
    mesh, strategies, micro_batch = SHARED_PLANS[name]
    plan = mw.make_plan(analyzed_deepseek(), sgd_job(clip=0.5), mesh, strategies, micro_batch)
    verdict = mw.verify(analyzed_deepseek(), plan, BATCHES)
    assert verdict.passed, str(verdict)


def sent_before_shared_backward(world: World) -> list[int]:
    """How many messages of the backward this rank has sent when that of its shared experts begins."""
    plan, found = mw.make_plan(analyzed_deepseek(), sgd_job(), mw.Mesh(ep=2)), list[int]()
    with mw.parallelize(analyzed_deepseek(), plan, world=world) as trainer:
        world.ledger.is_recording = True
        module = trainer.executor.state.trained_module.module
        shared = module.get_submodule("model.layers.1.mlp.shared_experts.down_proj")
        shared.register_full_backward_hook(
            lambda *given: found.append(
                sum(
                    each.action[0] == "B" and "all_to_all" in each.collective for each in world.ledger.entries
                )
            )
        )
        trainer.step(trainer.local_batch(BATCHES[0]))
    return found


def test_gradients_of_sums_are_sent_before_the_backward_of_shared_experts():
    assert run_on_threads(sent_before_shared_backward, mw.Mesh(ep=2)) == [[1], [1]]


@pytest.mark.parametrize("choice", [(0, 1), (4, 0)], ids=str)
def test_ranks_whose_experts_nobody_chooses_take_part(choice: tuple[int, int]):
    analyzed = analyzed_mixtral(5, choice)
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=3), expert_strategies(), 2)
    verdict = mw.verify(analyzed, plan, BATCHES)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_leaves_experts_whole_that_have_no_further_ranks(stage: int):
    mesh, strategies = mw.Mesh(ep=2), expert_strategies(mw.ZeRO(stage=stage))
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mesh, strategies)
    collectives = ("UNSHARD", "PACK", "REDUCE")
    moved = {
        name for action in plan.for_rank(0).actions for name in action.tensors if action.kind in collectives
    }
    assert not static_checks(plan)
    assert "lm_head.weight" in moved
    assert not any("experts" in name for name in moved)


def test_a_rank_has_its_experts_alone():
    analyzed = analyzed_mixtral()
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=3), expert_strategies())

    def body(world: World) -> tuple[int, ...]:
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            trainer.step(trainer.local_batch(BATCHES[0]))
            experts = trainer.executor.state.trained_module.parameters["model.layers.0.mlp.experts.down_proj"]
            return tuple(experts.shape)

    assert run_on_threads(body, plan.mesh) == [(2, 16, 12), (2, 16, 12), (1, 16, 12)]


def rows_of_step(
    world: World, analyzed: mw.AnalyzedModel, plan: mw.Plan, axis: str
) -> tuple[list[torch.Tensor], dict[str, int], Counter[str]]:
    """The choices of this rank's tokens by layer, the counts of its ledger, and the bytes that it sent."""
    chosen: list[torch.Tensor] = []
    with mw.parallelize(analyzed, plan, world=world) as trainer:
        module = trainer.executor.state.trained_module.module
        for layer in module.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        world.ledger.is_recording = True
        trainer.step(trainer.local_batch(BATCHES[0]))
        sent = Counter[str]()
        for entry in world.ledger.entries:
            if (
                entry.axes == (axis,)
                and entry.action[0] in "FB"
                and entry.collective.startswith("all_to_all")
            ):
                sent[entry.action[0]] += int(entry.sent_nbytes)
        return chosen, dict(world.ledger.counts), sent


@pytest.mark.parametrize("axis", ["ep", "dp_shard", "cp"])
def test_a_token_is_sent_once_to_each_other_rank_with_experts_of_its(axis: str):
    analyzed = analyzed_mixtral()
    strategies = expert_strategies(over=(axis,))
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh.infer({axis: 3}), strategies)
    found = run_on_threads(lambda world: rows_of_step(world, analyzed, plan, axis), plan.mesh)
    rank_of = [0, 0, 1, 1, 2]
    moved = Counter[tuple[int, int, int]]()  # layer, from, to
    for rank, (chosen, _, _) in enumerate(found):
        for layer, index in enumerate(chosen):
            for experts in index.tolist():
                moved.update((layer, rank, other) for other in {rank_of[each] for each in experts} - {rank})
    assert {len(chosen) for chosen, _, _ in found} == {2}
    row, choice = 16 * 4, 2 * 4
    for rank, (_, counts, sent) in enumerate(found):
        away = sum(number for (_, source, _), number in moved.items() if source == rank)
        here = sum(number for (_, _, target), number in moved.items() if target == rank)
        assert sum(number for name, number in counts.items() if name.startswith("rows to")) == away
        assert sum(number for name, number in counts.items() if name.startswith("rows from")) == here
        assert sent["F"] == 2 * 2 * 16 + away * (row + 2 * choice) + here * row
        assert sent["B"] == away * row + here * (row + choice)


def test_the_plan_states_the_rows_of_even_choices():
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mw.Mesh(ep=3), expert_strategies())
    tokens = 4 * TOKENS
    reached = [1 - 3 / 10, 1 - 3 / 10, 1 - 6 / 10]  # two of five experts, chosen without these two, or this
    for rank in range(3):
        transfers = [
            each for action in plan.for_rank(rank).actions if action.kind == "F" for each in action.transfers
        ]
        sizes = {each.runtime_size for each in transfers if each.runtime_size is not None}
        others = sum(share for other, share in enumerate(reached) if other != rank)
        to_experts = {size.expected_rows for size in sizes if size.count.startswith("rows to")}
        from_tokens = {size.expected_rows for size in sizes if size.count.startswith("rows from")}
        assert (to_experts, from_tokens) == ({round(tokens * others)}, {round(tokens * 2 * reached[rank])})
        assert {size.max_rows for size in sizes} == {2 * tokens}


@pytest.mark.parametrize("mesh", [mw.Mesh(ep=3, tp=2), mw.Mesh(dp_shard=2, ep=2, cp=3)], ids=str)
def test_a_trace_on_fake_tensors_issues_what_the_plan_states(mesh: mw.Mesh):
    analyzed = analyzed_mixtral()
    assert mw.trace(analyzed, mw.make_plan(analyzed, sgd_job(), mesh)).passed


def test_a_plan_that_leaves_the_way_back_out_is_found():
    analyzed = analyzed_mixtral()
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=2), expert_strategies())
    program = plan.program.edit(
        lambda actions: [
            replace(action, inner_transfers=action.inner_transfers[: -1 if action.kind == "F" else None])
            for action in actions
        ]
    )
    assert not mw.trace(analyzed, replace(plan, program=program)).passed


@pytest.mark.parametrize(
    ("saved", "taken"),
    [
        (mw.Mesh(ep=3), mw.Mesh(ep=2, dp_shard=2)),
        (mw.Mesh(ep=2, tp=2), mw.Mesh(dp_shard=3)),
        (mw.Mesh(dp_replicate=2), mw.Mesh(ep=3)),
    ],
    ids=str,
)
def test_a_checkpoint_is_loaded_on_other_ranks(saved: mw.Mesh, taken: mw.Mesh, tmp_path: Path):
    analyzed = analyzed_mixtral()
    job = mw.Job(train=mw.TrainConfig(steps=4, batch=12))
    plans = [mw.make_plan(analyzed, job, each) for each in (saved, taken)]
    loads_under_other_plan(analyzed, *plans, tmp_path)


def losses_on(world: World, mesh: mw.Mesh) -> list[float]:
    """The losses of two steps."""
    torch.set_num_threads(1)
    analyzed = analyzed_mixtral()
    plan = mw.make_plan(analyzed, sgd_job(), mesh)
    with mw.parallelize(analyzed, plan, world=world) as trainer:
        return [trainer.step(trainer.local_batch(batch)).loss for batch in BATCHES]


def test_processes_compute_the_losses_of_one_device(process_pool: ProcessPool):
    (alone,) = run_on_threads(lambda world: losses_on(world, mw.Mesh()), mw.Mesh())
    for losses in process_pool.run(losses_on, mw.Mesh(ep=3), mw.Mesh(ep=3)):
        assert losses == pytest.approx(alone, rel=1e-5)


def refusal(analyzed: mw.AnalyzedModel, job: mw.Job, mesh: mw.Mesh, *strategies: mw.Strategy) -> str:
    with pytest.raises(PlanError) as caught:
        mw.make_plan(analyzed, job, mesh, strategies or None)
    return str(caught.value)


def test_all_faults_are_told_at_once():
    job = sgd_job(batch=12, noise_scale=True)
    text = refusal(analyzed_mixtral(2), job, mw.Mesh(ep=3))
    assert "3 ranks along ep, and a layer has 2 experts" in text
    assert "set mesh.ep to at most 2" in text
    assert "the noise scale compares gradients of ranks" in text


def mixtral_with(edit: Callable[[Any], object]) -> mw.AnalyzedModel:
    def make() -> nn.Module:
        model = mixtral()
        edit(model.model.layers)
        return model

    return mw.analyze(make, batch_of(4))


def freeze(layers: Any) -> None:
    layers[0].mlp.experts.requires_grad_(False)
    layers[1].mlp.experts.down_proj.requires_grad_(False)
    layers[1].mlp.gate.requires_grad_(False)


def test_frozen_experts_and_routers_equal_one_device():
    analyzed = mixtral_with(freeze)
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(dp_shard=2, ep=2), expert_strategies(mw.ZeRO()))
    mw.verify(analyzed, plan, BATCHES[:1]).raise_if_failed()


def test_experts_that_layers_share_are_refused():
    shared = mixtral_with(lambda layers: setattr(layers[1].mlp, "experts", layers[0].mlp.experts))
    text = refusal(shared, sgd_job(), mw.Mesh(ep=2))
    assert "the experts model.layers.0.mlp.experts are called 2 times in a forward" in text
    assert "give each layer experts of its own, or set mesh.ep = 1" in text


def test_what_experts_cannot_be_combined_with_is_refused_by_name():
    analyzed, master = analyzed_mixtral(), mw.DataParallelMaster(axis="dp_replicate")
    split = (mw.BatchSplit(axis="ep"), mw.BatchSplit())
    text = refusal(analyzed, sgd_job(), mw.Mesh(ep=2, dp_replicate=2), mw.ExpertParallel(), *split, master)
    assert "with data_parallel_master one rank steps for all others" in text
    text = refusal(analyzed, sgd_job(), mw.Mesh(ep=2), mw.ExpertParallel())
    assert 'add [[strategies]] name = "batch_split", axis = "ep"' in text


def test_a_model_without_experts_is_refused():
    text = refusal(analyzed_model(), sgd_job(), mw.Mesh(ep=2))
    assert "no module of this model is called as experts are" in text
    assert "set mesh.ep = 1" in text


class OneModulePerExpert(nn.Module):
    """A layer with a list of experts, as many models of users have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return x + out.view(x.shape)


def list_of_experts() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), OneModulePerExpert(), OneModulePerExpert())


def test_a_list_of_experts_is_refused_by_name():
    batch = {"input": batch_of(4)["input_ids"], "labels": batch_of(4)["labels"].clamp(0, 7)}
    text = refusal(
        mw.analyze(list_of_experts, batch, loss=mw.token_cross_entropy()), sgd_job(), mw.Mesh(ep=2)
    )
    assert "1.experts is a list of 3 modules, each called with the tokens that chose it" in text
    assert "(and so in 1 more blocks)" in text
    assert "put mw.nn.MixtureOfExperts in its place" in text


def test_muon_steps_each_expert_by_itself():
    analyzed, muon = analyzed_mixtral(), mw.OptimizerConfig("muon", lr=0.02, momentum=0.9)
    plan = mw.make_plan(analyzed, replace(sgd_job(), optimizer=muon), mw.Mesh(ep=2, dp_shard=2))
    experts = [each for each in analyzed.model_spec.params if ".experts." in each.name]
    assert {param_optimizer(muon, each).optimizer for each in experts} == {"muon"}
    verdict = mw.verify(analyzed, plan, BATCHES)
    assert verdict.passed, str(verdict)
