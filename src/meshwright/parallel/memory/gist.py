"""Gist: what autograd saves of ReLU and max pooling rests in fewer bits between forward and backward.

Why it works: the backward of a ReLU reads only the sign of its result, so a bit per element is enough. The
operation behind it reads the values, but about half of them are zero: the others and a bit per element hold
all. Max pooling saves where each maximum was, as an int64, and there are only as many places as the window
has. So forward and backward compute the same bits as before; what rests between them is smaller. Nothing is
computed twice, which is what recomputation costs.

    forward    conv -> y -> relu -> z -> conv            backward    conv <- decode <- bits, values
                              |      saves z: bits, values                relu <- bits
                              saves z: bits (the same)
               max_pool  saves positions: a byte each

    n elements of z, of which m are not zero, w bytes each; p positions
      bytes = n/8 + m w + p        instead of n w + 8 p
      n/8 alone where nothing but the ReLU saves z; squared ReLU: as much again for the square

What is zero depends on the data: `plan` expects half of each result, and says what it is at most (no zeros).
`backward_dtype` does more, and is not exact: everything else in wider floats that only the backward reads
is rounded to it (delayed precision reduction). The forward stays as it is.

Cost: no bytes sent; the encoding reads and writes each such tensor about four times, on a CPU in C where a
compiler is found: 1.03 to 1.13 x the CPU seconds of a step. On a GPU one read by the host per tensor whose
values are kept, as their number decides a size.
Limits: ReLU, its square and two-dimensional max pooling inside a block. A result that a block returns is held
by the next block anyway. For models with SiLU or GELU (Llama, BERT) nothing is saved: that is refused, unless
`backward_dtype` is set. Block calls that activation checkpointing runs again save nothing to encode.
Paper: Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA (section 4).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright.parallel.memory.gist_encodings import GistEncoder
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.block_patterns import matches_any, unmatched_patterns
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ReluActivations, block_of
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.block_call_memory import saved_fraction
from meshwright.plan.step.memory.memory_names import SCRATCH, saved_activations_name, values_not_zero_name
from meshwright.plan.step.program import Action, Allocation, Program, RuntimeSize
from meshwright.plan.step.single_device_program import INPUT_GRAD_KINDS, samples_per_microbatch
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

LOCATION = "strategies.gist"
INDEX_NBYTES = 8  # a position of a maximum, as autograd saves it
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}  # relative


@dataclass(frozen=True)
class Gist(Strategy):
    """Encodes what the blocks that match one of `blocks` save (without `blocks`: all).

    `backward_dtype` rounds what else they save, if it is not empty.
    """

    name: ClassVar[str] = "gist"
    phase: ClassVar[StrategyPhase] = "storage"  # once it is known which block calls run again
    blocks: tuple[str, ...] = ()
    backward_dtype: str = field(default="", metadata=one_of("", *ROUNDING))

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether the numbers of training are the same without it."""
        return not self.backward_dtype

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        model_spec = sharding.model_spec
        yield from unmatched_patterns(self.blocks, model_spec, f"{LOCATION}.blocks")
        if not self._encoded(model_spec.relu_activations) and not self.backward_dtype:
            text = f"it saves 0 bytes: no block of {model_spec.name} has a ReLU or a max pooling inside"
            fix = 'remove it, or set its backward_dtype = "bfloat16", which rounds what backward reads'
            if model_spec.relu_activations:
                fix = "leave out its `blocks`: others have some"
            yield Diagnostic(text, fix, LOCATION)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        encoded = [each.block_call for each in self._encoded(sharding.model_spec.relu_activations)]
        if self.backward_dtype:
            encoded = [each for each in sharding.model_spec.block_calls if self._is_selected(each)]
        return replace(sharding, encoded_calls=tuple(encoded))

    def tolerance(self, sharding: ShardingPlan) -> float:
        return ROUNDING.get(self.backward_dtype, 0.0)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        calls = self._encoded(view.model_spec.relu_activations)
        return program.edit(lambda actions: encode_memory(actions, calls, view, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        calls = set(runtime.state.plan.sharding.encoded_calls)
        forwards = [each for each in runtime.state.plan.actions if each.kind == "F" and each.subject in calls]
        encode_forwards(runtime, forwards, self.backward_dtype)
        return {}

    def _encoded(self, activations: tuple[ReluActivations, ...]) -> list[ReluActivations]:
        return [each for each in activations if self._is_selected(each.block_call)]

    def _is_selected(self, block_call: str) -> bool:
        return not self.blocks or matches_any(block_call, self.blocks)


def encode_forwards(runtime: Runtime, forwards: Sequence[Action], backward_dtype: str = "") -> None:
    """Makes the block calls of the actions `forwards` encode what autograd saves when they run."""
    by_name = {action.name: action for action in forwards}
    for block in dict.fromkeys(block_of(action.subject) for action in forwards):
        runtime.state.patches.wrap_forward(block, partial(_run, runtime, block, by_name, backward_dtype))


def _run(
    runtime: Runtime,
    block: str,
    forwards: Mapping[str, Action],
    backward_dtype: str,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    action = forwards.get(runtime.state.current_action)
    if action is None or not torch.is_grad_enabled():  # an evaluation, or a forward that runs again
        return forward(*args, **kwargs)
    kept = 0

    def count(number: int) -> None:
        nonlocal kept
        kept += number

    narrow = getattr(torch, backward_dtype) if backward_dtype else None
    weights = _weights(runtime.state.trained_module.blocks[block]) if narrow else frozenset[int]()
    encoder = GistEncoder(count, narrow, weights)
    with encoder.encoding():
        outputs = forward(*args, **kwargs)
    name = values_not_zero_name(action.subject, action.microbatch)
    runtime.state.world.ledger.record_count(name, kept)
    return outputs


def encode_memory(
    actions: list[Action], calls: Iterable[ReluActivations], view: RankView, job: Job
) -> list[Action]:
    """Returns `actions` with the memory of block calls that encode what they save: those of `calls` that are
    not run again. Each allocates values that are not zero, maybe none. Raises PlanError for one that does.
    """
    num_samples, width = samples_per_microbatch(actions, view.plan, job), FLOAT_NBYTES[job.precision.compute]
    found = {each.block_call: local_relu_activations(each, view, num_samples) for each in calls}
    encoded: set[str] = set()

    def encode(action: Action) -> Action:
        activations = found.get(action.subject)
        name = saved_activations_name(action.subject, action.microbatch)
        if activations is not None and action.kind == "F":
            if is_encoded(action):
                text = f"what {action.subject} saves is encoded already, by another strategy"
                raise PlanError(text, fix="leave gist out of one of them", location=LOCATION)
            encoded.add(name)
            return _encoded_forward(action, activations, width)
        if activations is None or name not in encoded:
            return action
        frees, decoded = action.frees, activations.largest_numel * width
        if name in frees:
            frees = (*frees, values_not_zero_name(action.subject, action.microbatch))
        grows = action.kind in INPUT_GRAD_KINDS
        allocations = tuple(
            replace(each, nbytes=each.nbytes + decoded) if grows and each.name == SCRATCH else each
            for each in action.allocations
        )
        return replace(action, frees=frees, allocations=allocations)

    return [encode(action) for action in actions]


def is_encoded(forward: Action) -> bool:
    """Returns whether the block call of `forward` encodes what it saves."""
    name = values_not_zero_name(forward.subject, forward.microbatch or 0)
    return any(each.name == name for each in forward.allocations)


def local_relu_activations(activations: ReluActivations, view: RankView, num_samples: int) -> ReluActivations:
    """Returns `activations` of the rank of `view`, of a microbatch."""
    share = saved_fraction(view, activations.block_call)
    block_call, *sizes = astuple(activations)
    return ReluActivations(block_call, *(int(numel * num_samples * share) for numel in sizes))


def freed_and_added_nbytes(activations: ReluActivations, width: int) -> tuple[int, int]:
    """Returns the bytes of `activations` of `width` bytes each, and those of bits and bytes in their place,
    without values.
    """
    freed = activations.saved_numel * width + activations.index_numel * INDEX_NBYTES
    return freed, -(-activations.mask_numel // 8) + activations.index_numel


def _encoded_forward(forward: Action, activations: ReluActivations, width: int) -> Action:
    name = saved_activations_name(forward.subject, forward.microbatch)
    freed, added = freed_and_added_nbytes(activations, width)
    allocations = [
        replace(each, nbytes=max(0, each.nbytes - freed) + added) if each.name == name else each
        for each in forward.allocations
    ]
    values = values_not_zero_name(forward.subject, forward.microbatch)
    size = RuntimeSize(values, width, activations.value_numel // 2, activations.value_numel)
    return replace(forward, allocations=(*allocations, Allocation(values, size.expected, size)))


def _weights(block: nn.Module) -> frozenset[int]:
    tensors = (*block.parameters(), *block.buffers())
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
