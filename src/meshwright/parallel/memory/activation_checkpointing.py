"""Recompute (activation checkpointing): a block keeps what it took in, and computes its inside once more before its backward.

Why it works: a backward needs what the forward computed, and between the two lies the whole rest of the model, so all blocks'
insides are in memory at once. What a block took in is far less, and from it the inside follows: the forward is a function of
its inputs, its weights and its (stateless) random numbers. So F becomes F_LEAN, which keeps the inputs and drops the inside, and
RERUN stands before B: then one block's inside is in memory at any time. The last block's backward follows its forward at
once; to run it again would spare nothing, so by default it is left as it is.

    before   F0   F1   F2   LOSS   B2            B1            B0
    after    F_LEAN0   F_LEAN1   F2   LOSS   B2   RERUN1   B1   RERUN0   B0
    held     x0        x0 x1     x0 x1 [2]        x0 x1 [1]     x0 [0]              [i]: the inside of block i

F_LEAN (the forward of a block that keeps its inputs alone), RERUN (that forward once more, from what it kept). A second run
computes what the first one did, to the bit: the same masks, the same autocast, the same buffers; and it does nothing twice: batch
norm's statistics, counters and captured router logits are those of the first run.

    activations = sum_i x_i + max_i [i]          instead of sum_i (x_i + [i])
    operations <= 4/3 of a step's: forward 1, backward 2, forward again at most 1

`blocks` names what is run again, by patterns of visits ("model.layers.*"); whoever declares parts of a layer as blocks
(attention, mlp) selects among those. `keep_mb` is how much inside may be kept all the same: the blocks that cost most operations
per byte to run again are kept first, as many as fit; of equals, the later ones. What has no inside is never run again.

Cost: nothing on the wire, but for weights that ZeRO stores in shards: RERUN and B use one gathering together. Time: at most the
forward's. A clone of a stream per block where the model writes in place.
Limits: the inside is what a trial on one size of rows has found, in elements of the compute dtype; it is an estimate. Parts of
a block that is one to the engine are not run again by themselves. A block that hands tensors on in objects of its own, writes
into a cache that it is given, or whose input is overwritten, is refused by name; one that appends to its own list does so twice.
Kernels that add in no fixed order (sums by index on a GPU) give other last bits the second time.
Paper: Griewank and Walther 2000, "Algorithm 799: revolve" (TOMS); Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost", arXiv 1604.06174; Korthikanti et al. 2022, arXiv 2205.05198 (section 5, selective recomputation).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from typing import ClassVar

from meshwright.plan.job.errors import Fault, nearest
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import Anatomy, block_of
from meshwright.plan.sharding.rank_share import shares
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Program, with_more, with_waits
from meshwright.plan.step.activation_memory import taken
from meshwright.plan.step.single_device import BACKWARDS, COMPLETING, FORWARDS, inside, micro_rows, stream
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy


@dataclass(frozen=True)
class Recompute(Strategy):
    """Blocks whose visits match one of `blocks` (none given: all but the last visit) are run again before their backward.

    `keep_mb` MiB of what they compute within are kept all the same; 0: nothing.
    """

    name: ClassVar[str] = "recompute"
    phase: ClassVar[Phase] = "memory"
    blocks: tuple[str, ...] = ()
    keep_mb: float = 0.0

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        visits, where = space.anatomy.visits, "strategies.recompute"
        for pattern in self.blocks:
            if not any(_matches(visit, pattern) for visit in visits):
                text = f"'{pattern}' is no block of {space.anatomy.name}"
                yield Fault(text, nearest(pattern, visits), f"{where}.blocks")
        if not self.blocks and len(visits) == 1:
            text = f"the model runs as one block, '{visits[0]}', whose backward follows its forward at once: nothing is spared"
            yield Fault(text, "declare its layers as blocks: Model(blocks=[...])", f"{where}.blocks")
        if not 0 <= self.keep_mb < inf:
            yield Fault(f"keep_mb = {self.keep_mb}", "write a number from 0 up; 0 keeps nothing", f"{where}.keep_mb")

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(lambda actions: self._lean(actions, space, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"RERUN": runtime.rerun}

    def _lean(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        """`actions` with an F_LEAN in place of each F of the visits that are chosen, and a RERUN before its B."""
        chosen = self._chosen(actions, space, job)
        edited, leans = [], {}
        for action in actions:
            action = replace(action, waits=tuple(leans[wait].name if wait in leans else wait for wait in action.waits))
            if action.kind == "F" and action.subject in chosen:
                within = _within(action)
                kept = tuple(hold for hold in action.takes if hold not in within)
                lean = Action("F_LEAN", action.subject, action.micro, action.lane, action.waits, action.tensors, takes=kept)
                lean = replace(lean, transfer=action.transfer, flops=action.flops, frees=action.frees, inner=action.inner)
                leans[action.name] = lean
                again = Action("RERUN", action.subject, action.micro, waits=(lean.name,), flops=action.flops, takes=within)
                again = replace(again, inner=tuple(move for move in action.inner if not move.between))
                chosen[action.subject][action.micro] = again
                action = leans[action.name]
            elif action.kind in BACKWARDS and action.subject in chosen:
                again = chosen[action.subject][action.micro]
                edited.append(again)
                action = with_waits(action, (again.name,))
            edited.append(action)
        return _with_given(edited, space, job) if chosen else edited

    def _chosen(self, actions: Sequence[Action], space: Space, job: Job) -> dict[str, dict[int | None, Action]]:
        """The visits that are run again, each with room for its RERUNs by micro-batch.

        Ranks that meet within a visit choose alike: by the sizes of the one that has most of it.
        """
        anatomy, largest = space.anatomy, _largest(space)
        sizes, held = shares(largest), taken(largest, job, micro_rows(actions, space, job))
        forwards = {
            action.subject: action for action in actions if action.kind == "F" and self._asked_for(action.subject, anatomy)
        }
        order = list(anatomy.visits)
        alive = {visit: _most_at_once(actions, visit) for visit in forwards}
        known = bool(anatomy.inside_numel)  # else what it hands on stands for it
        nbytes = {visit: alive[visit] * (held[visit].inside if known else held[visit].stream) for visit in forwards}
        left = self.keep_mb * 2**20
        worth = {visit: sizes[visit].flops * alive[visit] / each if each else inf for visit, each in nbytes.items()}
        for visit in sorted(forwards, key=lambda visit: (-worth[visit], -order.index(visit))):
            if nbytes[visit] <= left:
                left -= nbytes[visit]
                del forwards[visit]
        return {visit: {} for visit in forwards}

    def _asked_for(self, visit: str, anatomy: Anatomy) -> bool:
        if not self.blocks:
            return visit != anatomy.visits[-1]
        return any(_matches(visit, pattern) for pattern in self.blocks)


def _matches(visit: str, pattern: str) -> bool:
    """Whether `pattern` is the visit, or the block of which it is one."""
    return fnmatchcase(visit, pattern) or fnmatchcase(block_of(visit), pattern)


def _with_given(actions: list[Action], space: Space, job: Job) -> list[Action]:
    """`actions` with what glue gives to visits that are run again, masks among it: kept from the first to its backward."""
    weighed, first = space.anatomy.weighed, space.anatomy.visits[0]
    if weighed is None:
        return actions
    more = (weighed.handed - weighed.glue).at(micro_rows(actions, space, job))

    def holding(action: Action) -> Action:
        if action.kind not in FORWARDS or action.subject != first:
            return action
        return with_more(action, stream(first, action.micro or 0), more)

    return [holding(action) for action in actions]


def _within(forward: Action) -> tuple[Hold, ...]:
    """What a forward takes that its backward alone needs."""
    return tuple(hold for hold in forward.takes if hold.name == inside(forward.subject, forward.micro))


def _largest(space: Space) -> Space:
    """`space` as the rank sees it that has most, of those that have other slices of weights, or other tokens."""
    where = {**dict(space.coordinate), **dict.fromkeys(space.cut_axes, 0)}  # units are dealt out larger first
    if space.deal is not None and space.anatomy.tokens is not None:
        counts = space.deal.counts(space.anatomy.tokens.length)
        peers = space.mesh.peers(space.mesh.rank(where), space.token_axes)
        where = space.mesh.coordinate(peers[counts.index(max(counts))])
    return space.at(where)


def _most_at_once(actions: Sequence[Action], visit: str) -> int:
    """For how many micro-batches a visit waits for its backward at the same time, at most."""
    now = most = 0
    for action in actions:
        if action.subject == visit:
            now += (action.kind == "F") - (action.kind in COMPLETING)
            most = max(most, now)
    return most
