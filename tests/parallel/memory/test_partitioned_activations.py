"""Partitioned activations: ranks along tp keep ceil(n / t) elements of an input; the bits do not change."""

from collections.abc import Sequence
from threading import get_ident

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.api import make_plan, trace
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.partitioned_activations import PartitionedActivations
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.kept_tensor_copies import InputLeaves
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes_by_category
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.memory.tiers.test_activation_offload_runs import FLOAT64, planned_copies, trained
from tests.parallel.memory.tiers.test_offload_combinations import MIXED, job
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import executor_of

LAYERS, LENGTH, HIDDEN = 4, 7, 35  # 245 elements per sample
HEADS = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8}
ALL, PARTS = ActivationCheckpointing(blocks=("*",)), PartitionedActivations(prefetch=0)
SPLIT = BatchSplit("dp_replicate")


def analyzed() -> AnalyzedModel:
    return analyzed_llama(LENGTH, num_hidden_layers=LAYERS, hidden_size=HIDDEN, **HEADS)


def planned(
    mesh: Mesh,
    strategies: Sequence[Strategy],
    micro_batch: int = 0,
    precision: PrecisionConfig = FLOAT64,
) -> Plan:
    micro_batch = micro_batch or (3 if mesh.tp == 2 else 2)  # so that mesh.tp does not divide an input
    return make_plan(analyzed(), job(precision), mesh, strategies, micro_batch)


