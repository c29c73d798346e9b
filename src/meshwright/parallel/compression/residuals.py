"""Runs sums of codes: adds to each gradient what is owed to it, and keeps what its codes lose.

    prepare    gradients, as the codec changes them           local clipping, momentum
    add        values = gradients + residual * loss scale      in the operand, or in a wider copy of it; where
                                                               parameters are coded one by one, where the
                                                               new residual is kept: a copy less
    exchange   the rounds of the codec: it leaves in `values` what its codes lost
    keep       residual = values / loss scale                  at once, or, where the step may be left out,
                                                               beside the old one until STEP has decided

A step in which nothing counts has no gradients: its zeros are sent, and residuals are neither added nor
changed. A step that the loss guard or the loss scale leaves out drops the new residuals, so the old ones keep
their bits, and what is not finite never enters them. All of it runs beside the computation, between the
messages (`Group.exchange`).
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from meshwright.comm.collectives.group import Group, Rounds
from meshwright.model.tensors.counter_rng import derive_key
from meshwright.parallel.compression.coded_sum import CodedSum
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, ObservedSum, Runtime

if TYPE_CHECKING:
    from meshwright.engine.runtime.rank_state import StepState
    from meshwright.parallel.compression.gradient_compression import GradientCompression

RESIDUAL = "residual"  # the name of the state that is owed


@dataclass
class CodedOperand:
    """What one rank puts into a sum of codes.

    `values` is a flat float tensor: gradients and what is owed to them; `by_param` are flat views of it, the
    parts of `coded_sum`. `output` takes the sum of all ranks, or this rank's slice of it, in any float dtype;
    it may be memory of `values`. `index` is this rank's in the group. `key` is for random numbers: another
    one for each rank, sum and step. `before` are the states that the codec keeps beside residuals, by key;
    `after` takes them as the sum leaves them, where they are kept: none of a step in which nothing counts.
    With `in_residuals`, what is owed is added in `kept`, if there is any, and `by_param` are then its views.
    `begins` are the parameters of which this is the first sum of the step that counts. With `adds_residual`
    what codes lose is added to `kept`: what the sum before this one has lost is there already.

    An observed sum knows what was `put_in`; by parameter, `lost` is what codes lost, `clipped` what local
    clipping took away, `momenta` those of the step before, times `decay`, with the gradient, and `dropped`
    those of them that have ended.
    """

    coded_sum: CodedSum
    values: torch.Tensor
    by_param: Mapping[str, torch.Tensor]
    output: torch.Tensor
    index: int
    key: int
    scale: float = 1.0
    adds_residual: bool = False
    owed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_observed: bool = False
    lost: Mapping[str, torch.Tensor] = field(default_factory=dict)  # if it is observed
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    after: Mapping[str, torch.Tensor] = field(default_factory=dict)
    begins: frozenset[str] = frozenset()
    clipped: MutableMapping[str, torch.Tensor] = field(default_factory=dict)
    momenta: MutableMapping[str, torch.Tensor] = field(default_factory=dict)
    dropped: MutableMapping[str, torch.Tensor] = field(default_factory=dict)
    put_in: torch.Tensor | None = None
    decay: float = 0.0
    in_residuals: bool = False

    @property
    def num_ranks(self) -> int:
        """The ranks of the group."""
        return self.coded_sum.num_ranks

    @property
    def is_scattered(self) -> bool:
        """Whether `output` is this rank's slice of the sum."""
        return self.coded_sum.is_scattered

    def add_owed(self) -> None:
        """Adds to the gradients what is owed to them, or both where the new residuals are kept."""
        if not self.in_residuals:
            for name, residual in self.owed.items():
                self.by_param[name].add_(residual.view(-1), alpha=self.scale)
            return
        sums = {name: kept.view(-1) for name, kept in self.kept.items()}
        for name, each in sums.items():
            torch.add(self.by_param[name], self.owed[name].view(-1), alpha=self.scale, out=each)
        self.by_param = {**self.by_param, **sums}

    def record_put_in(self) -> None:
        """Records gradients and what is owed to them, in the places of the operand."""
        self.put_in = self.values.clone()
        for part in self.coded_sum.parts:
            self.put_in[part.offset : part.offset + part.numel] = self.by_param[part.name]

    def place(self, name: str) -> int:
        """Returns where a parameter begins in `values`."""
        return int(self.by_param[name].storage_offset()) - int(self.values.storage_offset())

    def record_dropped(self) -> None:
        """Records the momenta of elements that codes carry: where `values` are no longer what was put in."""
        if self.put_in is None:
            return
        for name, momentum in self.momenta.items():
            begin = self.place(name)
            before = self.put_in[begin : begin + momentum.numel()]
            self.dropped[name] = momentum.where(before != self.by_param[name], 0.0)

    def clear_padding(self) -> None:
        """Makes the sum zero where no parameter lies: there a code may say something else, as a sign does."""
        first, end = self.index * len(self.output) if self.is_scattered else 0, 0
        places = sorted((part.offset, part.numel) for part in self.coded_sum.parts)
        for begin, numel in (*places, (len(self.values), 0)):
            if end < begin:
                self.output[max(0, end - first) : max(0, begin - first)] = 0
            end = begin + numel

    def keep_residual(self) -> None:
        """Keeps what the codes have left as what is owed."""
        if self.is_observed:
            self.lost = {name: each / self.scale for name, each in self.by_param.items()}
        for name, residual in self.kept.items():
            if self.adds_residual:
                residual.view(-1).add_(self.by_param[name] / self.scale)
            elif not self.in_residuals:
                torch.div(self.by_param[name], self.scale, out=residual.view(-1))
            elif self.scale != 1.0:
                residual.div_(self.scale)


