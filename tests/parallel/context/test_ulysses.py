"""Ulysses attention: heads exchanged for tokens equal one device, and send what the program states."""

import pytest
import torch

from meshwright.parallel.context import ulysses_all_to_all as exchange
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.context.attention_answers import (
    NUM_SAMPLES,
    Case,
    case,
    issued_transfers,
    largest_error,
    planned_transfers,
    run_on_ranks,
    sharding_of,
)
from tests.parallel.context.dense_attention import MASKS, mask_of

WORST = 1e-12
LENGTH = 7
HEADS = [
    (2, 4, 4),
    (2, 4, 1),
    (2, 6, 3),
    (2, 6, 2),
    (3, 6, 2),
    (3, 6, 6),
    (3, 6, 1),
    (4, 4, 2),
    (4, 4, 1),
    (4, 8, 2),
]
LEARNED = ("one learned", "learned keys")


def masked(name: str, length: int) -> torch.Tensor | None:
    """A mask for 4 heads, by name."""
    match name:
        case "keys":
            return (torch.arange(length) != 1).expand(NUM_SAMPLES, 1, 1, length)
        case "one learned":  # for all heads and rows
            return (
                torch.linspace(-1, 1, length * length, dtype=torch.float64)
                .view(1, 1, length, length)
                .requires_grad_()
            )
        case "learned keys":  # by head, for all queries
            return (
                torch.linspace(-1, 1, 4 * length, dtype=torch.float64).view(1, 4, 1, length).requires_grad_()
            )
    mask = mask_of(name, length)
    return mask.requires_grad_() if mask is not None and name == "learned" else mask


@pytest.mark.parametrize(("ranks", "heads", "groups"), HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_on_all_tokens_equal_one_device(ranks: int, heads: int, groups: int, causal: bool) -> None:
    assert largest_error(case(heads, groups, LENGTH, causal=causal), Ulysses(), Mesh(cp=ranks)) < WORST


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mask", [*MASKS, "keys", *LEARNED])
@pytest.mark.parametrize("length", [3, 9])
def test_masks_equal_one_device(ranks: int, mask: str, length: int) -> None:
    given = case(4, 2, length, mask=masked(mask, length), causal=mask == "causal")
    assert largest_error(given, Ulysses(), Mesh(cp=ranks)) < WORST


@pytest.mark.parametrize("length", [1, 2, 3])
def test_there_may_be_more_ranks_than_tokens(length: int) -> None:
    assert largest_error(case(4, 2, length, causal=True), Ulysses(), Mesh(cp=4)) < WORST


def test_float32_equals_one_device_within_rounding() -> None:
    given = case(6, 2, 33, causal=True, dtype=torch.float32)
    assert largest_error(given, Ulysses(), Mesh(cp=3)) < 1e-5  # sums over 33 keys, in another order


@pytest.mark.parametrize(("ranks", "heads", "groups"), HEADS)
def test_what_is_issued_is_what_the_program_states(ranks: int, heads: int, groups: int) -> None:
    assert_issues_as_planned(case(heads, groups, LENGTH, widths=(4, 2)), ranks)


@pytest.mark.parametrize("mask", ["window", "documents", "bias", "learned", "keys", *LEARNED])
def test_what_is_issued_with_masks_is_what_the_program_states(mask: str) -> None:
    assert_issues_as_planned(case(4, 2, LENGTH, widths=(4, 2), mask=masked(mask, LENGTH)), 4)


def assert_issues_as_planned(given: Case, ranks: int) -> None:
    """Check that every rank issues what the program states."""
    expected = planned_transfers(Ulysses(), given, Mesh(cp=ranks))
    assert expected["F"]
    assert all(
        issued_transfers(entries) == expected
        for entries in run_on_ranks(Ulysses(), given, Mesh(cp=ranks)).entries
    )


def test_bytes_are_those_of_the_paper() -> None:
    ranks, heads, groups, width, length = 4, 8, 4, 4, 12
    given = case(heads, groups, length)
    sent = sum(
        entry.sent_nbytes
        for entry in run_on_ranks(Ulysses(), given, Mesh(cp=ranks)).entries[0]
        if entry.action == "F"
    )
    elements = (2 + 2 * groups / heads) * NUM_SAMPLES * length * heads * width / ranks * (ranks - 1) / ranks
    assert sent == 8 * elements


def test_one_rank_sends_nothing() -> None:
    given = case(3, 3, LENGTH)
    assert largest_error(given, Ulysses(), Mesh(cp=1)) < WORST
    assert not run_on_ranks(Ulysses(), given, Mesh(cp=1)).entries[0]


def test_a_bug_in_the_order_of_heads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        exchange, "_head_indices", lambda rank, each: range((2 - rank) * each, (3 - rank) * each)
    )
    assert largest_error(case(6, 2, LENGTH), Ulysses(), Mesh(cp=3)) > 0.1


def test_heads_that_do_not_divide_are_refused_with_the_ring() -> None:
    space = Ulysses().place(sharding_of(Mesh(cp=4), [case(6, 3, LENGTH).attend]))
    (fault,) = Ulysses().check_combined(space)
    assert str(fault) == (
        "strategies.ulysses: layers.0: attention has 6 heads on a rank, and they go to 4 ranks "
        "in "
        "equal number\n"
        "  repair: use ring, which does not shard heads; or set mesh.cp to 1 or 2 or 3 or 6"
    )
    with pytest.raises(PlanError) as raised:
        Ulysses(axis="tp")
    assert str(raised.value) == (
        "strategies.ulysses.axis: axis = 'tp'; needed is 'cp'\n  repair: write axis = \"cp\""
    )


def test_heads_unknown_to_the_plan_are_refused() -> None:
    with pytest.raises(PlanError, match="attention has 3 heads on a rank, and they go to 2 ranks"):
        run_on_ranks(Ulysses(), case(3, 3, LENGTH), Mesh(cp=2))
