"""The load balancing loss of a model: the same numbers as the model's own code, on any parts of a batch."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import transformers
from torch import nn

import meshwright as mw
from meshwright.engine.losses.batch_sums import BatchSums
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.loss.load_balancing_loss import FUNCTION_NAME, find_calls
from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.program import Action
from meshwright.report.terminal.action_table import plan_summary
from meshwright.verifier.static_checks import static_checks
from tests.parallel.expert.mixture_model import SIZES, batch_of, expert_strategies, sgd_job
from tests.tiny_model import edited

FAMILIES = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "Olmoe": {"num_experts": 5, "num_experts_per_tok": 3, "eos_token_id": 1},
}


def build(family: str = "Mixtral", coefficient: float = 0.7) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **FAMILIES[family], "pad_token_id": 0},
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def padded_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Samples of unequal lengths: tokens that neither loss counts."""
    batch = batch_of(12, seed)
    mask = torch.ones_like(batch["input_ids"])
    for sample in range(12):
        mask[sample, 7 - sample % 5 :] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


@cache
def analyzed(family: str = "Mixtral") -> mw.AnalyzedModel:
    return mw.analyze(partial(build, family), padded_batch())


PLANS = {
    "dp 6": (mw.Mesh(dp_replicate=6), None, 1),
    "3 microbatches": (mw.Mesh(), None, 4),
    "zero 3, recomputed": (
        mw.Mesh(dp_shard=3),
        (mw.BatchSplit(axis="dp_shard"), mw.ZeRO(stage=3), mw.ActivationCheckpointing()),
        2,
    ),
    "ep": (mw.Mesh(ep=3), expert_strategies(), 2),
    "ep x tp": (mw.Mesh(ep=2, tp=2), None, 3),
    "cp": (mw.Mesh(cp=2), None, 4),
    "1f1b": (mw.Mesh(pp=2), None, 4),
    "zb_v x dp": (
        mw.Mesh(pp=2, dp_shard=2),
        (mw.BatchSplit(axis="dp_shard"), mw.DDP(axis="dp_shard"), mw.Pipeline(schedule="zb_v")),
        2,
    ),
}


def verdict_of(name: str, family: str = "Mixtral") -> mw.Verdict:
    mesh, strategies, micro_batch = PLANS[name]
    model = analyzed(family)
    plan = mw.make_plan(model, sgd_job(clip=0.5), mesh, strategies, micro_batch)
    incomplete = {key: value[:7] for key, value in padded_batch(1).items()}
    return mw.verify(model, plan, [padded_batch(), incomplete])


@pytest.mark.parametrize("name", PLANS)
def test_it_equals_one_device(name: str):
    verdict = verdict_of(name)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "Mixtral"])
def test_it_equals_one_device_in_other_families(family: str):
    verdict = verdict_of("ep", family)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_model_itself(family: str):
    model, batch = analyzed(family), padded_batch()
    module = model.make_module("cpu", torch.float64)[0].eval()
    prepared = model.loss.prepare(batch)
    weight = model.loss.count(prepared)
    stated = model.loss.whole_total(module(**model.loss.model_inputs(prepared)), prepared) / weight
    own = module(**batch).loss
    without = model.loss.total(module(**batch), prepared) / weight
    assert (stated - own).abs().item() < 1e-13
    assert (stated - without).abs().item() > 0.5
    routers = [parameter for name, parameter in module.named_parameters() if "mlp.gate" in name]
    grads = [torch.autograd.grad(each, routers, retain_graph=True) for each in (stated, own)]
    assert all(torch.allclose(ours, theirs, atol=1e-14) for ours, theirs in zip(*grads, strict=True))


def local_sums(self: BatchSums, action: Action, start: object = BatchSums.sum) -> None:
    start(self, action)
    self._sums = self._sums.clone()  # before the sum over ranks has arrived


def times_ranks(self: BatchSums, *given: object, correct: object = BatchSums.loss_sum) -> torch.Tensor:
    total = self._state.sequence_runner.loss_sum(*given)
    return total + (correct(self, *given) - total) * 3


def counted_twice(self: BatchSums, action: Action, start: object = BatchSums.sum) -> None:
    before = RankState.start_collective

    def double(state: RankState, action: Action, tensor: torch.Tensor) -> None:
        before(state, action, tensor.mul_(torch.tensor([2.0] * (len(tensor) - 2) + [1.0, 1.0])))

    self._state.start_collective = partial(double, self._state)
    start(self, action)
    del self._state.start_collective


