"""The parameter server: who serves what, bytes by the law, order of sums and actions, refusals."""

from dataclasses import replace
from itertools import count

import pytest
import torch

import meshwright as mw
from meshwright.comm.backends.run_algorithm import deliver_rounds
from meshwright.comm.collectives.deterministic_sum import ACCUMULATION_DTYPES
from meshwright.parallel.server.parameter_server import WIDE, assign_servers, push_rounds, take_rounds
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.report.terminal.memory_and_sent_bytes import sent_nbytes_by_role
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.parallel.server.server_plans import (
    DDP,
    ZERO_1,
    are_equal,
    entries_of,
    group_nbytes,
    sent,
    server_plan,
    trained,
)
from tests.tiny_model import analyzed_model, case_of, edited, first_of, tiny_job, verdict_of

UNCLIPPED = TrainConfig(steps=20, batch=12, clip=0.0)  # servers add up the norm, each that of its groups


def paper_plan(servers: int, ranks: int, layers: int = 5, **mesh: int) -> Plan:
    """The plan of blocks of equal size."""
    job, model = tiny_job(batch=4 * ranks), SyntheticModel(layers=layers, numel=77).model_spec
    strategies = (mw.BatchSplit(), mw.ParameterServer(servers=servers))
    return mw.Plan.make(job, mw.Mesh(dp_replicate=ranks, **mesh), model, strategies)


def owners(plan: Plan) -> list[int | None]:
    return [each.owner_index for each in plan.sharding.param_shardings]


def test_groups_go_to_the_server_with_least_and_the_fullest_comes_first():
    # of equal groups the last one, whose backward ends first, comes first
    assert owners(paper_plan(2, 4)) == [0, 2, 0, 2, 0]
    assert owners(paper_plan(3, 3)) == [1, 0, 2, 1, 0]
    assert owners(paper_plan(1, 7)) == [0] * 5
    assert owners(paper_plan(3, 8)) == [2, 0, 5, 2, 0]
    sizes = (9, 8, 7, 6, 5)
    plan = paper_plan(2, 2)
    shardings = plan.sharding.param_shardings
    unequal = replace(
        plan.sharding,
        param_shardings=tuple(
            replace(each, param=replace(each.param, shape=(size,)), owner_index=None)
            for each, size in zip(shardings, sizes, strict=True)
        ),
    )
    # 9 | 8, 9 | 8 + 7, 9 + 6 | 8 + 7, 9 + 6 + 5 | 8 + 7
    assert list(assign_servers(unequal, 2).values()) == [0, 1, 1, 0, 0]
    sizes = (6, 5, 5, 0, 0)  # the first server ends with less than the second, and they change places
    unequal = replace(
        unequal,
        param_shardings=tuple(
            replace(each, param=replace(each.param, shape=(size,)))
            for each, size in zip(shardings, sizes, strict=True)
        ),
    )
    assert list(assign_servers(unequal, 2).values()) == [1, 0, 0, 1, 1]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_every_rank_sends_what_the_law_says(servers: int):
    plan = server_plan(servers)
    total = group_nbytes(plan)
    assert static_checks(plan) == []
    received = [0.0] * 3
    for rank, entries in enumerate(entries_of(plan)):
        assert issued_messages(entries) == planned_messages(plan.for_rank(rank))
        served = group_nbytes(plan, lambda owner, rank=rank: owner == rank)
        assert sent(entries, ("REDUCE",)) == total - served
        assert sent(entries, ("UNSHARD",)) == served
        received[rank] += 2 * served  # from the two others
    assert sum(received) == 2 * total
    assert sum(share > 0 for share in received) == servers
    if servers == 1:
        assert received == [2 * total, 0, 0]


def test_a_rank_sends_more_than_under_ddp_and_one_server_receives_all():
    servers, total = server_plan(1), group_nbytes(server_plan(1))
    ddp, zero = (entries_of(server_plan(each))[0] for each in (DDP, ZERO_1))
    assert sent(ddp) == pytest.approx(2 * 2 / 3 * total)
    assert sent(zero) == pytest.approx(2 * 2 / 3 * total, rel=0.02)  # padded to thirds
    worker = entries_of(servers)[1]
    assert sent(worker) == total


