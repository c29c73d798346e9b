"""How a transfer is carried: the ledger, the bytes and the price are those of its messages, whatever it
means.
"""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Transfer
from meshwright.plan.step.program_json import program_from_dict, program_to_dict
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.network_time import RatedNetworkTime
from meshwright.report.terminal.memory_and_sent_bytes import sent_nbytes_by_role, sent_table
from meshwright.verifier.messages import planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.planner.simple_machine import ground
from tests.tiny_model import analyzed_model, case_of, edited, plan_of, verdict_of
from tests.verifier.int8_data_parallel import Int8DDP

BUCKET_MB = 300 / 2**20


@pytest.fixture(scope="module")
def analyzed() -> mw.AnalyzedModel:
    return analyzed_model()


@pytest.fixture(scope="module")
def plan(analyzed: mw.AnalyzedModel) -> Plan:
    return plan_of(analyzed, 3, (BatchSplit(), Int8DDP(bucket_mb=BUCKET_MB)))


def reduces(plan: Plan) -> list[Action]:
    return [action for action in plan.program.roles[0].actions if action.kind == "REDUCE"]


def changed(plan: Plan, change: Callable[[Transfer], Transfer]) -> Plan:
    def change_reduces(actions: list[Action]) -> list[Action]:
        return [replace(a, transfer=change(a.transfer)) if a.kind == "REDUCE" else a for a in actions]

    return edited(plan, change_reduces)


def test_a_compressed_sum_is_issued_as_its_messages_say(analyzed: mw.AnalyzedModel, plan: Plan):
    assert static_checks(plan) == []
    assert {action.transfer.collective for action in reduces(plan)} == {"all_reduce"}
    found = mw.trace(analyzed, plan)
    assert found.passed, found
    assert found.num_messages == len(planned_messages(plan.for_rank(0))) == 4 * len(reduces(plan)) + 2
    assert found.sent_nbytes == sent_nbytes_by_role(plan)["pp0"]


def test_a_compressed_sum_sends_the_bytes_of_its_law(plan: Plan):
    for action in reduces(plan):
        slice_numel = -(-action.transfer.nbytes // 8 // 3)
        law = 2 * 2 * (slice_numel + 8)  # (n - 1) slices of codes and as many scales, twice
        assert min_max_sent_nbytes(action.transfer, plan.mesh) == (law, law)


def test_a_compressed_sum_trains_on_threads_with_the_stated_tolerance(analyzed: mw.AnalyzedModel, plan: Plan):
    verdict = verdict_of(case_of(analyzed, plan), steps=2)
    assert verdict.passed, verdict
    assert verdict.tolerance == 0.1


def test_a_message_that_the_handler_leaves_out_is_named(analyzed: mw.AnalyzedModel, plan: Plan):
    more = changed(plan, lambda move: replace(move, carried_by=(*move.carried_by, move.carried_by[-1])))
    (first, *_) = mw.trace(analyzed, more, [1]).diagnostics
    assert first.problem.startswith("REDUCE(0) issued: all_to_all of ")
    assert first.problem.count("all_gather of 8 bytes float64") == 3


def test_a_compressed_sum_is_priced_as_its_messages(analyzed: mw.AnalyzedModel, plan: Plan):
    network = RatedNetworkTime(make_machine("h100", 3))
    costs = ActionCosts(plan, 0, replace(ground(), network_time=network))
    for action in reduces(plan):
        expected = sum(network.seconds(message, range(3)) for message in action.transfer.carried_by)
        assert costs.cost(action).comm_s == pytest.approx(expected)
        assert costs.cost(action).comm_s != network.seconds(replace(action.transfer, carried_by=()), range(3))


def test_a_compressed_sum_is_reported_by_what_it_means_with_the_bytes_of_its_messages(plan: Plan):
    kinds = {row[0]: row for row in sent_table(plan).rows}
    assert kinds["REDUCE"][1].startswith("all_reduce")
    assert kinds["REDUCE"][2] == 4 * len(reduces(plan))
    assert kinds["REDUCE"][3] == sum(min_max_sent_nbytes(a.transfer, plan.mesh)[1] for a in reduces(plan))


def test_messages_survive_the_json_form(plan: Plan):
    nameless = plan.program.edit(lambda actions: [replace(action, tensors=()) for action in actions])
    assert program_from_dict(json.loads(json.dumps(program_to_dict(plan.program)))) == nameless


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_hierarchical_sum_is_carried_with_the_bytes_of_its_rounds(hosts: int):
    """Reduce-scatter within hosts, all-reduce across, all-gather within: arXiv 1807.11205, section 3.3.2."""
    mesh, nbytes = Mesh(dp_replicate=hosts, dp_shard=4), 8 * 4 * hosts * 10
    inside, across = ("dp_shard",), ("dp_replicate",)
    carried = Transfer(
        "all_reduce",
        (*across, *inside),
        nbytes,
        carried_by=(
            Transfer("reduce_scatter", inside, nbytes),
            Transfer("all_reduce", across, nbytes // 4),
            Transfer("all_gather", inside, nbytes // 4),
        ),
    )
    by_rounds = Transfer("all_reduce", (*across, *inside), nbytes, "hierarchical/4")
    assert min_max_sent_nbytes(carried, mesh) == min_max_sent_nbytes(by_rounds, mesh)
    assert [message.member_ranks(mesh, 5) for message in carried.messages] == [
        (4, 5, 6, 7),
        tuple(range(1, 4 * hosts, 4)),
        (4, 5, 6, 7),
    ]


def test_a_transfer_within_a_transfer_is_carried_by_its_messages(plan: Plan):
    (first, *_) = reduces(plan)
    nested = Transfer("all_reduce", ("dp_shard", "dp_replicate"), 8, carried_by=(first.transfer,))
    assert nested.messages == first.transfer.carried_by


def test_exact_data_parallelism_is_carried_by_itself(analyzed: mw.AnalyzedModel):
    for action in reduces(plan_of(analyzed, 3, (BatchSplit(), DDP(bucket_mb=BUCKET_MB)))):
        assert action.transfer.messages == (action.transfer,)
