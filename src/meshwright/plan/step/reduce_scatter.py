"""The gradients of each bundle summed into shards: what is added to the list behind backwards where weights are stepped S(flat).

    once per step        B1 PACK(1) ............ B1' ... REDUCE(1)            kept in one buffer of the bundle from the first
                                                                              backward on; later ones add in place
    every micro-batch    B1 PACK(1, 0) REDUCE(1, 0) .. B1' PACK(1, 1) REDUCE(1, 1) .. ADD(1, 1)

    PACK      gradients into a contiguous buffer, at the places of the arena; where they lay is free again
    REDUCE    their sum over the ranks, of which each gets its shard (reduce_scatter), over `across` then the sum of shards
    ADD       a shard to what the micro-batches before have left, or from the dtype of the wire to that of the gradients
    SQUARE    looks at the sums: it waits for all of them (core/steps.py)

Two buffers serve all bundles in turn: one is packed while the other travels. What was in it has left before it is packed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.sharding.param_sharding import Bundle
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device import COMPLETING, SCRATCH, backwards, gradient, users

NUM_BUFFERS = 2


@dataclass
class _Buffer:
    """One of the buffers that bundles take in turn, and the reduction that it is busy with."""

    hold: Hold
    busy: Action | None = None
    adds: Action | None = None


class Sums:
    """Sums over `axes` into shards, and of shards over `across`; `every` micro-batch, or once per step."""

    def __init__(self, space: Space, job: Job, axes: tuple[str, ...], across: str, *, every: bool) -> None:
        self.axes, self.across, self.every = axes, across, every
        self.bundles, self.arenas, self.visits = space.bundles(), space.arenas(), space.anatomy.visits
        self._using = {visit: [each for each in self.bundles if visit in users(each, self.visits)] for visit in self.visits}
        precision = job.precision.resolved
        self.dtype, self.kept, self.wire = precision.parameters, precision.gradients, precision.reduce

    def added(self, actions: list[Action]) -> list[Action]:
        """`actions` with the gradients of every bundle summed before SQUARE."""
        done = list(self._once(actions) if self._in_place else self._in_turn(actions))
        done = self._summed_across(done) if self.across else done
        awaited = {action.tensors: action.name for action in done if action.kind in ("REDUCE", "ADD")}.values()
        frees = () if self._in_place else self._buffer_names(done)
        square = index_of_last(done, "SQUARE") or 0
        done[square] = replace(with_waits(done[square], awaited), frees=frees)
        return [self._stepped(action) for action in done]

    @property
    def _in_place(self) -> bool:
        """Whether gradients stay in the buffer that is sent: once per step, in the dtype in which backward makes them."""
        return not self.every and self.wire == self.kept == self.dtype

    def _reduce(self, bundle: Bundle, micro: int | None, waits: Sequence[str]) -> Action:
        transfer = Transfer("reduce_scatter", self.axes, self._nbytes(bundle), dtype=self.wire)
        return Action("REDUCE", bundle.name, micro, "wire", tuple(waits), bundle.names, transfer)

    def _summed_across(self, actions: list[Action]) -> list[Action]:
        """`actions` with the sum of each bundle's shard over the replicas, once it is complete.

        It is waited for where two more bundles have been packed: it has arrived by then, or their buffer would not be free.
        """
        last = {action.tensors: action for action in actions if action.kind in ("REDUCE", "ADD")}
        due: list[tuple[Action, int]] = []
        edited: list[Action] = []
        for action in actions:
            for complete, packed in due if action.kind in ("PACK", "SQUARE") else ():
                if action.kind == "SQUARE" or packed == NUM_BUFFERS:
                    edited += self._across(complete)
            if action.kind == "PACK":
                due = [(complete, packed + 1) for complete, packed in due if packed < NUM_BUFFERS]
            edited.append(action)
            if last.get(action.tensors) == action:
                due.append((action, 0))
        return edited

    def _across(self, complete: Action) -> list[Action]:
        """The sum over the replicas of the shard that `complete`, a REDUCE or an ADD of a bundle, leaves."""
        nbytes = self.arenas[complete.subject].shard * NBYTES[self.kept]
        transfer, name = Transfer("all_reduce", (self.across,), nbytes, dtype=self.kept), f"{complete.subject}, across"
        ready = Action("READY", name, waits=(complete.name,), tensors=complete.tensors)
        return [ready, Action("REDUCE", name, None, "wire", (ready.name,), complete.tensors, transfer)]

    def _once(self, actions: list[Action]) -> Iterator[Action]:
        """Each bundle packed behind its first backward and reduced behind its last."""
        behind: dict[int, list[Action]] = {}
        for bundle in self.bundles:
            places = backwards(actions, bundle, self.visits)
            first, last = places[0], places[-1]
            held = Hold(self._sum(bundle), self._nbytes(bundle))
            waits = (actions[first].name,)
            pack = Action("PACK", bundle.name, waits=waits, tensors=bundle.names, takes=(held,), frees=(gradient(bundle),))
            behind.setdefault(first, []).append(pack)
            behind.setdefault(last, []).append(self._reduce(bundle, None, (*dict.fromkeys((pack.name, actions[last].name)),)))
        for i, action in enumerate(actions):
            yield action
            yield from behind.get(i, ())

    def _in_turn(self, actions: list[Action]) -> Iterator[Action]:
        """Each bundle packed and reduced behind each backward that completes it; those before the last only if `every`."""
        largest = max(self._nbytes(bundle) for bundle in self.bundles)
        turn = [_Buffer(Hold(f"gradient buffer {number}", largest)) for number in range(NUM_BUFFERS)]
        packed, due = 0, self._due(actions)
        held, summed = set[str](), dict[str, str]()
        for i, action in enumerate(actions):
            if action.kind == "SQUARE":
                for number in range(packed, packed + NUM_BUFFERS):  # the one that was packed first comes first
                    yield from self._added(turn[number % NUM_BUFFERS])
            yield self._holding(action, held)
            for bundle in due.get(i, ()):
                buffer = turn[packed % NUM_BUFFERS]
                packed += 1
                yield from self._added(buffer)
                yield from self._packed(bundle, action, buffer, summed)
                held.discard(bundle.name)

    def _due(self, actions: Sequence[Action]) -> dict[int, list[Bundle]]:
        """By the place of a backward, the bundles that are packed behind it."""
        found: dict[int, list[Bundle]] = {}
        for bundle in self.bundles:
            places = backwards(actions, bundle, self.visits)
            for at in places if self.every else places[-1:]:
                found.setdefault(at, []).append(bundle)
        return found

    def _packed(self, bundle: Bundle, backward: Action, buffer: _Buffer, summed: dict[str, str]) -> Iterator[Action]:
        """PACK and REDUCE behind `backward`; the ADD that may be due is noted in `buffer`.

        `summed` are the actions after which shards hold the sums so far.
        """
        micro = backward.micro if self.every else None
        before = () if buffer.busy is None else (buffer.busy.name,)
        frees = (gradient(bundle), *((buffer.hold.name,) if buffer.busy else ()))
        waits = (backward.name, *before)
        pack = Action("PACK", bundle.name, micro, waits=waits, tensors=bundle.names, takes=(buffer.hold,), frees=frees)
        reduce = self._reduce(bundle, micro, (pack.name,))
        first, casts = bundle.name not in summed, self.wire != self.kept
        shard = Hold(self._sum(bundle), self.arenas[bundle.name].shard * NBYTES[self.kept])
        adds = None
        if casts or not first:
            waits = (reduce.name, *(() if first else (summed[bundle.name],)))
            adds = Action("ADD", bundle.name, micro, waits=waits, tensors=bundle.names, takes=(shard,) if first else ())
        reduce = replace(reduce, takes=(shard,) if first and not casts else ())
        buffer.busy, buffer.adds = adds or reduce, adds
        summed[bundle.name] = buffer.busy.name
        yield pack
        yield reduce

    @staticmethod
    def _added(buffer: _Buffer) -> Iterator[Action]:
        if buffer.adds is not None:
            yield buffer.adds
            buffer.adds = None

    def _holding(self, action: Action, held: set[str]) -> Action:
        """A backward with the whole gradients that it makes, until they are packed; `held` are those that are there."""
        if action.kind not in COMPLETING or not self.every:
            return action
        made = [bundle for bundle in self._using[action.subject] if bundle.name not in held]
        held |= {bundle.name for bundle in made}
        own = tuple(hold for hold in action.takes if hold.name == SCRATCH)
        return replace(action, takes=(*own, *(Hold(gradient(bundle), bundle.numel * NBYTES[self.dtype]) for bundle in made)))

    def _stepped(self, action: Action) -> Action:
        """STEP, which frees what is kept of the sums."""
        if action.kind != "STEP":
            return action
        whole = {gradient(bundle) for bundle in self.bundles}
        frees = tuple(name for name in action.frees if name not in whole)
        return replace(action, frees=(*frees, *map(self._sum, self.bundles)))

    def _buffer_names(self, actions: Sequence[Action]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(hold.name for action in actions if action.kind == "PACK" for hold in action.takes))

    def _nbytes(self, bundle: Bundle) -> int:
        return self.arenas[bundle.name].numel * NBYTES[self.wire]

    @staticmethod
    def _sum(bundle: Bundle) -> str:
        return f"summed gradient({bundle.name})"
