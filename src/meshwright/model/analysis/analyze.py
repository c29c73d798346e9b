"""Analyzes a user's model: deferred init, blocks, and the `ModelSpec` that one trial forward finds.

The analysis allocates no parameter memory: the constructor runs on meta parameters and the trial on fake
tensors. Only a model whose forward reads values of tensors is made once in full, on the CPU.

The model is run in training mode. A model that arrives in training mode keeps its own settings: a submodule
in eval mode stays in eval mode.
"""

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.find_model_loss import find_loss_inputs
from meshwright.model.analysis.memory_trial import MemoryTrial, measure_memory
from meshwright.model.analysis.record_model import record_model, run_trials
from meshwright.model.analysis.repeated_forward import ResizedForward
from meshwright.model.analysis.sharding_trials import (
    find_sequence_info,
    get_blocks,
    make_trial_factory,
    make_trial_module,
    repeat_samples,
    set_training_mode,
    try_splits_on_slices,
)
from meshwright.model.blocks.batch_coupling import TableUse, localize_sync_batch_norm
from meshwright.model.blocks.discovery import WHOLE_MODEL, find_blocks, param_owners
from meshwright.model.hf.cached_layers import TRIAL_DTYPE, find_cached_layers
from meshwright.model.hf.model_from_config import (
    gathers_expert_weights,
    use_batched_experts,
    use_eager_experts,
    use_grouped_experts,
)
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.loss.as_loss import check_is_sum
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.loss_inputs import batch_columns, loss_saved_numel
from meshwright.model.recording.forward_recording import Recording
from meshwright.model.recording.plain_lookups import not_plain_lookups
from meshwright.model.recording.plain_products import plain_linear_layers
from meshwright.model.rng.sharded_draws import sites_between_layers
from meshwright.model.rng.stateless_rng import DrawSites
from meshwright.model.sequence_analysis.same_ops_on_shards import SequenceShardCheck
from meshwright.model.sequence_analysis.trial_lengths import BlockOnTwoLengths
from meshwright.model.tensor_parallel.layer_pairs import UNKNOWN_SPLIT
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles, hidden_matrices
from meshwright.model.tensor_parallel.residual_stream_trace import trace_residual_stream
from meshwright.model.tensor_parallel.shared_sum_trace import FusedAllReduces
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.float64_mode import run_in_float64
from meshwright.model.tensors.garbage_collection import pause_garbage_collection
from meshwright.model.trial.expert_slices import with_inner_splits
from meshwright.model.trial.experts_calls import choice_biases
from meshwright.model.trial.fake_tensor_forward import (
    PROBE_BATCH,
    TrialFindings,
    make_fake,
    param_block_calls,
)
from meshwright.model.trial.kept_outputs import kept_outputs
from meshwright.model.trial.shardable_layers import ShardableLayers, find_shardable_layers, traced_roles
from meshwright.model.trial.weight_slice_trial import RecordedBlocks
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from meshwright.plan.model_spec.model_spec import ROOT, ModelSpec, ParamSpec, block_of
from meshwright.plan.model_spec.op_sizes_and_memory import ModelMemory
from meshwright.plan.model_spec.sequence_info import SequenceInfo

if TYPE_CHECKING:
    from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache

