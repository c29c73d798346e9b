"""Streams that copy within a rank: an action starts a work, others wait for it, its bytes have a price."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Thread
from time import sleep
from typing import ClassVar, get_args

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.step_profiler import StepProfiler
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.hardware.streams import STREAMS, StreamName, timeline_row, timeline_row_name
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.program_json import program_from_dict, program_to_dict
from meshwright.plan.step.simulator import simulate
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.prediction import predict_step
from meshwright.report.terminal.memory_and_sent_bytes import sent_table
from meshwright.report.terminal.plan_overview import sent_by_collective
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import program_of
from tests.planner.simple_machine import ground
from tests.tiny_model import analyzed_model, case_of, edited, executor_of, plan_of, token_samples, verdict_of

EVICTED = "embed.weight"


class ThreadWork(Work):
    """A copy that another thread makes, a little later."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._thread = Thread(target=lambda: (sleep(0.02), copy()))
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        Thread(target=lambda: (self._thread.join(), callback())).start()


@dataclass(frozen=True)
class HostCopy(Strategy):
    """Copies a parameter to the host while the first forward runs, and needs it there before CLIP.

    EVICT (starts the copy), USE_COPY (reads it).
    """

    name: ClassVar[str] = "host_copy"
    phase: ClassVar = "storage"
    waits: bool = True  # planted: whether the reader waits

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        nbytes = 8 * view.model_spec.params[0].numel
        evict = Action(
            "EVICT",
            EVICTED,
            stream="copy_out",
            transfer=Transfer("copy", (), nbytes, dtype="float64"),
            allocations=(Allocation("host copy", nbytes),),
        )
        use = Action("USE_COPY", EVICTED, waits=(evict.name,) if self.waits else (), frees=("host copy",))

        def insert(actions: list[Action]) -> list[Action]:
            at = next(i for i, action in enumerate(actions) if action.kind == "CLIP")
            return [evict, *actions[:at], use, *actions[at:]]

        return program.edit(insert)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state
        parameter = state.trained_module.parameters[EVICTED]
        host = torch.zeros(parameter.shape, dtype=parameter.dtype)

        def evict(action: Action) -> None:
            host.zero_()
            value = parameter.detach()
            state.issue(action, ThreadWork(lambda: host.copy_(value)))

        def use(action: Action) -> None:
            if not torch.equal(host, parameter.detach()):
                raise RuntimeError("the copy was read before it had arrived")

        return {"EVICT": evict, "USE_COPY": use}


@pytest.fixture(scope="module")
def analyzed() -> mw.AnalyzedModel:
    return analyzed_model()


@pytest.fixture(scope="module")
def plan(analyzed: mw.AnalyzedModel) -> Plan:
    return plan_of(analyzed, 2, (BatchSplit(), HostCopy(), DDP()))


def evict_of(plan: Plan) -> Action:
    return next(action for action in plan.program.roles[0].actions if action.kind == "EVICT")


def test_the_table_has_every_stream():
    assert tuple(STREAMS) == get_args(StreamName)
    assert [name for name, stream in STREAMS.items() if not stream.starts_work] == ["compute"]
    assert [name for name, stream in STREAMS.items() if stream.copies] == [
        "copy_in",
        "copy_out",
        "disk",
        "host",
    ]


def test_a_reader_waits_for_the_copy_that_another_stream_makes(analyzed: mw.AnalyzedModel, plan: Plan):
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan), steps=2)
    assert verdict.passed, verdict


def test_a_reader_that_does_not_wait_reads_too_early(analyzed: mw.AnalyzedModel):
    hasty = plan_of(analyzed, 1, (HostCopy(waits=False),))
    with pytest.raises(RuntimeError, match="before it had arrived"):
        run_on_threads(
            lambda world: executor_of(analyzed, hasty, world).step(
                {key: value[:12] for key, value in token_samples().items()}
            ),
            hasty.mesh,
        )


