"""Records the forwards of a model that its analysis reads.

    PROBE_BATCH samples           what `read_trial` and the residual stream read
    another number of them        on a fresh module: which dims are those of samples, and what varies

The second is the forward with labels that told the loss (find_model_loss.py), if it computes the same but for
its sizes: it also has other lengths. Otherwise one on SECOND_BATCH_SIZE samples runs. All run on fake
tensors; a model whose forward reads values of tensors is made in full for them, on the CPU.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from meshwright.model.analysis.forward_errors import check_outputs_need_grad, trial_error
from meshwright.model.analysis.repeated_forward import (
    RESIZED_BATCH_SIZE,
    RepeatedForward,
    ResizedForward,
    same_but_for_sizes,
)
from meshwright.model.analysis.sharding_trials import get_blocks, repeat_samples
from meshwright.model.blocks.recorded_block_calls import EqualBlocksOnce, RecordedBlockCalls
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.loss.loss_inputs import distinct_tensors
from meshwright.model.recording.forward_recording import Recording, TensorRecord
from meshwright.model.recording.model_operations import Operation, block_operations, model_operations
from meshwright.model.recording.parameter_dtype import tensors_in_parameter_dtype
from meshwright.model.rng.stateless_rng import DrawSites, StatelessRNG
from meshwright.model.sequence_analysis.trial_lengths import BlockOnTwoLengths, takes_number
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.tensors.pytree import named_tensors
from meshwright.model.trial.fake_tensor_forward import (
    PROBE_BATCH,
    RecordedTrial,
    TrialFindings,
    read_trial,
    record_trial,
)
from meshwright.model.trial.shardable_layers import traced_roles
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor

Example = Mapping[str, torch.Tensor]
SECOND_BATCH_SIZE = 5
FindLossInputs = Callable[[RecordedTrial, RecordedTrial | None], tuple[BatchTensor, ...]]


class TrialResult(NamedTuple):
    """The findings of a trial, its block calls and draw sites, the outputs that the loss reads, and the block
    calls that compute the same on two lengths.
    """

    findings: TrialFindings
    trial: RecordedTrial
    block_calls: RecordedBlockCalls
    sites: DrawSites
    outputs: tuple[BatchTensor, ...]
    on_two_lengths: Mapping[str, BlockOnTwoLengths]


def record_model(loaded_model: LoadedModel, block_names: tuple[str, ...], inputs: Example) -> Recording:
    """Returns the recording of a training forward on PROBE_BATCH samples like `inputs`.

    Raises PlanError if the forward fails.
    """
    plan = loaded_model.deferred_init
    module = plan.instantiate()
    roles = traced_roles(module, find_layer_roles(module, loaded_model.layer_roles), loaded_model.layer_roles)
    _, trial, _ = _record_first(_repeated_forward(plan, inputs), block_names, inputs, roles)
    return trial.recording


def run_trials(
    plan: DeferredInit,
    module: nn.Module,
    names: tuple[str, ...],
    inputs: Example,
    find_loss_inputs: FindLossInputs,
    layers: Mapping[str, str],
    *,
    whole_batch: bool,
    resized: ResizedForward | None,
) -> TrialResult:
    """Records a forward of a module like `module`, and one of another on more samples, unless `resized` is
    one.

    The second size separates the batch dim from other dims of the same size; it also shows whether the
    forward computes the same when it runs again. Of equal block calls only the first runs there, unless
    graphs behind outputs are compared.

    Raises PlanError if the forward fails, or computes something else when it runs again.
    """
    first, trial, sites = _record_first(_repeated_forward(plan, inputs), names, inputs, layers)
    located = list(block_operations(trial.recording))
    block_calls = RecordedBlockCalls.read(trial.recording, located, get_blocks(module, names))
    draws, larger, sources = bool(sites.layouts), None, ()
    has_graphs = whole_batch or any(graph.shapes for graph in trial.output_graphs)
    same = None if resized is None or has_graphs else _find_same(resized, first, trial, located, names, sites)
    if resized is not None and same is not None:
        check_outputs_need_grad(trial.outputs)
        outputs = find_loss_inputs(trial, None)
        in_dtype = tensors_in_parameter_dtype(
            trial.recording, [name for name in trial.recording.parameters if plan.keeps_dtype(name)]
        )
        pairs = zip(located, same, strict=True)
        on_two_lengths = _blocks_on_two_lengths(resized, pairs, block_calls, in_dtype)
        return TrialResult(read_trial(trial.recording), trial, block_calls, sites, outputs, on_two_lengths)
    needs_second = draws or has_graphs
    samples = {key: repeat_samples(value, SECOND_BATCH_SIZE) for key, value in inputs.items()}
    rng = StatelessRNG(seed=0, sites=sites)

    def repeat(block_call: str, equal_call: str) -> None:
        rng.enter_block(block_call)
        rng.repeat_draws(equal_call)

    once = EqualBlocksOnce({} if has_graphs or first.reads_values else block_calls.equal_calls, repeat)
    record = partial(_record_trial, names, layers, rng, once)
    try:
        larger, sources = replace(first, batch=samples).run(record, rng)
    except Exception as error:
        if needs_second:
            raise _as_trial_error(error, inputs, plan) from error
    if not first.reads_values and any(each.requires_grad for each in trial.recording.parameters.values()):
        check_outputs_need_grad(trial.outputs)
    compared = [operation for block_call, operation in located if block_call not in once.repeated]
    is_repeated = larger is not None and same_but_for_sizes(
        compared, model_operations(larger.recording), (PROBE_BATCH, SECOND_BATCH_SIZE)
    )
    findings = read_trial(trial.recording)
    if sources or not is_repeated or (draws and first.reads_values):
        findings.outside_generators = first.check([operation for _, operation in located], draws=draws)
    outputs = find_loss_inputs(trial, larger if needs_second else None)
    return TrialResult(findings, trial, block_calls, sites, outputs, {})


def _find_same(
    resized: ResizedForward,
    first: RepeatedForward,
    trial: RecordedTrial,
    located: Sequence[tuple[str, Operation]],
    names: tuple[str, ...],
    sites: DrawSites,
) -> list[Operation] | None:
    """Returns the operations of `resized` that are those of the `trial`, whose inputs are like its own; None
    if it computes something else. Keeps in `sites` the layouts that it allows.
    """
    inputs = {key: value.shape[1:] for key, value in first.batch.items()}
    trains = any(each.requires_grad for each in trial.recording.parameters.values())
    if first.reads_values or not trains or names != resized.block_names:
        return None
    if not resized.inputs.items() <= inputs.items():  # more of them are made from labels
        return None
    same = resized.find_same([operation for _, operation in located], PROBE_BATCH)
    draws_same = same is not None and resized.confirm_draws(
        sites, distinct_tensors(trial.outputs), PROBE_BATCH
    )
    return same if draws_same else None


def _blocks_on_two_lengths(
    resized: ResizedForward,
    pairs: Iterable[tuple[tuple[str, Operation], Operation]],
    block_calls: RecordedBlockCalls,
    in_dtype: Collection[int],
) -> dict[str, BlockOnTwoLengths]:
    """Returns the block calls of a recording that compute the same in `resized`; `pairs` holds its located
    operations with theirs, and `in_dtype` the tensors in the dtype of the parameters.
    """
    varying = {
        block_call
        for (block_call, one), other in pairs
        if one.constants != other.constants and takes_number(one.name.strip("_"))
    }
    found: dict[str, BlockOnTwoLengths] = {}
    for name, call in block_calls.calls.items():
        if name in varying or name not in resized.block_shapes:
            continue
        taken, returned = resized.block_shapes[name]
        given = call.start.args, call.start.kwargs
        found[name] = BlockOnTwoLengths(
            _pair_shapes(given, taken),
            _pair_shapes(call.outputs, returned),
            resized.lengths,
            (PROBE_BATCH, RESIZED_BATCH_SIZE),
            [
                path
                for path, record in named_tensors(given, kind=TensorRecord)
                if record.id in in_dtype or not record.dtype.is_floating_point
            ],
        )
    return found


def _pair_shapes(
    recorded: object, shapes: Mapping[str, torch.Size]
) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Returns the shapes of `recorded` tensors, each with that of the same path among `shapes`."""
    named = named_tensors(recorded, kind=TensorRecord)
    return {path: (record.shape, shapes[path]) for path, record in named if path in shapes}