@pytest.mark.parametrize(
    ("method", "broken"),
    [("sum", local_sums), ("loss_sum", times_ranks), ("sum", counted_twice)],
    ids=["f of a rank", "times the ranks", "counted by the rerun too"],
)
def test_planted_faults_are_found(method: str, broken: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BatchSums, method, broken)
    verdict = verdict_of("zero 3, recomputed")
    assert not verdict.passed
    assert verdict.first_difference.quantity in ("gradient", "loss")


@pytest.mark.parametrize("name", ["1f1b", "dp 6"])
def test_all_forwards_come_before_the_sums_and_these_before_any_loss(name: str):
    mesh, strategies, micro_batch = PLANS[name]
    plan = mw.make_plan(analyzed(), sgd_job(), mesh, strategies, micro_batch)
    for role in plan.program.roles:
        kinds = [action.kind for action in role.actions if action.kind in ("F", "BATCH_SUM", "LOSS", "B")]
        last_forward = max(at for at, kind in enumerate(kinds) if kind == "F")
        if "LOSS" in kinds:
            assert kinds.index("BATCH_SUM") == last_forward + 1 == kinds.index("LOSS") - 1
    sums = [action.transfer for action in plan.for_rank(0).actions if action.kind == "BATCH_SUM"]
    sent = [each and (each.nbytes, each.axes) for each in sums]
    assert sent == ([] if mesh.pp > 1 else [(8 * 7, ("dp_replicate",))])


def test_a_plan_says_what_the_sums_cost():
    plan = mw.make_plan(analyzed(), sgd_job(), mw.Mesh(dp_replicate=2), micro_batch=2)
    text = plan_summary(plan)["auxiliary loss"]
    assert text.startswith("of the global batch: 7 sums, known before the first backward; so all 3 microb")


def test_static_checks_find_sums_of_a_part_of_the_batch():
    plan = mw.make_plan(analyzed(), sgd_job(), mw.Mesh(dp_replicate=2))

    def of_a_part(action: Action) -> Action:
        return replace(action, transfer=None) if action.kind == "BATCH_SUM" else action

    def at_once(action: Action) -> Action:
        waits = tuple(name for name in action.waits if name != "BATCH_SUM()")
        return replace(action, waits=waits) if action.kind == "LOSS" else action

    faults = {"not summed over dp_replicate": of_a_part, "does not wait for BATCH_SUM": at_once}
    for says, change in faults.items():
        broken = edited(plan, lambda actions, change=change: list(map(change, actions)))
        assert any(says in each.problem for each in static_checks(broken))


def test_a_function_that_computes_something_else_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch):
    names = vars(transformers.models.mixtral.modeling_mixtral)
    theirs = names[FUNCTION_NAME]
    monkeypatch.setitem(names, FUNCTION_NAME, lambda *args, **kwargs: theirs(*args, **kwargs) * 1.01)
    model = mw.analyze(build, batch_of(4))
    assert model.loss.num_batch_sums == 0
    with pytest.raises(PlanError, match=r"the loss takes outputs\.aux_loss.* in 3 parts"):
        mw.make_plan(model, sgd_job(), mw.Mesh(dp_replicate=3))
    with find_calls(nn.Linear(1, 1)) as calls:
        pass
    assert calls == []


@pytest.mark.parametrize(
    ("mesh", "strategies", "says"),
    [
        (mw.Mesh(dp_replicate=2), [mw.BatchSplit(), mw.DataParallelMaster()], r"one rank, or every rank"),
        (mw.Mesh(pp=2), [mw.Pipeline(schedule="dualpipe")], r"on several ranks of the pipeline(?s:.*)zb_v"),
        (mw.Mesh(pp=2), [mw.PipeDream()], r"loss: the auxiliary loss reads sums.*(?s:.*)\"pipeline\""),
    ],
    ids=["master", "dualpipe", "pipedream"],
)
def test_what_cannot_sum_over_the_batch_first_is_refused(
    mesh: mw.Mesh, strategies: list[mw.Strategy], says: str
):
    with pytest.raises(PlanError, match=says):
        mw.make_plan(analyzed(), sgd_job(), mesh, strategies, 3)
