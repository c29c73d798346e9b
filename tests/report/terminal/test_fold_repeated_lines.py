"""Repeated lines become loops, and unfolding the loops gives the lines again."""

import random

from meshwright.report.terminal.fold_repeated_lines import Line, Loop, fold_repeated_lines, folded_rows


def rows(*texts: str) -> list[str]:
    return [row[1] for row in folded_rows([("", text) for text in texts], lambda head: ("", head))]


def slope(loop: Loop, position: int) -> int:
    return loop.step * ((position in loop.rising) - (position in loop.falling))


def unfolded(items: list[Line | Loop]) -> list[tuple[list[int], object]]:
    """The numbers and the template of every line that `items` stand for."""
    found: list[tuple[list[int], object]] = []
    for item in items:
        if isinstance(item, Line):
            found.append((list(item.numbers), item.template))
            continue
        for time in range(item.times):
            first = 0
            for part in item.body:
                inner = unfolded([part])
                for numbers, template in inner:
                    moved = [
                        number + time * slope(item, first + place % max(1, len(part.numbers)))
                        for place, number in enumerate(numbers)
                    ]
                    found.append((moved, template))
                first += len(part.numbers)
    return found


def test_lines_that_count_up_are_a_loop():
    assert rows("F 0", "F 1", "F 2", "LOSS") == ["3 times, m = 0 .. 2:", "  F m", "LOSS"]


def test_two_lines_are_not_worth_a_loop():
    assert rows("F 0", "F 1", "LOSS") == ["F 0", "F 1", "LOSS"]


def test_the_steady_state_of_a_pipeline_has_two_microbatches_in_a_round():
    steady = [f"{kind} microbatch {number}" for i in range(4) for kind, number in (("F", i + 2), ("B", i))]
    assert rows(*steady) == ["4 times, m = 0 .. 3:", "  F microbatch m+2", "  B microbatch m"]


def test_layers_count_down_in_a_backward():
    assert rows("B layers.3", "B layers.2", "B layers.1") == ["3 times, m = 3 .. 1:", "  B layers.[m]"]


def test_buckets_count_up_while_layers_count_down():
    lines = [text for i in range(4) for text in (f"B layers.{3 - i}", f"REDUCE {i}")]
    assert rows(*lines) == ["4 times, m = 0 .. 3:", "  B layers.[3-m]", "  REDUCE m"]


def test_layers_inside_of_microbatches_are_a_loop_in_a_loop():
    lines = [f"F layers.{layer} of {batch}" for batch in range(3) for layer in range(4)]
    assert rows(*lines) == ["3 times, m = 0 .. 2:", "  4 times, n = 0 .. 3:", "    F layers.[n] of m"]


def test_sizes_and_counts_must_be_equal():
    assert len(rows("send 1 MiB", "send 2 MiB", "send 3 MiB", "send 4 MiB")) == 4
    assert len(rows("F x1", "F x2", "F x3", "F x4")) == 4
    assert rows("0 send 1 MiB", "1 send 1 MiB", "2 send 1 MiB") == ["3 times, m = 0 .. 2:", "  m send 1 MiB"]


def test_a_round_of_an_interleaved_schedule_counts_in_its_own_step():
    lines = [f"F {4 * i + j} of {chunk}" for i in range(3) for chunk in (7, 8) for j in (0, 2, 3)]
    assert rows(*lines)[0] == "3 times, m = 0, 4 .. 8:"


def test_no_line_is_lost_or_changed():
    """Random programs, with loops in loops, unfold to their lines."""
    for seed in range(200):
        rng = random.Random(seed)
        lines = [
            f"{rng.choice('FB')} layers.{layer} {batch}"
            for batch in range(rng.randint(1, 5))
            for layer in range(rng.randint(1, 5))
            for _ in range(rng.randint(0, 2))
        ]
        items = [Line(("", line)) for line in lines]
        folded = fold_repeated_lines([("", line) for line in lines])
        assert unfolded(folded) == [(list(item.numbers), item.template) for item in items], seed
