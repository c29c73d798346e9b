"""Streaming DiLoCo: fragments of the model are averaged in turn, while the sites train on.

Why it works: DiLoCo sends the whole model in one step of a round, and all sites wait for it. Nothing demands
that all blocks meet in the same step. With P fragments, each averaged at an offset of its own, a step sends
1 / P of the model at most. And an outer gradient over H steps is hardly another one after a few
steps more: the sites train on while it travels, and go on with its result `delay` steps later. What they have
done in between would be lost; `mixing` keeps a share of it.

    H = 6, P = 3, delay = 1     s: all-reduce starts behind the step      a: sites go on with its result

    step         1  2  3  4  5  6  7  8  9 10 11 12
    fragment 0      s  a           s  a                 blocks 0, 3, 6 ... : the embedding is block 0
    fragment 1            s  a           s  a           blocks 1, 4, 7 ...
    fragment 2                  s  a           s        blocks 2, 5, 8 ... : strided, as in the paper

    behind step t        delta = mean_i(start - x_i)                    PACK_ROUND, OUTER_REDUCE
    behind t + delay     m     = mu m + delta                           END_ROUND
                         start = start - lr (delta + mu m)              the outer weights
                         x_i   = mixing x_i + (1 - mixing) start        the paper's alpha: 0 takes start alone

Blocks are those with trained parameters, numbered as the model calls them: embedding 0, then the layers, the
head last. Block b belongs to fragment b mod P, fragment p starts behind step (p + 1) H / P of each round, and
the first outer gradient of a fragment covers the steps up to there. fragments = 1 and delay = 0 is DiLoCo,
action for action.

    state/diloco/start/W, momentum/W    as in diloco.py
    state/diloco/sent/W                 what is under way: the sum over the sites, once it has arrived; else 0
    state/diloco/under_way              by fragment, whether it is

Sites agree behind the last step of the run alone: it applies what is under way, averages every fragment once
more, without delay, and all sites have the outer weights. Before it an evaluation and an export are refused.
Loss, counts and wishes to stop are summed every H steps, as in all rounds. A save waits until what is under
way has arrived, and keeps it: a run resumes after any step with the same bits. With another `delay`, a
fragment under way is applied when the new plan next applies or averages it; with other `fragments` the
checkpoint is refused. Plain DiLoCo drops it, and loses nothing: its next outer gradient begins at `start`.

Under a pipeline each stage averages what it has of a fragment, which may be nothing. `compress` with
axis = "outer" codes it, whatever the delay; the residual is that of the step in which the sum starts.

Cost: per round 2 (k-1)/k N bytes over `outer` as DiLoCo, and in one step those of the largest fragment at
most; in the last step all. With a delay, what is sent is a state: 4 bytes more per parameter that a rank
steps. Two fragments may be under way at once, where delay > H / P.
Limits: delay < H: the next average of a fragment may not begin before the last one ended. fragments <= H, so
that no two start together. The sites of a data centre (axis = "site") are not supported beside.
Paper: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512 (algorithm
2; strided fragments, section 2.2; alpha, section 2.3).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.outer.round_averages import SteppedTensors
from meshwright.parallel.outer.rounds import averaged_dtype
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, below_one
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.sharding.mesh import ROUND_AXES
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, S
from meshwright.plan.step.program import Action, Period
from meshwright.plan.strategy_interface import EndStep, Handler, Runtime, SiteLoop
from meshwright.plan.strategy_state import StateSpec

SENT, UNDER_WAY = "sent", "under_way"


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo that averages `fragments` parts of the model in turn. The sites go on with an average `delay`
    steps after it began, and keep the share `mixing` of their own parameters.
    """

    mode: ClassVar[str] = "streaming"
    fragments: int = field(default=1, metadata=at_least(1, "write the number of fragments; 1: all at once"))
    delay: int = field(default=0, metadata=at_least(0))
    mixing: float = field(default=0.0, metadata=below_one())

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        where, every = f"strategies.{self.name}", self.sync_every
        num_blocks = len(_blocks(sharding.model_spec))
        if self.fragments > num_blocks:
            text = f"{self.fragments} fragments of {num_blocks} blocks with trained parameters"
            yield Diagnostic(text, f"write at most {num_blocks}", f"{where}.fragments")
        if self.fragments > every:
            text = f"{self.fragments} fragments, each at a step of its own, in a round of {every} steps"
            yield Diagnostic(text, f"write at most {every}, or raise sync_every", f"{where}.fragments")
        if self.delay >= every:
            text = f"an average ends {self.delay} steps after it began, and the next one begins after {every}"
            yield Diagnostic(text, f"write less than {every}, or raise sync_every", f"{where}.delay")
        if self.mixing and not self.delay:
            text = f"mixing = {self.mixing} of what sites do while an average travels: nothing at delay = 0"
            fix = "set mixing = 0, or delay to the steps that an average may take"
            yield Diagnostic(text, fix, f"{where}.mixing")
        if self._is_streaming and sharding.mesh.size(ROUND_AXES[1]) > 1:
            text = f"fragments and delays beside rounds over {ROUND_AXES[1]} are not yet supported"
            fix = f"set mesh.{ROUND_AXES[1]} = 1, or fragments = 1 and delay = 0"
            yield Diagnostic(text, fix, where)

    @property
    def _is_streaming(self) -> bool:
        return self.fragments > 1 or self.delay > 0

    def agreement(self, job: Job) -> Period:
        steps = job.train.steps
        return Period(steps, run_steps=steps) if self._is_streaming else self.period(job)

    def periods_of(self, group: ParamGroup, model_spec: ModelSpec, job: Job) -> tuple[Period, Period]:
        return self.periods(self.fragment_of(group.names[0], model_spec), job)

    def periods(self, fragment: int, job: Job) -> tuple[Period, Period]:
        """Returns in which steps averages of `fragment` begin, and in which they end."""
        behind = (fragment + 1) * self.sync_every // self.fragments
        begins = replace(self.period(job), offset=behind % self.sync_every)
        return begins, replace(begins, offset=behind + self.delay) if self.delay else begins

    def fragment_of(self, name: str, model_spec: ModelSpec) -> int:
        """Returns the fragment of the parameter `name`."""
        param = next(each for each in model_spec.trainable if each.name == name)
        return _blocks(model_spec).index(param.block_calls[0]) % self.fragments

    def states(self, view: RankView, job: Job) -> Iterator[StateSpec]:
        yield from super().states(view, job)
        if not self.delay:
            return
        yield StateSpec(UNDER_WAY, (self.fragments,), dtype="int64", on_host=True, ends_with_params=True)
        for each in view.param_shardings:
            if each.param.trainable:
                layout = Layout().with_placement(each.flat_shard_axes, S(FLAT))
                yield StateSpec(SENT, param=each.param.name, dtype=averaged_dtype(job), layout=layout)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        handlers = super().bind(runtime)
        if not self.delay:
            return handlers
        return {**handlers, **DelayedAverages(runtime, self, handlers["ROUND_TOTALS"]).handlers}

    def on_sites(self, job: Job, sites: Sequence[SiteLoop]) -> EndStep:
        steps, every = job.train.steps, self.sync_every
        fragments = [
            [name for names in sites[0].blocks[number :: self.fragments] for name in names]
            for number in range(self.fragments)
        ]
        outer = {name: nn.Parameter(value.detach().clone()) for name, value in sites[0].parameters.items()}
        optimizer = torch.optim.SGD(
            outer.values(), lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0
        )
        sent = dict[int, dict[str, torch.Tensor]]()  # what is under way, by fragment
        since = dict[int, int]()

        def begin(number: int, done: int, lost: Mapping[str, torch.Tensor]) -> None:
            sent[number], since[number] = {}, done
            for name in fragments[number]:
                mean = torch.stack([site.parameters[name] for site in sites]).mean(0)
                delta = outer[name] - mean
                sent[number][name] = delta - lost[name] / len(sites) if name in lost else delta

        def apply(number: int, kept: float) -> None:
            optimizer.zero_grad()
            for name, delta in sent.pop(number).items():
                outer[name].grad = delta
            optimizer.step()
            for site in sites:
                for name in fragments[number]:
                    parameter = site.parameters[name]
                    parameter.copy_(kept * parameter + (1 - kept) * outer[name])

        @torch.no_grad()
        def end_step(step: int, lost: Mapping[str, torch.Tensor]) -> None:
            done = step + 1
            for number in range(self.fragments):
                begins = done == steps or (done - (number + 1) * every // self.fragments) % every == 0
                if number in sent and (begins or done == since[number] + self.delay):
                    apply(number, self.mixing)
                if begins:
                    begin(number, done, lost)
                if begins and (done == steps or not self.delay):
                    apply(number, 0.0)

        return end_step


def _blocks(model_spec: ModelSpec) -> list[str]:
    """Returns the blocks with trained parameters as the model calls them; what is in none comes last."""
    used = dict.fromkeys(param.block_calls[0] for param in model_spec.trainable)
    called = [each for each in model_spec.block_calls if each in used]
    return [*called, *(each for each in used if each not in called)]


class DelayedAverages:
    """The averages of one rank that end steps after they began. `add_totals` handles ROUND_TOTALS."""

    def __init__(self, runtime: Runtime, strategy: StreamingDiLoCo, add_totals: Handler) -> None:
        self._state, self._kept, self._strategy = runtime.state, runtime.tensors, strategy
        plan = runtime.state.plan
        self._num_sites, self._last_step = plan.mesh.size(strategy.axis), plan.job.train.steps - 1
        self._periods = [strategy.periods(number, plan.job) for number in range(strategy.fragments)]
        self._is_due = [False] * strategy.fragments  # what an earlier step has begun ends in this one
        self._stepped, self._add_totals = SteppedTensors(runtime.state), add_totals
        ends = [action for action in plan.actions if action.kind == "END_ROUND"]
        begun = {name for end in ends for name in end.previous_waits}
        self._sums = {each.subject: each for each in plan.actions if each.name in begun}
        runtime.state.awaited_later.update(begun)
        self._fragments = {
            each.subject: strategy.fragment_of(each.tensors[0], plan.model_spec) for each in ends
        }
        self._messages = {each.subject: self._message(each) for each in ends}
        self.handlers: dict[str, Callable[[Action], None]] = {
            "ROUND_TOTALS": self.begin_step,
            "PACK_ROUND": self.pack_round,
            "END_ROUND": self.end_round,
        }

    def begin_step(self, action: Action) -> None:
        """Notes which averages end in this step, and which begin: on all ranks, whatever they have."""
        step, under_way = self._state.step.number, self._kept[UNDER_WAY]
        for number, (begins, ends) in enumerate(self._periods):
            begun = begins.ends_with(step)
            self._is_due[number] = bool(under_way[number]) and (begun or ends.ends_with(step))
            if begun or self._is_due[number]:
                under_way[number] = begun and step != self._last_step
        self._add_totals(action)

    @torch.no_grad()
    def pack_round(self, action: Action) -> None:
        """Makes the outer gradients of a group, behind what is under way of it."""
        if self._is_due[self._fragments[action.subject]]:
            self._apply(action, self._strategy.mixing)
        message = self._messages[action.subject]
        for place, each in self._stepped.places(action, message):
            place.copy_(each)
        parts = self._stepped.parts(action, message)
        for name, part in parts.items():
            self._strategy.begin_average(name, part, self._kept)
        self._state.lend_operand(self._sums[action.subject].name, message, parts)

    @torch.no_grad()
    def end_round(self, action: Action) -> None:
        """Makes of a group what the sites go on with: in the last step of the run the outer weights."""
        if self._state.step.number == self._last_step:
            self._apply(action, 0.0)
        elif self._is_due[self._fragments[action.subject]]:
            self._apply(action, self._strategy.mixing)

    def _apply(self, action: Action, mixing: float) -> None:
        self._state.wait_for_carried((self._sums[action.subject].name,))
        message = self._messages[action.subject]
        message.div_(self._num_sites)
        for name, part in self._stepped.parts(action, message).items():
            self._strategy.end_round(name, part, self._kept)
        for place, each in self._stepped.places(action, message):
            each.copy_(place.lerp_(each.to(place.dtype), mixing) if mixing else place)
        self._stepped.round_masters(action)
        message.zero_()  # nothing is under way

    def _message(self, end: Action) -> torch.Tensor:
        """Returns the flat message of a group, whose memory its states take."""
        dtype = getattr(torch, averaged_dtype(self._state.plan.job))
        flat = torch.zeros(self._stepped.numel(end), dtype=dtype, device=self._state.world.device)
        for name, part in self._stepped.parts(end, flat).items():
            kept = self._kept[f"{SENT}/{name}"]
            kept.set_(part.untyped_storage(), part.storage_offset(), kept.shape, kept.stride())
        return flat
