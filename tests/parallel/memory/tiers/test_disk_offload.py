"""Disk offload changes no bit; bytes read and written, and memory per tier, are the plan's, to the byte."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshwright.api import make_plan, trace, verify
from meshwright.engine.params.disk_states import DiskStates
from meshwright.engine.params.rank_file import RankFile
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES, MEMORY_TIERS
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.model_states import STEP_COUNTER_NBYTES, group_states
from meshwright.plan.step.program import Action, Allocation
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes_by_category, state_bytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import SyntheticModel
from tests.parallel.memory.tiers.test_offload import ADAMW, ANALYZED, PRECISIONS, STORES, trained, without
from tests.plan.step.memory.test_model_states import JOB
from tests.tiny_model import edited, executor_of, plan_of, tiny_job, token_samples

OPTIMIZERS = ("sgd", "adamw", "lion", "adamw_bf16", "adamw_8bit")


STATES_ALONE, WITH_WEIGHTS = ("optimizer_states",), ("optimizer_states", "weights")


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("store", "what"),
    [*((store, STATES_ALONE) for store in STORES), ("zero 3", WITH_WEIGHTS)],
    ids=[*STORES, "zero 3, weights"],
)
def test_it_changes_no_bit(
    store: str, what: tuple[str, ...], precision: str, num_buffers: int, tmp_path: Path
):
    if store == "ddp" and precision == "float32 gradients":
        pytest.skip("ddp keeps gradients in the dtype of the weights")
    job = replace(tiny_job(), precision=PRECISIONS[precision], optimizer=ADAMW)
    disk = DiskOffload(str(tmp_path), num_buffers, what)
    plain, plan = (
        plan_of(ANALYZED, 2, strategies, job=job, micro_batch=2)
        for strategies in (STORES[store], (*STORES[store], disk))
    )
    assert static_checks(plan) == []
    found = trained(plan)
    assert [each["bits"] for each in found] == [each["bits"] for each in trained(plain)]
    for rank, each in enumerate(found):
        streams = ("copy_in", "copy_out", "disk")
        moved = (action for action in plan.for_rank(rank).actions if action.stream in streams)
        assert each["copied"] == {action.name: action.transfer.nbytes for action in moved}
        for tier in MEMORY_TIERS:
            said, sizes = state_bytes(plan, rank, tier).as_dict(), each["memory"][tier]
            said["buffers"] += said.pop("gradients")  # in ddp, gradients lie in buckets
            sizes["buffers"] = sizes.pop("buckets") + sizes.pop("gradients")
            assert sizes == {name: n for name, n in said.items() if n or name in sizes}, tier


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_of_elements_or_blocks_is_the_same(optimizer: str, tmp_path: Path):
    config = OptimizerConfig(optimizer, lr=0.01, momentum=0.9 if optimizer == "sgd" else 0.0)
    job = replace(tiny_job(), precision=PRECISIONS["masters"], optimizer=config)
    plain, plan = (
        plan_of(ANALYZED, 2, (*STORES["zero 2"], *more), job=job, micro_batch=2)
        for more in ((), (DiskOffload(str(tmp_path)),))
    )
    assert [each["bits"] for each in trained(plan)] == [each["bits"] for each in trained(plain)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_are_those_of_the_paper(ranks: int):
    """N elements of a rank: 12 N read and written, 2 N of gradients out, 2 N of weights back; the host holds
    buffers of the largest group alone.
    """
    spec = SyntheticModel(layers=4, numel=1200).model_spec
    store = (BatchSplit(axis="dp_shard"), ZeRO(stage=2)) if ranks > 1 else ()
    plan = Plan.make(JOB, Mesh(dp_shard=ranks), spec, (*store, DiskOffload("folder", num_buffers=2)), 2)
    numel, groups = spec.numel // ranks, list(group_states(JOB, plan.rank_view(0)))
    counters = STEP_COUNTER_NBYTES * sum(len(each.stepped_params) for each in groups)
    moved = {"copy_in": 0, "copy_out": 0, "READ_STATES": 0, "WRITE_STATES": 0}
    for action in plan.for_rank(0).actions:
        key = action.kind if action.stream == "disk" else action.stream
        if key in moved and action.transfer is not None:
            moved[key] += action.transfer.nbytes
    assert (moved["copy_in"], moved["copy_out"]) == (2 * numel, 2 * numel)
    disk = state_bytes(plan, 0, "disk")
    assert disk.master + disk.optimizer_states == 12 * numel + counters
    assert disk.total == moved["READ_STATES"] == moved["WRITE_STATES"]
    assert 0 <= disk.buffers < FILE_BLOCK_NBYTES * len(groups)
    largest = max(groups, key=lambda each: each.record_nbytes)
    host = state_bytes(plan, 0, "host")
    assert host.model_states == 2 * largest.grad_nbytes
    cast = 4 * largest.stepped_numel
    assert host.buffers == 2 * (largest.record_nbytes + largest.rounded_nbytes) + cast
    made = {"optimizer": largest.state_nbytes}  # by the first step, in memory
    assert peak_nbytes_by_category(plan, 0, "host").items() >= made.items()
    assert sum(peak_nbytes_by_category(plan, 0, "disk").values()) == disk.total


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_weights_on_disk_are_read_once_for_each_use_and_written_once(num_buffers: int):
    """N elements of a rank, bf16: 2 N read for each use and 2 N written, in whole blocks; nothing of them
    stays on the device, and the host has buffers of the largest shard.
    """
    spec = SyntheticModel(layers=4, numel=3 * 5_000).model_spec
    store = (BatchSplit(axis="dp_shard"), ZeRO(stage=3, keep_mb=0.0))
    plan, plain = (
        Plan.make(JOB, Mesh(dp_shard=3), spec, (*store, DiskOffload("folder", num_buffers, what)), 2)
        for what in (WITH_WEIGHTS, STATES_ALONE)
    )
    actions, groups = plan.for_rank(0).actions, list(group_states(JOB, plan.rank_view(0)))
    records = {each.name: each.weight_record_nbytes for each in groups}
    uses = [each.tensors for each in actions if each.kind == "UNSHARD"]
    group_of = {name: group.name for group in plan.rank_view(0).all_param_groups for name in group.names}
    assert len(uses) > 2 * len(groups)
    moved = {kind: [each for each in actions if each.kind == kind] for kind in ("READ_PARAM", "WRITE_PARAM")}
    read, written = (sum(each.transfer.nbytes for each in moves) for moves in moved.values())
    assert read == sum(records[group_of[names[0]]] for names in uses)
    assert written == sum(records.values())
    for each in groups:
        assert records[each.name] == round_up(2 * each.numel, FILE_BLOCK_NBYTES) >= each.weight_nbytes > 0
    disk, disk_of_plain = (state_bytes(each, 0, "disk") for each in (plan, plain))
    assert disk.parameters == state_bytes(plain, 0).parameters == 2 * sum(each.numel for each in groups)
    assert disk.total - disk_of_plain.total == written
    assert state_bytes(plan, 0).parameters == 0
    host, host_of_plain = (state_bytes(each, 0, "host").total for each in (plan, plain))
    largest = max(groups, key=lambda each: each.numel)
    extra = num_buffers * records[largest.name]
    rounded = num_buffers * (records[largest.name] - largest.rounded_nbytes)  # whole blocks are written
    assert host - host_of_plain == extra + rounded


def without_wait(kind: str, awaited: str) -> Callable[[list[Action]], list[Action]]:
    """Removes from actions of `kind` their waits for those of the kind `awaited`."""
    return lambda actions: [
        replace(each, waits=tuple(name for name in each.waits if not name.startswith(awaited)))
        if each.kind == kind
        else each
        for each in actions
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_wait("STEP", "READ_STATES"), r"STEP\(head\) does not wait for READ_STATES\(head\)"),
        (without_wait("STEP", "OFFLOAD_GRAD"), r"STEP\(head\) does not wait for OFFLOAD_GRAD\(head\)"),
        (without_wait("STEP", "FETCH_PARAM"), r"STEP\(\S+\) does not wait for FETCH_PARAM\(head\)"),
        (without_wait("WRITE_STATES", "STEP"), r"WRITE_STATES\(head\) does not wait for STEP\(head\)"),
        (without_wait("FETCH_PARAM", "STEP"), r"FETCH_PARAM\(head\) does not wait for STEP\(head\)"),
        (without_wait("READ_STATES", "WRITE_STATES"), r"READ_STATES\(\S+\) does not wait for WRITE_STATES"),
        (without_wait("OFFLOAD_GRAD", "STEP"), r"OFFLOAD_GRAD\(\S+\) does not wait for STEP\(head\)"),
        (without("READ_STATES"), r"STEP\(head\) updates states on disk, and there is no READ_STATES"),
        (without("WRITE_STATES"), r"STEP\(head\) updates states on disk, and there is no WRITE_STATES"),
        (without("FETCH_PARAM"), "updates what no OFFLOAD_STATES or FETCH_PARAM copies"),
        (without("OFFLOAD_GRAD"), "reads gradients on the host, and no OFFLOAD_GRAD copies them"),
    ],
)
def test_what_comes_too_early_or_never_is_found(change: Callable[[list[Action]], list[Action]], text: str):
    job = tiny_job(precision=PRECISIONS["masters"], optimizer=ADAMW)
    plan = plan_of(ANALYZED, 2, (*STORES["zero 2"], DiskOffload("folder", num_buffers=2)), job=job)
    assert static_checks(plan) == []
    found = "\n".join(str(diagnostic) for diagnostic in static_checks(edited(plan, change)))
    assert re.search(text, found), found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_wait("UNSHARD", "FETCH_PARAM"), r"UNSHARD\(\S+, F, 0\) does not wait for FETCH_PARAM\("),
        (without_wait("FETCH_PARAM", "READ_PARAM"), r"FETCH_PARAM\(\S+, F, 0\) does not wait for READ_PARAM"),
        (
            without_wait("READ_PARAM", "FETCH_PARAM"),
            r"READ_PARAM\(\S+ \S, \d\) does not wait for FETCH_PARAM",
        ),
        (without_wait("WRITE_PARAM", "STEP"), r"WRITE_PARAM\(head\) does not wait for STEP\(head\)"),
        (without_wait("STEP", "WRITE_PARAM"), r"STEP\(\S+\) does not wait for WRITE_PARAM\(head\)"),
        (without("READ_PARAM"), r"FETCH_PARAM\(embed, F, 0\) waits for READ_PARAM\(embed, F, 0\), which no"),
        (without("WRITE_PARAM"), r"STEP\(head\) updates weights on disk, and there is no WRITE_PARAM"),
    ],
)
def test_weights_on_disk_that_come_too_early_or_never_are_found(
    change: Callable[[list[Action]], list[Action]], text: str
):
    job = tiny_job(precision=PRECISIONS["masters"], optimizer=ADAMW)
    disk = DiskOffload("folder", 2, WITH_WEIGHTS)
    plan = plan_of(ANALYZED, 2, (*STORES["zero 3"], disk), job=job, micro_batch=2)
    assert static_checks(plan) == []
    found = "\n".join(str(diagnostic) for diagnostic in static_checks(edited(plan, change)))
    assert re.search(text, found), found


@contextmanager
def losing(kind: str, number: int) -> Iterator[None]:
    """Does not move the bytes of the `number`-th transfer of `kind`, in each step."""
    transfer = RankFile._transfer

    def most(self: RankFile, begin: int, tensor: torch.Tensor, action: str, *, writes: bool) -> None:
        if action != lost:
            transfer(self, begin, tensor, action, writes=writes)

    plan = plan_of(ANALYZED, 2, (*STORES["zero 3"], WEIGHTS_DISK), job=MASTERS_JOB, micro_batch=2)
    lost = [each.name for each in plan.for_rank(0).actions if each.kind == kind][number]
    with patch.object(RankFile, "_transfer", most):
        yield


@contextmanager
def one_buffer() -> Iterator[None]:
    """Reads all shards into one buffer."""
    pinned = DiskStates._pinned

    def first(self: DiskStates, allocation: Allocation) -> torch.Tensor:
        if not allocation.name.startswith("host parameter buffer"):
            return pinned(self, allocation)
        self._buffers[allocation.name] = pinned(self, replace(allocation, name="host parameter buffer 0"))
        return self._buffers[allocation.name]

    with patch.object(DiskStates, "_pinned", first):
        yield


WEIGHTS_DISK = DiskOffload("/var/tmp", 2, WITH_WEIGHTS)
MASTERS_JOB = replace(tiny_job(), precision=PRECISIONS["masters"], optimizer=ADAMW)
FAULTS = {
    "a shard is not read: that of another use": partial(losing, "READ_PARAM", 2),
    "a stepped shard is not written": partial(losing, "WRITE_PARAM", 0),
    "one buffer for two shards": one_buffer,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_lost_or_mixed_up_change_bits(fault: str, tmp_path: Path):
    disk = replace(WEIGHTS_DISK, folder=str(tmp_path))
    plain, plan = (
        plan_of(ANALYZED, 2, (*STORES["zero 3"], *more), job=MASTERS_JOB, micro_batch=2)
        for more in ((), (disk,))
    )
    with FAULTS[fault]():
        found = trained(plan)
    assert [each["bits"] for each in found] != [each["bits"] for each in trained(plain)]


def test_reads_begin_with_the_backward_and_take_the_buffers_in_turn():
    plan = plan_of(ANALYZED, 1, (DiskOffload("folder", num_buffers=2),), job=tiny_job(optimizer=ADAMW))
    kinds = [action.kind for action in plan.for_rank(0).actions]
    assert kinds.index("READ_STATES") < kinds.index("B") < kinds.index("CLIP")
    assert kinds[kinds.index("CLIP") :] == [
        *("CLIP", "OFFLOAD_GRAD", "OFFLOAD_GRAD"),
        *3 * ("STEP", "FETCH_PARAM", "WRITE_STATES", "READ_STATES", "OFFLOAD_GRAD"),
        *2 * ("STEP", "FETCH_PARAM", "WRITE_STATES"),
    ]


@pytest.mark.parametrize(
    ("given", "more", "text"),
    [
        ({"folder": ""}, {}, "folder = ''; needed is a string that is not empty"),
        ({"num_buffers": 0}, {}, "num_buffers = 0; needed is a whole number of at least 1"),
        ({"host_gb": 0}, {}, "host_gb = 0; needed is a number above 0"),
        ({"host_gb": 1e-6}, {}, "of host memory, and host_gb = 1e-06 allows less"),
        ({"disk_gb": 1e-6}, {}, "of disk, and disk_gb = 1e-06 allows less"),
        (
            {"what": ("gradients",)},
            {},
            "what contains 'gradients'; needed is 'optimizer_states' or 'weights'",
        ),
        ({"what": ("weights",)}, {}, "leaves out optimizer_states, the largest part"),
        ({"what": WITH_WEIGHTS}, {}, "weights are gathered from shards on disk, and no strategy stores"),
        ({}, {"optimizer": OptimizerConfig("muon", momentum=0.9)}, "reads whole matrices"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    given: dict[str, object], more: dict[str, object], text: str
):
    job, fields = tiny_job(**{"optimizer": ADAMW, **more}), {"folder": "folder", **given}
    with pytest.raises(PlanError, match=text) as refused:
        plan_of(ANALYZED, 2, (*STORES["zero 1"], DiskOffload(**fields)), job=job)
    assert all(each.fix for each in refused.value.diagnostics)


@pytest.mark.parametrize(
    ("strategies", "mesh", "text"),
    [
        ((BatchSplit(), DataParallelMaster()), Mesh(dp_replicate=2), "one rank updates for all others"),
        ((PipeDream(),), Mesh(pp=2), "the plan updates after every microbatch, and disk_offload"),
        ((Offload(),), Mesh(), "in the tier 'disk', and another strategy in 'host'"),
    ],
)
@pytest.mark.parametrize("comes_first", [True, False])
def test_other_ways_to_update_are_refused(
    strategies: tuple[Strategy, ...], mesh: Mesh, text: str, comes_first: bool
):
    job, disk = tiny_job(optimizer=ADAMW, train=TrainConfig(batch=12, clip=0.0)), (DiskOffload("folder"),)
    given = (*disk, *strategies) if comes_first else (*strategies, *disk)
    text = text if comes_first or "tier" not in text else "in the tier 'host', and another strategy in 'disk'"
    with pytest.raises(PlanError, match=text.replace("'disk', and", "'(disk|host)', and")):
        make_plan(ANALYZED, job, mesh, given, 1 if mesh.pp > 1 else 0)


def test_an_optimizer_that_was_passed_is_refused(tmp_path: Path):
    plan = plan_of(ANALYZED, 1, (DiskOffload(str(tmp_path)),), job=tiny_job(optimizer=ADAMW))
    with pytest.raises(PlanError, match="an optimizer that was passed may count its steps"):
        run_on_threads(
            lambda world: executor_of(ANALYZED, plan, world, optimizer=torch.optim.Adagrad), plan.mesh
        )


def test_a_folder_that_is_missing_is_refused_before_the_first_step(tmp_path: Path):
    plan = plan_of(ANALYZED, 1, (DiskOffload(str(tmp_path / "missing")),), job=tiny_job(optimizer=ADAMW))
    with pytest.raises(PlanError, match="No such file or directory"):
        run_on_threads(lambda world: executor_of(ANALYZED, plan, world), plan.mesh)


def test_it_is_verified_and_a_trace_makes_no_file(tmp_path: Path):
    plan = plan_of(ANALYZED, 2, (*STORES["zero 2"], DiskOffload(str(tmp_path))))
    assert verify(ANALYZED, plan, [token_samples(12)] * 2).passed
    for what in (STATES_ALONE, WITH_WEIGHTS):
        absent = DiskOffload(str(tmp_path / "missing"), what=what)
        assert trace(ANALYZED, plan_of(ANALYZED, 2, (*STORES["zero 3"], absent))).passed