Example = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class AnalyzedModel:
    """The analysis of a model: everything a plan needs to know, and everything needed to make the model
    again.

    `deferred_init` gives initial values, `loaded_model` is what was analyzed, `loss` what it is trained on.
    `example` holds one sample of every key of a batch, for ranks that receive no data; `example_samples`
    holds a few. `written_buffers` are the buffers that a training forward writes, `attention_calls` the block
    calls that call torch's attention, `num_captured` the number of tensors that leave blocks through each
    side channel, `unused_params` the trainable parameters that the trial did not use, `table_uses` the
    operations that couple all samples of a batch, and `untracked_write_lines` the source lines where glue may
    write to memory that no hook sees. `constants` are passed to every forward. `equal_block_calls`
    names, for a block call that computes the same as one before it, the first of these; `on_two_lengths`
    holds the block calls that compute the same on two lengths.
    """

    deferred_init: DeferredInit
    block_names: tuple[str, ...]
    model_spec: ModelSpec
    draw_sites: DrawSites
    example: dict[str, torch.Tensor]
    loaded_model: LoadedModel = field(repr=False, compare=False)
    loss: Loss = field(repr=False, compare=False)
    written_buffers: tuple[str, ...] = ()
    attention_calls: tuple[str, ...] = ()
    num_captured: dict[str, int] = field(default_factory=dict)
    unused_params: tuple[str, ...] = ()
    example_samples: Example = field(default_factory=dict, repr=False, compare=False)
    table_uses: tuple[TableUse, ...] = ()
    untracked_write_lines: tuple[str, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    equal_block_calls: Mapping[str, str] = field(default_factory=dict)
    on_two_lengths: Mapping[str, BlockOnTwoLengths] = field(default_factory=dict, repr=False, compare=False)

    def for_example(self, example: Example) -> "AnalyzedModel":
        """Returns the analysis of the same model for batches like `example`, whose sequences have another
        length.
        """
        return analyze(self.loaded_model, example, self.loss)

    def record_forward(self) -> Recording:
        """Returns the recording of a forward on the example, as the analysis reads it."""
        inputs = {each.name: self.example_samples[each.name] for each in self.model_spec.inputs}
        return record_model(self.loaded_model, self.block_names, inputs)

    @cached_property
    @pause_garbage_collection()
    def sequence_info(self) -> SequenceInfo | None:
        """The treatment of the sequence dim by the model, found by its own trial on first use; None if it
        takes no tokens.
        """
        inputs, targets = (
            {each.name: self.example_samples[each.name] for each in of}
            for of in (self.model_spec.inputs, self.model_spec.targets)
        )
        return find_sequence_info(
            self.model_spec.block_calls,
            self.deferred_init,
            self.block_names,
            inputs,
            targets,
            self.loss,
            self.equal_block_calls,
            self.on_two_lengths,
        )

    @cached_property
    @pause_garbage_collection()
    def cached_layers(self) -> tuple[CachedLayer, ...] | None:
        """What the layers of the model cache while they generate, found by its own trial on first use; None
        if it is not known.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        module, blocks, _ = self.make_module("cpu", TRIAL_DTYPE, mode)
        found = find_cached_layers(module, blocks, mode)
        clear_fake_caches(module)
        return found

    @cached_property
    def shard_check(self) -> SequenceShardCheck:
        """Checks that blocks run the same operations on a sequence shard as on full sequences."""
        inputs = {each.name: self.example_samples[each.name] for each in self.model_spec.inputs}
        return SequenceShardCheck(inputs, make_trial_factory(self.deferred_init, self.block_names))

    @cached_property
    def forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the model's forward."""
        return self.deferred_init.forward_parameters

    @cached_property
    def forward_graphs(self) -> dict[tuple[torch.dtype, str], "ForwardGraphCache"]:
        """The forward graphs that were requested so far, by dtype of the parameters and type of device."""
        return {}

    def measure_memory(
        self, param_dtype: torch.dtype, compute_dtype: torch.dtype, device_type: str = "cpu"
    ) -> ModelMemory | None:
        """Returns the memory that the model needs in these dtypes on a device of that type; None if it cannot
        be determined.

        The first call for each of these runs a trial; later calls return its result.
        """
        casts = None if compute_dtype == param_dtype else compute_dtype
        key = param_dtype, casts, device_type
        if key not in self._measured_memory:
            self._measured_memory[key] = self._measure_memory(*key)
        return self._measured_memory[key]

    @cached_property
    def _measured_memory(self) -> dict[tuple[torch.dtype, torch.dtype | None, str], ModelMemory | None]:
        return {}

    @pause_garbage_collection()
    def _measure_memory(
        self, param_dtype: torch.dtype, casts: torch.dtype | None, device_type: str
    ) -> ModelMemory | None:
        if self.loss.whole_batch:
            return None

        gathers_experts = self.deferred_init.read(gathers_expert_weights)

        def make(mode: FakeTensorMode) -> tuple[nn.Module, dict[str, nn.Module]]:
            module, blocks, _ = self.make_module("cpu", param_dtype, mode)
            if not gathers_experts:
                use_grouped_experts(module)
            return module, blocks

        writes, samples = self.model_spec.writes_in_place, self.example_samples
        experts = self.model_spec.experts_calls
        return measure_memory(MemoryTrial(make, samples, self.loss, writes, casts, device_type, experts))

    def make_module(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        fake_mode: FakeTensorMode | None = None,
        blank_params: Container[str] = (),
    ) -> tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Parameter]]:
        """Returns a module on `device` in training mode, its blocks by name, and its logical parameters by
        first name.

        With `fake_mode`, parameters and buffers are fake tensors of that mode, without values or memory; this
        host need not have the device. Parameters in `blank_params` have no values either;
        `deferred_init.initial_value` gives them.
        """
        module = self.deferred_init.instantiate()
        if fake_mode is not None:
            make_fake(module, fake_mode, lambda name: self.deferred_init.init_dtype(name, dtype), device)
            use_batched_experts(module)
        else:
            self.deferred_init.materialize(module, dtype=dtype, device=device, without_values=blank_params)
        if dtype == torch.float64 and fake_mode is None:
            use_eager_experts(module)
        if dtype == torch.float64:
            run_in_float64(module)
        localize_sync_batch_norm(module)
        blocks, parameters = get_blocks(module, self.block_names), dict(module.named_parameters())
        return set_training_mode(module), blocks, parameters