def test_a_copy_sends_no_message(plan: Plan):
    assert evict_of(plan).transfer.messages == ()
    assert evict_of(plan).sent_transfers == ()
    assert not any("copy" in text for _, text in sent_by_collective(plan))
    assert "EVICT" not in {row[0] for row in sent_table(plan).rows}


def test_a_copy_is_priced_by_the_host_link_and_runs_beside_compute(plan: Plan):
    target, nbytes = replace(ground(), copy_rates={"host link": 1e3}), evict_of(plan).transfer.nbytes
    cost = ActionCosts(plan, 0, target).cost(evict_of(plan))
    assert (cost.comm_s, cost.compute_s) == (nbytes / 1e3, 0.0)
    assert predict_step(plan, target).step_s == pytest.approx(nbytes / 1e3)
    ticks = {tick.action.name: tick for tick in simulate(plan.program)}
    first = next(action for action in plan.program.roles[0].actions if action.kind == "F")
    assert ticks[first.name].start < ticks[evict_of(plan).name].end


@pytest.mark.parametrize(
    ("stream", "resource", "key"),
    [
        ("copy_out", "host link", "host_link_gb_s"),
        ("disk", "disk", "disk_gb_s"),
        ("host", "host memory", "host_memory_gb_s"),
    ],
)
def test_a_plan_that_copies_is_refused_where_the_rate_is_unknown(
    plan: Plan, stream: StreamName, resource: str, key: str
):
    moved = edited(
        plan, lambda actions: [replace(a, stream=stream) if a.kind == "EVICT" else a for a in actions]
    )
    with pytest.raises(PlanError) as refused:
        predict_step(moved, ground())
    (fault,) = refused.value.diagnostics
    assert fault.problem == f"EVICT({EVICTED}) copies on {stream}, and even has no rate for its {resource}"
    assert key in fault.fix


def test_transfers_on_the_wrong_stream_are_refused(plan: Plan):
    def swap(actions: list[Action]) -> list[Action]:
        other: dict[str, StreamName] = {"EVICT": "comm", "REDUCE": "disk"}
        return [replace(a, stream=other.get(a.kind, a.stream)) for a in actions]

    problems = {fault.problem for fault in static_checks(edited(plan, swap))}
    assert f"EVICT({EVICTED}) copies within its rank, and is on comm" in problems
    assert "REDUCE(0) is on disk, which cannot carry its all_reduce" in problems


def test_a_program_with_copies_survives_the_json_form(plan: Plan):
    nameless = plan.program.edit(lambda actions: [replace(action, tensors=()) for action in actions])
    assert program_from_dict(json.loads(json.dumps(program_to_dict(plan.program)))) == nameless


def test_works_of_a_peer_are_in_order_for_that_peer_alone():
    def send(peer: int, at: int) -> Action:
        return Action("SEND", str(peer), at, "send", transfer=Transfer("send", ("pp",), 8, peer=peer))

    def ends(*actions: Action) -> list[float]:
        return sorted(each.end for each in simulate(program_of({"pp0": actions})))

    assert ends(send(1, 0), send(2, 0)) == [1.0, 1.0]
    assert ends(send(1, 0), send(1, 1)) == [1.0, 2.0]


def test_rows_of_a_timeline_have_the_names_of_their_streams():
    assert [timeline_row_name(row) for row in (0, 1, 2, 3)] == ["run", "compute", "comm", "comm (2)"]
    assert timeline_row_name(timeline_row("copy_out", 1)) == "copy_out (2)"
    assert timeline_row("send") == timeline_row("comm") == 2


def test_a_copy_is_drawn_on_a_row_of_its_stream(analyzed: mw.AnalyzedModel, plan: Plan):
    def spans(world):
        profiler = StepProfiler(torch.device("cpu"))
        executor_of(analyzed, plan, world).step(
            {key: value[: plan.local_batch] for key, value in token_samples().items()}, profiler=profiler
        )
        return {span.name: span.stream for span in profiler.spans()}

    for found in run_on_threads(spans, plan.mesh):
        assert found[f"EVICT({EVICTED})"] == "copy_out"
        assert found[f"wait EVICT({EVICTED})"] == "compute"
