"""Random chains of block calls, every choice for them, and the peak of a choice when it is played."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from random import Random
from typing import NamedTuple

from meshwright.plan.step.memory.activation_budget import ActivationOption, ChainBlock


class Part(NamedTuple):
    """Block calls `first` to `last`, with an option if it is one, and those that the first rerun saves."""

    first: int
    last: int
    option: str = ""
    saved: frozenset[int] = frozenset()


def random_chain(rng: Random, most: int, *, with_options: bool = True) -> list[ChainBlock]:
    """2 to `most` block calls with whole seconds, some of which may not run again or be dropped."""
    blocks = []
    for number in range(rng.randint(2, most)):
        saved = rng.choice((0, rng.randint(1, 40), rng.randint(1, 8)))
        options = []
        if with_options and saved > 2 and rng.random() < 0.3:
            held, seconds = rng.randint(0, saved - 1), rng.randint(1, 6)
            options.append(
                ActivationOption("gist", seconds, held, held + rng.randint(0, 5))
                if rng.random() < 0.5
                else ActivationOption("offload", seconds, held, saved, 0, saved - held)
            )
        if with_options and saved > 1 and rng.random() < 0.3:
            kept, until_rerun = rng.randint(0, saved - 1), rng.randint(0, 6)
            rerun = rng.randint(1, 6), kept + until_rerun, saved, saved + until_rerun
            options.append(ActivationOption("selective", *rerun))
        forward = rng.randint(1, 12)
        blocks.append(
            ChainBlock(
                f"block{number}",
                forward,
                rng.randint(1, 20),
                saved,
                rng.randint(0, 15),
                tuple(options),
                rng.random() < 0.9,
                rng.random() < 0.7,
                reload_s=rng.choice((0, 0, 1, 3)) if saved else 0,
                unread_s=rng.choice((0, forward // 4)),
            )
        )
    return blocks


def all_choices(blocks: Sequence[ChainBlock], first: int = 0) -> Iterator[tuple[Part, ...]]:
    """Every choice for the block calls from `first` on."""
    if first == len(blocks):
        yield ()
        return
    block = blocks[first]
    heads = [Part(first, first, "keep"), *(Part(first, first, each.name) for each in block.options)]
    if block.can_rerun:
        heads.append(Part(first, first, "recompute"))
    for last in range(first + 1, len(blocks)):
        members = blocks[first : last + 1]
        if not all(each.can_rerun for each in members) or not all(
            each.can_drop_output for each in members[:-1]
        ):
            break
        inner = range(first, last)
        subsets = chain.from_iterable(combinations(inner, count) for count in range(len(inner) + 1))
        heads += [Part(first, last, "", frozenset(each)) for each in subsets]
    for head in heads:
        for rest in all_choices(blocks, head.last + 1):
            yield (head, *rest)


def played(blocks: Sequence[ChainBlock], parts: Sequence[Part], loss: int) -> tuple[int, float]:
    """The peak of the bytes when forwards and backwards run, and the seconds that the choice adds."""
    play = _Play(blocks)
    for part in parts:
        play.forward(part)
    play.see(loss)
    options = [part.option for part in parts for _ in range(part.first, part.last + 1)]
    arriving = [0] + [
        sum(each.arriving_nbytes for each in block.options if each.name == option)
        for block, option in zip(blocks, options, strict=True)
    ]
    for part in reversed(parts):
        play.backward(part, arriving[part.first])
    return play.peak, play.seconds


class _Play:
    def __init__(self, blocks: Sequence[ChainBlock]) -> None:
        self.blocks, self.outputs, self.held = blocks, dict[int, int](), dict[int, int]()
        self.peak, self.seconds = 0, 0.0

    def see(self, more: int = 0) -> None:
        self.peak = max(self.peak, sum(self.outputs.values()) + sum(self.held.values()) + more)

    def arrive(self, number: int, nbytes: int) -> None:
        if nbytes:
            self.held[number] += nbytes

    def forward(self, part: Part) -> None:
        for number in range(part.first, part.last + 1):
            self.outputs[number] = self.blocks[number].output_nbytes
            if part.option == "keep":
                self.held[number] = self.blocks[number].saved_nbytes
            for option in self.blocks[number].options:
                if option.name == part.option:
                    self.held[number] = option.held_nbytes
                    self.seconds += option.seconds
            self.see()
            if number > part.first:
                del self.outputs[number - 1]

    def backward(self, part: Part, arriving: int) -> None:
        """Plays reruns and backwards of `part`; `arriving` bytes of the block call before it come back ahead
        of the last run of its first one.
        """
        last = self.blocks[part.last]
        if part.first in (part.last, *part.saved):
            self.arrive(part.first - 1, arriving)
        for number in range(part.first, part.last):
            block = self.blocks[number]
            self.seconds += block.forward_s
            self.outputs[number] = block.output_nbytes
            if number in part.saved:
                self.seconds += block.reload_s
                self.held[number] = block.saved_nbytes
                self.see(last.output_nbytes)  # the gradient of the output of the last
            else:
                self.see(block.saved_nbytes + last.output_nbytes)
        for number in reversed(range(part.first, part.last + 1)):
            block, runs_again = self.blocks[number], part.option in ("", "recompute")
            if number == part.first and number not in (part.last, *part.saved):
                self.arrive(number - 1, arriving)
            saved = block.saved_nbytes
            if runs_again and number not in part.saved:  # nobody reads its output
                self.seconds += block.forward_s - block.unread_s
                self.see(saved + block.output_nbytes)  # the gradient of its output
            self.held.pop(number, None)
            for option in block.options:
                if option.name == part.option:
                    saved = option.backward_nbytes
                    self.see(option.rerun_nbytes + block.output_nbytes if option.rerun_nbytes else 0)
            self.see(saved + block.scratch_nbytes)
            del self.outputs[number]
