"""Seconds of each action of a program, from what its block does and how fast the device is.

    F, B, I, W      the operations of the visit (core/work.py), as much of each as falls to the rank: tokens, heads, features;
                    the collectives within it on top, and the copies that put slices in order for them. W has the products
                    that sum over rows, I all others of a backward
    RERUN           a forward once more                  LOSS     what the loss does, forward and backward
    PACK, UNPACK, ADD, CLIP, SQUARE, STEP                bytes that they read and write: gradients, weights, moments
    REDUCE, UNSHARD, SEND ...                            the links (planner/wire.py)

    one operation of a block       the longer of a call and of       2 m n k at the speed of its shape       bytes at the memory's
    where the host asks ahead      the longer of all calls together, and of all operations together

A first micro-batch leaves gradients; each later one also adds to them. Where nobody has seen a block's operations, they are
one square product with as many operations, and what the block holds passes through memory: that is said.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.model_spec.op_costs import Attention, Passed, Product, Work, Works
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.param_sharding import Bundle
from meshwright.plan.sharding.rank_share import head_in_pieces, own_share, shares
from meshwright.plan.step.action import Action, Transfer
from meshwright.plan.step.chunked_loss import PIECE, tokens_of
from meshwright.plan.step.single_device import COMPLETING, FORWARDS, gradient
from meshwright.planner.program_cost.device_time import Ground
from meshwright.planner.program_cost.memory import stepped
from meshwright.planner.program_cost.network_time import GATHERING

WARM = 16 << 20  # bytes: what is much larger was measured with memory that is new each time
PASSES = 3  # what a block holds passes through memory so often, where nobody has seen its operations
THROUGH, CALLS = 14, 20  # times that a logit of divided words is read or written beside its exp; operations on each PIECE of them
TURNED = {"all_to_all": 2, "all_gather": 1, "reduce_scatter": 1}  # times that what is met within a block is copied to be sent
COPIED = ("PACK", "UNPACK", "STASH", "RESTORE", "RENEW")


@dataclass(frozen=True)
class Cost:
    """Seconds of an action: what it computes, what its rank waits within it for messages, and how late these start."""

    computing: float = 0.0
    meeting: float = 0.0
    late: float = 0.0

    @property
    def seconds(self) -> float:
        """What it takes itself: all but `late`."""
        return self.computing + self.meeting


@dataclass(frozen=True)
class _Part:
    """What of a visit falls to a rank: of its tokens, of its features or heads, and of what passes through memory."""

    tokens: float = 1.0
    features: float = 1.0
    passed: float = 1.0


class Prices:
    """What the actions of one role cost, as its first rank plays them."""

    def __init__(self, plan: Plan, rank: int, ground: Ground) -> None:
        self._plan, self._rank, self.ground = plan, rank, ground
        self._space = plan.space.at(plan.mesh.coordinate(rank))
        self._shares = shares(self._space)
        self._rows = plan.micro_batch
        weighed = plan.anatomy.weighed
        self._works: Works | None = None if weighed is None else weighed.works
        self._known: dict[tuple[str, str], float] = {}
        self._sent: dict[Transfer, float] = {}
        parts = [part.visits[0] for part in self._space.parts] or [self._space.anatomy.visits[0]]
        self._begins = {visit for visit in parts if visit in self._space.anatomy.visits}

    @property
    def seen(self) -> bool:
        """Whether what blocks do was seen."""
        return self._works is not None

    def cost(self, action: Action) -> Cost:
        """What `action` costs."""
        if action.lane == "receive":  # a message is counted where it is sent
            return Cost()
        own = 0.0 if action.transfer is None else self._moved(action.transfer)
        if action.lane != "compute":
            return Cost(0.0, own)
        computing = self.ground.slower * (self._computing(action) + self._turned(action))
        return Cost(computing, own + self._meeting(action))

    def _computing(self, action: Action) -> float:
        kind = action.kind
        if kind in (*FORWARDS, "RERUN"):
            glue = self._glue if kind in FORWARDS and action.subject in self._begins else 0.0
            return glue + self._of(action, "forward")
        if kind in ("B", "I", "W"):
            return self._of(action, kind) + self._added(action)
        if kind == "LOSS":
            return self._loss(action)
        if kind == "STEP":
            return self._stepped
        if kind in COPIED:
            return self._passing(action.tensors, 2)
        if kind == "ADD":
            return self._passing(action.tensors, 3, in_shards=True)
        if kind == "SQUARE" or (kind == "CLIP" and not self._space.norm_axes):
            return self._passing(self._numel, 1, in_shards=True)
        return 0.0

    def _of(self, action: Action, way: str) -> float:
        """What the forward of a visit takes, or its backward, or one half of that."""
        key = action.subject, way
        if key not in self._known:
            self._known[key] = self._visit(action, way)
        return self._known[key]

    def _visit(self, action: Action, way: str) -> float:
        visit = action.subject
        if self._works is None:
            held = 0 if way == "W" else sum(hold.nbytes for hold in action.takes)
            return self._guessed(action.flops or self._shares[visit].flops * self._rows, held)
        done = self._works.by_visit[visit]
        part = self._part(visit)
        work = done.forward if way == "forward" else done.backward
        if way in ("I", "W"):
            late = way == "W"
            kept = tuple(each for each in work.products if each.learns is late)
            work = Work(kept) if late else Work(kept, work.attention, work.passed)
        return self._seconds(work, part, back=way != "forward")

    def _part(self, visit: str) -> _Part:
        """What of a visit falls to the rank."""
        share, (flops, inside), tokens = self._shares[visit], self._whole(visit), float(own_share(self._space, visit))
        features = share.flops / flops / tokens if flops else 1.0
        return _Part(tokens, features, share.inside / inside if inside else tokens)

    def _whole(self, visit: str) -> tuple[int, int]:
        """The operations of a forward of `visit` per sample, and the elements that it keeps inside, on one device."""
        anatomy = self._plan.anatomy
        at = anatomy.visits.index(visit)
        return anatomy.flops[at], anatomy.inside_numel[at] if anatomy.inside_numel else 0

    def _seconds(self, work: Work, part: _Part, *, back: bool) -> float:
        ground, rows = self.ground, self._rows
        call = ground.pace.call_backward_s if back else ground.pace.call_s
        each = [(operation.count, self._one(operation, part, rows)) for operation in _all(work)]
        if ground.ahead:
            return max(call * work.calls, sum(count * seconds for count, seconds in each))
        return sum(count * max(call, seconds) for count, seconds in each)

    def _one(self, work: Product | Attention | Passed, part: _Part, rows: int) -> float:
        """Seconds of one of the operations."""
        pace = self.ground.pace
        if isinstance(work, Passed):
            nbytes, numbers = (line.at(rows) * part.passed for line in (work.nbytes, work.numbers))
            return pace.moved_seconds(nbytes, work.operation, numbers) if nbytes else 0.0
        if isinstance(work, Attention):
            keys = min(work.keys, (work.keys + self.ground.block) / 2) if work.causal else work.keys
            sizes = work.rows.at(rows), work.heads * part.features, work.queries * part.tokens, keys, work.width
            return pace.attention_seconds(sizes, work.dtype, backward=work.backward)
        m, n, k, batch = (line.at(rows) for line in (work.m, work.n, work.k, work.batch))
        if work.learns:
            return pace.product_seconds(m, n * part.features, k * part.tokens, batch, work.dtype)
        if work.batch.each:  # one for each head
            return pace.product_seconds(m * part.tokens, n, k, batch * part.features, work.dtype)
        return pace.product_seconds(m * part.tokens, n * part.features, k, batch, work.dtype)

    @cached_property
    def _glue(self) -> float:
        return 0.0 if self._works is None else self._seconds(self._works.glue, _Part(), back=False)

    def _loss(self, action: Action) -> float:
        space, visit = self._space, self._space.anatomy.visits[-1]
        share = self._shares[visit]
        call = head_in_pieces(space)
        tokens = float(own_share(space, visit))
        if self._works is None:
            return self._guessed(action.flops, sum(hold.nbytes for hold in action.takes))
        divided = bool(space.logits.axes("S"))
        if call is None and divided:
            return self._of_words(share.hands_on * self._rows)
        if call is None:
            return self._seconds(self._works.loss, _Part(passed=tokens), back=False)
        times, count = action.flops / (3 * space.pieces), max(1, tokens_of(space) * self._rows / space.pieces)
        into = call.into / max(1, space.anatomy.logits.tokens if space.anatomy.logits is not None else 1)
        words = times / (2 * count * into)
        products = 3 * space.pieces * self.ground.pace.product_seconds(count, words, into, 1, self._dtype)
        if divided:
            return products + self._of_words(words * count * space.pieces)
        return products + self._seconds(self._works.loss, _Part(passed=tokens), back=False)

    def _of_words(self, logits: float) -> float:
        """The loss of so many logits of the words that are here, and its gradient, some tokens at a time (engine/logits.py)."""
        pace, width = self.ground.pace, max(NBYTES["float32"], NBYTES[self._plan.job.precision.compute])
        passing = self._there(THROUGH * width * logits) + 2 * max(
            self._there(2 * width * logits), pace.moved_seconds(0.0, "exp", logits)
        )
        return max(passing, pace.call_s * CALLS * ceil(logits / PIECE))

    def _guessed(self, flops: float, held: float) -> float:
        side = (flops / 2) ** (1 / 3)
        pace = self.ground.pace
        return (pace.product_seconds(side, side, side, 1, self._dtype) if flops else 0.0) + pace.moved_seconds(PASSES * held)

    def _added(self, action: Action) -> float:
        """What a backward adds to gradients that others have left."""
        if action.kind not in COMPLETING:
            return 0.0
        new = {hold.name for hold in action.takes}
        using = (each for each in self._bundles if action.subject in each.visits and not each.homes[0].flat)
        names = [name for each in using if gradient(each) not in new for name in each.names]
        return self._passing(names, 3)

    def _passing(self, names: Iterable[str], times: int, *, in_shards: bool = False) -> float:
        """Reading or writing the gradients of these weights, or their shards, so many times, each by an operation of its own."""
        width = NBYTES[self._plan.job.precision.resolved.gradients]
        own = (self._numel[name][in_shards] for name in names if name in self._numel)
        return sum(self._there(times * width * numel) for numel in own)

    def _there(self, nbytes: float) -> float:
        """Seconds of an operation on memory that is there already: however large, it brings none that is new."""
        moved, pieces = self.ground.pace.moved_seconds, max(1.0, nbytes / WARM)
        return pieces * moved(nbytes / pieces)

    @cached_property
    def _stepped(self) -> float:
        """The optimizer reads gradients, and reads and writes what it steps and what it remembers."""
        precision = self._plan.job.precision.resolved
        numel, moments = stepped(self._plan, self._rank)
        width = NBYTES[precision.gradients] + 2 * NBYTES[precision.master]
        width += NBYTES[precision.parameters] if precision.master != precision.parameters else 0
        count = max(1, len(self._space.anatomy.trainable))
        return count * self._there((numel * width + 2 * moments) / count)

    @cached_property
    def _bundles(self) -> tuple[Bundle, ...]:
        return self._space.bundles()

    @cached_property
    def _numel(self) -> Mapping[str, tuple[float, float]]:
        """The elements of each trained weight that this rank has, and those of its shard."""
        homes, mesh = (home for home in self._space.homes if home.weight.trainable), self._plan.mesh
        return {home.weight.name: (home.weight.numel, home.weight.numel / mesh.extent(home.flat)) for home in homes}

    @property
    def _dtype(self) -> str:
        return self._plan.job.precision.compute

    def _meeting(self, action: Action) -> float:
        """Seconds of the collectives within an action; what goes round while attention runs is hidden, where it can be."""
        round_, others = 0.0, 0.0
        for move in action.inner:
            if move.collective == "shift":
                round_ += self._moved(move)
            else:
                others += self._moved(move)
        if round_ and self.ground.ahead and self._works is not None and action.subject in self._works.by_visit:
            done = self._works.by_visit[action.subject]
            work = done.forward if action.kind in (*FORWARDS, "RERUN") else done.backward
            attention = self._seconds(Work(attention=work.attention), self._part(action.subject), back=False)
            round_ = max(0.0, round_ - attention)
        return round_ + others

    def _turned(self, action: Action) -> float:
        """Seconds in which slices are put in order, to be sent and as they come."""
        found = 0.0
        for move in action.inner:
            size = len(self.meet(move))
            if size > 1:
                whole = move.nbytes * (size if move.collective in GATHERING else 1)
                found += TURNED.get(move.collective, 0) * self.ground.pace.moved_seconds(2 * whole)
        return found

    def _moved(self, move: Transfer) -> float:
        """Seconds of a transfer."""
        if move not in self._sent:
            self._sent[move] = self.ground.wire.seconds(move, self.meet(move))
        return self._sent[move]

    def axes(self, move: Transfer) -> frozenset[str]:
        """The axes along which ranks meet in it."""
        return frozenset(axis for axis in move.axes if self._plan.mesh.extent((axis,)) > 1)

    def meet(self, move: Transfer) -> tuple[int, ...]:
        """The ranks that meet in it."""
        ranks = self._plan.mesh.peers(self._rank, move.axes)
        if move.peer is not None:
            return self._rank, ranks[move.peer]
        if move.near:
            at = ranks.index(self._rank) // move.near * move.near
            return ranks[at : at + move.near]
        return tuple(ranks[index] for index in move.among) or ranks


def _all(work: Work) -> Iterable[Product | Attention | Passed]:
    return (*work.products, *work.attention, *work.passed)