class CodedSums:
    """The sums of the actions `coded` on one rank, in rounds of `codec`, behind its exact steps.

    `may_skip`: a step may be left out for what its gradients are.
    """

    def __init__(
        self, runtime: Runtime, codec: "GradientCompression", coded: Sequence[Action], *, may_skip: bool
    ) -> None:
        self._state, self._codec, self._may_skip = runtime.state, codec, may_skip
        view = runtime.state.plan.view
        self._param_shardings = {each.param.name: each for each in view.param_shardings}
        self._sums = {
            each.name: CodedSum.of(each, each.transfer, view) for each in coded if each.transfer is not None
        }
        sharding = runtime.state.plan.sharding
        self._replica_sums = {each.name for each in coded if codec.codes_replicas(each, sharding)}
        self._places = {action.name: self._place(action) for action in coded}  # of this rank, by action
        self._states = dict[str, dict[str, torch.Tensor]]()  # by parameter, by key
        for key, each in runtime.tensors.items():
            self._states.setdefault(split_state_key(key)[1], {})[key] = each
        self._pending = dict[str, dict[str, torch.Tensor]]()  # the new states, until STEP has decided
        self._begun = set[str]()  # the parameters of which a sum has counted in this step
        self._step: object = None  # the state of the step which these belong to
        self._defined = DefinedStates()
        self._num_sums = 0

    def wrap_reduce(self, handler: Handler) -> Handler:
        """Returns a handler of REDUCE that sums codes where it should, and calls `handler` for the rest."""

        def reduce(action: Action) -> None:
            state, transfer = self._state, action.transfer
            is_exact = state.step.number < self._codec.exact_steps
            if transfer is None or is_exact or action.name not in self._places:
                handler(action)
                return
            group = state.world.group(transfer.axes, transfer.member_indices)
            self._num_sums += 1
            rounds = self._rounds(self._operand(action, group), action, group, self._num_sums)
            state.start_exchange(action, group, rounds)

        return reduce

    def wrap_step(self, handler: Handler) -> Handler:
        """Returns a handler of STEP that keeps the new states of what `handler` has stepped."""

        def step(action: Action) -> None:
            handler(action)
            if self._step is not self._state.step:
                return
            for name in action.tensors:
                pending = self._pending.pop(name, {})
                for key, each in pending.items() if self._state.step.updates else ():
                    self._states[name][key].copy_(each)

        return step

    def _rounds(self, operand: CodedOperand, action: Action, group: Group, number: int) -> Rounds:
        self._codec.prepare(operand)
        operand.add_owed()
        if operand.is_observed:
            operand.record_put_in()
            self._defined.record_first(operand.before)
        yield from self._codec.sum_rounds(operand)
        if self._state.observed_sums is not None and operand.put_in is not None:
            sharding = self._state.plan.sharding
            observed = ObservedSum(
                group.axes,
                operand.put_in / operand.scale,
                operand.output / operand.scale,
                operand.lost,
                {
                    name: self._codec.owed_layout(self._param_shardings[name], sharding)
                    for name in operand.lost
                },
                bool(operand.kept),
                partial(self._defined_sum, action, group, operand, self._state.step),
                operand.clipped,
                operand.dropped,
                operand.decay,
                number,
            )
            self._state.observed_sums.append(observed)
        operand.clear_padding()

    def _defined_sum(
        self,
        action: Action,
        group: Group,
        operand: CodedOperand,
        step: "StepState",
        inputs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        keys = [self._key(action, index) for index in range(group.size)]
        states = self._defined.states(step, keeps=bool(operand.after))
        return self._codec.defined_sum(operand.coded_sum, inputs, keys, states)

    def _key(self, action: Action, index: int) -> int:
        """Returns the key of the rank at `index` of a group; equal for copies of it, which code the same."""
        seed, place = self._state.plan.job.train.seed, self._places[action.name]
        return derive_key(seed, "codes", self._state.step.number, action.name, index, place)

    def _place(self, action: Action) -> int:
        """Returns the index of this rank among those that have other parts of what `action` sums."""
        plan, sharding = self._state.plan, self._param_shardings[action.tensors[0]]
        summed = action.transfer.axes if action.transfer is not None else ()
        axes = in_mesh_order({*sharding.sliced_dims, *sharding.flat_shard_axes}.difference(summed))
        return plan.mesh.index(plan.mesh.coordinate(self._state.world.rank), axes) if axes else 0

    def _operand(self, action: Action, group: Group) -> CodedOperand:
        state, operand = self._state, self._state.operand(action)
        flat, by_param = operand.input.view(-1), state.operand_by_param(action)
        wide = torch.promote_types(flat.dtype, torch.float32)
        if flat.dtype != wide:
            copy, begin = flat.to(wide), flat.storage_offset()
            places = {name: each.storage_offset() - begin for name, each in by_param.items()}
            by_param = {name: copy[at : at + by_param[name].numel()] for name, at in places.items()}
            flat = copy
        for name in action.tensors:
            by_param.setdefault(name, flat[:0])  # this shard has nothing of it
        before, after = self._states_of(by_param, action)
        begins = frozenset(by_param).difference(self._begun) if after else frozenset()
        self._begun |= begins
        counts = self._counts(action)
        coded_sum, kept = self._sums[action.name], _residuals(after)
        sums_replicas = action.name in self._replica_sums
        if sums_replicas:  # of the residual of a whole gradient, what lies in this shard
            places = {part.name: slice(part.begin, part.end) for part in coded_sum.parts}
            kept = {name: each.view(-1)[places.get(name, slice(0))] for name, each in kept.items()}
        return CodedOperand(
            coded_sum,
            flat,
            by_param,
            operand.output.view(-1),
            group.index,
            self._key(action, group.index),
            state.update.loss_scale_value,
            sums_replicas,
            _residuals(before) if counts and not sums_replicas else {},
            kept,
            state.observed_sums is not None,
            before=before,
            after=after,
            begins=begins,
            in_residuals=self._codec.codes_in_residuals,
        )

    def _counts(self, action: Action) -> bool:
        """Returns whether anything counts in what `action` sums; a round always does."""
        return action.period is not None or bool(self._state.token_counter.loss_weight(action.microbatch))

    def _states_of(
        self, names: Iterable[str], action: Action
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Returns the states of parameters as a sum finds them, and where it leaves them, by key."""
        state = self._state
        if self._step is not state.step:
            self._pending, self._begun, self._step = {}, set(), state.step
        before, after = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name in names:
            states = self._states.get(name, {})
            before |= self._pending.get(name, states)
            if not self._counts(action):
                continue
            if self._may_skip and name not in self._pending:
                self._pending[name] = {key: _new(key, each) for key, each in states.items()}
            after |= self._pending.get(name, states)
        return before, after


def _new(key: str, state: torch.Tensor) -> torch.Tensor:
    """Returns memory for the new value of a state. A sum writes all of a residual; of others it may write
    nothing, as where a shard has no element of a matrix.
    """
    return torch.empty_like(state) if split_state_key(key)[0] == RESIDUAL else state.clone()


class DefinedStates:
    """What a technique defines that its states beside residuals are, from step to step, for the verifier.

    It begins with those of the first sums; a step that is left out changes nothing.
    """

    def __init__(self) -> None:
        self._states, self._at_begin = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self._step: StepState | None = None

    def record_first(self, before: Mapping[str, torch.Tensor]) -> None:
        """Records the states that no sum has changed yet."""
        for key in before.keys() - self._states.keys():
            if split_state_key(key)[0] != RESIDUAL:
                self._states[key] = before[key].clone()

    def states(self, step: "StepState", *, keeps: bool) -> MutableMapping[str, torch.Tensor]:
        """Returns the states before a sum of `step`, whose changes stay if the sum `keeps` any."""
        if step is not self._step:
            if self._step is not None and not self._step.updates:
                self._states = self._at_begin
            self._step, self._at_begin = step, dict(self._states)
        return self._states if keeps else dict(self._states)


def split_state_key(key: str) -> tuple[str, str]:
    """Returns the name of a state, and that of its parameter: "residual/head.weight"."""
    name, _, param = key.partition("/")
    return name, param


def _residuals(states: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns the residuals among `states`, by parameter."""
    split = ((*split_state_key(key), each) for key, each in states.items())
    return {param: each for name, param, each in split if name == RESIDUAL}