@pause_garbage_collection()
def analyze(
    loaded_model: LoadedModel,
    example: Example,
    loss: Loss,
    resized: ResizedForward | None = None,
) -> AnalyzedModel:
    """Returns the analysis of the model that `loaded_model` builds, from a trial forward on samples like
    `example`.

    `example` is prepared for `loss` (`Loss.prepare`), which tells which outputs are used; `resized` is the
    forward that told the loss, if one did (`run_with_labels`). Raises PlanError if
    the forward fails on the example, if a tensor bypasses the boundary of a block, if gradients are taken
    between blocks, or if the model draws random numbers that cannot be reproduced.
    """
    plan = loaded_model.deferred_init
    _check_example(example)
    inputs = {key: value for key, value in example.items() if key not in loss.targets}
    targets = {key: value for key, value in example.items() if key in loss.targets}
    module = plan.instantiate()
    names = tuple(find_blocks(module, loaded_model.blocks or ()))
    example_samples = {key: repeat_samples(value, PROBE_BATCH) for key, value in example.items()}
    find_inputs = partial(find_loss_inputs, loss, example_samples)
    other = loss.whole_batch
    layer_roles = find_layer_roles(module, loaded_model.layer_roles)
    roles = traced_roles(module, layer_roles, loaded_model.layer_roles)
    run = partial(
        run_trials, plan, module, inputs=inputs, find_loss_inputs=find_inputs, layers=roles, resized=resized
    )
    findings, trial, block_calls, sites, outputs, on_two_lengths = run(names, whole_batch=other)
    _check_declared(loaded_model.blocks or (), findings.block_calls)
    # the forwards of the blocks are never called: the model calls their submodules
    if not findings.block_calls:
        names = (WHOLE_MODEL,)
        findings, trial, block_calls, sites, outputs, on_two_lengths = run(names, whole_batch=other)
    check_is_sum(loss, example_samples, trial.outputs)
    recorded = RecordedBlocks(trial.recording, block_calls, findings.feature_flow)
    try_splits = partial(try_splits_on_slices, plan, recorded, inputs)
    divisible = find_shardable_layers(module, findings, trial, layer_roles, roles, loss, try_splits)
    sites.layer_pairs = sites_between_layers(findings.layer_uses.uses, findings.num_draws, divisible.calls)
    if findings.experts_calls:
        findings.experts_calls = list(with_inner_splits(findings.experts_calls, make_trial_module(plan)))
    model_spec = _build_model_spec(loaded_model, module, names, findings, divisible)
    model_spec = _add_plain_layers(model_spec, module, trial.recording)
    model_spec = replace(
        _add_residual_stream(model_spec, trial.recording),
        has_dropout=bool(sites.layouts),
        inputs=batch_columns(inputs),
        targets=batch_columns(targets),
        outputs=outputs,
        needs_global_batch=other,
        num_batch_sums=loss.num_batch_sums,
        loss_saved_numel=loss_saved_numel(loss, example_samples, trial.outputs) // PROBE_BATCH,
    )
    unused = (each.name for each in model_spec.trainable if not findings.param_users[each.name])
    clear_fake_caches(module)
    return AnalyzedModel(
        plan,
        names,
        model_spec,
        sites,
        {key: value.detach()[:1].clone() for key, value in example.items()},
        loaded_model,
        loss,
        written_buffers=tuple(findings.written_buffers),
        attention_calls=tuple(dict.fromkeys(findings.attention_calls)),
        num_captured=findings.num_captured,
        unused_params=tuple(unused),
        example_samples={key: value.detach() for key, value in example_samples.items()},
        table_uses=tuple(findings.table_uses),
        untracked_write_lines=tuple(findings.untracked_write_lines),
        equal_block_calls=block_calls.equal_calls,
        on_two_lengths=on_two_lengths,
    )


