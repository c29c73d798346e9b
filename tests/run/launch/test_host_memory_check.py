"""Ranks that keep more in the memory of their host than is free are refused, with repairs that fit."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.api import analyze, parallelize
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.job.errors import PlanError, format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import nbytes_of_ranks, peak_nbytes
from meshwright.run.launch import host_memory_check
from meshwright.run.launch.host_memory_check import (
    SAME_MEMORY,
    check_disk_space,
    check_host_memory,
    check_ranks_fit_here,
)
from tests.parallel.memory.tiers.test_offload import ADAMW, ANALYZED, STORES
from tests.tiny_model import VOCABULARY, plan_of, tiny_job, token_samples


class Deep(nn.Module):
    """Twelve layers, so that three parameter groups are a small part of all states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


HOST: Sequence[MemoryTier] = ("host",)


def plan_with(*strategies: Strategy, ranks: int = 2) -> Plan:
    return plan_of(ANALYZED, ranks, strategies, job=tiny_job(optimizer=ADAMW), micro_batch=2)


def refusal(plan: Plan, free: int, tiers: Sequence[MemoryTier] = HOST) -> str:
    with pytest.raises(PlanError) as refused:
        check_host_memory(ANALYZED, plan, range(plan.mesh.world_size), free, tiers)
    return str(refused.value)


def test_it_counts_the_ranks_of_a_host_together():
    plan = plan_with(*STORES["zero 1"], Offload())
    needed = sum(peak_nbytes(plan, rank, "host") for rank in range(2))
    check_host_memory(ANALYZED, plan, range(2), needed, HOST)
    text = refusal(plan, needed - 1)
    assert f"2 ranks of this host need {format_nbytes(needed)} of its memory" in text
    check_host_memory(ANALYZED, plan, [1], needed - 1, HOST)


def test_on_the_cpu_the_memory_of_the_device_is_that_of_the_host():
    plan = plan_with(*STORES["ddp"])
    check_host_memory(ANALYZED, plan, range(2), 0, HOST)
    needed = 2 * peak_nbytes(plan, 0)
    assert nbytes_of_ranks(plan, range(2), SAME_MEMORY) == needed
    check_host_memory(ANALYZED, plan, range(2), needed, SAME_MEMORY)
    assert "what a device holds is there too" in refusal(plan, needed - 1, SAME_MEMORY)


def test_states_on_a_disk_are_proposed_where_they_fit():
    deep, job = analyze(Deep, token_samples(2)), tiny_job(optimizer=ADAMW)
    plan, on_disk = (
        plan_of(deep, 2, (*STORES["zero 1"], each), job=job) for each in (Offload(), DiskOffload("/scratch"))
    )
    free, needed = (nbytes_of_ranks(each, range(2)) for each in (plan, on_disk))
    text = f"in place of offload, which needs {format_nbytes(needed)}"
    with pytest.raises(PlanError, match=text):
        check_host_memory(deep, plan, range(2), free - 1, HOST)
    with pytest.raises(PlanError) as refused:
        check_host_memory(deep, plan, range(2), needed - 1, HOST)
    assert "disk_offload" not in str(refused.value)


def test_fewer_buffers_are_proposed_for_states_on_a_disk():
    plan = plan_with(*STORES["zero 1"], DiskOffload("/scratch", 3))
    needed = nbytes_of_ranks(plan_with(*STORES["zero 1"], DiskOffload("/scratch", 2)), range(2), HOST)
    assert f"num_buffers = 2, which needs {format_nbytes(needed)}" in refusal(plan, needed)


def test_a_memory_budget_without_offload_is_proposed_where_the_host_is_full():
    times = (1.0,) * len(ANALYZED.model_spec.block_calls)
    budget = MemoryBudget(choices=("recompute", "offload"), forward_ms=times, host_gb_per_s=1e3, host_gb=1)
    plan = plan_with(*STORES["ddp"], budget)
    assert 'leave "offload" out of memory_budget.choices' in refusal(plan, nbytes_of_ranks(plan, [0], HOST))


def test_shards_are_proposed_in_place_of_copies():
    plan = plan_with(BatchSplit(), DDP(), Offload())
    text = refusal(plan, nbytes_of_ranks(plan, range(2), HOST) - 1)
    assert 'name = "zero", axis = "dp_replicate", stage = 1 in place of ddp' in text


def test_more_hosts_are_proposed_where_each_holds_its_ranks():
    plan = plan_with(*STORES["zero 1"], Offload(), ranks=3)
    one = max(peak_nbytes(plan, rank, "host") for rank in range(3))
    found = re.search(r"on (\d) such hosts", refusal(plan, 2 * one))
    assert found is not None
    assert found[1] == "2"


def test_a_host_too_small_for_everything_is_told_what_is_needed():
    plan = plan_with(*STORES["zero 1"], Offload())
    needed = format_nbytes(nbytes_of_ranks(plan, range(2), HOST))
    assert f"a host with {needed} of free memory" in refusal(plan, 1)


def test_a_disk_that_is_too_small_for_the_files_of_all_ranks_is_refused(tmp_path: Path):
    plan = plan_with(*STORES["zero 1"], DiskOffload(str(tmp_path)))
    needed = sum(peak_nbytes(plan, rank, "disk") for rank in range(2))
    check_disk_space(plan, range(2), needed)
    check_disk_space(plan, [1], needed - 1)
    with pytest.raises(PlanError) as refused:
        check_disk_space(plan, range(2), needed - 4096)
    text = str(refused.value)
    assert f"2 ranks of this host need {format_nbytes(needed)} on the disk of '{tmp_path}'" in text
    assert "free 4 KiB more, name a folder on a larger disk" in text


def test_a_folder_that_is_missing_is_refused_before_ranks_start(tmp_path: Path):
    plan = plan_with(*STORES["zero 1"], DiskOffload(str(tmp_path / "missing")))
    with pytest.raises(PlanError, match=r"No such file or directory \(ENOENT\)"):
        check_ranks_fit_here(ANALYZED, plan, range(2))
    check_ranks_fit_here(ANALYZED, plan_with(*STORES["zero 1"], DiskOffload(str(tmp_path))), range(2))


@pytest.mark.parametrize("lacking", ["memory", "disk"])
def test_parallelize_refuses_a_rank_that_does_not_fit_here(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_with(DiskOffload(str(tmp_path)), ranks=1)
    if lacking == "memory":
        monkeypatch.setattr(host_memory_check, "free_and_total_host_nbytes", lambda: (4096, 1 << 30))
    else:
        monkeypatch.setattr(host_memory_check, "free_disk_nbytes", lambda folder: 4096)
    with pytest.raises(PlanError, match=f"rank 0 of this host needs .* {lacking}"):
        parallelize(ANALYZED, plan)
