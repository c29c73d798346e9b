"""The dynamic program finds what trying everything finds, at every budget; it is quick, and never slower than
a greedy choice.
"""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.memory.random_chains import Part, all_choices, played, random_chain
from meshwright.plan.step.memory.activation_budget import ActivationBudget, ActivationChoice, ChainBlock


def best_of(pairs: set[tuple[int, float]]) -> list[tuple[int, float]]:
    """The pairs of bytes and seconds of which none is worse than another in both, by bytes."""
    found: list[tuple[int, float]] = []
    for nbytes, seconds in sorted(pairs):
        if not found or seconds < found[-1][1]:
            found.append((nbytes, seconds))
    return found


def parts_of(choice: ActivationChoice, blocks: list[ChainBlock]) -> list[Part]:
    """The choice in the form in which it is played."""
    numbers = {block.block_call: number for number, block in enumerate(blocks)}
    begins = {each.block_calls[0]: each for each in choice.segments}
    parts, number = list[Part](), 0
    while number < len(blocks):
        call = blocks[number].block_call
        segment = begins.get(call)
        last = numbers[segment.block_calls[-1]] if segment else number
        saved = frozenset(numbers[each] for each in segment.saved_in_rerun) if segment else frozenset()
        parts.append(Part(number, last, "" if last > number else choice.options[call], saved))
        number = last + 1
    return parts


@pytest.mark.parametrize("seed", range(8))
def test_it_equals_trying_everything_at_every_budget(seed: int):
    rng = Random(seed)
    for _ in range(25):
        blocks, loss = random_chain(rng, 6), rng.randint(0, 60)
        budget = ActivationBudget(blocks, loss)
        found = [(choice.peak_nbytes, choice.seconds) for choice in budget.choices()]
        assert found == best_of({played(blocks, parts, loss) for parts in all_choices(blocks)})


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_that_is_played_has_the_bytes_and_seconds_that_it_says(seed: int):
    rng = Random(100 + seed)
    for most in (4, 12, 60):
        blocks, loss = random_chain(rng, most), rng.randint(0, 60)
        for choice in ActivationBudget(blocks, loss).choices():
            assert played(blocks, parts_of(choice, blocks), loss) == (choice.peak_nbytes, choice.seconds)


def greedy_keeps(blocks: list[ChainBlock], nbytes: int) -> list[Part]:
    """Keeps the blocks with the most seconds per byte, as many as fit in `nbytes`; recomputes the others."""
    order = sorted(blocks, key=lambda block: -block.forward_s / max(1, block.saved_nbytes))
    kept = {block.block_call for block in blocks if not block.can_rerun or not block.saved_nbytes}
    for block in order:
        if block.saved_nbytes <= nbytes and block.block_call not in kept:
            kept.add(block.block_call)
            nbytes -= block.saved_nbytes
    return [
        Part(number, number, "keep" if block.block_call in kept else "recompute")
        for number, block in enumerate(blocks)
    ]


def test_it_is_never_slower_than_greedy_in_as_many_bytes():
    rng, faster = Random(7), 0
    for _ in range(60):
        blocks = random_chain(rng, 40)
        budget = ActivationBudget(blocks, 10)
        for nbytes in (0, 30, 100, 300, 1000):
            peak, seconds = played(blocks, greedy_keeps(blocks, nbytes), 10)
            choice = budget.fastest(peak)
            assert choice is not None
            assert choice.peak_nbytes <= peak
            assert choice.seconds <= seconds
            faster += choice.seconds < seconds
    assert faster > 50


def test_a_budget_below_the_smallest_choice_is_not_met():
    blocks = random_chain(Random(3), 8)
    budget = ActivationBudget(blocks, 5)
    least = budget.smallest()
    assert budget.fastest(least.peak_nbytes - 1) is None
    assert budget.fastest(least.peak_nbytes) == least


def equal_blocks(count: int, saved: int, **more: object) -> list[ChainBlock]:
    return [ChainBlock(f"block{n}", 1.0, 10, saved, can_drop_output=True, **more) for n in range(count)]


def test_segments_take_less_than_the_inputs_of_all_blocks():
    blocks = equal_blocks(64, 20)
    with_segments, without = ActivationBudget(blocks), ActivationBudget(blocks, use_segments=False)
    assert without.smallest().peak_nbytes == 64 * 10 + 20
    assert with_segments.smallest().peak_nbytes < 300
    assert with_segments.smallest().seconds <= 2 * 64
    longest = max(with_segments.smallest().segments, key=lambda each: len(each.block_calls))
    assert len(longest.block_calls) > 3


def test_microbatches_that_wait_hold_as_much_once_more():
    blocks = equal_blocks(8, 20)
    waiting = [replace(block, in_flight=3) for block in blocks]
    kept, kept_by_three = (ActivationBudget(each).choices()[-1] for each in (blocks, waiting))
    assert (kept.peak_nbytes, kept_by_three.peak_nbytes) == (8 * 30, 3 * 8 * 30)
    assert kept.seconds == kept_by_three.seconds == 0


@pytest.mark.parametrize("kind", ["equal", "random"])
def test_choices_for_two_hundred_blocks_hold_what_they_say(kind: str):
    blocks = equal_blocks(200, 160) if kind == "equal" else [
        replace(random_chain(rng, 2)[0], block_call=f"block{n}", can_rerun=True, can_drop_output=True)
        for rng in [Random(1)] for n in range(200)
    ]  # fmt: skip
    choices = ActivationBudget(blocks, 100).choices()
    for choice in choices[:: max(1, len(choices) // 5)]:
        assert played(blocks, parts_of(choice, blocks), 100)[0] == choice.peak_nbytes
