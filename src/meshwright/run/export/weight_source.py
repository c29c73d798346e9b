"""Streams the whole tensors of a model in training, for an engine that runs the same model elsewhere (vLLM,
SGLang): names, dtypes and values are those of `export`, and one tensor is in memory at a time.

    ranks         agree   gather   yield   agree   gather   yield  ...
    rank 0          .       w0      w0       .       w1      w1
    rank 1          .       w0      w0       .       w1      w1

`metadata` has names, dtypes and shapes before any value, as the engines ask for them, and a source can be
iterated after every step: it is what vLLM calls a `WeightSource`. Before each tensor the ranks exchange 8
bytes each, so that a rank may leave the loop: the others are told when it takes part in anything else, and
raise an error instead of waiting for it. A step ends an iteration too: no stream has weights of two steps.

Memory above training, beside what the caller keeps: one tensor, and along tp a slice of it; of experts that
are stored one by one, those of a layer, twice. Where a rank stores a tensor whole and in the dtype that is
asked for, what it yields is the memory of training: to be read before the next step, and not to be changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.engine.optim.sharded_state_dict import persistent_buffers
from meshwright.engine.step.broadcast_stage_params import full_buffer, full_value, full_value_dtype
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.weight_conversion import KeyConversion
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.export.stored_tensors import StoredTensors

ACTION = "GATHER_FULL"  # the ledger name of collectives that no plan has
LOCATION = "weights"


@dataclass(frozen=True)
class ParamMeta:
    """Name, dtype and full shape of a tensor, as it is stored."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightIteration:
    """What the iterations of all weight sources of a trainer have in common: at most one runs.

    It ends on this rank at its last gather, or where `end` is called: before the next collective of the
    trainer, on all ranks.
    """

    def __init__(self, executor: StepExecutor) -> None:
        self._world = executor.state.world
        self._number, self._meets_others = 0, False

    def begin(self) -> int:
        """Ends an iteration that was left, and returns the number of a new one."""
        self.end()
        return self._number

    def end(self) -> None:
        """Ends the iteration that runs, if one does; ranks that are still in it are told."""
        self._number += 1
        if self._meets_others:
            self._leaving_ranks(leaves=True)

    def check(self, number: int) -> None:
        """Raises PlanError if the iteration `number` has ended."""
        if number != self._number:
            text = "the trainer went on before the last tensor, and an iteration has the weights of one step"
            raise PlanError(text, fix="iterate again: for name, tensor in source", location=LOCATION)

    def agree(self, number: int) -> None:
        """Returns when all ranks go on with the iteration. Raises PlanError where one has left it."""
        self.check(number)
        leaving = self._leaving_ranks(leaves=False)
        if leaving:
            self._number += 1
            text = f"rank {', '.join(map(str, leaving))} left the iteration over the weights before its end"
            fix = "iterate to the end on all ranks, or leave the loop on all of them at the same tensor"
            raise PlanError(text, fix=fix, location=LOCATION)

    def expect(self, *, more: bool) -> None:
        """Says whether the ranks meet again in this iteration, now that they have gathered."""
        self._meets_others = more

    def _leaving_ranks(self, *, leaves: bool) -> list[int]:
        group = self._world.group(AXES)
        if group.size == 1:
            return []
        self._meets_others = False  # nor after an error here, or in what the ranks gather next
        own = torch.tensor([int(leaves)], device=self._world.device)
        every = own.new_empty(group.size)
        with self._world.ledger.pause_recording():
            group.all_gather(every, own, action=ACTION).wait()
        return [rank for rank, leaving in enumerate(every.tolist()) if leaving]


class WeightSource:
    """The whole tensors of a model in training under the names of its export; all ranks iterate it.

        source = trainer.weights(torch.bfloat16, rank=0)
        for name, tensor in source:                       on rank 0; other ranks take part, and get none
            engine.load_weights([(name, tensor)])

    Each iteration yields the weights of the last step. `Trainer.weights` makes it.
    """

    def __init__(
        self,
        executor: StepExecutor,
        deferred_init: DeferredInit,
        iteration: WeightIteration,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
    ) -> None:
        self._executor, self._iteration, self._state = executor, iteration, executor.state
        world_size = self._state.world.mesh.world_size
        if number := self._state.plan.sharding.num_servers:
            text = f"the last {number} ranks only serve: not every rank has weights between two steps"
            fix = "save a checkpoint, and export it: trainer.save(folder), meshwright export"
            raise PlanError(text, fix=fix, location=LOCATION)
        if rank is not None and not 0 <= rank < world_size:
            text = f"rank = {rank!r}, and the ranks of the plan are 0 to {world_size - 1}"
            raise PlanError(text, fix="pass one of them, or None for all ranks", location=LOCATION)
        self._is_receiver = rank is None or rank == self._state.world.rank
        self._first_names = {
            alias: name for name, entry in deferred_init.logical_params.items() for alias in entry.aliases
        }
        self._params = {param.name: param for param in self._state.plan.model_spec.params}
        self._buffers = {name for name, _ in persistent_buffers(self._state.trained_module.module)}
        self._stored = StoredTensors.of_model(deferred_init, self._read_dtype, dtype)

    @property
    def version(self) -> int:
        """The optimizer step whose weights an iteration yields now: what an engine calls `weight_version`."""
        return self._executor.steps_done

    def check_version(self, answer: str | int) -> None:
        """Raises PlanError unless `answer`, the weight version that an engine says it runs, is `version`."""
        if str(answer) != str(self.version):
            text = f"the engine answers weight version {answer!r}, and the weights are those of step "
            fix = f"send them, and tell it their version: weight_version='{self.version}'"
            raise PlanError(f"{text}{self.version}", fix=fix, location=LOCATION)

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and shape of each tensor, in the order of an iteration; nothing is sent."""
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._stored.without_values().items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor with its name, on all ranks, or on the one that was asked for.

        Raises PlanError on ranks that go on where another has left the loop, and where the trainer has gone
        on in between.
        """
        number = self._iteration.begin()
        self._executor.check_sites_agree(LOCATION)
        self._state.offloaded.delayed_steps.wait_for_all()
        for left, conversion in zip(
            reversed(range(len(self._stored.conversions))), self._stored.conversions, strict=True
        ):
            self._iteration.agree(number)
            tensors = self._gather(conversion)
            self._iteration.expect(more=left > 0)
            for name in list(tensors):
                yield name, tensors.pop(name)
                self._iteration.check(number)

    @torch.no_grad()
    def _gather(self, conversion: KeyConversion) -> dict[str, torch.Tensor]:
        with self._state.world.ledger.pause_recording():
            if self._is_receiver:
                return self._stored.convert(conversion, self._read)
            for name in conversion.source_names:
                self._read(name)
        return {}

    def _read(self, name: str) -> torch.Tensor:
        """Returns the value of a parameter or buffer, a parameter in the dtype in which it is stored."""
        if name in self._buffers:
            return full_buffer(self._state, name, ACTION)
        dtype = self._stored.sources[name].dtype
        param = self._params[self._first_names.get(name, name)]

        def read_local(name: str) -> torch.Tensor:
            return self._state.flat_params.full_value(name, ACTION, use_masters=True, dtype=dtype)

        value = full_value(self._state, read_local, param, ACTION, dtype)
        if value is None:
            raise ValueError(f"no rank has {name}")
        return value.detach()

    def _read_dtype(self, name: str) -> torch.dtype:
        param = self._params[self._first_names.get(name, name)]
        with self._state.world.ledger.pause_recording():
            return full_value_dtype(self._state, param, ACTION)
