"""Seconds of a call of `generate` beside transformers', on 2 cores over gloo: greedy, 32 + 24 tokens.

    one device       4 sequences of a 25.6 M Llama      at least 0.98 x the tokens/s of transformers
    tp 2             the same on 2 ranks                1.3 x transformers' tensor parallelism
    pp 2             4 and 8 sequences                  1.1 and 1.5 x transformers' pipeline
    ZeRO-3           weights gathered once a call       0.9 x copies of the weights
    copies           4 sequences on 2 ranks             1.7 x one rank
    ep 2             Mixtral of 64 experts              1.3 x transformers' expert parallelism
    continuous       64 requests of 4 to 128 tokens     1.5 x fixed batches, 10 x transformers'
                     `generate_batch`

One call of each side in turn; a second instance of the base is the twin that shows the noise. Bars are on
seconds (1 / the bar on tokens/s), as the slowest rank sees them: ranks that wait use no CPU. transformers'
ranks exchange over gloo, ours over the memory of their host, their default there.

    python -m benchmarks.generation.generation_speed             about twenty minutes, and the result
    python -m benchmarks.generation.generation_speed tp pp       rows with these words; writes nothing
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.generation.generation_sides import (
    ours,
    ours_continuous,
    ours_in_fixed_batches,
    their_continuous,
    theirs,
)
from benchmarks.harness.interleaved_timing import (
    Comparison,
    Rounds,
    Verdict,
    Window,
    compare,
    measure,
    overall,
)
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.harness.side_by_side import Build
from benchmarks.models.llama_steps import HEAVY, fresh_store

NAME = "generation_speed"
CLAIM = (
    "generate on 2 cores makes, of transformers' tokens/s, 0.98 on one device, 1.3 with tp 2, 1.1 with pp 2 "
    "(8 sequences: 1.5), 1.3 with ep 2; ZeRO-3 0.9 of copies, copies on 2 ranks 1.7 of one rank; continuous "
    "batching 1.5 of fixed batches and 10 of transformers' generate_batch"
)
PRELOAD = (*HEAVY, "transformers.models.mixtral.modeling_mixtral")


@dataclass(frozen=True)
class TimedCall:
    """A side: the function that builds its call, on how many ranks, with which arguments."""

    build: Build
    num_ranks: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def ranks(self, name: str) -> Ranks:
        """Returns the processes of this side."""
        store = fresh_store()
        return Ranks(name, self.build, self.num_ranks, preload=PRELOAD, store=store, **self.arguments)


@dataclass(frozen=True)
class Row:
    """Our call beside another, and how many times as many tokens/s it has to make."""

    ours: TimedCall
    base: TimedCall
    speed: float
    window: Window = Window(20, 40, 150)

    def measured(self) -> tuple[Rounds, Comparison, Comparison]:
        """Returns the rounds, the comparison of seconds, and that of CPU seconds."""
        with ExitStack() as opened:
            sides = {"base": self.base, "ours": self.ours, "twin": self.base}
            ranks = [opened.enter_context(side.ranks(name)) for name, side in sides.items()]
            rounds = measure(ranks, self.window)
        how = {"base": "base", "twin": "twin", "bar": 1 / self.speed}
        return rounds, compare(rounds, "ours", **how, figure="wall_s"), compare(rounds, "ours", **how)


def verdict(found: Comparison) -> Verdict:
    """Returns whether the seconds are within the bar: undecided where the noise, by which twins differ,
    reaches from one side of it to the other.
    """
    noise = 1 + max(abs(found.aa.low - 1), abs(found.aa.high - 1))
    is_within, is_beyond = found.ratio.high * noise <= found.bar, found.ratio.low / noise > found.bar
    return is_within or (False if is_beyond else "unresolved")


def _under(axis: str, num_prompts: int = 4, model: str = "llama") -> tuple[TimedCall, TimedCall]:
    """Returns our call and theirs on two ranks along one axis."""
    common = {"num_prompts": num_prompts, "model": model}
    sizes = {f"{axis}_size": 2}
    sizes |= {"tp_size": 2} if axis == "ep" else {}  # experts over ranks that have the same tokens
    return TimedCall(ours, 2, {**common, "mesh": {axis: 2}}), TimedCall(theirs, 2, {**common, "sizes": sizes})


def rows() -> dict[str, Row]:
    """Returns all rows by name."""
    one, few = {"mesh": {}, "num_prompts": 4}, Window(15, 20, 420, warmup=1)
    copies = TimedCall(ours, 2, {"mesh": {"dp_replicate": 2}, "num_prompts": 4})
    sharded = TimedCall(ours, 2, {"mesh": {"dp_shard": 2}, "num_prompts": 4, "stage": 3})
    continuous = TimedCall(ours_continuous)
    return {
        "one device": Row(
            TimedCall(ours, 1, one), TimedCall(theirs, 1, {"sizes": {}, "num_prompts": 4}), 0.98
        ),
        "tp 2": Row(*_under("tp"), 1.3),
        "pp 2, 4 sequences": Row(*_under("pp"), 1.1),
        "pp 2, 8 sequences": Row(*_under("pp", 8), 1.5),
        "ep 2": Row(*_under("ep", model="mixtral"), 1.3),
        "ZeRO-3 beside copies": Row(sharded, copies, 0.9),
        "copies beside one rank": Row(copies, TimedCall(ours, 1, one), 1.7),
        "continuous beside fixed batches": Row(continuous, TimedCall(ours_in_fixed_batches), 1.5, few),
        "continuous beside generate_batch": Row(continuous, TimedCall(their_continuous), 10.0, few),
    }


def main(words: Sequence[str]) -> None:
    """Measures the rows that have any of `words` in their name; of all rows, writes the result."""
    measured = dict[str, tuple[Rounds, Comparison, Comparison]]()
    for name, row in rows().items():
        if not words or any(word in name for word in words):
            measured[name] = row.measured()
            _, wall, cpu = measured[name]
            speed = f"{name}: {1 / wall.ratio.median:.3f} x tokens/s, of {wall.bar:.3f} seconds {wall.ratio}"
            print(f"{speed}, A/A {wall.aa}, holds {verdict(wall)}; cpu {cpu.ratio}", flush=True)
    if words:
        return
    result = Result.of_worst(
        NAME,
        CLAIM,
        [wall for _, wall, _ in measured.values()],
        holds=overall(verdict(wall) for _, wall, _ in measured.values()),
        discarded=sum(rounds.discarded for rounds, _, _ in measured.values()),
        detail={
            name: {
                "wall": wall.as_dict() | {"holds": verdict(wall)},
                "cpu": cpu.as_dict(),
                "wall_ratios": list(wall.values),
            }
            for name, (_, wall, cpu) in measured.items()
        },
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main(sys.argv[1:])
