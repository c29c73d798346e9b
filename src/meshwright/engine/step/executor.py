"""Plays one rank's list of actions. The engine is this loop: wait for what an action waits for, do it, go on.

    list     COUNT  F0 F1 F2  LOSS  B2 PACK B1 PACK B0 PACK  TALLY  CLIP STEP
    wire     COUNT ......                  REDUCE  REDUCE  REDUCE  TALLY

Forwards (F, F_LEAN) are special in one way: the model's own forward, written by its user, decides when a block is reached. The
player calls the model at a micro-batch's first F; each block, before it runs, plays the list up to its own F. All other
actions are looked up in a table from kind to handler; strategies bring handlers for the kinds they introduced.

What a strategy may touch of the rank that plays it: `core.strategy.Runtime`, as the engine has it.

Each word is one line: who does it stands in a file of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.forward.backward import Again
from meshwright.engine.forward.block_collectives import Inner, Meanwhile
from meshwright.engine.forward.evaluation import Evaluation
from meshwright.engine.forward.graph_check import cuts_blocks
from meshwright.engine.forward.lockstep_forward import Abreast
from meshwright.engine.forward.sequence_sharding import AllTokens, dealing
from meshwright.engine.forward.stage_io import Crossing, crossing
from meshwright.engine.losses.chunked import Pieces
from meshwright.engine.losses.vocab_parallel import Divided
from meshwright.engine.optim.memory_report import sizes
from meshwright.engine.optim.optimizers import MakeOptimizer, factor, group_numbers, groups_of, make_optimizers
from meshwright.engine.optim.state_dict import Saved, model_tensors, moments, of_part, restore_model, restore_moments
from meshwright.engine.optim.update import Update
from meshwright.engine.params.flat_params import Store
from meshwright.engine.params.summon_full import whole
from meshwright.engine.runtime.comm_groups import meet
from meshwright.engine.runtime.cpu_allocator import give_back
from meshwright.engine.runtime.microbatches import Rows
from meshwright.engine.runtime.module_patches import Sockets
from meshwright.engine.runtime.state import Metrics, State
from meshwright.engine.runtime.step_profiler import GLUE, Entry, Watch, wait_for, watched
from meshwright.engine.step.actions import Acts
from meshwright.engine.step.gather_full import spread
from meshwright.engine.step.gradient_noise import Noise
from meshwright.model.blocks.driver import Drive, Reach
from meshwright.model.rng.sites import Dice
from meshwright.model.sequence_parallel.attention_call import Answer
from meshwright.model.sequence_parallel.conv_call import Beside
from meshwright.model.tensors.lazy_tensors import under
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.placement import Place
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import FORWARDS, LEAN
from meshwright.plan.strategy import Handler


class Touched:
    """The parts of a player, and what strategies may do with them."""

    plan: Plan
    state: State
    store: Store
    _acts: Acts
    _again: Again
    _crossing: Crossing | None
    _dealing: AllTokens
    _inner: Inner
    _sockets: Sockets

    def start(self, action: Action) -> None:
        """Start the collective that `action.transfer` states on the flat tensor of `action.subject`."""
        self._acts.start(action, self.state.tensor(action.subject))

    def unshard(self, action: Action) -> None:
        """Start gathering the weights of `action.tensors` from their shards."""
        self.store.unshard(action)

    def reduce(self, action: Action) -> None:
        """Start summing the packed gradients of `action.tensors` into shards, or their shards over replicas."""
        self.store.reduce(action)

    def add(self, action: Action) -> None:
        """Add the shard that REDUCE left for this micro-batch to the sum of those before."""
        self.store.add(action)

    def fill(self, name: str, forward: Callable[..., torch.Tensor]) -> None:
        """Have the module `name` of the model compute `forward(module, *its arguments)`."""
        self._sockets.fill(name, forward)

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Have the module `name` of the model compute `around(what it computes otherwise, *its arguments)`."""
        self._sockets.wrap(name, around)

    def move(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place, meanwhile: Meanwhile = None) -> torch.Tensor:
        """`tensor` moved along `axis` for the action under way; once in a block."""
        return self._inner.move(tensor, axis, src, dst, meanwhile)

    def exchange(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place, near: int = 0) -> torch.Tensor:
        """`tensor` moved along `axis`, or among `near` neighbours there, for the action under way; as often as it is asked."""
        return self._inner.exchange(tensor, axis, src, dst, near)

    def attend(self, answer: Answer) -> None:
        """Have attention within blocks, asked for with the tokens of this rank, be what `answer` says."""
        self._dealing.attend(answer)

    def convolve(self, answer: Beside) -> None:
        """Have convolutions over tokens within blocks, asked for with the tokens of this rank, be what `answer` says."""
        self._dealing.convolve(answer)

    def again(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place) -> AbstractContextManager[object]:
        """While it lasts, autograd keeps nothing of what `tensor` became by this move: backward moves it once more."""
        return self._inner.again(tensor, axis, src, dst)

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, axis: str, by: int = 1) -> Work:
        """Start sending `tensor` to the rank `by` places on along `axis`, and filling `output`, for the action under way."""
        return self.state.world.group((axis,)).shift(output, tensor, by=by, action=self.state.acting)

    def cross(self, action: Action) -> None:
        """Start sending or receiving a value between parts of the model, or its gradient."""
        if self._crossing is None:
            raise RuntimeError(f"this rank runs the whole model, and a strategy has it do {action.name}")
        self._crossing.cross(action)

    def rerun(self, action: Action) -> None:
        """Run a visit once more that kept only what it took in, so that its backward finds a graph."""
        self._inner.begin(action.name)
        self._again.rerun(action)