def without_parts(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    return tuple(each for each in strategies if not isinstance(each, PartitionedActivations))


CASES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "tp 2": (Mesh(tp=2), (TensorParallel(), ALL, PARTS)),
    "tp 3, ahead": (Mesh(tp=3), (TensorParallel(), VocabParallel(), ALL, PartitionedActivations(prefetch=2))),
    "tp 3, zero 3": (
        Mesh(dp_replicate=2, tp=3),
        (SPLIT, TensorParallel(), ZeRO("dp_replicate", 3), ALL, PARTS),
    ),
    "tp 2, pp 2": (Mesh(pp=2, tp=2), (Pipeline(schedule="1f1b"), TensorParallel(), ALL, PARTS)),
    "tp 2, zb_h1, ddp": (
        Mesh(pp=2, dp_replicate=2, tp=2),
        (Pipeline(schedule="zb_h1"), SPLIT, DDP(), TensorParallel(), ALL, PARTS),
    ),
    "tp 3, on the host": (
        Mesh(tp=3),
        (ActivationOffload(prefetch=0), PARTS, TensorParallel(), ALL),
    ),
    "tp 2, on the host, ahead": (
        Mesh(tp=2),
        (PartitionedActivations(prefetch=1), ActivationOffload(prefetch=2), TensorParallel(), ALL),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_bit_and_sends_what_the_plan_says(case: str):
    mesh, strategies = CASES[case]
    plan, plain = planned(mesh, strategies), planned(mesh, without_parts(strategies))
    assert static_checks(plan) == []
    data = batches(2, 12, LENGTH)
    found, wanted = trained(analyzed(), plan, data), trained(analyzed(), plain, data)
    assert [each for each, _ in found] == [each for each, _ in wanted]
    for rank, (_, copied) in enumerate(found):
        names = planned_copies(plan, rank)
        assert {name: copied[name] for name in names} == names
    assert mesh.pp > 1 or trace(analyzed(), plan).passed


def test_it_changes_no_bit_in_mixed_precision():
    mesh, strategies = Mesh(tp=3), (TensorParallel(), ALL, PARTS)
    plans = (planned(mesh, each, precision=MIXED) for each in (strategies, without_parts(strategies)))
    data = batches(2, 12, LENGTH)
    found, wanted = ([bits for bits, _ in trained(analyzed(), plan, data)] for plan in plans)
    assert found == wanted


def test_parts_are_padded_and_the_gathers_send_them():
    plan, plain = (
        planned(Mesh(tp=3), each, 1) for each in ((TensorParallel(), ALL, PARTS), (TensorParallel(), ALL))
    )
    numel = LENGTH * HIDDEN
    part = -(-numel // 3) * 8
    gathers = [each for each in plan.for_rank(0).actions if each.kind == "GATHER_ACTIVATIONS"]
    assert {each.transfer.nbytes for each in gathers} == {part}
    assert len({each.subject for each in gathers}) == LAYERS  # of layers; glue reads the embedded tokens
    peaks = [planned_memory(each.for_rank(0).actions, {})[1]["activations"] for each in (plan, plain)]
    assert peaks[1] - peaks[0] == LAYERS * (numel * 8 - part)


def test_on_the_host_it_is_the_part_that_is_copied():
    strategies = (TensorParallel(), ALL, PARTS, ActivationOffload(prefetch=0))
    plan = planned(Mesh(tp=3), strategies, 1)
    part = -(-LENGTH * HIDDEN // 3) * 8
    assert set(planned_copies(plan, 0).values()) == {part}
    assert peak_nbytes_by_category(plan, 0, "host") == {"activations": LAYERS * part}
    at = {action.name: index for index, action in enumerate(plan.for_rank(0).actions)}
    for layer in range(1, LAYERS):
        value, call = f"model.layers.{layer - 1}", f"model.layers.{layer}"
        order = (
            f"F_CHECKPOINTED({call}, 0)",
            f"PARTITION_ACTIVATIONS({value}, 0)",
            f"OFFLOAD_ACTIVATIONS({call}, 0)",
            f"FETCH_ACTIVATIONS({call}, 0)",
            f"GATHER_ACTIVATIONS({value}, 0)",
            f"RECOMPUTE({call}, 0)",
        )
        places = [at[name] for name in order]
        assert places == sorted(places)


def test_a_part_is_all_that_a_rank_has_when_the_loss_is_computed(monkeypatch: pytest.MonkeyPatch):
    leaves: dict[int, list[tuple[torch.Tensor, StorageWeakRef]]] = {}  # by thread, so by rank
    find = InputLeaves.find

    def noted(self: InputLeaves, *args: object) -> dict[str, torch.Tensor]:
        found = find(self, *args)
        pairs = [(leaf, StorageWeakRef(leaf.untyped_storage())) for leaf in found.values()]
        leaves.setdefault(get_ident(), []).extend(pairs)
        return found

    monkeypatch.setattr(InputLeaves, "find", noted)

    def body(world: World) -> list[int]:
        plan = planned(Mesh(tp=3), (TensorParallel(), ALL, PARTS), 12)
        executor, sizes = executor_of(analyzed(), plan, world), list[int]()
        loss = executor._actions.handlers["LOSS"]

        def watched(action: Action) -> None:
            parts = leaves[get_ident()]
            assert all(storage.expired() for _, storage in parts)
            sizes.extend(leaf.untyped_storage().nbytes() for leaf, _ in parts)
            loss(action)

        executor._entries = [
            (action, watched if action.kind == "LOSS" else handler, waits)
            for action, handler, waits in executor._entries
        ]
        executor.step(batches(1, 12, LENGTH)[0])
        executor.close()
        return sizes

    assert run_on_threads(body, Mesh(tp=3)) == [LAYERS * [-(-12 * LENGTH * HIDDEN // 3) * 8]] * 3


def on_process(world: World) -> bool:
    data = batches(1, 12, LENGTH)
    ends = []
    for strategies in ((TensorParallel(), ALL, PARTS), (TensorParallel(), ALL)):
        executor = executor_of(analyzed(), planned(Mesh(tp=3), strategies), world)
        executor.step(data[0])
        ends.append({name: value.clone() for name, value in executor.gather_parameters().items()})
        executor.close()
    return all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_it_changes_no_bit_on_processes(process_pool: ProcessPool):
    assert process_pool.run(on_process, Mesh(tp=3)) == [True] * 3


@pytest.mark.parametrize(
    ("mesh", "strategies", "text"),
    [
        (Mesh(), (ALL, PARTS), r"mesh\.tp = 1(?s:.*)use activation_offload in its place"),
        (Mesh(tp=2), (TensorParallel(), PARTS), "no block keeps an input(?s:.*)add activation_checkpointing"),
        (
            Mesh(tp=2),
            (TensorParallel(), SequenceParallel(), ALL, PARTS),
            "in slices along tp already(?s:.*)remove partitioned_activations",
        ),
    ],
)
def test_what_saves_nothing_is_refused(mesh: Mesh, strategies: tuple[Strategy, ...], text: str):
    with pytest.raises(PlanError, match=text) as refused:
        planned(mesh, strategies)
    assert all(each.fix for each in refused.value.diagnostics)


def test_another_axis_is_refused():
    with pytest.raises(PlanError, match="axis = 'cp'"):
        PartitionedActivations(axis="cp")
