"""Slices and pieces between stages on processes, where what was sent is there only when it has been waited
for.
"""

import pytest
import torch

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.job import TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import select_local_batch
from meshwright.testing.ranks import ProcessPool
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.parity import RankReport, compare_rank
from meshwright.verifier.reference import run_reference
from tests.parallel.tensor.declared_pairs import pairs
from tests.tiny_model import VOCABULARY, tiny_job

MESH, NUM_SAMPLES, LENGTH, STEPS = Mesh(pp=2, tp=2), 6, 6, 2
CASES = {
    "slices": (Pipeline(), TensorParallel(), SequenceParallel(), VocabParallel()),
    "pieces": (Pipeline(schedule="interleaved", scatter=True), TensorParallel()),
}


def tokens(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator) for _ in range(2)]
    return {"input_ids": found[0], "labels": found[1]}


def compared(world: World, name: str) -> tuple[RankReport, bool]:
    """Returns what this rank found, and whether it sent what its program states."""
    data = [tokens(step) for step in range(STEPS)]
    analyzed = pairs(0.0, {key: value[:2] for key, value in data[0].items()}, layers=4)
    plan = make_plan(analyzed, tiny_job(train=TrainConfig(batch=NUM_SAMPLES, clip=0.5)), MESH, CASES[name], 1)
    case = make_parity_case(
        analyzed,
        plan,
        token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(data[step], plan, rank),
    )
    report = compare_rank(case, world, run_reference(case, STEPS))
    return report, issued_messages(report.sent_entries) == planned_messages(
        case.plan.for_rank(world.rank)
    ) * STEPS


@pytest.mark.parametrize("name", CASES)
def test_it_equals_one_device_on_processes(process_pool: ProcessPool, name: str):
    reports = process_pool.run(compared, MESH, name)
    assert [(report.differences, report.num_steps, exact) for report, exact in reports] == [
        ([], STEPS, True)
    ] * MESH.world_size
    assert len({tuple(report.digests.items()) for report, _ in reports}) == 1
