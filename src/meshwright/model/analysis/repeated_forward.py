"""Refuses a forward that computes something else when it runs again, and names the line that does.

    x = x * random.random()                           mul takes 0.37, and then 0.81
    if np.random.rand() < self.layer_drop: continue   linear of layers.1, and then of layers.2
    x = x + time.time() % 1                           add takes 0.20, and then 0.21
    if torch.rand([]) < self.layer_drop: continue     the same draw, read as a value

Ranks would compute something else than one device, and a resumed run something else than one that went on.
Only numbers that torch draws as tensors belong to samples and steps (model/rng). So the forward runs again:
on a fresh copy of the module, on fake tensors where it can, with other states of all generators. Operations
are compared: their names, the parameters and constants that they take, the lines that call them.

    trial = second run              nothing varies; if a generator was used, more runs look for what is rare
    trial, second run = third run   something was computed once and kept, such as a table of positions
    second run, third run           refused

Cost: one forward on fake tensors. Limits: numbers that reach no operation as a constant (values computed
inside of another library) are not seen; nor is a branch that is taken in less than one of some runs.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import combinations
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.sharding_trials import make_trial_module
from meshwright.model.hf.model_from_config import use_eager_experts
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.recording.model_operations import Operation, OperationRecorder
from meshwright.model.recording.op_table import find_op
from meshwright.model.rng.stateless_dropout import record_draw_sites
from meshwright.model.rng.stateless_rng import DrawSites, StatelessRNG
from meshwright.model.tensors.fake_tensor_limits import without_fake_tensor_log
from meshwright.model.trial.fake_tensor_forward import make_fake
from meshwright.plan.job.errors import PlanError

Result = TypeVar("Result")
BlockShapes = tuple[dict[str, torch.Size], dict[str, torch.Size]]  # by path
MAX_RUNS = 12
RESIZED_BATCH_SIZE = 7  # a prime that is no usual size
LENGTH_MULTIPLES = (-2, -1, 1, 2)
SMALL_DRAW = 2.0**-16  # below the probability of any layer drop
DRAWS_FIX = (
    "draw with torch.rand or F.dropout, whose numbers belong to samples and steps, or when the data is "
    "prepared; or turn off what draws (in transformers: layerdrop = 0, apply_spec_augment = False)"
)
CLOCK_FIX = "compute with parameters and the batch alone: what changes with time can be a key of the batch"
LAYER_DROP_FIX = (
    "set the layer drop to 0 (in transformers' configs: layerdrop, encoder_layerdrop, decoder_layerdrop); or "
    "multiply what a layer adds by the draw, without reading its value"
)


@dataclass(frozen=True)
class RepeatedForward:
    """Runs of the forward of one model on `batch`, on real tensors if it `reads_values`."""

    deferred_init: DeferredInit
    batch: Mapping[str, torch.Tensor]
    reads_values: bool = False

    def run(
        self,
        forward: Callable[[nn.Module, Mapping[str, torch.Tensor]], Result],
        rng: StatelessRNG,
        seed: int | None = 1,
        draws: Callable[[StatelessRNG, int], AbstractContextManager[None]] = record_draw_sites,
    ) -> tuple[Result, tuple[str, ...]]:
        """Returns `forward(module, batch)` of a fresh module, and the generators that it used.

        torch's functions draw from `rng`, as `draws` lets them, and generators of the module start at `seed`,
        if that is not None.
        """
        module = make_trial_module(self.deferred_init)
        num_samples = len(next(iter(self.batch.values())))
        with ExitStack() as stack:
            batch = dict(self.batch)
            if self.reads_values:
                use_eager_experts(module)
                self.deferred_init.materialize(module)
            else:
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                make_fake(module, mode)
                stack.enter_context(mode)
                stack.enter_context(without_fake_tensor_log())
                batch = {key: mode.from_tensor(value) for key, value in batch.items()}
            if seed is not None:
                _reseed_generators(module, seed)
            before = _generator_states(module)
            stack.enter_context(draws(rng, num_samples))
            result = forward(module, batch)
        after = _generator_states(module)
        return result, tuple(name for name in after if after[name] != before[name])

    def check(self, trial: list[Operation], *, draws: bool) -> tuple[str, ...]:
        """Returns the generators outside of torch that the forward uses.

        `trial` are the operations of a trial on the same batch, and `draws` says whether it drew by torch.
        Raises PlanError if the forward computes something else when it runs again.
        """
        second, sources = self._operations(1)
        if draws and self.reads_values:
            self._check_draws(second)
        if trial == second and not sources:
            return ()
        for seed in range(2, MAX_RUNS if sources else 3):
            other, more = self._operations(seed)
            sources = tuple(dict.fromkeys((*sources, *more)))
            if (found := _first_difference(second, other)) is not None:
                given = f"draws from {' and '.join(sources)}" if sources else "reads a clock, or the system"
                when, fix = f"when it runs again, because it {given}", DRAWS_FIX if sources else CLOCK_FIX
                raise _repeat_error(when, second, other, found, fix)
        return sources

    def _check_draws(self, second: list[Operation]) -> None:
        other, _ = self._operations(1, SMALL_DRAW)
        one, another = ([each._replace(constants=()) for each in run] for run in (second, other))
        if (found := _first_difference(one, another)) is not None:
            raise _repeat_error("for other draws of torch", one, another, found, LAYER_DROP_FIX)

    def _operations(self, seed: int, draw: float = 0.5) -> tuple[list[Operation], tuple[str, ...]]:
        """Returns the operations of a run, and the generators that it used. torch's functions draw `draw`."""
        return self.run(_run_operations, StatelessRNG(0, trial_draw=draw), seed)


