"""Blocks that a memory budget offloads: bits, live bytes of both tiers, and what is chosen for which link."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.harness.live_bytes import live_bytes
from benchmarks.memory.planted_offload_faults import losing
from meshwright.api import verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.runtime.host_memory import HostMemory
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.memory.activation_files import activation_nbytes
from meshwright.plan.step.program import Action
from meshwright.verifier.static_checks import static_checks
from tests.parallel.memory.test_memory_budget_numbers import llama_plan, trained
from tests.parallel.memory.unequal_model import BATCH, HIDDEN, MIB, activations, kinds, planned, unequal
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import executor_of

FAST, SLOW = 1e3, 1e-6  # 1e9 bytes per second
FULL = activations(planned())
LLAMA_CALLS = len(analyzed_llama(num_hidden_layers=6).model_spec.block_calls)
CALLS = len(unequal().model_spec.block_calls)


def offloading(
    *more: str, calls: int = CALLS, nbytes: float = 0, link: float = FAST, host_gb: float | None = None
) -> MemoryBudget:
    """A budget that may offload; blocks take a millisecond each."""
    times = {"forward_ms": (1.0,) * calls, "host_gb_per_s": link, "host_gb": host_gb}
    return MemoryBudget(nbytes / MIB, (*more, "offload"), **times)


ALL = offloading()
LLAMA = offloading(calls=LLAMA_CALLS)
LEAST = activations(planned(ALL))


def offloaded(plan: Plan, rank: int = 0) -> list[str]:
    return [call for _, call in kinds(plan, "OFFLOAD_ACTIVATIONS", rank=rank)]


@pytest.mark.parametrize("case", ["one device", "zero 3 of 3", "zb_h1", "tp 2"])
def test_the_bits_are_those_of_the_plan_without(case: str):
    plan = llama_plan(case, LLAMA)
    assert static_checks(plan) == []
    assert any(offloaded(plan, rank) for rank in range(plan.mesh.world_size))
    assert trained(plan) == trained(llama_plan(case))


@pytest.mark.parametrize("case", ["one device", "zero 3 of 3", "1f1b"])
def test_it_equals_one_device_and_sends_what_is_planned(case: str):
    verdict = verify(analyzed_llama(num_hidden_layers=6), llama_plan(case, LLAMA), batches(2, 12))
    assert verdict.passed, str(verdict)


def test_segments_and_offloaded_blocks_are_one_plan():
    least = activations(planned(offloading("recompute", "segment")))
    plan = planned(offloading("recompute", "segment", nbytes=1.02 * least))
    assert least < LEAST
    assert static_checks(plan) == []
    assert offloaded(plan)
    assert kinds(plan, "F_INPUT_DROPPED")
    assert parameters(plan) == parameters(planned())


def parameters(plan: Plan) -> dict[str, bytes]:
    executor = executor_of(unequal(), plan, single_rank_world(torch.device("cpu")))
    for _ in range(2):
        executor.step(BATCH)
    found = executor.gather_parameters()
    executor.close()
    return {name: tensor.detach().numpy().tobytes() for name, tensor in found.items()}


def live_at_loss(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The bytes that live on the device and on the host when the loss is computed."""
    made, found = list[tuple[StorageWeakRef, int]](), list[tuple[int, int]]()
    empty = HostMemory.empty

    def noted(self: HostMemory, *args: object) -> torch.Tensor:
        tensor = empty(self, *args)
        storage = tensor.untyped_storage()
        made.append((StorageWeakRef(storage), storage.nbytes()))
        return tensor

    monkeypatch.setattr(HostMemory, "empty", noted)
    executor = executor_of(unequal(), plan, single_rank_world(torch.device("cpu")))
    loss = executor._actions.handlers["LOSS"]

    def counted(action: Action) -> None:
        gc.collect()
        host = sum(nbytes for reference, nbytes in made if not reference.expired())
        found.append((live_bytes() - host, host))
        loss(action)

    executor._entries = [
        (each, counted if each.kind == "LOSS" else handler, waits)
        for each, handler, waits in executor._entries
    ]
    executor.step(BATCH)
    executor.close()
    return found[0]


def test_live_bytes_of_both_tiers_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch):
    plan = planned(offloading(nbytes=1.2 * LEAST))
    leaves = activation_nbytes(plan.for_rank(0).actions, "host")
    assert 1 < len(offloaded(plan)) < len(HIDDEN)
    device, host = live_at_loss(plan, monkeypatch)
    plain, nothing = live_at_loss(planned(), monkeypatch)
    assert (device, host, nothing) == (plain - leaves, leaves, 0)


def test_what_is_chosen_depends_on_the_link():
    nbytes = (LEAST + FULL) / 2
    fast, slow = (planned(offloading("recompute", nbytes=nbytes, link=link)) for link in (FAST, SLOW))
    assert offloaded(fast)
    assert not kinds(fast, "RECOMPUTE")
    assert kinds(slow, "RECOMPUTE")
    assert not offloaded(slow)
    assert activations(fast) <= nbytes
    nobody_knows = planned(MemoryBudget(nbytes / MIB))
    assert not offloaded(nobody_knows)


def test_no_more_leaves_than_the_bytes_ask_for():
    few, more = (planned(offloading(nbytes=share * FULL)) for share in (0.95, LEAST / FULL))
    leaves = [activation_nbytes(each.for_rank(0).actions, "host") for each in (few, more)]
    assert 0 < leaves[0] < leaves[1]


def test_the_host_bounds_what_leaves():
    whole = activation_nbytes(planned(ALL).for_rank(0).actions, "host")
    bounded = planned(offloading(host_gb=0.4 * whole / 2**30))
    assert 0 < activation_nbytes(bounded.for_rank(0).actions, "host") <= 0.4 * whole
    with pytest.raises(PlanError, match="activations of the block calls 'embed' to 'head' take"):
        planned(offloading(nbytes=1.01 * LEAST, host_gb=0.4 * whole / 2**30))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: planned(ALL, ActivationOffload()), "both copy activations to the host"),
        (lambda: planned(MemoryBudget(choices=("offload",))), "seconds of blocks and of copies are unknown"),
        (lambda: planned(MemoryBudget(choices=("gist",), host_gb=1)), "`choices` leaves out offload"),
        (lambda: planned(MemoryBudget(budget_mb=1e-3)), "forward_ms or host_gb_per_s is unknown"),
        (lambda: offloading(link=-1.0), "host_gb_per_s = -1"),
    ],
)
def test_what_does_not_work_is_refused(make: Callable[[], object], text: str):
    with pytest.raises(PlanError, match=text) as refused:
        make()
    assert all(each.fix for each in refused.value.diagnostics)


def test_a_copy_that_is_lost_changes_the_bits():
    plan = planned(ALL)
    right = parameters(plan)
    with losing("FETCH_ACTIVATIONS", lambda pairs: pairs[:-1]):
        assert parameters(plan) != right
