"""`verify` of asynchronous servers: every worker and server beside one process, in the recorded order."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.parallel.server.arrival_record import WorkerClocks
from meshwright.parallel.server.stale_updates import ServerUpdates, WorkerExchanges
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.one_device.arrival_replay import record_arrivals, replay_arrivals
from meshwright.verifier.one_device.recorded_run import record_run
from meshwright.verifier.parity import RankReport, compare_rank, make_verdict
from meshwright.verifier.reference import run_reference
from meshwright.verifier.verdict_and_cause import Verdict
from tests.parallel.server.stale_plans import records_of, stale_plan, trained
from tests.tiny_model import analyzed_model, case_of, edited, token_samples, verdict_of

MOMENTUM = OptimizerConfig("sgd", lr=0.1, momentum=0.5, weight_decay=0.1)
JOB = {"train": mw.TrainConfig(steps=4, batch=12, clip=0.5), "optimizer": MOMENTUM}


def verdict(model: dict[str, float | bool] | None = None, **options: object) -> Verdict:
    analyzed = analyzed_model(**(model or {}))
    return verdict_of(case_of(analyzed, stale_plan(analyzed=analyzed, job=JOB, **options)), 4)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {"bound": 0}),
        ({"p": 0.2}, {"bound": 1, "servers": 2, "micro_batch": 2}),
        ({"tied": True}, {"servers": 2, "lr_by_staleness": "inverse"}),
        ({"frozen": True, "spare": True}, {"workers": 2, "servers": 3, "bound": 1}),
        ({}, {"workers": 1, "bound": 2}),
    ],
    ids=str,
)
def test_every_worker_and_server_equals_one_process_in_every_step(
    model: dict[str, float | bool], options: dict[str, object]
):
    found = verdict(model, **options)
    assert found.passed, str(found)
    assert found.num_steps == 4
    assert found.reference == "its updates in the order in which they arrived, played in one process"


def test_workers_without_samples_and_data_that_end_are_those_of_one_process():
    once = {**JOB, "data": DataConfig("example", sequence=5, epochs=1)}
    case = case_of(analyzed_model(), stale_plan(3, bound=1, job=once), token_samples(13))
    found = verdict_of(case, 5)
    assert found.passed, str(found)
    assert found.num_steps == 2  # 13 samples, of which the second step has one


def compared(world: World) -> RankReport:
    case = case_of(analyzed_model(), stale_plan(2, 2, bound=1, job=JOB))
    return compare_rank(case, world, run_reference(case, 3, record_run(case, world, 3)))


def test_processes_equal_one_process(process_pool: ProcessPool):
    reports = process_pool.run(compared, mw.Mesh(outer=4))
    case = case_of(analyzed_model(), stale_plan(2, 2, bound=1, job=JOB))
    found = make_verdict(case, reports, "processes", {})
    assert found.passed, str(found)


def test_the_order_is_that_of_the_record_that_a_plan_replays(tmp_path: Path):
    late = stale_plan(3, job=JOB, record=str(tmp_path))
    trained(late, 4, lambda rank, step: 0.05 * (rank == 0))
    (record,) = records_of(late, tmp_path)
    written = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    order = [each.worker for each in record.updates]
    case = case_of(analyzed_model(), late.with_strategies([late.strategies[0].without_files()], 0))
    case = replace(case, recorded_arrivals=mw.StaleServer(replay=str(tmp_path)).recorded_arrivals())
    (found,) = {
        tuple(each[3]) for each in run_on_threads(lambda world: record_arrivals(case, world, 4), late.mesh)
    }
    assert list(found) == order
    assert verdict_of(case, 6).passed  # two more steps than it has
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == written


def test_orders_of_two_servers_that_exclude_one_another_are_refused():
    case = case_of(analyzed_model(), stale_plan(2, 2, job=JOB))
    match = r"the rest of their gradients in this order: server 2: 0, 1, 1; server 3: 1, 0, 0"
    with pytest.raises(ValueError, match=match):  # each waits for what the other one takes later
        replay_arrivals(case, 2, {2: [0, 0, 1, 1], 3: [1, 1, 0, 0]})


def test_a_server_that_ignores_the_bound_is_noticed(monkeypatch: pytest.MonkeyPatch):
    class Boundless(WorkerClocks):
        def __init__(self, num_workers: int, bound: int | None) -> None:
            super().__init__(num_workers, None)

    def late(plan: Plan, rank: int) -> Callable[[int], dict[str, torch.Tensor] | None]:
        time.sleep(0.2 * (rank == 0))
        return case.batch_reader(plan, rank)

    monkeypatch.setattr("meshwright.parallel.server.stale_updates.WorkerClocks", Boundless)
    case = case_of(analyzed_model(), stale_plan(3, bound=1, job=JOB))
    with pytest.raises(ValueError, match="cannot have taken the rest of their gradients in this order"):
        verdict_of(replace(case, batch_reader=late), 4)


def _unclipped(self: WorkerExchanges, handler: Callable[[Action], None]) -> Callable[[Action], None]:
    return handler


def _undivided(make: Callable[..., None]) -> Callable[..., None]:
    def made(self: ServerUpdates, *given: object, divides_lr: bool) -> None:
        make(self, *given, divides_lr=False)

    return made


def _given_before_the_step(step: Callable[[ServerUpdates, Action], None]) -> Callable[..., None]:
    def stepped(self: ServerUpdates, action: Action) -> None:
        before = [each.full_tensor.clone() for each in self._state.flat_params.by_param_group.values()]
        step(self, action)
        if self._worker == 1:
            for flat, old in zip(self._state.flat_params.by_param_group.values(), before, strict=True):
                with torch.no_grad():
                    flat.full_tensor.copy_(old)

    return stepped


FAULTS = [
    (WorkerExchanges, "_clip_pushes", lambda old: _unclipped),
    (ServerUpdates, "__init__", _undivided),
    (ServerUpdates, "step", _given_before_the_step),
]


@pytest.mark.parametrize(("owner", "name", "change"), FAULTS, ids=[name for _, name, _ in FAULTS])
def test_a_wrong_number_of_a_server_is_noticed(
    owner: type, name: str, change: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    found = verdict(bound=1, lr_by_staleness="inverse")
    assert not found.passed
    assert found.first_difference.quantity in ("gradient", "parameter", "loss")


def test_a_message_that_no_program_states_is_noticed():
    def another(actions: Sequence[Action]) -> list[Action]:
        return [
            replace(each, transfer=replace(each.transfer, nbytes=each.transfer.nbytes + 8))
            if each.kind == "GIVE"
            else each
            for each in actions
        ]

    case = case_of(analyzed_model(), stale_plan(2, bound=1, job=JOB))
    found = verdict_of(replace(case, plan=edited(case.plan, another)), 2)
    assert found.cause == "plan"
