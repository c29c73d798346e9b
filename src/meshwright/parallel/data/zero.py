"""ZeRO and fully sharded data parallel (FSDP): what all data-parallel ranks would hold alike, each holds a share of.

Why it works: a rank needs whole weights only while a block runs, and the optimizer needs no whole weights at all: it steps each
element by itself. So of the n copies of moments (stage 1), gradients (2) and weights (3) that `replicate` keeps, n-1 go.
The sum of the gradients arrives where it is stepped (reduce-scatter), and what was stepped is handed out (all-gather): together
the bytes of one all-reduce. Storage is split, not work: every rank still computes every block, on its own samples.

    stage 1, 2   UNSHARD(0) UNSHARD(1)  F0 F1 LOSS B1 PACK(1) B0 PACK(0)            SQUARE NORM CLIP STEP
    wire                                              REDUCE(1)      REDUCE(0)
    stage 3      UNSHARD(0) F0 RESHARD(0)  F1 LOSS B1 PACK(1) RESHARD(1)  B0 PACK(0) RESHARD(0) SQUARE NORM CLIP STEP
    wire           UNSHARD(1, F, 0)           UNSHARD(0, B, 0)  REDUCE(1, 0)  REDUCE(0, 0)

    gradients P -> S(flat) along the axis: reduce_scatter; weights S(flat) -> R: all_gather
    bytes per rank, P elements of 2 (weight) + 2 (gradient) + 12 (master, moments):
        4 P + 12 P/n (stage 1)      2 P + 14 P/n (2)      16 P/n + buffers (3)
    sent per rank, over the bundles b of N_b elements: a = sum (n-1) ceil(N_b/n) * wire bytes
        2 a (stage 1)      (m + 1) a (stage 2, m micro-batches)      (2 m + m) a or, gathered once, (m + m) a, (1 + m) a (3)

    UNSHARD   whole weights from the shards of all ranks
    READY     wait for what glue uses at any time, or for what is summed next
    RESHARD   let go of the whole weights; the buffer is the next bundle's

`gather` says how long stage 3 keeps weights: for one "use" (forward, and again backward), for a "micro"-batch, for the "step";
`keep_mb` keeps as many more as fit. They are gathered `ahead` uses early into a fixed number of buffers. Stage 2 and 3 reduce
after every backward, through two buffers, so no whole gradient outlives its block. With `across`, shards are replicated over a
second axis (hybrid): reduce-scatter inside, all-reduce of the shard across. Ranks that have other tokens of the same samples are
among the n: sums, and shards, are over them and the ranks along the axis together.
Cost: stages 1 and 2 send what `replicate` sends (stage 2 more often, where micro-batches accumulate), stage 3 half as much again.
Limits: an optimizer that looks at more than an element needs shards cut at its grain (core/arena.py). Stage 3 wants fast links.
Paper: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054 (sections 5 and 7); Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277
(sections 3.2 hybrid, 3.3 overlap).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from meshwright.parallel.data.batch_split import DATA_AXES, SUMMED_AXES, alike_fault
from meshwright.plan.job.errors import Fault, nearest
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES_OWN, ROOT
from meshwright.plan.sharding.flat_param import Arena
from meshwright.plan.sharding.param_sharding import Bundle, Home
from meshwright.plan.sharding.placement import FLAT, I, S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Program, Transfer, with_waits
from meshwright.plan.step.reduce_scatter import Sums
from meshwright.plan.step.single_device import FORWARDS, USES
from meshwright.plan.step.unshard_windows import Join, Use, buffers, stays
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy

STAGES = (1, 2, 3)
GATHERS = ("use", "micro", "step")


@dataclass(frozen=True)
class Zero(Strategy):
    """Moments (stage 1), gradients too (2), weights too (3) in equal shards along `axis`, replicated along `across` if given.

    Ranks that have other tokens of the same samples share in the shards. Of stage 3 alone: `gather`, `keep_mb` and `ahead` (see
    above).
    """

    name: ClassVar[str] = "zero"
    phase: ClassVar[Phase] = "store"
    axis: str = "dp_shard"
    stage: int = 3
    across: str = ""
    gather: Join = "use"
    keep_mb: float = 0.0
    ahead: int = 1

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.zero"
        if self.stage not in STAGES:
            text = f"stage {self.stage}; needed is 1 (moments), 2 (and gradients) or 3 (and weights)"
            yield Fault(text, "write stage = 3; to cut nothing into shards, use replicate", f"{where}.stage")
        if self.gather not in GATHERS:
            yield Fault(f"gather = '{self.gather}'", nearest(self.gather, GATHERS), f"{where}.gather")
        if not 0 <= self.keep_mb < inf or self.ahead < 0:
            text = f"keep_mb = {self.keep_mb}, ahead = {self.ahead}"
            yield Fault(text, "write numbers from 0 up; ahead = 1 is a good start", where)
        for key, axis in (("axis", self.axis), ("across", self.across)):
            if axis and axis not in SUMMED_AXES:
                yield Fault(f"{key} = '{axis}' is no axis of data parallelism", nearest(axis, DATA_AXES), f"{where}.{key}")
            elif axis and axis not in space.summed_axes:
                yield alike_fault("shards", axis, where)
        unused = [key for key, usual in (("gather", "use"), ("keep_mb", 0.0), ("ahead", 1)) if vars(self)[key] != usual]
        if unused and self.stage in (1, 2):
            text = f"{' and '.join(unused)} with stage {self.stage}, which keeps weights whole"
            yield Fault(text, f"remove {' and '.join(unused)}, or set stage = 3", where)
        yield from self._dtype_faults(space)
        if self.axis == self.across:
            yield Fault(f"axis and across are both {self.axis}", "shard along one axis, replicate along the other", where)
        elif self.across in space.token_axes:
            text = f"across = '{self.across}', where ranks have other tokens of a sample: shards are cut along {self.axis} and it"
            yield Fault(text, 'remove across, or write the other axis of samples there: "dp_replicate"', f"{where}.across")
        yield from self._taken_faults(space)

    def _taken_faults(self, space: Space) -> Iterator[Fault]:
        """Sums that another strategy takes."""
        stored = [axis for axis in space.summed_axes if any(axis not in home.grad.axes("P") for home in _trained(space))]
        if taken := [axis for axis in stored if axis in (*space.with_theirs(self.axis), self.across)]:
            text = f"another strategy stores the weights along {' and '.join(taken)} already"
            other = [axis for axis in stored if axis in space.data_axes and axis != self.axis]
            more = f'; zero replicates by itself: across = "{other[0]}"' if other else ""
            yield Fault(text, f"keep one of them{more}", "strategies.zero")
        elif cut := sorted({axis for home in space.homes for axis in home.flat}):
            text = f"the weights are cut into shards along {' and '.join(cut)} already, and now along {self.axis} too"
            fix = f'keep one of them, along one axis; zero replicates by itself: across = "{cut[0]}"'
            yield Fault(text, fix, "strategies.zero")

    def _dtype_faults(self, space: Space) -> Iterator[Fault]:
        for weight in (home.weight for home in space.homes):
            if weight.dtype and weight.trainable:
                text = f"{weight.name} is trained in {weight.dtype}, and shards are stepped in the dtype of the job"
                yield Fault(text, "make it a parameter of real floats, or freeze it", weight.name)
            elif weight.dtype and weight.dtype not in NBYTES_OWN and self.stage == 3:
                text = f"{weight.name} is of {weight.dtype}, which is not cut into shards"
                yield Fault(text, f"use stage = 2, which keeps weights whole, or one of {', '.join(NBYTES_OWN)}", weight.name)

    def place(self, space: Space) -> Space:
        axes = space.with_theirs(self.axis)

        def stored(home: Home) -> Home:
            return replace(home, stored=home.stored.with_place(axes, S(FLAT))) if self.stage == 3 else home

        def shard(home: Home) -> Home:
            grad = home.grad.with_place(axes, S(FLAT)).with_place((self.across,) if self.across else (), I)
            return replace(stored(home), grad=grad)

        return space.with_homes(shard).with_homes(stored, frozen=True)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        sums = Sums(space, job, space.with_theirs(self.axis), self.across, every=self.stage > 1)
        program = program.edit(sums.added)
        return program.edit(lambda actions: (self._stay if self.stage == 3 else self._hand_out)(actions, space, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        words = {"UNSHARD": runtime.unshard, "RESHARD": _nothing, "READY": _nothing}
        return {**words, "REDUCE": runtime.reduce, "ADD": runtime.add}

    @staticmethod
    def _gather_of(bundle: Bundle, arena: Arena, job: Job, what: str, micro: int | None) -> Action:
        """The UNSHARD of `bundle`, which lies in `arena`, for `what`."""
        first, parameters = bundle.weights[0], job.precision.parameters
        dtype, nbytes = first.held_in(parameters), arena.shard * first.width(parameters)
        transfer = Transfer("all_gather", arena.axes, nbytes, dtype=dtype)
        return Action("UNSHARD", f"{bundle.name}{what}", micro, "wire", tensors=bundle.names, transfer=transfer)

    def _hand_out(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        """`actions` with what the last step has stepped handed out once, each bundle ahead of its first use."""
        bundles, arenas = sorted(space.bundles(), key=lambda bundle: min(_places(bundle, space))), space.arenas()
        gathers = {bundle.name: self._gather_of(bundle, arenas[bundle.name], job, "", None) for bundle in bundles}
        first = next(i for i, action in enumerate(actions) if action.kind in FORWARDS)
        waiting = [self._waiting(action, bundles, {b: g.name for b, g in gathers.items()}) for action in actions[first:]]
        ready = [_ready(gathers[bundle.name]) for bundle in bundles if ROOT in bundle.visits]
        return [*actions[:first], *gathers.values(), *ready, *waiting]

    @staticmethod
    def _waiting(action: Action, bundles: Sequence[Bundle], names: Mapping[str, str]) -> Action:
        if action.kind not in USES:
            return action
        return with_waits(action, [names[bundle.name] for bundle in bundles if action.subject in bundle.visits])

    def _stay(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        """`actions` with an UNSHARD ahead of each stay of a bundle and a RESHARD behind it."""
        bundles, arenas = {bundle.name: bundle for bundle in space.all_bundles()}, space.arenas()
        widths = {name: bundle.weights[0].width(job.precision.parameters) for name, bundle in bundles.items()}
        nbytes = {name: arena.numel * widths[name] for name, arena in arenas.items()}
        at = [i for i, action in enumerate(actions) if action.kind in USES or (action.kind == "LOSS" and action.tensors)]
        uses = [Use(_needed(actions[i], list(bundles.values())), actions[i].micro or 0) for i in at]
        found = stays(uses, nbytes, self.gather, self.keep_mb * 2**20, self.ahead)
        number, sizes = buffers(found, nbytes)
        before: dict[int, list[Action]] = {}
        behind: dict[int, list[Action]] = {}
        waits: dict[int, list[str]] = {}
        for stay in found:
            bundle, first = bundles[stay.bundle], actions[at[stay.begin]]
            held = Hold(f"weight buffer {number[stay.bundle]}", sizes[number[stay.bundle]])
            fetch = self._gather_of(bundle, arenas[stay.bundle], job, _for(first, bundle), first.micro)
            fetch = replace(fetch, takes=(held,))
            release = Action("RESHARD", fetch.subject, fetch.micro, tensors=fetch.tensors, frees=(held.name,))
            before.setdefault(at[stay.fetch], []).append(fetch)
            if ROOT in bundle.visits:
                before[at[stay.fetch]].append(_ready(fetch))
            behind.setdefault(at[stay.end], []).append(release)
            for use in range(stay.begin, stay.end + 1):
                if stay.bundle in uses[use].bundles:
                    waits.setdefault(at[use], []).append(fetch.name)
        return _inserted(actions, before, waits, behind)


def _inserted(
    actions: list[Action],
    before: Mapping[int, list[Action]],
    waits: Mapping[int, list[str]],
    behind: Mapping[int, list[Action]],
) -> list[Action]:
    """`actions` with others before and behind some; what stands behind a backward comes after its PACKs and REDUCEs."""
    edited: list[Action] = []
    owed: list[Action] = []
    for i, action in enumerate(actions):
        if action.kind not in ("PACK", "REDUCE", "ADD"):
            edited += owed
            owed = []
        edited += [*before.get(i, ()), with_waits(action, waits.get(i, ()))]
        owed += behind.get(i, ())
    return edited + owed


def _needed(action: Action, bundles: Sequence[Bundle]) -> tuple[str, ...]:
    """The bundles that `action` finds whole: those of its visit, and those that glue uses at any time."""
    by_loss = set(action.tensors) if action.kind == "LOSS" else set()
    flat = (bundle for bundle in bundles if bundle.homes[0].flat)
    return tuple(each.name for each in flat if {action.subject, ROOT} & set(each.visits) or by_loss & set(each.names))


def _places(bundle: Bundle, space: Space) -> list[int]:
    order = space.anatomy.visits
    return [-1 if visit == ROOT else order.index(visit) for visit in bundle.visits]


def _for(use: Action, bundle: Bundle) -> str:
    """What a bundle is gathered for, as a part of the name: tied weights are, by several blocks."""
    return f", {use.kind}" + ("" if bundle.visits == (use.subject,) else f" of {use.subject}")


def _ready(fetch: Action) -> Action:
    """Glue uses the weights of the root whenever it likes: they are there before the forward begins."""
    return Action("READY", fetch.subject, fetch.micro, waits=(fetch.name,), tensors=fetch.tensors)


def _trained(space: Space) -> list[Home]:
    return [home for home in space.homes if home.weight.trainable]


def _nothing(action: Action) -> None:
    """What it waits for, or frees, is all."""