def _repeated_forward(plan: DeferredInit, inputs: Example) -> RepeatedForward:
    return RepeatedForward(plan, {key: repeat_samples(value, PROBE_BATCH) for key, value in inputs.items()})


def _record_first(
    forward: RepeatedForward, names: tuple[str, ...], inputs: Example, layers: Mapping[str, str]
) -> tuple[RepeatedForward, RecordedTrial, DrawSites]:
    """Records `forward` on fake tensors, or on real ones if it reads values: `reads_values` is then set."""
    rng = StatelessRNG(seed=0)
    try:
        trial, _ = forward.run(partial(_record_trial, names, layers, rng, None), rng, seed=None)
    except Exception as error:
        if forward.reads_values or isinstance(error, PlanError) or not depends_on_values(error):
            raise _as_trial_error(error, inputs, forward.deferred_init) from error
        return _record_first(replace(forward, reads_values=True), names, inputs, layers)
    return forward, trial, rng.sites


def _record_trial(
    names: tuple[str, ...],
    layers: Mapping[str, str],
    rng: StatelessRNG,
    once: EqualBlocksOnce | None,
    module: nn.Module,
    batch: Example,
) -> RecordedTrial:
    num_samples = len(next(iter(batch.values())))
    blocks, run = get_blocks(module, names), lambda: module(**batch)
    return record_trial(
        module, blocks, rng.enter_block, run, layers, lambda: rng.num_draws, num_samples, once
    )


def _as_trial_error(error: Exception, inputs: Example, plan: DeferredInit) -> PlanError:
    return error if isinstance(error, PlanError) else trial_error(error, inputs, plan.instantiate())
