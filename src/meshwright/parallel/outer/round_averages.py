"""Runs the averages of a rank, and the sums of what was counted in a round.

    AVERAGE(group)     stepped tensors -> one flat tensor -> all_reduce over the sites
                       a shard of a flat parameter in float32 or wider is that tensor itself
    END_ROUND(group)   / k -> what the technique makes of the mean -> stepped tensors -> parameters

Every site receives the same bits, does the same with them, and so goes on with equal parameters. The totals
of a round are summands of the sites (P), so that they survive a checkpoint in its middle.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime

TOTALS = "totals"  # of the round so far: loss, loss weight, samples, tokens
EndRound = Callable[[str, torch.Tensor, Mapping[str, torch.Tensor]], None]


class RoundAverages:
    """The averages of one rank over the sites along `axis`; `end_round(name, mean, kept)` makes of the mean
    of a parameter, in place, what all sites go on with.
    """

    def __init__(self, runtime: Runtime, end_round: EndRound, axis: str) -> None:
        self._state, self._kept, self._end_round = runtime.state, runtime.tensors, end_round
        self._num_sites = runtime.state.plan.mesh.size(axis)
        self._under_way: dict[str, torch.Tensor] = {}  # by parameter group
        self._stop = False  # any rank of this site has asked to stop in this round
        self.handlers: dict[str, Handler] = {
            "ROUND_TOTALS": self.add_totals,
            "ROUND_SUM": self.sum_totals,
            "AVERAGE": self.average,
            "END_ROUND": self.end_round,
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

    def average(self, action: Action) -> None:
        """Starts the sum of what the parameters of a group were stepped to."""
        stepped = self._stepped(action)
        if action.allocations and action.transfer is not None:
            (allocation,), dtype = action.allocations, getattr(torch, action.transfer.dtype)
            buffer = self._state.flat_params.buffer(allocation.name, allocation.nbytes, dtype)
            values = buffer[: sum(each.numel() for each in stepped)]
            for place, each in _places(values, stepped):
                place.copy_(each)
        else:
            (values,) = stepped
        self._under_way[action.subject] = values
        self._state.start_collective(action, values)

    @torch.no_grad()
    def end_round(self, action: Action) -> None:
        """Makes the mean, or what the technique makes of it, the parameters of a group."""
        mean, stepped = self._under_way.pop(action.subject).div_(self._num_sites), self._stepped(action)
        for name, part in self._parts(action, mean).items():
            self._end_round(name, part, self._kept)
        for place, each in _places(mean, stepped) if action.frees else ():
            each.copy_(place)
        flat_param = self._state.flat_params.flat_param_of(action.tensors[0])
        if flat_param is None:
            self._state.flat_params.master_weights.round_masters(action.tensors)
        else:
            flat_param.round_master()

    def _stepped(self, action: Action) -> list[torch.Tensor]:
        """Returns what the optimizer has stepped: one flat tensor, or one tensor per parameter."""
        flat_params = self._state.flat_params
        flat_param = flat_params.flat_param_of(action.tensors[0])
        if flat_param is not None:
            return [flat_param.optimizer_tensor.detach()]
        stepped = flat_params.optimizer_params()
        return [stepped[name].data for name in action.tensors]

    def _parts(self, action: Action, mean: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the place of each parameter in the flat `mean` of its group."""
        flat_param = self._state.flat_params.flat_param_of(action.tensors[0])
        if flat_param is not None:
            return {each.name: mean[each.in_shard] for each in flat_param.param_shards}
        numels = [self._state.trained_module.parameters[name].numel() for name in action.tensors]
        return dict(zip(action.tensors, mean.split(numels), strict=True))


def _places(flat: torch.Tensor, tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the place of each tensor in `flat`, in its shape, and the tensor."""
    parts = flat.split([each.numel() for each in tensors])
    yield from ((part.view(each.shape), each) for part, each in zip(parts, tensors, strict=True))
