"""Runs the averages of a rank, and the sums of what was counted in a round.

    PACK_ROUND(group)  stepped tensors -> one flat tensor -> what the technique sends of it, in its place
                       a shard of a flat parameter in float32 or wider is that tensor itself
                       optimizer states that are averaged, too, lie behind: parameters | exp_avg | exp_avg_sq
    AVERAGE(group)     all_reduce over the sites; of outer gradients OUTER_REDUCE, which codes may carry
    END_ROUND(group)   / k -> what the technique makes of the mean -> stepped tensors -> parameters

Every site receives the same bits, does the same with them, and so goes on with equal parameters. The totals
of a round are summands of the sites (P), so that they survive a checkpoint in its middle.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime

if TYPE_CHECKING:  # no strategy imports the engine
    from meshwright.engine.runtime.rank_state import RankState

TOTALS = "totals"  # of the round so far: loss, loss weight, samples, tokens
ChangeInPlace = Callable[[str, torch.Tensor, Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True)
class RoundRule:
    """What a technique does with each parameter, by name, flat and in place: `begin` makes of what was
    stepped what is summed over the sites along `axis`, `end` of the mean what all these sites go on with.

    `kinds` are those of the actions that pack, sum and end a round. `averaged_states` are the names of the
    optimizer states of each parameter that become their mean.
    """

    axis: str
    kinds: tuple[str, str, str]
    begin: ChangeInPlace
    end: ChangeInPlace
    averaged_states: Mapping[str, tuple[str, ...]]


class SteppedTensors:
    """What the optimizer of one rank steps, by parameter group."""

    def __init__(self, state: "RankState") -> None:
        self._state = state

    def tensors(self, action: Action) -> list[torch.Tensor]:
        """Returns what is stepped of `action.tensors`: one flat tensor, or one tensor per parameter."""
        flat_params = self._state.flat_params
        flat_param = flat_params.flat_param_of(action.tensors[0])
        if flat_param is not None:
            return [flat_param.optimizer_tensor.detach()]
        stepped = flat_params.optimizer_params()
        return [stepped[name].data for name in action.tensors]

    def numel(self, action: Action) -> int:
        """Returns the number of elements that are stepped."""
        return sum(each.numel() for each in self.tensors(action))

    def places(self, action: Action, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the place of each tensor in `flat`, in its shape, and the tensor."""
        tensors = self.tensors(action)
        parts = flat.split([each.numel() for each in tensors])
        yield from ((part.view(each.shape), each) for part, each in zip(parts, tensors, strict=True))

    def parts(self, action: Action, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the place of each parameter in `flat`, which has the elements that are stepped."""
        flat_param = self._state.flat_params.flat_param_of(action.tensors[0])
        if flat_param is not None:
            return {each.name: flat[each.in_shard] for each in flat_param.param_shards}
        numels = [self._state.trained_module.parameters[name].numel() for name in action.tensors]
        return dict(zip(action.tensors, flat.split(numels), strict=True))

    def round_masters(self, action: Action) -> None:
        """Rounds what is stepped to the parameters, where these are others."""
        flat_param = self._state.flat_params.flat_param_of(action.tensors[0])
        if flat_param is None:
            self._state.flat_params.master_weights.round_masters(action.tensors)
        else:
            flat_param.round_master()


class RoundAverages:
    """The averages of one rank over the sites, by `rule`."""

    def __init__(self, runtime: Runtime, rule: RoundRule) -> None:
        self._state, self._kept, self._rule = runtime.state, runtime.tensors, rule
        self._stepped = SteppedTensors(runtime.state)
        self._num_sites = runtime.state.plan.mesh.size(rule.axis)
        sums = (each for each in runtime.state.plan.actions if each.kind == rule.kinds[1])
        self._sums = {each.subject: each for each in sums}  # by parameter group
        self._under_way: dict[str, torch.Tensor] = {}  # by parameter group
        self._stop = False  # any rank of this site has asked to stop in this round
        self.handlers: dict[str, Handler] = {
            "ROUND_TOTALS": self.add_totals,
            "ROUND_SUM": self.sum_totals,
            rule.kinds[0]: self.pack_round,
            rule.kinds[1]: runtime.state.start_collective,
            rule.kinds[2]: self.end_round,
        }

    def add_totals(self, action: Action) -> None:
        """Adds the sums of the step, which all ranks of the site have, to those of the round."""
        state = self._state
        weight, stop, samples, tokens = state.token_counter.totals()
        totals, self._stop = self._kept[TOTALS], self._stop or stop > 0
        totals[0] += state.step.loss_sum
        totals[1:] += torch.tensor([weight, samples, tokens], dtype=torch.float64, device=totals.device)

    def sum_totals(self, action: Action) -> None:
        """Starts the sum over the sites; the step reads it when it ends."""
        totals = self._kept[TOTALS]
        message = torch.cat((totals, totals.new_tensor([float(self._stop)])))
        totals.zero_()
        self._stop = False
        self._state.start_collective(action, message)
        self._state.step.round_totals = message

    @torch.no_grad()
    def pack_round(self, action: Action) -> None:
        """Makes the message of a group: what its parameters were stepped to, or what is sent of that, and
        optimizer states.
        """
        total, numel = self._sums[action.subject], self._stepped.numel(action)
        if action.allocations and total.transfer is not None:
            (allocation,), dtype = action.allocations, getattr(torch, total.transfer.dtype)
            buffer = self._state.flat_params.buffer(allocation.name, allocation.nbytes, dtype)
            values = buffer[: total.transfer.nbytes // dtype.itemsize]
            for place, each in self._stepped.places(action, values[:numel]):
                place.copy_(each)
            values[numel:].zero_()
            for place, each in self._states(action, values):
                place.copy_(each)
        else:
            (values,) = self._stepped.tensors(action)
        parts = self._stepped.parts(action, values[:numel])
        for name, part in parts.items():
            self._rule.begin(name, part, self._kept)
        self._under_way[action.subject] = values
        self._state.lend_operand(total.name, values, parts)

    @torch.no_grad()
    def end_round(self, action: Action) -> None:
        """Makes the mean, or what the technique makes of it, the parameters of a group."""
        mean = self._under_way.pop(action.subject).div_(self._num_sites)
        params = mean[: self._stepped.numel(action)]
        for name, part in self._stepped.parts(action, params).items():
            self._rule.end(name, part, self._kept)
        for place, each in self._stepped.places(action, params) if action.frees else ():
            each.copy_(place)
        for place, each in self._states(action, mean):
            each.copy_(place)
        self._stepped.round_masters(action)

    def _states(self, action: Action, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the places of optimizer states in the message `flat`, behind the parameters, each in the
        shape of its state, and the states. A site that has not updated yet has none.

        Raises PlanError for an optimizer that keeps others.
        """
        params, optimizers = self._state.flat_params.optimizer_params(), self._state.optimizers
        blocks = flat.split(self._stepped.numel(action))[1:]
        for number, block in enumerate(blocks):
            for name, place in self._stepped.parts(action, block).items():
                if name not in params:  # this rank steps none of it
                    continue
                parameter, keys = params[name], self._rule.averaged_states[name]
                of_site = next((each.state[parameter] for each in optimizers if parameter in each.state), {})
                if not of_site:
                    continue
                _check_states(name, keys, parameter, of_site)
                if number < len(keys):
                    yield place.view(parameter.shape), of_site[keys[number]]


def _check_states(
    name: str, keys: tuple[str, ...], parameter: torch.Tensor, states: Mapping[str, object]
) -> None:
    tensors = {key: each for key, each in states.items() if isinstance(each, torch.Tensor)}
    found = {key for key, each in tensors.items() if each.shape == parameter.shape and each.dim()}
    if found.difference(keys) or not set(keys) <= tensors.keys():
        text = f"the optimizer keeps {', '.join(sorted(found)) or 'no state'} of {name}, element by element, "
        text += f"and the plan averages {', '.join(keys)}"
        fix = 'name the optimizer in the job (optimizer.name), or set optimizer_states = "own"'
        raise PlanError(text, fix=fix, location="strategies.local_sgd.optimizer_states")
