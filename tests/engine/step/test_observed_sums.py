"""Faults in sums of codes that `verify` must find: what is dropped, doubled, or of another sum."""

from collections.abc import Callable

import pytest
import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.observed_sums import largest_sum_error
from meshwright.parallel.compression import residuals
from meshwright.parallel.compression.codecs.block_codes import BlockCodec
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.topk import TopKCompression
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.verifier.one_device import lost_steps
from tests.parallel.compression.coded_plans import ANALYZED, coded_plan
from tests.tiny_model import case_of, first_of, verdict_of

Plant = Callable[[pytest.MonkeyPatch], None]
keep, add = CodedOperand.keep_residual, CodedOperand.add_owed


def patched(name: str, change: Callable[[CodedOperand], None]) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(CodedOperand, name, change)


def scaled(factor: float) -> Callable[[CodedOperand], None]:
    def change(operand: CodedOperand) -> None:
        keep(operand)
        for each in operand.kept.values():
            each.mul_(factor)

    return change


def of_another(operand: CodedOperand) -> None:
    keep(operand)
    first, *others = operand.kept.values()
    if others and others[0].shape == first.shape:
        first.copy_(others[0])
    else:
        first.view(-1).copy_(first.view(-1).roll(1))


def only_on_rank_0(operand: CodedOperand) -> None:
    if operand.index == 0:
        keep(operand)


def twice(operand: CodedOperand) -> None:
    add(operand)
    add(operand)


def mean_for_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Int8Compression.decode_into
    monkeypatch.setattr(
        Int8Compression,
        "decode_into",
        lambda self, codes, values, *, add: (decode(self, codes, values, add=add), values.mul_(0.5)),
    )


def lost_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = BlockCodec.encode_slice

    def faulty(self: BlockCodec, values: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        encode(self, values, codes, key)
        values.zero_()

    monkeypatch.setattr(BlockCodec, "encode_slice", faulty)


def another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residuals.CodedSums, "_key", lambda self, action, index: id(action) % 97 + index)


FAULTS: dict[str, Plant] = {
    "residual dropped": patched("keep_residual", scaled(0.0)),
    "residual doubled": patched("keep_residual", scaled(2.0)),
    "residual of the wrong sign": patched("keep_residual", scaled(-1.0)),
    "residual of another element": patched("keep_residual", of_another),
    "residual of one rank only": patched("keep_residual", only_on_rank_0),
    "residual added twice": patched("add_owed", twice),
    "residual never added": patched("add_owed", lambda operand: None),
    "mean for sum": mean_for_sum,
    "nothing is owed": lost_of_the_sum,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arrangement", ["ddp", "zero 2"])
def test_a_planted_fault_is_found(fault: str, arrangement: str, monkeypatch: pytest.MonkeyPatch):
    FAULTS[fault](monkeypatch)
    verdict = verdict_of(case_of(ANALYZED, coded_plan(Int8Compression(), arrangement)), steps=3)
    assert not verdict.passed, fault


def test_a_small_fault_is_found_in_a_block_of_which_codes_send_nothing(monkeypatch: pytest.MonkeyPatch):
    """Its gradients are compared at the scale of what codes leave out (0.04), and not looser."""
    clear = CodedOperand.clear_padding

    def add_to_embedding(
        operand: CodedOperand,
    ) -> None:  # its sum has been compared
        clear(operand)
        part = next(each for each in operand.coded_sum.parts if each.name == "embed.weight")
        sent = operand.output[part.offset : part.offset + part.numel]
        assert not sent.any()
        sent += 1e-10

    monkeypatch.setattr(CodedOperand, "clear_padding", add_to_embedding)
    verdict = verdict_of(case_of(ANALYZED, coded_plan(TopKCompression(density=0.01))), steps=1)
    assert first_of(verdict) == (0, "gradient", "embed.weight", "embed")
    assert 1e-9 < (verdict.first_difference.error or 0) < 1e-8


def test_random_numbers_that_a_step_does_not_determine_are_found(monkeypatch: pytest.MonkeyPatch):
    another_key(monkeypatch)
    plan = coded_plan(Int8Compression(rounding="stochastic"))
    assert verdict_of(case_of(ANALYZED, plan), steps=2).passed, "the same in both runs of one process"


def test_a_plan_without_codes_trains_no_second_time():
    assert verdict_of(case_of(ANALYZED, coded_plan(Int8Compression(exact_steps=9))), steps=2).passed


def test_sums_that_end_in_another_order_on_one_rank_are_compared_in_the_order_of_their_begin(
    monkeypatch: pytest.MonkeyPatch,
):
    def compared(state: RankState) -> float:
        if state.world.rank == 1 and state.observed_sums:
            state.observed_sums.reverse()
        return largest_sum_error(state)

    monkeypatch.setattr(lost_steps, "largest_sum_error", compared)
    assert verdict_of(case_of(ANALYZED, coded_plan(Int8Compression(), "zero 2")), steps=2).passed
