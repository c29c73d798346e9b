"""The messages of a rank, compared with its program.

Bugs planted in handlers and programs, on meshes larger than any machine.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler
from meshwright.verifier.message_trace import (
    NeedsRealTensorsError,
    TraceVerdict,
    sample_ranks,
)
from meshwright.verifier.messages import planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import Tiny, analyzed_model, edited, plan_of, tiny_job, token_samples

BUCKET_MB = 300 / 2**20  # five buckets, REDUCE(0) to REDUCE(4)


@pytest.fixture(scope="module")
def analyzed() -> mw.AnalyzedModel:
    return analyzed_model()


def odd(act: Callable[..., object]) -> DDP:
    """Data parallelism whose handler of REDUCE is `act(runtime, action)`."""

    class Odd(DDP):
        def bind(self, runtime) -> Mapping[str, Handler]:
            return {"REDUCE": lambda action: act(runtime, action)}

    return Odd(bucket_mb=BUCKET_MB)


def told(analyzed: mw.AnalyzedModel, act: Callable[..., object]) -> list[str]:
    """Returns what is wrong with rank 2 of 3 when REDUCE is done by `act`."""
    plan = plan_of(analyzed, 3, (BatchSplit(), odd(act)), micro_batch=2)
    assert static_checks(plan) == []
    found = mw.trace(analyzed, plan, [2])
    assert found.passed == (not found.diagnostics)
    return [fault.problem for fault in found.diagnostics]


def broken(analyzed: mw.AnalyzedModel, name: str, **changes: object) -> list[str]:
    """Returns what is wrong with rank 1 of 3 when the program states something else of action `name` than
    what is done.
    """
    plan = plan_of(analyzed, 3, (BatchSplit(), DDP(bucket_mb=BUCKET_MB)))

    def change(actions: list[Action]) -> list[Action]:
        return [replace(a, transfer=replace(a.transfer, **changes)) if a.name == name else a for a in actions]

    return [fault.problem for fault in mw.trace(analyzed, edited(plan, change), [1]).diagnostics]


@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("reduce", ["float64", "float32"])
def test_a_sound_plan_issues_what_it_states(analyzed: mw.AnalyzedModel, micro_batch: int, reduce: str):
    job = tiny_job(precision=PrecisionConfig("float64", "float64", reduce))
    plan = plan_of(analyzed, 3, (BatchSplit(), DDP(bucket_mb=BUCKET_MB)), micro_batch=micro_batch, job=job)
    found = mw.trace(analyzed, plan)
    assert (found.passed, found.ranks, found.tensor_kind, found.plan) == (
        True,
        sample_ranks(plan),
        "fake",
        plan.hash,
    )
    assert found.num_messages == len(planned_messages(plan.for_rank(0))) > 4
    numel = plan.model_spec.numel
    assert found.sent_nbytes == pytest.approx(
        (numel * {"float64": 8, "float32": 4}[reduce] + 32 + 8) * 2 * 2 / 3
    )
    assert str(found).endswith(
        f"issued the {found.num_messages} collectives that the program states, in each of 2 steps"
    )


def test_a_rank_of_a_large_mesh_is_played_alone(analyzed: mw.AnalyzedModel):
    plan = plan_of(analyzed, 1024, job=tiny_job(batch=2048), micro_batch=1)
    found = mw.trace(analyzed, plan, [777])
    assert str(found).startswith("rank 777 of dp_replicate 1024 issued the 3 collectives")
    assert mw.trace(analyzed, plan).ranks == sample_ranks(plan)
    assert sample_ranks(plan)[0] == 0
    assert sample_ranks(plan)[-1] == 1023


def test_a_model_that_no_machine_here_holds_is_traced():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(64)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    wide = mw.analyze(Wide, {"x": torch.zeros(1, 5, 1 << 14), "labels": torch.zeros(1, 5, dtype=torch.long)})
    plan = plan_of(wide, 3)
    assert plan.model_spec.numel * 8 > 1.3e11, "bytes of the weights alone"
    assert mw.trace(wide, plan, [1]).passed


@pytest.mark.parametrize("options", [{"p": 0.3}, {"tied": True}, {"spare": True}, {"frozen": True}])
def test_dropout_ties_and_parameters_without_gradients_are_played(options: dict[str, bool]):
    analyzed = analyzed_model(**options)
    assert mw.trace(analyzed, plan_of(analyzed, 3, micro_batch=2)).passed


# bugs


def test_an_action_that_sends_twice_is_named(analyzed: mw.AnalyzedModel):
    found = told(
        analyzed,
        lambda runtime, action: (
            runtime.state.start_collective(action),
            runtime.state.start_collective(action),
        ),
    )
    assert len(found) == 5
    message = "all_reduce of 728 bytes float64 over dp_replicate (3 ranks, backend)"
    twice = f"REDUCE(0) issued 2 collectives ({message}; {message}), not the one stated: {message}"
    assert found[0] == f"{twice}, on rank 2 in step 1"


def test_an_action_that_forgets_its_collective_is_named(analyzed: mw.AnalyzedModel):
    found = told(
        analyzed,
        lambda runtime, action: (
            runtime.state.start_collective(action) if action.name != "REDUCE(3)" else None
        ),
    )
    assert len(found) == 1
    assert found[0].startswith("REDUCE(3) issued nothing, and the program states: all_reduce of")


def test_an_action_that_sends_more_is_named(analyzed: mw.AnalyzedModel):
    def longer(runtime, action: Action) -> None:
        group = runtime.state.world.group(action.transfer.axes)
        group.all_reduce(torch.zeros(92, dtype=torch.float64), action=action.name)

    found = told(
        analyzed,
        lambda runtime, action: (
            longer(runtime, action) if action.name == "REDUCE(0)" else runtime.state.start_collective(action)
        ),
    )
    assert len(found) == 1
    assert found[0].startswith("REDUCE(0) issued: all_reduce of 736 bytes float64")
    assert "states: all_reduce of 728 bytes float64" in found[0]


def test_actions_that_send_in_another_order_are_named(analyzed: mw.AnalyzedModel):
    kept: list[Action] = []

    def swapped(runtime, action: Action) -> None:
        if action.name == "REDUCE(0)":
            kept.append(action)
            return
        runtime.state.start_collective(action)
        if action.name == "REDUCE(1)":
            runtime.state.start_collective(kept.pop())

    found = told(analyzed, swapped)
    assert found == [
        "REDUCE(1) was issued where the program has REDUCE(0): the order differs, on rank 2 in step 1"
    ]


def test_a_collective_that_no_action_states_is_named(analyzed: mw.AnalyzedModel):
    def more(runtime, action: Action) -> None:
        runtime.state.start_collective(action)
        if action.name == "REDUCE(2)":
            runtime.state.world.group(("dp_replicate",)).all_gather(
                torch.zeros(6), torch.zeros(2), action="PEEK"
            )

    found = told(analyzed, more)
    assert len(found) == 1
    assert found[0].startswith(
        "PEEK issued: all_gather of 8 bytes float32 over dp_replicate (3 ranks, backend), and the program"
    )


def test_a_second_step_that_differs_from_the_first_is_named_once(analyzed: mw.AnalyzedModel):
    calls: list[str] = []

    def later(runtime, action: Action) -> None:
        calls.append(action.name)
        if not (action.name == "REDUCE(1)" and calls.count(action.name) > 1):
            runtime.state.start_collective(action)

    found = told(analyzed, later)
    assert len(found) == 1
    assert found[0].startswith("REDUCE(1) issued nothing")
    assert found[0].endswith("on rank 2 in step 2")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"nbytes": 364}, "364 bytes float64"),
        ({"dtype": "float32"}, "728 bytes float32"),
        ({"collective": "all_to_all"}, "all_to_all"),
    ],
)
def test_a_program_that_states_something_else_than_what_is_done_is_named(
    analyzed: mw.AnalyzedModel, changes: dict, word: str
):
    found = broken(analyzed, "REDUCE(0)", **changes)
    assert len(found) == 1
    assert found[0].startswith("REDUCE(0) issued: all_reduce of 728 bytes float64")
    assert f"the program states: {word}" in found[0] or f"of {word}" in found[0]


# what cannot be played


class Looks(Tiny):
    """Chooses its way by an activation: unless its sum is far too large, the head is used as it is."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(input_ids)
        return x if x.detach().sum().item() < 1e9 else x * 0