@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(reduce="bfloat16")], ids=str)
def test_pushes_travel_in_the_dtype_of_sums_and_pulls_in_that_of_parameters(precision: PrecisionConfig):
    plan = server_plan(2, precision=precision)
    widths = {"REDUCE": 4 if precision.reduce == "float32" else 2, "UNSHARD": 4}
    numel = group_nbytes(plan) // 8
    for kind, width in widths.items():
        transfers = [action.transfer for action in plan.program.actions(FIRST_ROLE) if action.kind == kind]
        assert sum(each.nbytes for each in transfers if each) == numel * width


def test_the_sum_has_the_bits_of_the_order_of_ranks_whoever_serves():
    gradients = [torch.tensor([value, 1.0]) for value in (1e8, 1.0, -1e8, 1.0)]
    for root in range(4):
        inputs, total = [each.clone() for each in gradients], torch.zeros(2)
        rounds = [
            take_rounds(4, root, inputs[root], total, torch.empty(2), torch.empty(2))
            if index == root
            else push_rounds(4, index, root, inputs[index])
            for index in range(4)
        ]
        deliver_rounds(rounds, "push")
        assert total.tolist() == [1.0, 4.0]  # 1e8 + 1 is 1e8 in float32
        assert all(map(torch.equal, inputs, gradients))


def test_sums_of_half_types_are_rounded_once():
    assert {getattr(torch, half): getattr(torch, wide) for half, wide in WIDE.items()} == dict(
        ACCUMULATION_DTYPES
    )
    gradients = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    sums, place = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    take, *push = (
        take_rounds(3, 0, gradients[0], gradients[0], sums, place),
        *(push_rounds(3, index, 0, gradients[index]) for index in (1, 2)),
    )
    deliver_rounds([take, *push], "push")
    assert gradients[0].item() == 258.0  # 256 + 1 is 256 in bfloat16


def test_no_bit_depends_on_the_number_of_servers_and_ddp_on_threads_has_the_same():
    found = [trained(server_plan(storage, train=UNCLIPPED)) for storage in (1, 2, 3, DDP)]
    assert all(are_equal(found[0], each) for each in found[1:])


def test_a_push_begins_behind_the_backward_of_its_group_and_a_block_waits_for_its_pull_alone():
    actions = paper_plan(2, 4, layers=3).program.actions(FIRST_ROLE)
    names = [action.name for action in actions]
    assert names.index("REDUCE(layer2)") < names.index("B(layer1, 0)") < names.index("REDUCE(layer1)")
    assert names[:4] == ["TOKEN_COUNT()", "UNSHARD(layer0)", "UNSHARD(layer1)", "UNSHARD(layer2)"]
    waits = {action.name: action.waits for action in actions}
    assert "UNSHARD(layer1)" in waits["F(layer1, 0)"]
    assert not {"UNSHARD(layer1)", "UNSHARD(layer2)"} & set(waits["F(layer0, 0)"])


def test_gradients_are_pushed_once_for_several_microbatches():
    actions = server_plan(2, micro_batch=1).program.actions(FIRST_ROLE)
    assert sum(action.kind == "REDUCE" for action in actions) == sum(a.kind == "PACK" for a in actions) == 5


def test_a_server_has_a_buffer_for_what_arrives_and_the_sum_of_its_largest_group():
    plan, unit = paper_plan(2, 4), 77 * 8
    buffers = [
        [
            (hold.name, hold.nbytes)
            for action in plan.for_rank(rank).actions
            for hold in action.allocations
            if hold.name.startswith("pushed")
        ]
        for rank in range(4)
    ]
    assert buffers == [[("pushed gradients over dp_replicate", 2 * unit)], [], buffers[0], []]
    half = server_plan(1, precision=PrecisionConfig(reduce="bfloat16"))
    (first,) = (
        a for a in half.for_rank(0).actions if any(h.name.startswith("pushed") for h in a.allocations)
    )
    assert first.transfer is not None
    largest = max(a.transfer.nbytes for a in half.for_rank(0).actions if a.kind == "REDUCE" and a.transfer)
    assert first.allocations[-1].nbytes == 3 * largest  # bfloat16 arrives, and is added in float32


