"""Each direction between two ranks has its own process group if messages are ordered by issue."""

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.comm_groups import p2p_group
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import select_local_batch
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.parity import RankReport, compare_rank
from meshwright.verifier.reference import run_reference
from tests.tiny_model import analyzed_model, tiny_job, token_samples

STEPS = 2


def compared(world: World) -> tuple[RankReport, set[tuple[str, int]]]:
    world.serializes_p2p = True  # as on NCCL
    analyzed = analyzed_model()
    plan = make_plan(analyzed, tiny_job(), Mesh(pp=3), (Pipeline(),), 1)
    batches = [token_samples(plan.job.train.batch) for _ in range(STEPS)]
    case = make_parity_case(
        analyzed,
        plan,
        token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(batches[step], plan, rank),
    )
    world.ledger.is_recording = True
    report = compare_rank(case, world, run_reference(case, STEPS))
    return report, {
        (entry.collective, entry.group_size)
        for entry in world.ledger.entries
        if entry.collective in ("send", "recv")
    }


def test_messages_in_groups_of_two_ranks_equal_one_device():
    for report, sent in run_on_threads(compared, Mesh(pp=3)):
        assert (report.differences, report.num_steps) == ([], STEPS)
        assert sent == {("send", 2), ("recv", 2)}


def test_both_sides_of_a_message_ask_for_the_same_group():
    def asked(world: World) -> tuple[object, ...]:
        before = p2p_group(world, ("pp",), 1 - world.rank, is_sender=world.rank == 0)
        world.serializes_p2p = True
        group, peer = p2p_group(world, ("pp",), 1 - world.rank, is_sender=world.rank == 0)
        return before[0].size, before[1], group.member_indices, peer, group.ranks[peer]

    assert run_on_threads(asked, Mesh(pp=2)) == [(2, 1, (0, 1), 1, 1), (2, 0, (0, 1), 0, 0)]