def test_a_model_that_looks_at_values_is_played_on_real_tensors_only():
    analyzed = mw.analyze(Looks, token_samples(2))
    plan = plan_of(analyzed, 3)
    with pytest.raises(
        NeedsRealTensorsError, match="the model reads tensor values, which fake tensors lack"
    ) as refused:
        mw.trace(analyzed, plan)
    assert "fake=False" in refused.value.diagnostics[0].fix
    found = mw.trace(analyzed, plan, [1], fake=False)
    assert (found.passed, found.tensor_kind) == (True, "real")


def test_an_error_of_the_model_itself_passes_through(analyzed: mw.AnalyzedModel):
    def fails(runtime, action: Action) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        told(analyzed, fails)


@pytest.mark.parametrize("ranks", [[3], [-1], []])
def test_a_rank_that_the_mesh_does_not_have_is_refused(analyzed: mw.AnalyzedModel, ranks: list[int]):
    with pytest.raises(mw.PlanError, match="no rank") as refused:
        mw.trace(analyzed, plan_of(analyzed, 3), ranks)
    assert "from 0 to 2" in str(refused.value)


def test_the_model_keeps_no_hook(analyzed: mw.AnalyzedModel):
    made = []
    read_on = replace(analyzed)
    plan = plan_of(read_on, 3)
    original = type(analyzed).make_module

    def noted(self, *given):
        made.append(original(self, *given))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(analyzed), "make_module", noted)
        mw.trace(read_on, plan, [0])
    module = made[0][0]
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_the_verdict_is_written_as_json(analyzed: mw.AnalyzedModel, tmp_path: Path):
    plan = plan_of(analyzed, 3)
    found: TraceVerdict = mw.trace(analyzed, plan)
    found.write(tmp_path / "made" / "trace.json")
    written = json.loads((tmp_path / "made" / "trace.json").read_text())
    assert (written["passed"], written["rank_backend"], written["ranks"]) == (
        True,
        "trace",
        list(found.ranks),
    )
    assert written["planned_nbytes"]["TOKEN_COUNT()"] == 32
    assert written["versions"]["torch"] == torch.__version__


def test_many_faults_are_counted_not_listed(analyzed: mw.AnalyzedModel):
    plan = plan_of(analyzed, 3, (BatchSplit(), odd(lambda runtime, action: None)))
    found = mw.trace(analyzed, plan, [0, 1])
    assert len(found.diagnostics) == 10
    assert str(found).startswith(
        "ranks 0, 1 of dp_replicate 3 did NOT issue what the program states\n  REDUCE(0): "
    )
    assert str(found).endswith("\n  and 5 more")