REFUSED = [
    (lambda: mw.ParameterServer(servers=0), r"servers = 0(?s:.*)number of at least 1(?s:.*)use ddp"),
    (lambda: mw.ParameterServer("tp"), r"axis = 'tp'(?s:.*)dp_replicate"),
    (
        lambda: server_plan(4),
        r"servers = 4, and there are 3 ranks along dp_replicate(?s:.*)servers = 3 or fewer",
    ),
    (lambda: server_plan(2, ranks=1), r"servers = 2, and there are 1 ranks along dp_replicate"),
    (lambda: paper_plan(3, 4, layers=2), r"there are 2 parameter groups: a server would step nothing"),
    (
        lambda: refused_on(mw.Mesh(dp_replicate=2), mw.ParameterServer()),
        r"would all see the same samples(?s:.*)batch_split",
    ),
    (
        lambda: refused_on(
            mw.Mesh(dp_replicate=2, dp_shard=3),
            mw.BatchSplit(),
            mw.BatchSplit("dp_shard"),
            mw.ParameterServer(),
        ),
        r"ranks along dp_shard have other samples(?s:.*)mesh.dp_replicate = 6, mesh.dp_shard = 1",
    ),
    (
        lambda: refused_on(mw.Mesh(dp_replicate=2), mw.BatchSplit(), DDP, mw.ParameterServer()),
        "both decide how parameters are stored along dp_replicate",
    ),
    (
        lambda: refused_on(
            mw.Mesh(dp_replicate=2, dp_shard=2),
            *(mw.BatchSplit(), mw.BatchSplit("dp_shard"), mw.ZeRO(stage=1), mw.ParameterServer()),
        ),
        "ranks along dp_shard have other samples",
    ),
    (
        lambda: refused_on(
            mw.Mesh(dp_replicate=2), mw.BatchSplit(), mw.ParameterServer(), mw.Offload(step_on="host")
        ),
        "rest off the device(?s:.*)remove offload",
    ),
    (
        lambda: refused_on(
            mw.Mesh(dp_replicate=2), mw.BatchSplit(), mw.ParameterServer(), mw.Int8Compression()
        ),
        "travel as codes(?s:.*)remove the compression",
    ),
]


def refused_on(mesh: mw.Mesh, *strategies: mw.Strategy) -> Plan:
    return mw.Plan.make(tiny_job(), mesh, SyntheticModel().model_spec, strategies)


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_work_is_refused_with_the_repair(make, text: str):
    with pytest.raises(PlanError, match=text):
        make()


def test_one_rank_serves_itself_and_sends_nothing():
    plan = server_plan(1, ranks=1)
    (entries,) = entries_of(plan)
    assert sent(entries) == 0
    plans = (server_plan(storage, ranks=1, train=UNCLIPPED) for storage in (1, DDP))
    assert are_equal(*map(trained, plans))


def without(kind: str, number: int = 0):
    """Returns what removes that action of `kind` from a list."""

    def change(actions: list[Action]) -> list[Action]:
        seen = count()
        return [each for each in actions if each.kind != kind or next(seen) != number]

    return change


@pytest.mark.parametrize(("kind", "where"), [("UNSHARD", "from"), ("REDUCE", "to")])
def test_another_rank_than_the_server_of_a_group_is_noticed(kind: str, where: str):
    def change(actions: list[Action]) -> list[Action]:
        return [
            replace(each, transfer=replace(each.transfer, root=2))
            if each.kind == kind and each.transfer
            else each
            for each in actions
        ]

    texts = [str(each) for each in static_checks(edited(server_plan(1), change))]
    assert any(f"{kind}(head) goes {where} index 2, and index 0 steps head.weight" in text for text in texts)


def test_a_gradient_that_is_not_pushed_and_a_parameter_that_is_not_pulled_are_noticed():
    plan = server_plan(2)
    texts = [str(each) for each in static_checks(edited(plan, without("REDUCE")))]
    assert any("stays a partial sum over dp_replicate: no reduce moves it" in text for text in texts)
    texts = [str(each) for each in static_checks(edited(plan, without("UNSHARD")))]
    assert any("which no UNSHARD has gathered" in text for text in texts)


def test_a_server_that_leaves_a_worker_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def forgets(size, root, gradient, total, sums, place):
        for peer in (each for each in range(size) if each != root):
            yield [], [(peer, place)]
        total.copy_(gradient)

    monkeypatch.setattr("meshwright.parallel.server.parameter_server.take_rounds", forgets)
    verdict = verdict_of(case_of(analyzed_model(), server_plan(2)), 1)
    assert first_of(verdict)[1] == "gradient"


def test_the_plan_tells_what_the_busiest_rank_sends():
    plan = server_plan(1)
    total = group_nbytes(plan)
    totals = next(iter(sent_nbytes_by_role(plan).values()))
    beside = totals - sent_nbytes_by_role(server_plan(DDP))[FIRST_ROLE] + 2 * 2 / 3 * total
    assert beside == pytest.approx(total, abs=32)  # beside counts and norms
