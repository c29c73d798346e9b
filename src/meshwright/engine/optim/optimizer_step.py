"""From summed gradients to stepped weights: CLIP (gradient norm, loss scale and clipping) and STEP.

    gradients have the dtype of the stepped weights    the optimizer reads them in place, all at once
    they have another dtype                            group 0: cast, divide, step, round; then group 1

An optimizer sees the parameters of one group alone when it steps that group, so all groups together cost what
one step costs. An optimizer of the user may count its calls; it gets all gradients at once.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import nn

from meshwright.engine.optim.abstract_optimizer import PerParamOptimizer
from meshwright.engine.optim.make_optimizers import all_param_groups
from meshwright.engine.optim.step_grad_scale import clear_grad_scale, clip_in_step, divide_in_step
from meshwright.engine.params.master_weights import UpdateGroup
from meshwright.engine.runtime.grad_bucket import copy_gradients
from meshwright.engine.runtime.mixed_precision import LossScale, check_dtypes_match_plan, total_norm
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.program import Action


class OptimizerUpdate:
    """One rank's optimizers over its parameters; `is_user_made` tells that the user made them."""

    def __init__(self, state: RankState, *, is_user_made: bool) -> None:
        self._state, self._is_user_made = state, is_user_made
        self._store, self._optimizers, plan = state.flat_params, state.optimizers, state.plan
        precision = plan.job.precision.effective
        self.loss_scale: LossScale | None = None
        if precision.scales_loss:
            self.loss_scale = LossScale(precision, state.strategy_tensors.of("loss_scale"))
        self._optimizer_params = self._store.optimizer_params()
        groups = enumerate(all_param_groups(self._optimizers))
        self._group_indices = {id(each): index for index, group in groups for each in group["params"]}
        self._casts = precision.gradients != precision.master
        self._rounds = precision.master != precision.parameters
        clips = (action for action in plan.actions if action.kind == "CLIP")
        self._clipped_params = {
            clip.name: [
                self._optimizer_params[name] for name in clip.tensors if name in self._optimizer_params
            ]
            for clip in clips
        }
        if is_user_made and any(action.kind == "STEP" and action.subject for action in plan.actions):
            text = "the plan steps one parameter group after the other, and an optimizer that was passed may "
            text += "count its steps"
            fix = "pass no optimizer: name one in the job (optimizer.name)"
            raise PlanError(text, fix=fix, location="optimizer")
        self._divisor: float | torch.Tensor = 1.0
        self._checked = False
        # no rank knows the norm: GLOBAL_NORM adds it up
        self._norm_needs_collective = bool(plan.sharding.grad_norm_axes)
        self._buffer = torch.empty(0)
        # states on disk are stepped in buffers, to which each STEP brings its gradients
        self._grads_come_late = plan.sharding.tiers.optimizer_states == "disk"
        self._scale_late: Callable[[list[nn.Parameter]], None] | None = None

    @property
    def loss_scale_value(self) -> float:
        """The factor of the loss before backward."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    @property
    def nbytes(self) -> int:
        """The bytes of the memory that gradients are cast into, and of stashed weights."""
        return self._buffer.nbytes + self._store.master_weights.weight_stash.nbytes

    def stepped_tensors(self) -> Iterator[torch.Tensor]:
        """Yields all that a step reads and writes: stepped weights, gradients, cast gradients, states."""
        yield self._buffer
        for parameter in (each for group in all_param_groups(self._optimizers) for each in group["params"]):
            yield parameter.detach()
            if parameter.grad is not None:
                yield parameter.grad
        for states in (each for optimizer in self._optimizers for each in optimizer.state.values()):
            yield from (value for value in states.values() if isinstance(value, torch.Tensor))

    def clip(self, action: Action) -> None:
        """Computes the gradient norm, each parameter once; STEP then unscales and clips to `train.clip`."""
        parameters, self._scale_late = [] if self._casts else self._clipped_params[action.name], None
        for parameter in () if self._grads_come_late else parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._norm_needs_collective:
            norm = self._store.total_norm
        elif self._grads_come_late and not self._casts:
            names = (name for name in action.tensors if name in self._optimizer_params)
            norm = total_norm([self._device_gradient(name) for name in names])
        else:
            norm = total_norm(list(self._gradients(parameters)))
        self._state.step.scaled_norm = norm.to(self._state.world.device)
        self._state.step.loss_scale = self.loss_scale_value
        if self._state.plan.sharding.tiers.step == "host":
            norm = norm.cpu()
        # to read a number of a GPU is to wait for the GPU
        reads = norm.is_cpu or self.loss_scale is not None
        (self._clip_read if reads else self._clip_unread)(parameters, norm, self._state.plan.job.train.clip)

    def _clip_read(self, parameters: list[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
        true_norm = self._state.step.grad_norm
        clips = bool(limit) and not true_norm + 1e-6 <= limit  # as torch.nn.utils.clip_grad_norm_ has it
        self._divisor = self.loss_scale_value * ((true_norm + 1e-6) / limit if clips else 1.0)
        if clips and self.loss_scale is None and not self._casts:
            divisor = (norm + 1e-6) / limit
            self._scale(parameters, lambda found: clip_in_step(self._optimizers, found, norm, divisor, limit))
        elif self.loss_scale is not None and not self._casts:
            divisor = self._divisor
            self._scale(parameters, lambda found: divide_in_step(self._optimizers, found, divisor))

    def _scale(self, parameters: list[nn.Parameter], scale: Callable[[list[nn.Parameter]], None]) -> None:
        """Scales the gradients of `parameters`, or lets each STEP scale those that it finds."""
        if self._grads_come_late:
            self._scale_late = scale
        else:
            scale(parameters)

    def _clip_unread(self, parameters: list[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
        """Lets STEP divide by a number on the device, which is 1 where the norm is below `limit`."""
        if not limit:
            return
        divisor = ((norm + 1e-6) / limit).clamp(min=1.0)
        if self._casts:
            self._divisor = divisor
        else:
            clip_in_step(self._optimizers, parameters, norm, divisor, limit)

    def step(self, names: Collection[str] | None = None) -> None:
        """Steps the optimizers, and updates the weights from what was stepped.

        With `names`, the parameters of a group alone.
        """
        self._store.master_weights.assign_alias_grads()
        if self._casts and not self._buffer.numel():
            every = list(self._store.update_groups())
            sizes = [sum(parameter.numel() for parameter in group.parameters) for group in every]
            like = next((group.parameters[0].detach() for group in every if group.parameters), self._buffer)
            self._buffer = like.new_empty(sum(sizes) if self._is_user_made else max(sizes, default=0))
        chosen, named = None, None
        if names is not None:
            # of other groups nothing is made: every group has a STEP of its own
            chosen = [self._optimizer_params[name] for name in names if name in self._optimizer_params]
            named = frozenset(names)
        needed = self._casts or self._rounds or not self._checked
        groups = list(self._store.update_groups(named)) if needed else []
        if self._scale_late is not None and chosen:
            self._scale_late(chosen)
        if not self._casts:
            self._step(chosen)
        for group in (_merge_groups(groups),) if self._casts and self._is_user_made else groups:
            if self._casts:
                self._cast(group)
                self._step(None if self._is_user_made else group.parameters)
                for parameter in group.parameters:
                    parameter.grad = None
            group.finish()
        if not self._checked:
            check_dtypes_match_plan(self._state.plan, self._live_tensors(groups))
            self._checked = names is None

    def clear_grad_scale(self) -> None:
        """Lets the next step use its gradients as they are."""
        clear_grad_scale(self._optimizers)

    def _gradients(self, parameters: list[nn.Parameter]) -> Iterator[torch.Tensor]:
        if self._casts:
            yield from (
                grad for group in self._store.update_groups() for grad in group.gradients if grad is not None
            )
        else:
            yield from (parameter.grad for parameter in parameters if parameter.grad is not None)

    def _device_gradient(self, name: str) -> torch.Tensor:
        """Returns the summed gradient of `name` on the device; a zero if backward did not reach it."""
        flat_param, weight = self._store.flat_param_of(name), self._state.trained_module.parameters[name]
        gradient = weight.grad if flat_param is None else flat_param.param_gradient(name)
        return weight.new_zeros(1) if gradient is None else gradient

    def _step(self, chosen: Iterable[nn.Parameter] | None) -> None:
        """Steps the parameters in `chosen`; None: all. The optimizers see no others, which cost nothing."""
        groups = all_param_groups(self._optimizers)
        everything = [group["params"] for group in groups]
        if chosen is not None:
            for group in groups:
                group["params"] = []
            for parameter in chosen:
                groups[self._group_indices[id(parameter)]]["params"].append(parameter)
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters

    def _cast(self, group: UpdateGroup) -> None:
        at, places = 0, []
        for parameter in group.parameters:
            places.append(self._buffer[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()
        pairs = zip(group.parameters, group.gradients, strict=True)
        copy_gradients(places, [None if grad is None else grad.view(p.shape) for p, grad in pairs])
        for parameter, place in zip(group.parameters, places, strict=True):
            parameter.grad = place
        if isinstance(self._divisor, torch.Tensor) or self._divisor != 1.0:
            self._buffer[:at].div_(self._divisor)

    def _live_tensors(self, groups: Iterable[UpdateGroup]) -> Iterator[tuple[str, str, torch.Tensor]]:
        names = {id(parameter): name for name, parameter in self._optimizer_params.items()}
        for name, weight in self._state.trained_module.trainable_parameters.items():
            yield "parameters", name, weight
        for group in groups:
            for parameter, gradient in zip(group.parameters, group.gradients, strict=True):
                name = names[id(parameter)]
                yield "master", name, parameter
                if gradient is not None:
                    yield "gradients", name, gradient
                for optimizer in () if self._is_user_made else self._optimizers:
                    # its moments have dtypes and shapes of their own: plan/optimizer_per_param.py
                    if isinstance(optimizer, PerParamOptimizer):
                        continue
                    states = optimizer.state.get(parameter, {}).values()
                    elementwise = (
                        each
                        for each in states
                        if isinstance(each, torch.Tensor) and each.shape == parameter.shape and each.ndim
                    )
                    yield from (
                        ("optimizer_states", name, each) for each in elementwise if each.is_floating_point()
                    )


def _merge_groups(groups: list[UpdateGroup]) -> UpdateGroup:
    def finish() -> None:
        for group in groups:
            group.finish()

    parameters = tuple(parameter for group in groups for parameter in group.parameters)
    return UpdateGroup(
        parameters, tuple(gradient for group in groups for gradient in group.gradients), finish
    )