def _build_model_spec(
    loaded_model: LoadedModel,
    module: nn.Module,
    block_names: tuple[str, ...],
    findings: TrialFindings,
    divisible: ShardableLayers,
) -> ModelSpec:
    plan, hidden = loaded_model.deferred_init, hidden_matrices(module)
    of_experts = {name for call in findings.experts_calls for name in call.params}
    owners_by_id = param_owners(module, get_blocks(module, block_names))
    owners = {name: owners_by_id.get(id(parameter), []) for name, parameter in module.named_parameters()}
    params = tuple(
        ParamSpec(
            name,
            entry.shape,
            param_block_calls(owners[name], findings.param_users[name], findings.block_calls),
            entry.requires_grad,
            entry.aliases,
            str(entry.dtype).removeprefix("torch.") if plan.keeps_dtype(name) else "",
            name in hidden or (len(entry.shape) == 3 and not of_experts.isdisjoint((name, *entry.aliases))),
            divisible.weight_parts.get(name, UNKNOWN_SPLIT).role,
            divisible.weight_parts.get(name, UNKNOWN_SPLIT).dim_splits,
            divisible.unsharded_reasons.get(name, ""),
            divisible.user_roles.get(name, ""),
        )
        for name, entry in plan.logical_params.items()
    )
    in_one_block = block_names == (WHOLE_MODEL,) and not loaded_model.blocks
    return ModelSpec(
        loaded_model.name,
        tuple(findings.block_calls),
        params,
        tuple(findings.output_numel),
        tuple(findings.flops),
        writes_in_place=findings.writes_in_place,
        notes=(*loaded_model.notes, *_model_notes(in_one_block, params, findings), *divisible.notes),
        pretrained_source=plan.pretrained_source,
        saved_numel=tuple(findings.saved_numel),
        requests_checkpointing=loaded_model.requests_checkpointing,
        user_checkpointed_calls=tuple(dict.fromkeys(findings.user_checkpointed_calls)),
        batch_norm_calls=tuple(findings.batch_norm_calls),
        relu_activations=tuple(findings.relu_activations),
        kept_outputs=kept_outputs(
            findings.output_storages,
            findings.layer_ranges.ranged_calls(divisible.calls, findings.layer_uses.uses),
            PROBE_BATCH,
        ),
        unread_products=findings.unread_products,
        experts_calls=tuple(findings.experts_calls),
        choice_biases=tuple(choice_biases(module, findings.experts_calls)),
        layer_calls=divisible.calls,
        logits=divisible.logits,
        size_attributes=divisible.size_attributes,
        per_head_inputs=divisible.per_head_inputs,
    )


def _add_plain_layers(model_spec: ModelSpec, module: nn.Module, recording: Recording) -> ModelSpec:
    """Returns `model_spec` with why embeddings are more than a lookup, and with plain linear layers."""
    reasons = not_plain_lookups(module, recording)
    params = tuple(replace(each, not_plain_lookup=reasons.get(each.name, "")) for each in model_spec.params)
    return replace(model_spec, params=params, linear_layers=plain_linear_layers(module, recording))


def _add_residual_stream(model_spec: ModelSpec, recording: Recording) -> ModelSpec:
    """Returns `model_spec` with the path of the residual stream and the sums in which rowwise layers end.

    A model without colwise layers is returned unchanged.
    """
    if not any(call.role == "colwise" for call in model_spec.layer_calls):
        return model_spec
    rowwise_layers = [call.name for call in model_spec.layer_calls if call.role == "rowwise"]
    calls, flows = trace_residual_stream(recording, model_spec.layer_calls)
    calls = FusedAllReduces(recording, rowwise_layers).mark_calls(calls)
    return replace(model_spec, layer_calls=calls, residual_flows=flows)


def _check_example(example: Example) -> None:
    shapes = {key: tuple(value.shape) for key, value in example.items()}
    batches = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(batches) != 1 or 0 in batches:
        given = ", ".join(f"{key} of shape {list(shape)}" for key, shape in shapes.items()) or "no tensors"
        text = (
            f"the example batch holds {given}; needed is the same number of samples along dim 0 "
            f"of every tensor, at least one"
        )
        raise PlanError(
            text,
            fix="give one batch as the loader makes it, by the names of the forward's arguments",
            location="example",
        )


def _check_declared(declared: Iterable[str], block_calls: Iterable[str]) -> None:
    called = {block_of(block_call) for block_call in block_calls}
    if idle := [name for name in declared if name not in called]:
        text = f"the declared blocks {', '.join(idle)} are not called in the trial, or only without gradients"
        fix = (
            "declare modules whose forward the model calls on every batch, not modules of which "
            "it calls only submodules"
        )
        raise PlanError(text, fix=fix, location="model.blocks")


def _model_notes(unbroken: bool, weights: tuple[ParamSpec, ...], findings: TrialFindings) -> Iterator[str]:
    if unbroken:
        yield (
            "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward"
        )
    in_glue = [weight.name for weight in weights if ROOT in weight.block_calls]
    if in_glue:
        yield (
            f"{len(in_glue)} parameters are used outside blocks ({in_glue[0]}...): complete "
            f"after the last backward"
        )
    if findings.written_buffers:
        yield (
            f"{len(findings.written_buffers)} buffers are written by the forward "
            f"({findings.written_buffers[0]}...): every rank writes its own"
        )
    if findings.outside_generators:
        yield (
            f"the forward draws numbers from {' and '.join(findings.outside_generators)}: no operation took "
            "one in a trial"
        )
