"""The vocabulary divided by words: no rank holds the whole table, the whole head, or all logits of a token.

Why it works: a row of the table is looked up on the rank that has the word; the others add zeros. A rank's part of the head makes
the logits of its words, and cross-entropy needs of the others only how large theirs are together, and the label's: two numbers
per token (engine/logits.py). Table and head, tied or not, are cut alike, so that a rank steps the same words of both.

    ids ---> rows of words 0..33 ---P -> I---> ... layers ... ---I -> R---> logits of words 0..33  ---a, t--+         rank 0
    ids ---> rows of words 34..66 --P -> I---> ... layers ... ---I -> R---> logits of words 34..66 --a, t--+--> loss  rank 1
        backward: nothing                            backward: sum          backward: nothing

    a = log sum exp(a rank's logits), t = the label's logit there, else 0:   loss = log sum exp(a_0, a_1, ...) - sum t
    weights: table S(words), head and its bias S(words); logits S(words), never gathered

Words need not divide by the number of ranks: the first ranks have one more.
Cost, per micro-batch of b samples of s tokens, on t ranks: one all_reduce of b s h in the forward, for the table, and one in the
backward, for the head; two numbers of 4 bytes per token from each rank to each. Table, head, their gradients and moments, and the
logits: 1/t.
Limits: what looks at all words of a token between head and loss, a loss that cannot be taken in parts, or a table that somebody
else reads leave table or head whole (`meshwright plan --explain-model` says which, and why). An optimizer that looks at whole
matrices steps each on one rank, which then has it whole; AdamW, SGD and Lion do not.
Paper: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053 (section 3: the parallel embedding and cross-entropy).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.parallel.tensor.comm_accounting import booked, heard
from meshwright.parallel.tensor.layer_sharding import WIDTH, Held, Move, Way, Ways, filled, linear, placed
from meshwright.parallel.tensor.validation import axis_fault, unit_faults
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES, Anatomy
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import P, R
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer
from meshwright.plan.step.chunked_loss import sizes, tokens_of
from meshwright.plan.step.single_device import micro_rows
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy

ROLES = ("table", "head")


@dataclass(frozen=True)
class Vocabulary(Strategy):
    """Tables and heads divided by words along `axis`."""

    name: ClassVar[str] = "vocabulary"
    phase: ClassVar[Phase] = "shard"
    axis: str = "tp"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.vocabulary"
        if self.axis != "tp":
            yield axis_fault(self.axis, "words", where)
            return
        if not divisible(space.anatomy, 1):
            found = {weight.why: weight.name for weight in space.anatomy.weights if weight.why and len(weight.shape) > 1}
            kept = "; ".join(f"{name}: {why}" for why, name in list(found.items())[:2])
            text = f"{space.anatomy.name} has no table and no head that can be divided by words" + (f" ({kept})" if kept else "")
            yield Fault(text, "leave the strategy out; they stay whole on every rank", where)
        yield from unit_faults(space, self.ways(space))

    def ways(self, space: Space) -> Ways:
        """How layers compute, by role; the stream lies where the space says."""
        calls, compute = (space.whole or space).anatomy.calls, linear if space.pieces == 1 else _plain
        stream = {role: space.stream_for([call for call in calls if call.role == role], self.axis) for role in ROLES}
        return {
            "table": Way({self.axis: "in"}, out=Move(self.axis, P, stream["table"], wide=True)),
            "head": Way({self.axis: "out"}, into=Move(self.axis, stream["head"], R), compute=compute),
        }

    def place(self, space: Space) -> Space:
        ways = self.ways(space)

        def divided(home: Home) -> Home:
            return placed(home, ways)

        if space.anatomy.logits is not None:
            space = space.with_logits(self.axis, WIDTH)
        return space.with_homes(divided).with_homes(divided, frozen=True)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        program = booked(program, self.ways(space), space, job)
        return heard(program.edit(lambda actions: self._told(actions, space, job)), self.axis)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        space = runtime.plan.space
        ways = dict(self.ways(space))
        whole = [home.weight for home in (space.whole or space).homes]
        named = {name: weight for weight in whole for name in weight.names}
        for layer in dict.fromkeys(call.name for call in space.anatomy.calls if call.role == "table"):
            weight = named[f"{layer}.weight"]
            words = range(*space.range_of(weight.name, self.axis)), weight.cut(0).units  # rows, whatever the head calls them
            ways[layer] = replace(ways["table"], compute=partial(_rows, *words))
        filled(runtime, ways)
        return {}

    def _told(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        """`actions`, LOSS with the numbers that ranks tell each other of each token."""
        logits = space.anatomy.logits
        if logits is None:
            return actions
        dtype = "float64" if job.precision.compute == "float64" else "float32"
        each = micro_rows(actions, space, job) * logits.numbers * NBYTES[dtype]
        told = (Transfer("all_gather", (self.axis,), each * size, dtype=dtype) for size in sizes(tokens_of(space), space.pieces))
        inner = tuple(told)
        return [replace(action, inner=(*action.inner, *inner)) if action.kind == "LOSS" else action for action in actions]


def divisible(anatomy: Anatomy, ranks: int) -> bool:
    """Whether the model has a table or a head that can be divided by words among so many ranks."""
    words = [weight.side("in" if weight.role == "table" else "out") for weight in anatomy.weights if weight.role in ROLES]
    return bool(words) and all(cut is not None and cut.units >= ranks for cut in words)


def undivided(anatomy: Anatomy) -> Iterator[str]:
    """What to say of tables and heads that no rank can have a part of, by words, and why."""
    kept = [weight for weight in anatomy.weights if weight.role in ("logits", "lookup") and len(weight.shape) > 1]
    for weight in kept:
        if weight.role == "logits" or weight.aliases:
            yield f"{weight.name} stays whole on every rank: {weight.why}"


def _plain(runtime: Runtime, module: nn.Module, held: Held, x: torch.Tensor) -> torch.Tensor:
    """The product, with nothing beside it: the loss makes it."""
    return F.linear(x, held["weight"], held.get("bias"))


def _rows(words: range, total: int, runtime: Runtime, module: nn.Module, held: Held, ids: torch.Tensor) -> torch.Tensor:
    """The rows of `words`, which this rank has of `total`, and zeros for the others. An id that is no word fails as ever."""
    table = cast(nn.Embedding, module)
    padding, elsewhere = table.padding_idx, (ids >= 0) & (ids < total) & ((ids < words.start) | (ids >= words.stop))
    table.padding_idx = None if padding is None or padding not in words else padding - words.start
    try:
        rows = type(table).forward(table, (ids - words.start).masked_fill(elsewhere, 0))
    finally:
        table.padding_idx = padding
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)
