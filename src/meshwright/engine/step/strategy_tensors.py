"""What techniques keep from step to step on one rank: tensors, made from declarations, saved and loaded.

    declared    plan/strategy_state.py: shape, dtype, placement along every axis
    here        one tensor each, filled with its first value; a technique gets its own, by key
    saved       as "state/OWNER/KEY": full values, or this rank's slice, shard or summand

A tensor is loaded in place, so a technique may keep what it was given. One that a checkpoint lacks begins
anew; one of another shape, under this plan, is refused.

What observers have answered has a shape that is known at run time: workers save it as
"state/observer/VERSION/OBSERVER/NAME", whatever it is.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from meshwright.engine.optim.sharded_state_dict import SavedTensor, TensorShard
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.tensors.counter_rng import derive_key, fill_normal_
from meshwright.model.tensors.lazy_mapping import read_region, strip_prefix, tensor_shape
from meshwright.plan.job.errors import PlanError
from meshwright.plan.strategy_interface import Answer
from meshwright.plan.strategy_state import ANSWER_PREFIX, STATE_PREFIX, StateSpec


class StrategyTensors:
    """The tensors of all techniques of the plan on the rank of `state`, by `owner/key`."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._specs = {
            f"{owner}/{spec.key}": spec for owner, specs in state.plan.states.items() for spec in specs
        }
        self._tensors = {name: self._make(spec) for name, spec in self._specs.items()}
        for name, tensor in self._tensors.items():
            self._fill(name, tensor)

    def of(self, owner: str) -> dict[str, torch.Tensor]:
        """Returns the tensors of one technique, by key; those of a shard are flat."""
        return dict(strip_prefix(f"{owner}/", self._tensors))

    @property
    def nbytes(self) -> int:
        """The bytes on the device."""
        return sum(tensor.nbytes for name, tensor in self._tensors.items() if not self._specs[name].on_host)

    def state_dict(self) -> dict[str, SavedTensor]:
        """Returns what this rank saves: full values that every rank has, or its part of a tensor."""
        answers = (
            (f"{ANSWER_PREFIX}{each.version}/{each.observer}/{name}", tensor)
            for each in self._state.answers
            for name, tensor in each.tensors.items()
        )
        return {
            f"{STATE_PREFIX}{name}": self._saved(self._specs[name], tensor)
            for name, tensor in self._tensors.items()
        } | {name: TensorShard(each.reshape(-1), 0, tuple(each.shape)) for name, each in answers}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's parts of what all ranks have saved, full tensors by name, maybe as another plan.

        Raises PlanError for a tensor of another shape.
        """
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                spec, entry = self._specs[name], f"{STATE_PREFIX}{name}"
                self._fill(name, tensor)
                if entry in saved:
                    self._load(entry, spec, tensor, saved)
        if self._state.plan.sharding.has_observers and not self._state.plan.view.is_server:
            self._state.answers = _answers(saved)

    def begin_at_parameters(self) -> None:
        """Makes what begins at the parameters begin at the present ones, and ends what is under way."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if self._specs[name].fills_from_param or self._specs[name].ends_with_params:
                    self._fill(name, tensor)

    def _make(self, spec: StateSpec) -> torch.Tensor:
        dtype, state = getattr(torch, spec.dtype), self._state
        if not spec.param:
            device = torch.device("cpu") if spec.on_host else state.world.device
            return torch.empty(spec.shape, dtype=dtype, device=device)
        parameter = state.trained_module.parameters[spec.param].detach()
        shape = (self._range(spec)[1],) if spec.is_shard else tuple(parameter.shape)
        return parameter.new_empty(shape, dtype=dtype)

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        """Gives `tensor` its first value; random numbers are the same on every rank."""
        spec, flat_params = self._specs[name], self._state.flat_params
        if spec.is_random:
            fill_normal_(tensor, derive_key(self._state.plan.job.train.seed, "state", name))
        else:
            tensor.fill_(spec.fill)
        if not spec.fills_from_param:
            return
        shard = flat_params.param_shard(spec.param)
        if shard is not None:
            tensor.copy_(flat_params.shard_values(shard).view(tensor.shape))
        elif not flat_params.is_flattened(spec.param):
            parameter = self._state.trained_module.parameters[spec.param]
            tensor.copy_(flat_params.master_weights.exact_value(spec.param, parameter))

    def _saved(self, spec: StateSpec, tensor: torch.Tensor) -> SavedTensor:
        axes, shape, begin, spans = spec.layout.axes_with("P"), spec.shape, 0, ()
        if spec.param:
            shape, spans = self._full_shape(spec), self._state.flat_params.param_slices.spans(spec.param)
            begin = self._range(spec)[0] if spec.is_shard else 0
        elif not axes:
            return tensor
        if axes:
            group, local_numel = self._state.world.group(axes), tensor.numel()
            if spec.is_shard:
                local_numel = self._state.trained_module.parameters[spec.param].numel()
            shape, begin = (group.size, *shape), begin + group.index * local_numel
            spans = tuple(replace(span, dim=span.dim + 1) for span in spans)
        return TensorShard(tensor.detach().reshape(-1), begin, shape, spans)

    def _load(
        self, entry: str, spec: StateSpec, tensor: torch.Tensor, saved: Mapping[str, torch.Tensor]
    ) -> None:
        axes, shape = spec.layout.axes_with("P"), tensor_shape(saved, entry)
        expected = self._full_shape(spec)
        if spec.shape_of_one(shape) != (expected[1:] if spec.is_history else expected):
            if spec.may_begin_anew:
                return
            text = f"{entry} has the shape {list(shape)}, and {list(expected)} is needed under this plan"
            fix = "continue with the options that it was saved with, or train into another run.folder"
            raise PlanError(text, fix=fix, location="checkpoint")
        if not axes:
            values = saved[entry]
        else:  # the sum of all summands stays what it was
            group = self._state.world.group(axes)
            mine = range(group.index, shape[0], group.size)
            summands = [read_region(saved, entry, (range(row, row + 1),))[0] for row in mine]
            if not summands:
                return
            values = sum(summands[1:], start=summands[0])
        if spec.is_history:
            rows = min(len(values), len(tensor))
            tensor[len(tensor) - rows :] = values[len(values) - rows :]
            return
        if spec.param:
            values = self._state.flat_params.param_slices.local_slice(spec.param, values)
        if spec.is_shard:
            begin, numel = self._range(spec)
            values = values.reshape(-1)[begin : begin + numel]
        tensor.copy_(values)

    def _full_shape(self, spec: StateSpec) -> tuple[int, ...]:
        if not spec.param:
            return spec.shape
        specs = self._state.plan.model_spec.params
        return next(param.shape for param in specs if param.name == spec.param)

    def _range(self, spec: StateSpec) -> tuple[int, int]:
        """Returns the first element of this rank's shard of the parameter, and their number."""
        shard = self._state.flat_params.param_shard(spec.param)
        return (0, 0) if shard is None else (shard.begin, shard.numel)


def _answers(saved: Mapping[str, torch.Tensor]) -> tuple[Answer, ...]:
    """Returns the answers of observers in a checkpoint, in the order of the observers."""
    found = defaultdict[tuple[int, int], dict[str, torch.Tensor]](dict)
    for entry in saved:
        if entry.startswith(ANSWER_PREFIX):
            version, observer, name = entry.removeprefix(ANSWER_PREFIX).split("/")
            found[int(version), int(observer)][name] = saved[entry]
    return tuple(Answer(*key, found[key]) for key in sorted(found))