SETTLING = 2  # steps after which the heap is as large as it stays: moments are made in the first


class Player(Touched):
    """One rank of a plan: `step(batch)` plays the list once. `extra` are handlers for kinds that a caller added."""

    def __init__(
        self,
        plan: Plan,
        state: State,
        optimizer: MakeOptimizer | None = None,
        dice: Dice | None = None,
        extra: Mapping[str, Callable[[Action, State], None]] | None = None,
    ) -> None:
        meet(plan, state.world)
        plan = plan.at(state.world.rank)
        if plan.space.stages:
            state.subject = state.subject.within(plan.space.anatomy)
        self.plan, self.state = plan, state
        self.steps_done, self._cursor, self._settling = 0, 0, SETTLING
        self.store = Store(plan, state)
        self._logits = Divided(plan, state)
        weights = {weight.name: weight for weight in plan.anatomy.trainable}
        grains = {home.weight.name: home.grain for home in plan.space.homes if home.flat or home.cut}
        self.optimizers = make_optimizers(plan.job.optimizer, self.store.owned(), optimizer, weights, grains)
        self._base_lrs = [group["lr"] for group in groups_of(self.optimizers)]
        self._numbers = group_numbers(self.optimizers)
        self._inner = Inner(state)
        self._sockets, self._dealing = Sockets(state.subject.module), dealing(plan, state)
        self._pieces = Pieces(plan, state, self._sockets)
        bound: dict[str, Handler] = {}
        for strategy in plan.strategies:  # before the blocks' own forwards are replaced: a block may be a socket itself
            bound |= strategy.bind(self)
        self._sockets.close()
        self._drive = Drive(state.subject.blocks, in_place=plan.space.anatomy.in_place, cut=cuts_blocks(plan))
        self._update = Update(plan, state, self.store, self.optimizers, made=optimizer is not None)
        self._crossing = crossing(plan, state, self._drive, self._dealing)
        self._abreast = Abreast(plan, state, self._drive)
        self._acts = Acts(plan, state, self.store, self._update, self._drive, self._inner, dice, self._crossing, self._dealing)
        self._noise, self._again = Noise(plan, state, self._acts), Again(state, self._drive, self._acts.draws, self._dealing)
        handlers: dict[str, Handler] = self._acts.handlers | self._noise.handlers | self.store.owners.handlers | bound
        handlers |= {kind: self._with_state(act) for kind, act in (extra or {}).items()}
        self._list = self._resolve(plan.actions, handlers)
        forwards = [(i, action) for i, (action, _, _) in enumerate(self._list) if action.kind in FORWARDS]
        self._place = {(action.subject, action.micro): i for i, action in forwards}
        begins = {plan.space.anatomy.visits[0]} if self._crossing is None else self._crossing.begins
        self._starts = [i for i, action in forwards if action.subject in begins]  # where a forward of the model starts
        self._now: Sequence[Entry] = self._list  # what this step plays: the list, or the same under watch

    def step(self, batch: Rows, *, stop: bool = False, watch: Watch | None = None) -> Metrics:
        """Train one global step on this rank's samples; the same numbers come back on every rank.

        `batch` holds this rank's rows, micro-batch after micro-batch: at most micro_batch * num_micro; fewer, or None, when
        its data ran out (it then takes part with zero weight). A list holds the micro-batches, whose rows may differ in
        length. `stop` asks all ranks to stop after this step: each sees it in the metrics. `watch` is told what each action
        takes; without it nothing is measured.
        """
        acts, state = self._acts, self.state
        acts.begin(self.steps_done, batch, stop=stop)
        lr = self._set_lr()
        self._cursor, self._now = 0, self._list if watch is None else watched(self._list, state.works, watch)
        for first in self._starts:
            self._play_to(first)
            start, _, waits = self._list[first]
            wait_for(waits, state.works, watch)  # glue before the block may read what came
            state.acting = start.name
            micro = start.micro or 0
            if watch is None:
                acts.forward(micro, self._reach(micro), first=start.subject)
            else:
                with watch.during(f"forward({micro})", GLUE):
                    acts.forward(micro, self._reach(micro), watch.end, start.subject)
        self._play_to(len(self._list))
        wait_for(state.works, state.works, watch)
        self.steps_done += 1
        state.forget()
        if self._settling and state.world.device.type == "cpu":
            give_back()
            self._settling -= 1
        return acts.metrics(self.steps_done, lr)

    def evaluate(self, batches: Iterable[Rows]) -> Evaluation:
        """The loss over `batches`, exact over all ranks, each of which calls this with its own rows; nothing is trained.

        Each batch holds this rank's rows, as for `step`. Raises PlanError when nothing counts in any of them.
        """
        self._inner.begin("EVALUATE")
        with whole(self.state.subject, self.store, self._drive, "EVALUATE"):
            return self._acts.evaluate(batches)

    def tensors(self) -> dict[str, Saved]:
        """All that must be saved, by full name: parameters, persistent buffers, optimizer state, and what lasts of the rest.

        The rest is what the guard knows, the averages behind the noise scale, and the loss scale. Of what is cut, this rank's
        share; of what has a master, the master.
        """
        subject = self.state.subject
        usual = {} if self._acts.spikes is None else self._acts.spikes.tensors()
        noise = {f"noise/{name}": value for name, value in self._noise.tensors().items()}
        scale = {} if self._update.scale is None else self._update.scale.tensors()
        lasting = {f"guard/{name}": value for name, value in usual.items()} | noise
        lasting |= {f"loss_scale/{name}": value for name, value in scale.items()}
        held = model_tensors(subject, self.store) | moments(self.optimizers, subject, self.store, self._numbers) | lasting
        return of_part(held, subject)

    def restore(self, saved: Mapping[str, torch.Tensor], steps_done: int) -> None:
        """Take up `saved`, whole tensors by full name, after `steps_done` global steps; each is asked for once at most."""
        subject = self.state.subject
        dtypes = restore_model(subject, self.store, saved)
        restore_moments(self.optimizers, subject, self.store, under("optimizer/", saved), dtypes)
        if self._update.scale is not None:
            self._update.scale.restore(under("loss_scale/", saved))
        usual = under("guard/", saved)
        if usual and self._acts.spikes is not None:
            self._acts.spikes.restore(usual)
        self._noise.restore(under("noise/", saved))
        self.steps_done = steps_done

    @contextmanager
    def whole(self, action: str) -> Iterator[None]:
        """Have the module's forward find its weights, and give whole outputs, outside of steps; all ranks run the same."""
        subject = self.state.subject
        joined, abreast = self._logits.joined(subject.module, action), self._abreast.forwards(action)
        with whole(subject, self.store, self._drive, action), joined, abreast, self._pieces.joined():
            yield

    def parameters(self, *, keep: bool = True, exact: bool = False) -> dict[str, torch.Tensor]:
        """Every logical parameter, whole, with its present value; all ranks call this, and nothing of it is in the ledger.

        A rank that does not `keep` them only takes part, and holds one bundle at a time. `exact`: masters, where there are any.
        """
        with self.state.world.ledger.silent():
            values = self.store.values("WHOLE", exact=exact)
            whole = spread(self.plan, self.state, values, self.plan.anatomy.weights, "WHOLE")
            return {name: value for name, value in whole if keep}

    def gradients(self, *, own: bool = False) -> dict[str, torch.Tensor]:
        """The gradient of every trained logical parameter, whole, as the optimizer is about to see it; likewise.

        With `own`, of those that this rank uses; ranks that use others need not call this.
        """
        with self.state.world.ledger.silent():
            mine = self.store.gradients("WHOLE")
            whole = mine if own else spread(self.plan, self.state, mine, self.plan.anatomy.trainable, "WHOLE")
            return {name: each / self._update.factor for name, each in whole}

    def sizes(self) -> dict[str, int]:
        """The bytes that this rank holds for the model, by category (engine/sizes.py)."""
        return sizes(self.state, self.store, self.optimizers, self._update)

    def close(self) -> None:
        """Give the user's module its own forwards back."""
        self._drive.detach()
        self._dealing.detach()
        self._sockets.empty()

    def _set_lr(self) -> float:
        scale = factor(self.plan.job.schedule, self.steps_done, self.plan.job.train.steps)
        for group, base in zip(groups_of(self.optimizers), self._base_lrs, strict=True):
            group["lr"] = base * scale
        return self._base_lrs[0] * scale

    def _reach(self, micro: int) -> Reach:
        """What a block calls before it runs: play the list up to its F, and tell whether that is a lean one."""

        def reach(visit: str) -> bool:
            target = self._place.get((visit, micro))
            if target is None or target < self._cursor:
                known = " ".join(self.plan.space.anatomy.visits)
                what = "out of the order" if target is not None else "more often than in the order"
                text = f"the model reached block '{visit}' {what} that the plan knows: {known}"
                fix = "a forward may leave blocks out; let it call them in the order of the trial run, or declare larger blocks"
                raise PlanError(text, fix=fix, where="model")
            self._play_to(target + 1)
            self._inner.begin(self._list[target][0].name)
            return self._list[target][0].kind == LEAN

        return reach

    def _play_to(self, end: int) -> None:
        while self._cursor < end:
            action, handler, waits = self._now[self._cursor]
            self._cursor += 1
            if waits:
                wait_for(waits, self.state.works, None)
            if handler is not None:
                self.state.acting = action.name
                handler(action)

    def _with_state(self, act: Callable[[Action, State], None]) -> Handler:
        return lambda action: act(action, self.state)

    @staticmethod
    def _resolve(actions: tuple[Action, ...], handlers: Mapping[str, Handler]) -> list[Entry]:
        """Each action with its handler and those on other lanes it waits for; acts of its own lane go in list order anyway."""
        unknown = sorted({action.kind for action in actions}.difference(handlers, FORWARDS))
        if unknown:
            fix = "return a handler from the strategy's `bind` for each kind that its `rewrite` adds"
            raise PlanError(f"nobody plays {', '.join(unknown)}", fix=fix, where="program")
        beside = {action.name: action.lane for action in actions if action.lane != "compute"}
        resolved = []
        for action in actions:
            handler = None if action.kind in FORWARDS else handlers[action.kind]
            waits = tuple(name for name in action.waits if beside.get(name, action.lane) != action.lane)
            resolved.append((action, handler, waits))
        return resolved
