"""Activations on disk at run time: the bits of the plan without it, a file that grows, planted faults."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as drawn

from meshwright.api import make_plan, trace
from meshwright.engine.params.rank_file import RankFile
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.tiers import kept_tensor_file
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.kept_tensor_file import FileRanges, KeptTensorFile
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.launch.host_memory_check import check_disk_space
from meshwright.testing.ranks import run_on_threads
from tests.parallel.expert.mixture_model import analyzed_mixtral, batch_of, expert_strategies
from tests.parallel.memory.tiers.test_activation_offload_runs import (
    ALL,
    CASES,
    FLOAT64,
    STORES,
    Watched,
    assert_same_bits_and_planned_bytes,
    trained,
)
from tests.parallel.memory.tiers.test_offload_combinations import MIXED, job
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import NUM_SAMPLES, analyzed_model, executor_of, tiny_job, token_samples

Maker = Callable[[tuple[Strategy, ...]], Plan]
SEVERAL = ["tp 3, sequence, zero 3", "pp 2, 1f1b, zero 2", "pp 2, zb_h1", "cp 3", "chunked loss, offload"]


def to_file(folder: Path, *blocks: str) -> ActivationOffload:
    return ActivationOffload(blocks, prefetch=0, folder=str(folder))


@pytest.mark.parametrize("case", SEVERAL)
def test_beside_other_techniques_it_changes_no_bit(case: str, tmp_path: Path):
    mesh, strategies = CASES[case]
    analyzed = analyzed_llama(num_hidden_layers=4)

    def make(chosen: tuple[Strategy, ...]) -> Plan:
        return make_plan(analyzed, job(FLOAT64), mesh, chosen, 2)

    chosen = (*strategies, to_file(tmp_path, "model.layers.*"))
    assert_same_bits_and_planned_bytes(analyzed, make, chosen, batches(2, 12), exact=False)


@pytest.mark.parametrize("other", [(), (DiskOffload,)], ids=["alone", "beside states on disk"])
def test_inputs_of_checkpointed_blocks_go_there_and_back(
    other: tuple[type[DiskOffload], ...], tmp_path: Path
):
    analyzed = analyzed_model(p=0.2)
    states = tuple(each(str(tmp_path), num_buffers=2) for each in other)

    def make(chosen: tuple[Strategy, ...]) -> Plan:
        return make_plan(analyzed, tiny_job(precision=MIXED), Mesh(dp_replicate=3), chosen, 2)

    data = [{key: value[:12] for key, value in token_samples(NUM_SAMPLES).items()}] * 3
    strategies = (*STORES["zero 3"], *states, ALL, to_file(tmp_path))
    assert_same_bits_and_planned_bytes(analyzed, make, strategies, data)


def test_experts_go_to_the_file(tmp_path: Path):
    strategies = (*expert_strategies(ZeRO("dp_shard", 2)), to_file(tmp_path))

    def make(chosen: tuple[Strategy, ...]) -> Plan:
        unguarded = replace(job(PrecisionConfig()), guard=LossGuard())
        return make_plan(analyzed_mixtral(), unguarded, Mesh(ep=2), chosen, 3)

    data = [batch_of(12, seed) for seed in range(3)]
    assert_same_bits_and_planned_bytes(analyzed_mixtral(), make, strategies, data, exact=False)


@given(drawn.lists(drawn.tuples(drawn.integers(1, 9), drawn.booleans()), max_size=30))
def test_ranges_that_are_taken_do_not_overlap(steps: list[tuple[int, bool]]):
    ranges, taken = FileRanges(), dict[int, int]()
    for nbytes, gives in steps:
        if gives and taken:
            begin = next(iter(taken))
            ranges.give(begin)
            del taken[begin]
        begin = ranges.take(nbytes)
        assert begin == 0 or begin in [each + taken[each] for each in taken]  # no gap that it fits into
        assert all(begin + nbytes <= each or each + taken[each] <= begin for each in taken)
        taken[begin] = nbytes


def of_tiny(folder: Path | None, num_samples: int = 12) -> Plan:
    more = (to_file(folder, "layers.*"),) if folder else ()
    return make_plan(analyzed_model(), tiny_job(num_samples), Mesh(), more, 2)


@contextmanager
def losing(kind: str) -> Iterator[None]:
    """Does not move the bytes of the second transfer of `kind` in each step."""
    transfer = RankFile._transfer
    plan = of_tiny(Path("folder"))
    lost = [each.name for each in plan.for_rank(0).actions if each.kind == kind][1]

    def most(self: RankFile, begin: int, tensor: torch.Tensor, action: str, *, writes: bool) -> None:
        if action != lost:
            transfer(self, begin, tensor, action, writes=writes)

    with patch.object(RankFile, "_transfer", most):
        yield


@contextmanager
def one_place() -> Iterator[None]:
    """Writes all records over each other."""
    with patch.object(FileRanges, "take", lambda self, nbytes: 0), patch.object(FileRanges, "give"):
        yield


@contextmanager
def one_buffer() -> Iterator[None]:
    """Fills a buffer while it is still to be copied to the device."""
    read = KeptTensorFile.read

    def into_first(self: KeptTensorFile, action: Action) -> None:
        (buffer,) = action.allocations
        read(self, replace(action, allocations=(replace(buffer, name="host activation buffer in 0"),)))
        self._state.works[action.name].wait()

    with patch.object(KeptTensorFile, "read", into_first):
        yield


FAULTS = {
    "a record is not written": partial(losing, "WRITE_ACTIVATIONS"),
    "a record is not read": partial(losing, "READ_ACTIVATIONS"),
    "all records in one place": one_place,
    "one buffer for two records": one_buffer,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_records_that_are_lost_or_mixed_up_change_bits(fault: str, tmp_path: Path):
    data = [{key: value[:12] for key, value in token_samples(NUM_SAMPLES).items()}] * 2
    plain, plan = of_tiny(None), of_tiny(tmp_path)
    ((wanted, _),), ((found, _),) = (
        trained(analyzed_model(), plain, data),
        trained(analyzed_model(), plan, data),
    )
    assert found == wanted
    with FAULTS[fault]():
        ((found, _),) = trained(analyzed_model(), plan, data)
    assert found != wanted


def test_a_file_that_is_too_short_grows_until_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = [{key: value[:12] for key, value in token_samples(NUM_SAMPLES).items()}] * 2
    analyzed, plan, allocate = analyzed_model(), of_tiny(tmp_path), os.posix_fallocate
    ends = list[int]()

    def noted(descriptor: int, begin: int, nbytes: int) -> None:
        ends.append(begin + nbytes)
        if len(ends) > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, begin, nbytes)

    monkeypatch.setattr(kept_tensor_file, "activation_nbytes", lambda *given: FILE_BLOCK_NBYTES)
    monkeypatch.setattr(os, "posix_fallocate", noted)
    limit = 3
    ((found, _),) = trained(analyzed, plan, data)
    assert ends == [number * FILE_BLOCK_NBYTES for number in (1, 2, 3)]
    assert found == trained(analyzed, of_tiny(None), data)[0][0]
    ends, limit = [], 1
    with pytest.raises(PlanError, match=r"8 KiB cannot be made(?s:.*)No space left"):
        trained(analyzed, plan, data)


def test_after_a_step_that_failed_the_next_one_finds_the_file_empty(tmp_path: Path):
    plain, watched = Watched(()), Watched((to_file(tmp_path),))
    for each in (plain, watched):
        each.fails = True
        with pytest.raises(KeyboardInterrupt):
            each.step()
        each.fails = False
    assert [watched.step(), watched.step()] == [plain.step(), plain.step()]
    (file,) = watched.executor._files
    with patch.object(RankFile, "grow") as grown:
        watched.step()
    assert max(each.args[0] for each in grown.call_args_list) == len(file.tensor)
    for each in (plain, watched):
        each.executor.close()


def test_a_folder_that_is_missing_is_named_and_a_trace_makes_no_file(tmp_path: Path):
    analyzed, missing = analyzed_model(), tmp_path / "missing"
    plan = make_plan(analyzed, tiny_job(), Mesh(), (to_file(missing),))
    with pytest.raises(PlanError, match=r"activation_offload\.folder: (?s:.*)No such file or directory"):
        run_on_threads(lambda world: executor_of(analyzed, plan, world), plan.mesh)
    strategies = (BatchSplit("dp_shard"), ZeRO(), to_file(missing))
    assert trace(analyzed, make_plan(analyzed, tiny_job(12), Mesh(dp_shard=3), strategies, 2), [0, 2]).passed


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path):
    plan = of_tiny(tmp_path)
    needed = 3 * FILE_BLOCK_NBYTES
    check_disk_space(plan, [0], needed)
    with pytest.raises(PlanError, match=r"activation_offload\.folder: (?s:.*)12 KiB on the disk"):
        check_disk_space(plan, [0], needed - 1)