@dataclass(frozen=True)
class ResizedForward:
    """What a forward on RESIZED_BATCH_SIZE samples of other lengths shows.

    `inputs` are the shapes of one sample of the example by key, labels left out; `lengths` maps those of its
    sequences to those that ran. `of_labels` are the numbers of the operations on labels alone. `block_shapes`
    holds, per block call, the shapes of the tensors that it takes and of those that it returns;
    `output_shapes` those that the model returns, its loss left out.
    """

    block_names: tuple[str, ...]
    inputs: Mapping[str, torch.Size]
    lengths: Mapping[int, int]
    operations: Sequence[Operation]
    of_labels: Collection[int]
    sites: DrawSites
    block_shapes: Mapping[str, BlockShapes]
    output_shapes: Sequence[torch.Size]

    def find_same(self, operations: Sequence[Operation], num_samples: int) -> list[Operation] | None:
        """Returns those of its operations that are the given ones, which ran on `num_samples` of the example;
        None if it begins with others. It may compute with labels meanwhile.
        """
        found, sizes = list[Operation](), (num_samples, RESIZED_BATCH_SIZE)
        for number, operation in enumerate(self.operations):
            if len(found) == len(operations):
                break
            if same_but_for_sizes([operations[len(found)]], [operation], sizes, self.lengths):
                found.append(operation)
            elif number not in self.of_labels:
                return None
        return found if len(found) == len(operations) else None

    def confirm_draws(self, sites: DrawSites, outputs: Sequence[torch.Tensor], num_samples: int) -> bool:
        """Leaves of `sites`, which a forward on `num_samples` drew, the layouts that hold here too.

        Returns False, and changes nothing, if another draw was made, or if some of `outputs` are not per
        sample, so that one forward does not tell their samples.
        """
        shapes = [tuple(each.shape) for each in outputs]
        per_sample = len(shapes) == len(self.output_shapes) and all(
            shape[:1] == (num_samples,) and other[:1] == (RESIZED_BATCH_SIZE,)
            for shape, other in zip(shapes, self.output_shapes, strict=True)
        )
        if sites.layouts and not (per_sample and sites.layouts.keys() <= self.sites.layouts.keys()):
            return False
        for site, layouts in sites.layouts.items():
            sites.layouts[site] = tuple(each for each in layouts if each in self.sites.layouts[site])
        return True


