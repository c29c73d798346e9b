"""Sums, gathers and scatters of 1-D tensor parallelism travel as codes: results, bytes and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.coded_redistribution import CodedRedistribution
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.block_redistributions import BlockCollectives, _CodedMove
from meshwright.parallel.compression.activation_compression import ActivationCompression, FlatCodec
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.tensor_placements import COLLECTIVES
from meshwright.plan.strategy_interface import ActivationName, Strategy
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.compression.gated_model import (
    BATCH,
    LENGTH,
    WIDTH,
    analyzed_gated,
    gated_plan,
    tokens,
)
from tests.planner.simple_machine import ground
from tests.tiny_model import case_of, executor_of, first_of, verdict_of

INT8 = ActivationCompression(axis="tp", codec="int8")
NUMEL = 2 * LENGTH * WIDTH  # of the value of a microbatch
SLICES, SHARD = mw.SequenceParallel(), mw.BatchSplit(axis="dp_shard")


def code_nbytes(codec: str, numel: int) -> int:
    """The law of the technique's page, which counts from the sizes alone."""
    return 2 * numel if codec in ("bfloat16", "float16") else numel + 4 * -(-numel // 256)


def found_by_verify(plan: Plan, steps: int = 2, p: float = 0.0, *, parallel: bool = False) -> Any:
    """The verdict on `plan`, against one device that loses what the codes lose."""
    analyzed = analyzed_gated(p, parallel=parallel)
    return verdict_of(case_of(analyzed, plan, data=tokens(2 * BATCH)), steps=steps)


def check(plan: Plan, p: float = 0.0, *, parallel: bool = False) -> None:
    """Fails unless the plan passes static checks, and equals one device that loses what its codes lose."""
    assert static_checks(plan) == []
    found = found_by_verify(plan, p=p, parallel=parallel)
    assert found.passed, found


@pytest.mark.parametrize(
    ("ranks", "codec"), [(2, "bfloat16"), (2, "int8"), (3, "float16"), (3, "float8"), (3, "int8")]
)
def test_sums_of_every_codec_equal_one_device_that_loses_what_codes_lose(ranks: int, codec: str):
    check(gated_plan(ActivationCompression(axis="tp", codec=codec), ranks))


@pytest.mark.parametrize(
    ("ranks", "strategies", "options"),
    [
        (4, (), {"micro_batch": 1}),  # slices of a sum that do not divide
        (3, (mw.TensorParallel(num_overlap_chunks=2),), {}),
        (2, (mw.ActivationCheckpointing(),), {}),
        (3, (), {"p": 0.2}),
        (2, (SHARD, mw.ZeRO(stage=3)), {"mesh": mw.Mesh(dp_shard=3, tp=2)}),
    ],
    ids=["uneven slices", "chunks", "recomputed", "dropout", "zero 3"],
)
def test_sums_go_with_other_techniques(ranks: int, strategies: tuple[Strategy, ...], options: dict[str, Any]):
    check(gated_plan(INT8, ranks, *strategies, **options), options.get("p", 0.0))


@pytest.mark.parametrize(
    ("ranks", "strategies", "options"),
    [
        (2, (SLICES,), {}),
        (3, (SLICES,), {}),
        (3, (mw.SequenceParallel(regather=True), mw.ActivationCheckpointing()), {}),
        (2, (SLICES, mw.VocabParallel()), {}),
        (3, (SLICES,), {"parallel": True}),
    ],
    ids=["2 ranks", "3 ranks", "regathered, recomputed", "vocab_parallel", "joint sums"],
)
def test_gathers_and_scatters_of_the_sequence_do(
    ranks: int, strategies: tuple[Strategy, ...], options: dict[str, Any]
):
    check(gated_plan(INT8, ranks, *strategies, **options), parallel=options.get("parallel", False))


@pytest.mark.parametrize("more", [(), (SLICES,)], ids=["sums", "slices"])
def test_stages_and_sums_may_both_travel_as_codes(more: tuple[Strategy, ...]):
    stages = ActivationCompression(axis="pp", codec="bfloat16", exact_steps=1)
    check(gated_plan(INT8, 2, mw.Pipeline(), stages, *more, mesh=mw.Mesh(pp=2, tp=2)))


def sent_by_blocks(plan: Plan) -> dict[str, float]:
    """The bytes that rank 0 sends in each action of a block, in one step."""

    def run(world: World) -> dict[str, float]:
        executor = executor_of(analyzed_gated(), plan, world)
        executor.step(tokens())
        executor.close()
        return dict(world.ledger.sent_nbytes)

    return {
        name: nbytes
        for name, nbytes in run_on_threads(run, plan.mesh)[0].items()
        if name.startswith(("F(layers", "B(layers"))
    }


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_sum_sends_the_bytes_of_the_law(ranks: int, codec: str):
    plan = gated_plan(ActivationCompression(axis="tp", codec=codec), ranks)
    numel = 2 * LENGTH * WIDTH
    part = -(-numel // ranks)
    law = code_nbytes(codec, numel) if ranks == 2 else 2 * (ranks - 1) * code_nbytes(codec, part)
    sent = sent_by_blocks(plan)
    assert len(sent) == 2 * 2 * 3  # forward and backward, layers, microbatches
    assert set(sent.values()) == {law}


def test_with_bfloat16_compute_a_sum_sends_the_same_codes():
    compute = PrecisionConfig(parameters="float32", compute="bfloat16")
    sent = sent_by_blocks(gated_plan(INT8, 3, precision=compute))
    assert set(sent.values()) == {2 * 2 * code_nbytes("int8", NUMEL // 3)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_and_a_scatter_send_the_bytes_of_the_law(ranks: int):
    sent = sent_by_blocks(gated_plan(INT8, ranks, SLICES))
    part = (ranks - 1) * code_nbytes("int8", 2 * LENGTH * WIDTH // ranks)
    # gradients of weight and bias of the norm, and of the bias behind the sum, in float64; the stream is
    # gathered behind the last block, and in front of the first one in its backward
    exact = 3 * 2 * WIDTH * 8 * (ranks - 1) / ranks
    assert sent["F(layers.0, 0)"] == 2 * part
    assert sent["F(layers.1, 0)"] == 3 * part
    assert sent["B(layers.1, 0)"] - 2 * part == pytest.approx(exact, abs=1e-6)
    assert sent["B(layers.0, 0)"] - 3 * part == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "strategies", "kind", "passes"),
    [
        (2, (), "F", (NUMEL, 2 * NUMEL)),  # both summands are decoded
        (3, (), "B", (NUMEL + NUMEL // 3, 2 * NUMEL)),  # and each slice of the sum is coded once more
        (3, (SLICES,), "F", (NUMEL // 3 + NUMEL, 2 * NUMEL)),  # a gather and a scatter
    ],
)
def test_what_is_coded_and_decoded_inside_a_block_is_priced(
    ranks: int, strategies: tuple[Strategy, ...], kind: str, passes: tuple[int, int]
):
    plan = gated_plan(INT8, ranks, *strategies)
    (action,) = [each for each in plan.for_rank(0).actions if each.name == f"{kind}(layers.0, 0)"]
    found = INT8.coding_passes(action, plan.rank_view(0))
    assert (found["encode int8"], found["decode int8"]) == passes
    timed, untimed = (
        ActionCosts(plan, 0, ground(links=1e6, coding=coding)).cost(action).comm_s for coding in (2e-6, None)
    )
    assert timed - untimed == pytest.approx(2e-6 * sum(passes))


def test_the_first_steps_and_small_values_travel_as_they_are():
    def dtypes(coding: ActivationCompression, step: int) -> set[str]:
        plan = gated_plan(coding, 3)
        inner = (each for action in plan.for_rank(0).actions for each in action.inner_transfers)
        return {message.dtype for transfer in inner for message in transfer.messages_in_step(step)}

    late = ActivationCompression(axis="tp", codec="int8", exact_steps=2)
    assert [dtypes(late, step) for step in range(3)] == [{"float64"}, {"float64"}, {"uint8"}]
    check(gated_plan(ActivationCompression(axis="tp", codec="int8", exact_steps=1), 3))
    small = ActivationCompression(axis="tp", codec="int8", min_numel=2 * LENGTH * WIDTH + 1)
    assert dtypes(small, 0) == {"float64"}
    with pytest.raises(PlanError, match="no value along tp has 9999 elements; the largest has 1260"):
        gated_plan(ActivationCompression(axis="tp", min_numel=9999), 2)


def test_an_evaluation_and_logits_are_exact():
    def evaluated(coding: ActivationCompression | None) -> float:
        plan = gated_plan(coding, 3)

        def run(world: World) -> float:
            executor = executor_of(analyzed_gated(), plan, world)
            loss = executor.evaluate([tokens()]).loss
            executor.close()
            return loss

        return run_on_threads(run, plan.mesh)[0]

    assert evaluated(INT8) == evaluated(None)
    plan = gated_plan(INT8, 2, mw.VocabParallel())
    coded = {
        action.subject
        for action in plan.for_rank(0).actions
        for each in action.inner_transfers
        if each.carried_by
    }
    assert coded == {"layers.0", "layers.1"}


def test_all_ranks_end_with_the_same_bits_and_the_loss_guard_sees_what_is_not_finite():
    plan = gated_plan(INT8, 3, guard=LossGuard("skip"))

    def run(world: World) -> tuple[bool, bool, list[torch.Tensor]]:
        executor = executor_of(analyzed_gated(), plan, world)
        first = executor.step(tokens()).is_skipped
        parameters = executor.state.trained_module.parameters
        whole = [parameters[name].detach().clone() for name in ("embed.weight", "layers.0.norm.weight")]
        if world.rank == 1:
            parameters["layers.0.up.weight"].data[0, 0] = float("nan")
        second = executor.step(tokens()).is_skipped
        executor.close()
        return first, second, whole

    found = run_on_threads(run, plan.mesh)
    assert [each[:2] for each in found] == [(False, True)] * 3
    for _, _, whole in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(whole, found[0][2], strict=True))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: gated_plan(INT8, 2, mesh=mw.Mesh()), "mesh.tp is 1(?s:.*)set mesh.tp to 2 or more"),
        (
            lambda: mw.make_plan(
                analyzed_gated(), gated_plan(INT8, 2).job, mw.Mesh(tp=2), (mw.VocabParallel(), INT8), 2
            ),
            'no pair of layers ends in a sum along tp(?s:.*)"tensor_parallel" of mode "1d"',
        ),
        (
            lambda: gated_plan(
                ActivationCompression(axis="tp"),
                2,
                precision=PrecisionConfig(parameters="bfloat16", compute="bfloat16", reduce="float32"),
            ),
            'values travel in bfloat16, and codes of bfloat16 are as large(?s:.*)"int8"',
        ),
        (
            lambda: gated_plan(INT8, 2, ActivationCompression(axis="tp", codec="float8")),
            "compress_activations is listed twice, with other options",
        ),
        (lambda: ActivationCompression(axis="ep"), "axis = 'ep'; needed is 'pp'"),
    ],
)
def test_what_cannot_be_coded_is_refused_with_a_repair(make: Callable[[], object], told: str):
    with pytest.raises(PlanError, match=told) as refused:
        make()
    assert all(each.fix for each in refused.value.diagnostics)


def test_products_of_two_dims_are_refused_by_name():
    strategies = mw.TensorParallel2D(), INT8
    with pytest.raises(PlanError, match=r"sharded by width along tp \(tensor_parallel of mode 2d"):
        mw.make_plan(analyzed_gated(), gated_plan(INT8, 2).job, mw.Mesh(tp=4), strategies, 2)


decode, encode, summed, carried, move = (
    FlatCodec.decode,
    FlatCodec.encode,
    CodedRedistribution._sum,
    BlockCollectives._carry,
    _CodedMove.__call__,
)


def halved(codec: FlatCodec, codes: torch.Tensor, values: torch.Tensor) -> None:
    decode(codec, codes, values)
    values.mul_(0.5)


def without_the_last(
    coded: CodedRedistribution, arrived: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return summed(coded, arrived[:-1], *args, **kwargs)


def mean(coded: CodedRedistribution, arrived: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return summed(coded, arrived, *args, **kwargs) / len(arrived)


def exact_gradients(coded: _CodedMove, *args: Any, is_backward: bool) -> torch.Tensor | None:
    return None if is_backward else move(coded, *args, is_backward=is_backward)


def exact_reruns(
    inner: BlockCollectives, axis: str, name: ActivationName | None, *, is_observed: bool = True
) -> object:
    reruns = inner._state.current_action.startswith("RECOMPUTE")
    return None if reruns else carried(inner, axis, name, is_observed=is_observed)


FAULTS = {
    "a value is decoded at half its size": (FlatCodec, "decode", halved, "sum of codes"),
    "codes of other elements": (
        FlatCodec,
        "encode",
        lambda codec, values: encode(codec, values.flip(0).contiguous()),
        "sum of codes",
    ),
    "a summand is left out": (CodedRedistribution, "_sum", without_the_last, "loss"),
    "a mean for a sum": (CodedRedistribution, "_sum", mean, "loss"),
    "values travel as they are": (BlockCollectives, "_carry", lambda *args, **kwargs: None, "ledger"),
    "gradients travel as they are": (_CodedMove, "__call__", exact_gradients, "ledger"),
    "a rerun sends values as they are": (BlockCollectives, "_carry", exact_reruns, "ledger"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    where, name, wrong, quantity = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    plan = gated_plan(INT8, 3, mw.ActivationCheckpointing())
    assert first_of(found_by_verify(plan, steps=1))[1] in (quantity, "gradient")


def test_every_collective_that_is_coded_is_one_of_the_table():
    inner = gated_plan(INT8, 3, SLICES).for_rank(0).actions
    moved = {each.collective for action in inner for each in action.inner_transfers if each.carried_by}
    assert moved == {"all_gather", "reduce_scatter"} < COLLECTIVES


def test_a_loss_that_changes_by_more_than_stated_is_noticed(monkeypatch: pytest.MonkeyPatch):
    plan = gated_plan(INT8, 3)
    assert INT8.loss_tolerance(plan.sharding) == 2 * (3 + 1) / 254
    assert INT8.loss_tolerance(gated_plan(INT8, 2).sharding) == 2 * 2 / 254
    assert INT8.loss_tolerance(gated_plan(INT8, 3, SLICES).sharding) == (2 * 3 + 2 + 1) / 254
    monkeypatch.setattr(ActivationCompression, "loss_tolerance", lambda coding, sharding: 1e-9)
    assert first_of(found_by_verify(plan, steps=1))[1] == "rounded loss"
