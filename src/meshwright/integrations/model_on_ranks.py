"""The user's model under a plan: analyzed, planned, and this rank's part of it.

    ModelOnRanks(model, ...)        mesh and strategies, or a plan
      .prepare(example)             analysis and plan, once per model
      .open(optimizer)              this rank's part, with values read from the user's model
      .release() ... .restore()     the user's model gives up its memory, and gets the trained values

Outside of `release` and `restore` the user's model is the truth: `push_values` makes ranks read it again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from meshwright.api import analyze_loaded, default_strategies, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.comm.current_world import current_world
from meshwright.engine.optim.lr_schedule import LRScheduler
from meshwright.engine.optim.make_optimizers import all_param_groups
from meshwright.engine.optim.optimizer_template import PARAM_KEYS, optimizer_template
from meshwright.engine.optim.sharded_state_dict import (
    local_optimizer_state,
    param_group_numbers,
    persistent_buffers,
)
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.engine.step.broadcast_stage_params import gather_full_buffers
from meshwright.integrations.released_parameters import ReleasedParameters
from meshwright.integrations.training_arguments import job_for, model_diagnostics, plan_diagnostics
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.module_weights import load_in_place
from meshwright.model.loss.as_loss import LossInput
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.errors import raise_diagnostics
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh, axes_with
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.training.trainer import Trainer


@dataclass(frozen=True)
class PlanChoice:
    """How the user asks for a plan: a mesh and strategies, or a plan; and the loss, None for the model's."""

    mesh: Mesh | None = None
    strategies: Iterable[Strategy] | None = None
    plan: Plan | None = None
    loss: LossInput | None = None
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class ExternalLRScheduler:
    """Stands for the scheduler of transformers, which transformers steps; it is saved with the ranks."""

    scheduler: Callable[[], LRScheduler]

    def step(self) -> None:
        """Leaves the learning rates to transformers."""

    def state_dict(self) -> dict[str, Any]:
        """Returns that of the scheduler."""
        return self.scheduler().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores it."""
        self.scheduler().load_state_dict(state_dict)


@dataclass
class ModelOnRanks:
    """`module`, the user's model, under the plan of `request`."""

    module: nn.Module
    args: TrainingArguments
    request: PlanChoice
    analyzed: AnalyzedModel | None = None
    plan: Plan | None = None
    trainer: Trainer | None = None
    released: ReleasedParameters | None = None
    _optimizer: torch.optim.Optimizer | None = None
    world: World | None = None
    _state_keys: tuple[str, ...] = ()

    def prepare(
        self, make_example: Callable[[], object], optimizer: torch.optim.Optimizer | None, steps: int
    ) -> Plan:
        """Returns the plan of the model, which is analyzed on batches like `make_example()`.

        Raises PlanError with everything that cannot work.
        """
        if self.analyzed is None or self.plan is None:
            analyzed = analyze_loaded(
                load_in_place(self.module, self.args.seed), make_example(), self.request.loss
            )
            self.analyzed, self.plan = analyzed, self._make_plan(analyzed, optimizer, steps)
        return self.plan

    def _make_plan(
        self, analyzed: AnalyzedModel, optimizer: torch.optim.Optimizer | None, steps: int
    ) -> Plan:
        args, given = self.args, self.request.plan
        local_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps

        def job(num_data: int) -> Job:
            return job_for(args, self.module, optimizer, steps, local_batch * num_data)

        if given is not None:
            found = (
                *model_diagnostics(given, analyzed.model_spec),
                *plan_diagnostics(given, args, job(given.num_data)),
            )
            raise_diagnostics(found)
            return given
        mesh = self.request.mesh or Mesh(dp_replicate=args.world_size)
        chosen = self.request.strategies
        strategies = default_strategies(mesh, analyzed.model_spec) if chosen is None else tuple(chosen)
        names = {strategy.name for strategy in strategies}
        if self.request.activation_checkpointing and ActivationCheckpointing.name not in names:
            strategies = (*strategies, ActivationCheckpointing())
        micro_batch = args.per_device_train_batch_size
        num_data = mesh.group_size(axes_with("samples"))
        plan = make_plan(analyzed, job(num_data), mesh, strategies, micro_batch)
        if plan.num_data != num_data:  # strategies share samples over other axes
            plan = make_plan(analyzed, job(plan.num_data), mesh, strategies, micro_batch)
        raise_diagnostics(plan_diagnostics(plan, args, plan.job))
        return plan

    def open(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Callable[[], LRScheduler] | None = None,
    ) -> Trainer:
        """Returns this rank's part, which `optimizer` steps with the learning rates of `scheduler` (None:
        nothing is trained); the same as before for the same optimizer.
        """
        if self.trainer is not None and (optimizer is None or optimizer is self._optimizer):
            self.push_values()
            return self.trainer
        if self.analyzed is None or self.plan is None:
            raise ValueError("no plan yet; call prepare(example, ...) first")
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = parallelize(
            self.analyzed,
            self.plan,
            optimizer=None if optimizer is None else optimizer_template(optimizer, self.module),
            lr_scheduler=None if scheduler is None else lambda _: ExternalLRScheduler(scheduler),
            world=self._rank_world(self.plan.mesh),
        )
        self._optimizer = optimizer
        return self.trainer

    def step(self, batches: Sequence[object]) -> Metrics:
        """Trains one step on this rank's microbatches, with the numbers of the optimizer's groups."""
        return self._with_present_groups().step(list(batches) or None)

    def save(self, folder: Path) -> Path:
        """Saves a checkpoint of the ranks into `folder`, and returns its path; all ranks call it."""
        return self._with_present_groups().save(folder)

    def load(self, checkpoint: Path) -> None:
        """Loads the checkpoint at `checkpoint`, and the numbers of its groups into those of the optimizer."""
        trainer, optimizer = self._opened()
        trainer.load(checkpoint)
        groups = all_param_groups(trainer.executor.state.optimizers)
        for group, target in zip(groups, optimizer.param_groups, strict=True):
            target |= _options(group)

    def _with_present_groups(self) -> Trainer:
        """Returns the trainer, whose groups have the numbers that a scheduler wrote into the optimizer's."""
        trainer, optimizer = self._opened()
        groups = all_param_groups(trainer.executor.state.optimizers)
        for group, source in zip(groups, optimizer.param_groups, strict=True):
            group |= _options(source)
        return trainer

    def release(self) -> None:
        """Frees the memory of the user's model: the ranks have its values."""
        self._state_keys = tuple(self.module.state_dict())
        self.released = ReleasedParameters(self.module)

    def restore(self) -> None:
        """Gives the user's model the values of the ranks; all ranks call it."""
        if self.released is not None:
            self.released.restore(*self._gather(keep_result=True))
            self.released = None

    def full_state(self, *, keep_result: bool) -> dict[str, torch.Tensor]:
        """Returns the state_dict of the user's model with the values of the ranks; all ranks call it.

        A rank without `keep_result` gets nothing.
        """
        parameters, buffers = self._gather(keep_result=keep_result)
        if not keep_result:
            return {}
        dtypes = {name: parameter.dtype for name, parameter in self.module.named_parameters()}
        values = {name: value.to(dtypes[name]).cpu() for name, value in parameters.items()}
        for name, entry in self._analysis().deferred_init.logical_params.items():
            values |= dict.fromkeys(entry.aliases, values[name])
        values |= {name: value.cpu() for name, value in buffers.items()}
        return {key: values[key] for key in self._state_keys}

    def push_values(self) -> None:
        """Makes ranks hold the values that the user's model has now, unless it is released."""
        if self.released is None and self.trainer is not None:
            names = self._analysis().deferred_init.logical_params
            values = {f"model/{name}": self.module.get_parameter(name).detach() for name in names}
            values |= {f"buffer/{name}": buffer for name, buffer in persistent_buffers(self.module)}
            self.trainer.executor.load_parameters(values)

    def load_optimizer_state(self, steps_done: int) -> None:
        """Gives the ranks the state that the user's optimizer holds, read by transformers."""
        trainer, optimizer = self._opened()
        parameters = dict(self.module.named_parameters())
        values = local_optimizer_state([optimizer], parameters, param_group_numbers([optimizer]))
        trainer.executor.load_optimizer_state({f"optimizer/{key}": value for key, value in values.items()})
        trainer.executor.steps_done = steps_done
        optimizer.state.clear()

    def close(self) -> None:
        """Ends this rank's part; the world of a process group closes its own groups."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None
        if self.world is not None:
            self.world.close()
            self.world = None

    def _gather(self, *, keep_result: bool) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        trainer, _ = self._opened()
        parameters = trainer.executor.gather_parameters(keep_result=keep_result, use_masters=True)
        with trainer.world.ledger.pause_recording():
            return parameters, gather_full_buffers(trainer.executor.state, "GATHER_FULL")

    def _rank_world(self, mesh: Mesh) -> World:
        if self.world is None:
            device = self.args.device
            device = torch.device("cpu") if device.type == "cpu" else device  # accelerate says cpu:0
            self.world = current_world(mesh, device)
        return self.world

    def _analysis(self) -> AnalyzedModel:
        if self.analyzed is None:
            raise ValueError("the model is not analyzed yet; call prepare(example, ...) first")
        return self.analyzed

    def _opened(self) -> tuple[Trainer, torch.optim.Optimizer]:
        if self.trainer is None or self._optimizer is None:
            raise ValueError("the ranks have no optimizer yet; call open(optimizer) first")
        return self.trainer, self._optimizer


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in PARAM_KEYS}