def same_but_for_sizes(
    first: Sequence[Operation],
    second: Sequence[Operation],
    num_samples: tuple[int, int],
    lengths: Mapping[int, int] = MappingProxyType({}),
) -> bool:
    """Returns whether the operations of two runs are equal, except for sizes that grow with the samples, or
    with `lengths` of the first run, which are others in the second.
    """
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if one == other:
            continue
        if one._replace(constants=()) != other._replace(constants=()):
            return False
        pairs = zip(one.constants, other.constants, strict=False)
        grows = all(a == b or _is_size(a, b, num_samples, lengths) for a, b in pairs)
        if not grows or len(one.constants) != len(other.constants):
            return False
    return True


def _is_size(first: str, second: str, num_samples: tuple[int, int], lengths: Mapping[int, int]) -> bool:
    if not (first.lstrip("-").isdigit() and second.lstrip("-").isdigit()):
        return False
    one, other = int(first), int(second)
    if any(other - one == times * (new - old) for old, new in lengths.items() for times in LENGTH_MULTIPLES):
        return True  # the last token, a table of distances
    factors = [num_samples, *lengths.items(), *lengths.items()]  # a mask has its length twice
    return any(
        one * prod(new for _, new in some) == other * prod(old for old, _ in some)
        for count in range(1, len(factors) + 1)
        for some in combinations(factors, count)
    )


def _run_operations(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> list[Operation]:
    """Returns the operations of a forward; an error ends them as an operation of its own."""
    recorder, failed = OperationRecorder(module), []
    try:
        with recorder:
            module(**batch)
    except PlanError:
        raise
    except Exception as error:
        failed = [Operation("", 0, type(error).__name__, (), (str(error),))]
    return recorder.operations + failed


def _first_difference(first: list[Operation], second: list[Operation]) -> int | None:
    """Returns the index of the first operation in which two runs differ; None if they are equal."""
    pairs = zip(first, second, strict=False)
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    shorter = min(len(first), len(second))
    return at if at is not None or len(first) == len(second) else shorter


def _repeat_error(when: str, first: list[Operation], second: list[Operation], at: int, fix: str) -> PlanError:
    one, other = (run[at] if at < len(run) else None for run in (first, second))
    before = first[at - 1] if at else None
    # a value that was read decides on the branch
    branch = before if before is not None and find_op(before.name).kind == "read" else one or other
    if one is not None and other is not None and (one.name, one.params) == (other.name, other.params):
        pairs = zip(one.constants, other.constants, strict=False)
        taken = next((f"{a}, and then {b}" for a, b in pairs if a != b), "other arguments")
        what = f"{one.title} takes {taken}"
    else:
        titles = ["its end" if each is None else each.title for each in (one, other)]
        what = f"it comes to {titles[0]}, and then to {titles[1]}"
    line = "" if branch is None or not branch.file else f"; {branch.code}"
    text = f"the forward computes something else {when}: {what}{line}"
    return PlanError(text, fix=fix, location="model")


def _own_generators(module: nn.Module) -> Iterator[Any]:
    for inner in module.modules():
        for value in vars(inner).values():
            if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
                yield value


def _reseed_generators(module: nn.Module, seed: int) -> None:
    for generator in _own_generators(module):
        if isinstance(generator, np.random.Generator):
            bits = type(generator.bit_generator)(seed)
            generator.bit_generator.state = bits.state
        else:
            generator.seed(seed)


def _generator_states(module: nn.Module) -> dict[str, str]:
    """Returns the states of the generators that a forward may use, by their name in a message."""
    own = [
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.getstate()
        if isinstance(generator, random.Random)
        else generator.get_state(legacy=False)
        for generator in _own_generators(module)
    ]
    return {
        "Python's random": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state(legacy=False)),
        "a generator of its own": repr(own),
    }
