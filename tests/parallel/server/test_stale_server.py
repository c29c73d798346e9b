"""The asynchronous server: definition and replay, bytes by the law, what each bound is, refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.parallel.server.arrival_record import (
    RecordHeader,
    RecordWriter,
    WorkerClocks,
    most_staleness,
    read_record,
    record_path,
)
from meshwright.plan.job.job import LossGuard, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.program import Action
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.server.server_plans import entries_of, group_nbytes, held_by, samples_of
from tests.parallel.server.stale_plans import delays, play_definition, records_of, stale_plan, trained
from tests.planner.program_cost.test_rank_memory import assert_holds_planned_bytes
from tests.tiny_model import analyzed_model, edited, executor_of, tiny_job

STEPS = 4
HALF = PrecisionConfig("float16", "float16", "float16", master="float32")
MOMENTUM = OptimizerConfig("sgd", lr=0.1, momentum=0.5, weight_decay=0.0)
ADAMW = OptimizerConfig("adamw", lr=0.01, weight_decay=0.0)
JOB = {"train": mw.TrainConfig(steps=STEPS, batch=12, clip=0.5), "optimizer": MOMENTUM}
make_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
make_adamw = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)


def late(after: int) -> Callable[[int, int], float]:
    """The first worker begins when the second one begins the step `after`."""
    begun = Event()

    def wait(rank: int, step: int) -> float:
        if (rank, step) == (1, after):
            begun.set()
        if (rank, step) == (0, 0):
            assert begun.wait(30)
        return 0.0

    return wait


@pytest.mark.parametrize(
    ("options", "job"),
    [
        ({"bound": 0}, {}),
        ({"bound": 1, "servers": 2, "micro_batch": 2}, {}),
        ({"servers": 2, "lr_by_staleness": "inverse"}, {}),
        ({"bound": 1, "servers": 2}, {"optimizer": ADAMW}),
    ],
    ids=str,
)
def test_a_run_is_what_the_definition_makes_of_its_order_and_a_replay_has_its_bits(
    options: dict[str, object], job: dict[str, object], tmp_path: Path
):
    job = {**JOB, **job}
    plan = stale_plan(3, job=job, record=str(tmp_path / "run"), **options)
    assert static_checks(plan) == []
    found, _ = trained(plan, STEPS, delays(0))
    records = records_of(plan, tmp_path / "run")
    divides = "lr_by_staleness" in options
    make = make_adamw if job["optimizer"] == ADAMW else make_sgd
    expected = play_definition(plan, records, make, divides_lr=divides)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
    bound = plan.strategies[0].bound
    assert bound is None or max(max(each.staleness) for each in records) <= most_staleness(bound, 3)
    folders = {"record": str(tmp_path / "replay"), "replay": str(tmp_path / "run")}
    again = stale_plan(3, job=job, **options, **folders)
    repeated, _ = trained(again, STEPS, delays(1))
    assert all(torch.equal(repeated[name], found[name]) for name in found)
    assert records_of(again, tmp_path / "replay") == records


@pytest.mark.parametrize("options", [{"tied": True}, {"frozen": True}, {"spare": True}], ids=str)
def test_ties_frozen_and_unused_parameters_are_those_of_the_definition(
    options: dict[str, bool], tmp_path: Path
):
    analyzed = analyzed_model(**options)
    plan = stale_plan(2, 2, analyzed=analyzed, job=JOB, record=str(tmp_path))
    found, _ = trained(plan, 3, delays(0), analyzed)
    expected = play_definition(plan, records_of(plan, tmp_path), make_sgd, **options)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bound", [0, 2, None])
def test_one_worker_is_one_device_whatever_the_bound(bound: int | None):
    alone = mw.make_plan(analyzed_model(), tiny_job(**JOB), mw.Mesh(), ())

    def body(world: World) -> dict[str, torch.Tensor]:
        executor = executor_of(analyzed_model(), alone, world)
        for step in range(3):
            executor.step(samples_of(alone, 0, step))
        return {name: each.clone() for name, each in executor.gather_parameters().items()}

    (expected,) = run_on_threads(body, alone.mesh)
    found, _ = trained(stale_plan(1, 2, bound=bound, job=JOB), 3)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


def test_with_bound_0_the_gradients_of_a_step_are_made_of_one_version_and_applied_one_by_one(tmp_path: Path):
    plan = stale_plan(3, bound=0, job=JOB, record=str(tmp_path))
    trained(plan, STEPS, delays(0))
    (record,) = records_of(plan, tmp_path)
    for number, update in enumerate(record.updates):
        assert update.version == number - number % 3
        assert update.step == number // 3
    assert record.staleness == {0: STEPS, 1: STEPS, 2: STEPS}


@pytest.mark.parametrize(("bound", "after"), [(1, 1), (None, STEPS - 1)])
def test_a_late_worker_holds_others_back_by_the_bound_alone(bound: int | None, after: int, tmp_path: Path):
    plan = stale_plan(3, bound=bound, job=JOB, record=str(tmp_path))
    trained(plan, STEPS, late(after))
    (record,) = records_of(plan, tmp_path)
    steps, ahead = [0] * 3, 0
    for update in record.updates:
        steps[update.worker] += 1
        ahead = max(ahead, max(steps) - min(steps))
    if bound is None:
        assert ahead >= after
    else:
        assert after <= ahead <= bound + 1  # it may begin a step when it is `bound` steps ahead


@pytest.mark.parametrize(("workers", "servers", "bound"), [(1, 1, None), (3, 2, 0), (3, 2, 1)])
def test_2_n_s_over_k_bytes_go_to_and_from_a_server_to_the_byte(
    workers: int, servers: int, bound: int | None
):
    plan = stale_plan(workers, servers, bound=bound, job=JOB)
    entries, total = entries_of(plan), group_nbytes(plan)
    for rank in range(workers):
        sent = [each for each in entries[rank] if each.action.startswith("PUSH")]
        assert sum(each.sent_nbytes for each in sent) == total
        assert sum(each.nbytes for each in entries[rank] if each.action.startswith("PULL")) == total
        assert issued_messages(entries[rank]) == planned_messages(plan.for_rank(rank))
    for rank in plan.sharding.server_indices:
        served = group_nbytes(plan, lambda owner, rank=rank: owner == rank)
        taken = sum(each.nbytes for each in entries[rank] if each.action.startswith("TAKE"))
        given = sum(each.sent_nbytes for each in entries[rank] if each.action.startswith("GIVE"))
        assert taken == given == workers * served
        planned = planned_messages(plan.for_rank(rank))
        assert sorted(issued_messages(entries[rank])) == sorted(planned)
    assert sum(len(held_by(plan, rank)) for rank in plan.sharding.server_indices) == len(
        plan.model_spec.trainable
    )


@pytest.mark.parametrize("bound", [0, 1])
def test_ranks_of_many_are_traced_without_the_others(bound: int):
    plan = stale_plan(6, 2, bound=bound, job=JOB)
    traced = mw.trace(analyzed_model(), plan, [0, 5, 6, 7])
    assert traced.passed, str(traced)


def test_every_rank_holds_the_planned_bytes():
    plan = stale_plan(2, 2, micro_batch=2, job={"optimizer": ADAMW})
    assert_holds_planned_bytes({}, plan.strategies, plan.mesh, tiny_job(optimizer=ADAMW), 2)
    total = group_nbytes(plan)
    held = state_bytes(plan, 0)
    assert (held.parameters, held.gradients, held.optimizer_states) == (total, total, 0)
    for rank in plan.sharding.server_indices:
        held, served = state_bytes(plan, rank), group_nbytes(plan, lambda owner, rank=rank: owner == rank)
        assert (held.parameters, held.gradients) == (served, served)
        assert held.optimizer_states == 2 * served + 4 * len(held_by(plan, rank))


def test_metrics_are_those_of_each_worker_and_an_evaluation_is_that_of_the_servers_parameters(tmp_path: Path):
    plan = stale_plan(2, 1, job=JOB)

    def body(world: World) -> tuple[int, float, float]:
        executor = executor_of(analyzed_model(), plan, world)
        metrics = executor.step(samples_of(plan, world.rank, 0) or None)
        loss = executor.evaluate([samples_of(plan, world.rank, 1) or None]).loss
        save_tensors(tmp_path, 1, executor.state_dict(), {}, world.group(AXES), keep=9)
        executor.close()
        return metrics.samples, metrics.loss, loss

    (first, one, _), (second, other, _), (none, _, _) = results = run_on_threads(body, plan.mesh)
    assert (first, second, none) == (6, 6, 0)
    assert one != other
    saved = load_tensors(tmp_path / "step-00000001")[0]

    def reload(world: World) -> float:
        executor = executor_of(analyzed_model(), ddp, world)
        executor.load_state_dict(saved, 1)
        return executor.evaluate([samples_of(ddp, world.rank, 1)]).loss

    ddp = mw.make_plan(analyzed_model(), tiny_job(**JOB), mw.Mesh(dp_replicate=2))
    assert {loss for _, _, loss in results} == {results[0][2]}
    assert run_on_threads(reload, ddp.mesh)[0] == pytest.approx(results[0][2], rel=1e-12)


def run_and_replay(world: World, folder: str) -> list[torch.Tensor]:
    found = []
    for options in ({"record": folder}, {"replay": folder}):
        world.group(AXES).barrier()
        plan = stale_plan(2, 2, bound=1, job=JOB, **options)
        executor = executor_of(analyzed_model(), plan, world)
        for step in range(STEPS):
            executor.step(samples_of(plan, world.rank, step) or None)
        found += [torch.cat([each.flatten() for each in executor.gather_parameters().values()])]
        executor.close()
    return found


def test_processes_receive_from_any_and_replay_what_they_recorded(process_pool: ProcessPool, tmp_path: Path):
    mesh = mw.Mesh(outer=4)
    for recorded, replayed in process_pool.run(run_and_replay, mesh, str(tmp_path)):
        assert torch.equal(recorded, replayed)
    plan = stale_plan(2, 2, bound=1, job=JOB)
    assert {len(each.updates) for each in records_of(plan, tmp_path)} == {2 * STEPS}


REFUSED = [
    (lambda: mw.StaleServer(bound=-1), r"bound = -1(?s:.*)at least 0(?s:.*)leave it out"),
    (lambda: mw.StaleServer(servers=0), r"servers = 0(?s:.*)number of at least 1"),
    (lambda: mw.StaleServer(lr_by_staleness="linear"), r"lr_by_staleness = 'linear'"),
    (lambda: stale_plan(0, 2), r"servers = 2 of the 2 ranks along outer: no worker is left"),
    (lambda: stale_plan(1, 6), r"servers = 6, and there are 5 parameter groups"),
    (lambda: stale_plan(5), r"12 samples does not divide by 5 workers"),
    (lambda: plan_on(mw.Mesh(outer=3, tp=2)), r"each worker of stale_server is one rank, and mesh.tp is 2"),
    (lambda: stale_plan(job={"guard": LossGuard("stop")}), r"loss guard(?s:.*)guard.action"),
    (lambda: stale_plan(job={"train": noisy()}), r"noise scale(?s:.*)train.noise_scale = false"),
    (
        lambda: stale_plan(
            job={"precision": PrecisionConfig("float16", "float16", "float16", master="float32")}
        ),
        r"loss scale of float16",
    ),
    (
        lambda: stale_plan(job={"precision": PrecisionConfig(reduce="bfloat16")}),
        r"sums in bfloat16: what is pushed is stepped as it is",
    ),
    (
        lambda: stale_plan(job={"evaluate": replace(tiny_job().evaluate, every=2, hold_out=4)}),
        r"evaluation every 2 steps(?s:.*)evaluate.every = 0",
    ),
    (lambda: plan_on(mw.Mesh(outer=3), mw.Offload(step_on="host")), "rest off the device"),
    (lambda: plan_on(mw.Mesh(outer=3), mw.LocalSGD(sync_every=2)), "train apart"),
]


def noisy() -> mw.TrainConfig:
    return mw.TrainConfig(steps=STEPS, batch=12, noise_scale=True)


def plan_on(mesh: mw.Mesh, *beside: mw.Strategy) -> Plan:
    return mw.make_plan(analyzed_model(), tiny_job(**JOB), mesh, (mw.StaleServer(), *beside))


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_work_is_refused_with_the_repair(make, text: str):
    with pytest.raises(mw.PlanError, match=text):
        make()


def test_a_record_of_another_plan_or_run_too_short_or_missing_is_refused_before_ranks_start(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    trained(stale_plan(2, bound=1, job=JOB, record=str(one)), 2)
    with pytest.raises(mw.PlanError, match=r"ends after step 2 of 4(?s:.*)the record of a whole run"):
        stale_plan(2, bound=1, job=JOB, replay=str(one))
    with pytest.raises(mw.PlanError, match=r"of 2 workers with bound 1, the plan of 2 with bound None"):
        stale_plan(2, job=JOB, replay=str(one))
    with pytest.raises(mw.PlanError, match=r"arrivals-3.txt cannot be read"):
        stale_plan(3, bound=1, job=JOB, replay=str(one))
    other = {**JOB, "optimizer": replace(MOMENTUM, lr=0.2)}
    with pytest.raises(mw.PlanError, match=r"arrivals-2.txt is of another plan, \w{16}, than \w{16}"):
        stale_plan(2, bound=1, job=other, replay=str(one))
    plan = stale_plan(2, 2, job=JOB, record=str(two))
    header = RecordHeader(read_record(trained_record(plan, two, 2)).header.plan, 2, 2, None)
    for server, order in ((2, (0, 0, 0, 0, 1, 1, 1, 1)), (3, (1, 1, 1, 1, 0, 0, 0, 0))):
        clocks = WorkerClocks(2, None)
        writer = RecordWriter(record_path(str(two), server), replace(header, server=server))
        updates = [(clocks.apply(worker), clocks.release())[0] for worker in order]
        for first in range(0, 8, 2):
            writer.append(updates[first : first + 2])
    with pytest.raises(mw.PlanError, match="are not of one run: each waits for the other"):
        stale_plan(2, 2, job=JOB, replay=str(two))


def trained_record(plan: Plan, folder: Path, server: int) -> Path:
    trained(plan, STEPS)
    return record_path(str(folder), server)


def go_on(plan: Plan, first: int, folder: Path) -> dict[str, torch.Tensor]:
    """What the server of `plan` has at the end of a run from step `first`, whose checkpoint is in `folder`;
    from 0, after two steps, which it saves.
    """

    def body(world: World) -> dict[str, torch.Tensor]:
        executor = executor_of(analyzed_model(), plan, world)
        if first:
            executor.load_state_dict(load_tensors(folder / f"step-{first:08d}")[0], first)
        for step in range(first, STEPS if first else 2):
            executor.step(samples_of(plan, world.rank, step) or None)
        if not first:
            save_tensors(folder, 2, executor.state_dict(), {}, world.group(AXES), keep=9)
        return {name: each.clone() for name, each in executor.gather_parameters().items()}

    return run_on_threads(body, plan.mesh)[plan.sharding.server_indices[0]]


def test_a_record_is_followed_from_a_checkpoint_in_its_middle_where_workers_go_on_together(tmp_path: Path):
    options = {"bound": 0, "job": {**JOB, "optimizer": ADAMW}}
    expected, _ = trained(stale_plan(3, record=str(tmp_path / "run"), **options), STEPS, delays(0))
    again = stale_plan(3, replay=str(tmp_path / "run"), **options)
    again.check_start(2)
    go_on(again, 0, tmp_path)
    found = go_on(again, 2, tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_record_is_not_followed_from_a_checkpoint_in_its_middle_where_workers_do_not(tmp_path: Path):
    plan = stale_plan(2, bound=1, job=JOB, record=str(tmp_path / "run"))
    trained(plan, STEPS)
    again = stale_plan(2, bound=1, job=JOB, replay=str(tmp_path / "run"))
    go_on(stale_plan(2, bound=1, job=JOB), 0, tmp_path)
    match = (
        r"begins with step 3, and the record with step 1: under bound 1(?s:.*)from where the record begins"
    )
    with pytest.raises(mw.PlanError, match=match):
        again.check_start(2)
    with pytest.raises(mw.PlanError, match=match):  # nobody has asked before
        go_on(again, 2, tmp_path)


def test_a_record_that_begins_at_a_checkpoint_is_followed_from_there_alone(tmp_path: Path):
    first, later = (stale_plan(2, bound=1, job=JOB, record=str(tmp_path / each)) for each in ("a", "b"))
    go_on(first, 0, tmp_path)
    go_on(later, 2, tmp_path)
    again = stale_plan(2, bound=1, job=JOB, replay=str(tmp_path / "b"))
    again.check_start(2)
    for step in (0, 3):
        with pytest.raises(mw.PlanError, match=rf"begins with step {step + 1}, and the record with step 3"):
            again.check_start(step)


@pytest.mark.parametrize("kind", ["PUSH", "PULL"])
def test_a_push_or_a_pull_that_is_missing_or_goes_elsewhere_is_noticed(kind: str):
    def without(actions: list[Action]) -> list[Action]:
        return [each for each in actions if each.kind != kind]

    def elsewhere(actions: list[Action]) -> list[Action]:
        return [
            replace(each, transfer=replace(each.transfer, root=1)) if each.kind == kind else each
            for each in actions
        ]

    def unordered(actions: list[Action]) -> list[Action]:
        return [replace(each, waits=("CLIP()",)) if each.kind == "PULL" else each for each in actions]

    plan = stale_plan(2, 1)
    assert "is to be pushed once, and then pulled" in str(static_checks(edited(plan, without)))
    assert "name index 1, and index 2 steps" in str(static_checks(edited(plan, elsewhere)))
    assert "PULL(head) does not wait for PUSH(head)" in str(static_checks(edited(plan, unordered)))


def test_a_server_that_steps_twice_with_one_gradient_or_too_early_is_noticed():
    def without_take(actions: list[Action]) -> list[Action]:
        return [each for each in actions if (each.kind, each.microbatch) != ("TAKE", 1)]

    found = str(static_checks(edited(stale_plan(2, 1), without_take)))
    assert "STEP(1) finds the gradients of no microbatch" in found


def test_a_server_that_ignores_the_bound_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Boundless(WorkerClocks):
        def __init__(self, num_workers: int, bound: int | None) -> None:
            super().__init__(num_workers, None)

    monkeypatch.setattr("meshwright.parallel.server.stale_updates.WorkerClocks", Boundless)
    plan = stale_plan(3, bound=1, job=JOB, record=str(tmp_path))
    trained(plan, STEPS, late(STEPS - 1))
    with pytest.raises(mw.PlanError, match="is no order of pushes: worker"):
        records_of(plan, tmp_path)
