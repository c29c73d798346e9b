"""Values between stages travel as codes: what is computed, what is sent and held, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.stage_send_recv import StageIO
from meshwright.parallel.compression.activation_compression import (
    UNIT_ERROR,
    ActivationCompression,
    FlatCodec,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action, Transfer
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.compression_gain import compression_notes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.pipeline.test_pipeline_strategy_tensor import CASES, planned, tokens
from tests.parallel.pipeline.test_pipeline_strategy_tensor import model as paired_model
from tests.planner.simple_machine import ground
from tests.tiny_model import (
    TOKENS,
    WIDTH,
    analyzed_model,
    case_of,
    executor_of,
    first_of,
    tiny_job,
    token_samples,
)
from tests.tiny_model import verdict_of as verdict

CODECS = tuple(UNIT_ERROR)
MICRO_BATCH = 2
NUMEL = MICRO_BATCH * TOKENS * WIDTH  # of the value at each boundary
NBYTES = {"bfloat16": 2 * NUMEL, "float16": 2 * NUMEL, "float8": NUMEL + 4, "int8": NUMEL + 4}
ANALYZED = analyzed_model()


def coded(
    coding: ActivationCompression,
    *strategies: Strategy,
    mesh: mw.Mesh | None = None,
    schedule: str = "1f1b",
    **job: object,
) -> Plan:
    """The plan of the tiny model in a pipeline whose values `coding` codes."""
    order = mw.Pipeline(schedule=schedule)
    all_strategies = order, *strategies, coding
    return mw.make_plan(ANALYZED, tiny_job(**job), mesh or mw.Mesh(pp=3), all_strategies, MICRO_BATCH)


def check(plan: Plan) -> None:
    """Fails unless the plan passes static checks, and equals one device that loses what its codes lose."""
    assert static_checks(plan) == []
    found = verdict(case_of(ANALYZED, plan), steps=2)
    assert found.passed, found


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_equals_one_device_that_loses_what_codes_lose(codec: str):
    check(coded(ActivationCompression(codec=codec)))


@pytest.mark.parametrize("schedule", ["interleaved", "zb_h1", "zb_v", "dualpipe", "dualpipev"])
def test_every_schedule_does(schedule: str):
    check(coded(ActivationCompression(codec="int8"), mesh=mw.Mesh(pp=2), schedule=schedule))


@pytest.mark.parametrize(
    ("strategies", "mesh"),
    [
        ((mw.BatchSplit("dp_shard"), mw.ZeRO(stage=3)), mw.Mesh(pp=2, dp_shard=3)),
        ((mw.BatchSplit(), mw.DDP(), mw.Int8Compression()), mw.Mesh(pp=2, dp_replicate=2)),
        ((mw.ActivationCheckpointing(), mw.Offload()), mw.Mesh(pp=3)),
    ],
    ids=["zero 3", "compressed gradients", "recomputed, offloaded"],
)
def test_it_goes_with_other_techniques(strategies: tuple[Strategy, ...], mesh: mw.Mesh):
    check(coded(ActivationCompression(codec="int8", exact_steps=1), *strategies, mesh=mesh))


@pytest.mark.parametrize("name", ["tokens", "pieces"])
def test_slices_and_chunks_of_values_are_coded_by_the_rank_that_sends_them(name: str):
    mesh, strategies = CASES[name]
    plan = planned(mesh, *strategies, ActivationCompression(codec="int8"))
    found = mw.verify(paired_model(), plan, [tokens()] * 2)
    assert found.passed, found


def test_weights_of_several_versions_are_replayed_with_their_codes():
    job = tiny_job(train=replace(tiny_job().train, clip=0.0))
    strategies = mw.PipeDream(), ActivationCompression(codec="int8")
    check(mw.make_plan(ANALYZED, job, mw.Mesh(pp=2), strategies, MICRO_BATCH))


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_has_the_bytes_of_its_codes(codec: str):
    plan = coded(ActivationCompression(codec=codec))

    def run(world: World) -> dict[str, float]:
        executor = executor_of(ANALYZED, plan, world)
        executor.step(token_samples(12))
        executor.close()
        return dict(world.ledger.sent_nbytes)

    for sent in run_on_threads(run, plan.mesh)[:2]:
        values = {name: nbytes for name, nbytes in sent.items() if name.startswith("SEND")}
        assert set(values.values()) == {NBYTES[codec]}
    held = [
        each.nbytes
        for action in plan.for_rank(1).actions
        for each in action.allocations
        if each.name.startswith("codes of")
    ]
    assert set(held) == {NBYTES[codec]}
    assert len(held) == 4 * 6  # both ways, at both boundaries, for each microbatch


def test_a_send_is_encoded_and_a_receive_decoded_and_both_are_priced():
    plan, target = coded(ActivationCompression(codec="int8")), ground(links=1e6, coding=2e-6)
    costs = {each.name: ActionCosts(plan, 1, target).cost(each) for each in plan.for_rank(1).actions}
    for action in plan.for_rank(1).actions:
        found = [each.coding_passes(action, plan.rank_view(1)) for each in plan.strategies]
        passes = {name: numel for each in found for name, numel in each.items()}
        ways = {"SEND": "encode", "SEND_GRAD": "encode", "RECV": "decode", "RECV_GRAD": "decode"}
        expected = {f"{ways[action.kind]} int8": NUMEL} if action.kind in ways else {}
        assert passes == expected
        if passes:  # the message is counted where it is sent
            sending = 1e-6 * NBYTES["int8"] if action.kind.startswith("SEND") else 0.0
            assert costs[action.name].comm_s == pytest.approx(sending + 2e-6 * NUMEL)
    (note,) = compression_notes(plan, ground(links=1e6))
    assert "(decode int8, encode int8)" in note


def test_large_values_take_a_quarter_or_half_of_their_bytes():
    for codec, share in {"bfloat16": 0.5, "float16": 0.5, "float8": 0.25390625, "int8": 0.25390625}.items():
        flat = FlatCodec(ActivationCompression(codec=codec)._codec, codec)
        values = torch.randn(3, 100_000)
        assert flat.empty_codes(values).numel() == pytest.approx(share * 4 * values.numel(), rel=1e-5)
        decoded = torch.empty_like(values)
        flat.decode(flat.encode(values), decoded)
        lost = (values - decoded).view(-1)
        assert 0.5 < flat.error_in_units(values, lost) <= 1
        again = torch.empty_like(values)
        flat.decode(flat.encode(decoded), again)
        assert torch.allclose(again, decoded, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", ["bfloat16", "float16", "float8", "int8"])
def test_an_element_may_lose_what_the_largest_of_its_block_allows(codec: str):
    flat = FlatCodec(ActivationCompression(codec=codec)._codec, codec)
    values, lost = torch.ones(3, 200), torch.zeros(600)
    values[0, 0] = 1000.0  # in the first block of 256 elements
    assert flat.error_in_units(values, lost) == 0
    lost[100] = 0.4
    assert flat.error_in_units(values, lost) < 1
    lost[100], lost[300] = 0.0, 0.1
    assert flat.error_in_units(values, lost) > 1
    assert flat.error_in_units(values[:0], lost[:0]) == 0
    lost[5] = float("nan")
    assert not flat.error_in_units(values, lost) <= 1


def test_the_first_steps_and_small_values_travel_as_they_are():
    plan = coded(ActivationCompression(codec="int8", exact_steps=2)).for_rank(0)
    (transfer, *_) = [action.transfer for action in plan.actions if action.kind == "SEND"]
    assert [transfer.messages_in_step(step)[0].dtype for step in range(3)] == ["float64", "float64", "uint8"]
    plan = coded(ActivationCompression(codec="int8", min_numel=NUMEL)).for_rank(0)
    assert all(action.transfer.carried_by for action in plan.actions if action.kind == "SEND")
    with pytest.raises(PlanError, match="no value between stages has 1000 elements; the largest has 360"):
        coded(ActivationCompression(codec="int8", min_numel=1000))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(), (ActivationCompression(),)),
            'no value crosses a stage boundary(?s:.*)add the strategy "pipeline"',
        ),
        (
            lambda: coded(
                ActivationCompression(),
                precision=PrecisionConfig(parameters="bfloat16", compute="bfloat16", reduce="float32"),
            ),
            'values travel in bfloat16, and codes of bfloat16 are as large(?s:.*)"int8"',
        ),
        (lambda: ActivationCompression(codec="int2"), "codec = 'int2'; needed is 'bfloat16'"),
    ],
)
def test_what_cannot_be_coded_is_refused_with_a_repair(make: Callable[[], object], told: str):
    with pytest.raises(PlanError, match=told) as refused:
        make()
    assert all(each.fix for each in refused.value.diagnostics)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_reaches_the_loss_guard(codec: str):
    plan = coded(ActivationCompression(codec=codec), guard=LossGuard("skip"))

    def run(world: World) -> bool:
        executor = executor_of(ANALYZED, plan, world)
        if world.rank == 0:
            executor.state.trained_module.parameters["embed.weight"].data[3, 2] = float("nan")
        metrics = executor.step(token_samples(12))
        executor.close()
        return metrics.is_skipped

    assert run_on_threads(run, plan.mesh) == [True] * 3


decode, encode, receive = FlatCodec.decode, FlatCodec.encode, StageIO._receive


def halved(codec: FlatCodec, codes: torch.Tensor, values: torch.Tensor) -> None:
    decode(codec, codes, values)
    values.mul_(0.5)


def other_codes(codec: FlatCodec, values: torch.Tensor) -> torch.Tensor:
    return encode(codec, values.flip(0).contiguous())


def undecoded(kind: str) -> Callable[..., torch.Tensor]:
    def leaves_what_memory_held(
        io: StageIO, action: Action, transfer: Transfer, tensor: torch.Tensor
    ) -> torch.Tensor:
        found = receive(io, action, transfer, tensor.zero_())
        if action.kind == kind:
            io._state.works[action.name]._finish = None
        return found

    return leaves_what_memory_held


FAULTS = {
    "a value is decoded at half its size": (FlatCodec, "decode", halved, "sum of codes"),
    "codes of other samples": (FlatCodec, "encode", other_codes, "sum of codes"),
    "a value is used before it is decoded": (StageIO, "_receive", undecoded("RECV"), "loss"),
    "a gradient is used before it is decoded": (StageIO, "_receive", undecoded("RECV_GRAD"), "gradient"),
    "values are sent as they are": (StageIO, "_codec", lambda io, transfer: None, "ledger"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    where, name, wrong, quantity = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    plan = coded(ActivationCompression(codec="int8"))
    assert first_of(verdict(case_of(ANALYZED, plan), steps=1))[1] in (quantity, "gradient")


def test_a_loss_that_changes_by_more_than_stated_is_noticed(monkeypatch: pytest.MonkeyPatch):
    plan = coded(ActivationCompression(codec="int8"))
    assert ActivationCompression(codec="int8").loss_tolerance(plan.sharding) == 2 / 254
    monkeypatch.setattr(ActivationCompression, "loss_tolerance", lambda coding, sharding: 1e-9)
    assert first_of(verdict(case_of(ANALYZED, plan), steps=1))[1] == "rounded loss"
