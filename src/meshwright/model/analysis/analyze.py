"""A user's model as the rest of the house sees it: blueprint, blocks, and the anatomy that one trial forward shows.

Reading takes no parameter memory: the constructor runs on blank parameters, the trial on fake ones. Only a model whose
forward looks at values is made once, whole, on the CPU.

A model is run in training mode. One that comes in training mode keeps what it set itself: a part in eval mode stays so.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.extra_trials import (
    add_residual_stream,
    find_sequence_info,
    get_blocks,
    make_trial_factory,
    make_trial_module,
    repeat_samples,
    set_training_mode,
    try_splits_on_slices,
)
from meshwright.model.analysis.memory_trial import MemoryTrial, measure_memory
from meshwright.model.blocks.batch_coupling import TableUse
from meshwright.model.blocks.discovery import WHOLE_MODEL, find_blocks, param_owners
from meshwright.model.blocks.loss_inputs import LossSpec, batch_columns, loss_inputs, loss_saved_numel
from meshwright.model.hf.config import use_batched_experts, use_eager_experts
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.loading.meta_init import DeferredInit
from meshwright.model.rng.dropout_mode import record_draw_sites
from meshwright.model.rng.sharded_draws import sites_between_layers
from meshwright.model.rng.sites import DrawSites, StatelessRNG
from meshwright.model.sequence_analysis.runtime_check import SequenceShardCheck
from meshwright.model.tensor_parallel.layer_pairs import UNKNOWN_SPLIT
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles, hidden_matrices
from meshwright.model.tensors.fake_cache import clear_fake_caches
from meshwright.model.tensors.float64_mode import run_in_float64
from meshwright.model.trial.divisible_layers import find_divisible_layers, traced_roles
from meshwright.model.trial.trial import (
    PROBE_BATCH,
    TrialFindings,
    depends_on_values,
    make_fake,
    param_block_calls,
    run_trial,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ROOT, BatchTensor, ModelSpec, ParamSpec, block_of
from meshwright.plan.model_spec.op_costs import ModelMemory
from meshwright.plan.model_spec.sequence_info import SequenceInfo

if TYPE_CHECKING:
    from meshwright.model.analysis.pipeline_trial import ForwardGraphCache

Example = Mapping[str, torch.Tensor]
SECOND_BATCH_SIZE = 5
TrialResult = tuple[
    TrialFindings, DrawSites, tuple[BatchTensor, ...]
]  # what a trial shows; the columns are what is handed to the loss
NUMPY_RANDOM_NOTE = "the forward draws numbers with numpy.random: where they reach its outputs, another plan trains another model; draw with"
NUMPY_RANDOM_NOTE += " torch.rand, or turn off what draws (in transformers' models of speech apply_spec_augment, or a layer drop)"
FindLossInputs = Callable[[Any, Any], tuple[BatchTensor, ...]]


@dataclass(frozen=True)
class AnalyzedModel:
    """A model that can be made: `blueprint` for its values, `block_names`, its `anatomy`, and its dropout `sites`.

    It was read from `loaded`. `example` is one row of every key of a batch, for ranks that have none; `few` are some. `stateful`
    are the buffers that a training forward writes, `attends` the visits that call torch's attention, `captured` how many tensors
    leave blocks by each side channel, `unused` the trained parameters that the trial did not use, `tables` those that look at all
    rows of a batch, and `unseen` the lines of code in which glue writes with nobody told.
    """

    deferred_init: DeferredInit
    block_names: tuple[str, ...]
    model_spec: ModelSpec
    draw_sites: DrawSites
    example: dict[str, torch.Tensor]
    loaded_model: LoadedModel = field(repr=False, compare=False)
    written_buffers: tuple[str, ...] = ()
    attention_calls: tuple[str, ...] = ()
    num_captured: dict[str, int] = field(default_factory=dict)
    unused_params: tuple[str, ...] = ()
    example_samples: Example = field(default_factory=dict, repr=False, compare=False)
    loss_spec: LossSpec | None = field(default=None, repr=False, compare=False)
    table_uses: tuple[TableUse, ...] = ()
    untracked_write_lines: tuple[str, ...] = ()

    def for_example(self, example: Example) -> "AnalyzedModel":
        """The reading of the same model on rows like those of `example`, a batch that has them of another length."""
        return analyze(
            self.loaded_model, example, tuple(each.name for each in self.model_spec.targets), self.loss_spec
        )

    @cached_property
    def sequence_info(self) -> SequenceInfo | None:
        """What the model does with tokens, learnt by a trial of its own when it is first asked; None where it takes in none."""
        inputs, targets = (
            {each.name: self.example_samples[each.name] for each in of}
            for of in (self.model_spec.inputs, self.model_spec.targets)
        )
        return find_sequence_info(
            self.model_spec.block_calls, self.deferred_init, self.block_names, inputs, targets, self.loss_spec
        )

    @cached_property
    def shard_check(self) -> SequenceShardCheck:
        """Whether its blocks compute alike on as many tokens as a run has, and on as few as a rank has (model/alike.py)."""
        inputs = {each.name: self.example_samples[each.name] for each in self.model_spec.inputs}
        return SequenceShardCheck(inputs, make_trial_factory(self.deferred_init, self.block_names))

    @cached_property
    def forward_graphs(self) -> dict[torch.dtype, "ForwardGraphCache"]:
        """The courses of its forward by the dtype of parameters, as far as somebody has asked for them (model/courses.py)."""
        return {}

    def measure_memory(self, param_dtype: torch.dtype, compute_dtype: torch.dtype) -> ModelMemory | None:
        """What the model holds in memory in these dtypes, weighed when it is first asked; None where nobody can tell."""
        if (param_dtype, compute_dtype) not in self._memory_by_dtypes:
            self._memory_by_dtypes[param_dtype, compute_dtype] = self._measure_memory(
                param_dtype, compute_dtype
            )
        return self._memory_by_dtypes[param_dtype, compute_dtype]

    @cached_property
    def _memory_by_dtypes(self) -> dict[tuple[torch.dtype, torch.dtype], ModelMemory | None]:
        return {}

    def _measure_memory(self, param_dtype: torch.dtype, compute_dtype: torch.dtype) -> ModelMemory | None:
        if self.loss_spec is None or self.loss_spec.whole_batch:
            return None

        def make(mode: FakeTensorMode) -> tuple[nn.Module, dict[str, nn.Module]]:
            return self.make_module("cpu", param_dtype, mode)[:2]

        casts = None if compute_dtype == param_dtype else compute_dtype
        return measure_memory(
            MemoryTrial(make, self.example_samples, self.loss_spec, self.model_spec.writes_in_place, casts)
        )

    def make_module(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        fake_mode: FakeTensorMode | None = None,
        blank_params: Container[str] = (),
    ) -> tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Parameter]]:
        """A module with initial values on `device`, in training mode; its blocks; its logical parameters by first name.

        With `fake` it has parameters and buffers of that mode instead: shapes on the CPU, without values or memory. Parameters
        in `blank` have neither, too; `blueprint.value` gives theirs.
        """
        module = self.deferred_init.instantiate()
        if fake_mode is not None:
            make_fake(module, fake_mode, lambda name: self.deferred_init.init_dtype(name, dtype))
            use_batched_experts(module)
        else:
            self.deferred_init.materialize(module, dtype=dtype, device=device, without_values=blank_params)
        if dtype == torch.float64 and fake_mode is None:
            use_eager_experts(module)
        if dtype == torch.float64:
            run_in_float64(module)
        return (
            set_training_mode(module),
            get_blocks(module, self.block_names),
            dict(module.named_parameters()),
        )


def analyze(
    loaded_model: LoadedModel,
    example: Example,
    target_names: tuple[str, ...],
    loss_spec: LossSpec | None = None,
) -> AnalyzedModel:
    """The reading of the model that `loaded` builds, learnt from a forward on rows like those of `example`.

    `targets` are the keys of the batch that are not passed to the model; `judge` is the loss, by which the reading knows what
    it takes. Raises PlanError when the forward fails on the
    example, when a tensor goes round the border of a block, when gradients are taken between blocks, and when the model
    draws random numbers that cannot be replayed.
    """
    plan = loaded_model.deferred_init
    _check_example(example)
    inputs = {key: value for key, value in example.items() if key not in target_names}
    module = plan.instantiate()
    names = tuple(find_blocks(module, loaded_model.blocks or ()))
    loss_spec = loss_spec or LossSpec(_missing_loss, target_names)
    few = {key: repeat_samples(value, PROBE_BATCH) for key, value in example.items()}
    look = partial(loss_inputs, loss_spec, few)
    other = loss_spec.whole_batch
    sockets = find_layer_roles(module, loaded_model.layer_roles)
    roles = traced_roles(module, sockets, loaded_model.layer_roles)
    found, sites, outputs = _run_trial(plan, names, inputs, look, roles, other=other)
    _check_declared(loaded_model.blocks or (), found.block_calls)
    if not found.block_calls:  # the blocks' own forwards are never called: somebody calls into their parts
        names = (WHOLE_MODEL,)
        found, sites, outputs = _run_trial(plan, names, inputs, look, roles, other=other)
    held = param_owners(module, get_blocks(module, names))
    holders = {name: held.get(id(parameter), []) for name, parameter in module.named_parameters()}
    hidden = hidden_matrices(module)
    shown = find_divisible_layers(
        module, found, sockets, roles, loss_spec, partial(try_splits_on_slices, plan, names, inputs)
    )
    sites.layer_pairs = sites_between_layers(found.layer_uses.uses, found.num_draws, shown.calls)
    weights = tuple(
        ParamSpec(
            name,
            entry.shape,
            param_block_calls(holders[name], found.param_users[name], found.block_calls),
            entry.requires_grad,
            entry.aliases,
            str(entry.dtype).removeprefix("torch.") if plan.keeps_dtype(name) else "",
            name in hidden,
            shown.weight_parts.get(name, UNKNOWN_SPLIT).role,
            shown.weight_parts.get(name, UNKNOWN_SPLIT).dim_splits,
            shown.unsharded_reasons.get(name, ""),
            shown.user_roles.get(name, ""),
        )
        for name, entry in plan.logical_params.items()
    )
    numel, flops = tuple(found.output_numel), tuple(found.flops)
    notes = (
        tuple(_model_notes(names == (WHOLE_MODEL,) and not loaded_model.blocks, weights, found)) + shown.notes
    )
    anatomy = ModelSpec(
        loaded_model.name,
        tuple(found.block_calls),
        weights,
        numel,
        flops,
        bool(sites.layouts),
        found.writes_in_place,
        notes,
    )
    targeted = {key: value for key, value in example.items() if key in target_names}
    batch = batch_columns(inputs), batch_columns(targeted)
    anatomy = replace(
        anatomy,
        inputs=batch[0],
        targets=batch[1],
        outputs=outputs,
        needs_global_batch=other,
        pretrained_source=plan.pretrained_source,
    )
    anatomy = replace(
        anatomy, saved_numel=tuple(found.saved_numel), layer_calls=shown.calls, logits=shown.logits
    )
    anatomy = replace(
        anatomy,
        size_attributes=shown.size_attributes,
        per_head_inputs=shown.per_head_inputs,
        user_checkpointed_calls=tuple(dict.fromkeys(found.user_checkpointed_calls)),
    )
    anatomy = replace(
        add_residual_stream(anatomy, plan, names, inputs),
        loss_saved_numel=loss_saved_numel(loss_spec, few, found.outputs) // PROBE_BATCH,
    )
    row = {key: value.detach()[:1].clone() for key, value in example.items()}
    unused = tuple(
        name
        for name, entry in plan.logical_params.items()
        if entry.requires_grad and not found.param_users[name]
    )
    few = {key: value.detach() for key, value in few.items()}
    clear_fake_caches(module)
    told = (
        tuple(found.written_buffers),
        tuple(dict.fromkeys(found.attention_calls)),
        found.num_captured,
        unused,
    )
    return AnalyzedModel(
        plan,
        names,
        anatomy,
        sites,
        row,
        loaded_model,
        *told,
        few,
        loss_spec,
        tuple(found.table_uses),
        tuple(found.untracked_write_lines),
    )


def _run_trial(
    plan: DeferredInit,
    names: tuple[str, ...],
    inputs: Example,
    look: FindLossInputs,
    layers: Mapping[str, str],
    *,
    other: bool,
) -> TrialResult:
    rows = {
        batch: {key: repeat_samples(value, batch) for key, value in inputs.items()}
        for batch in (PROBE_BATCH, SECOND_BATCH_SIZE)
    }
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = make_trial_module(plan)
    make_fake(module, mode)
    try:
        with mode:
            fakes = {
                batch: {key: mode.from_tensor(value) for key, value in some.items()}
                for batch, some in rows.items()
            }
            return _forwards(module, names, fakes, look, layers, other=other)
    except PlanError:
        raise
    except Exception as error:
        if not depends_on_values(error):
            raise _forward_error(error, inputs) from error
    module = make_trial_module(plan)
    use_eager_experts(
        module
    )  # on real tensors, weights by token would take the memory of as many experts as tokens
    plan.materialize(module)
    try:
        return _forwards(module, names, rows, look, layers, other=other)
    except PlanError:
        raise
    except Exception as error:
        raise _forward_error(error, inputs) from error


def _forwards(
    module: nn.Module,
    names: tuple[str, ...],
    rows: Mapping[int, Example],
    look: FindLossInputs,
    layers: Mapping[str, str],
    *,
    other: bool,
) -> TrialResult:
    dice, blocks = StatelessRNG(seed=0), get_blocks(module, names)

    def forward(batch: int) -> TrialFindings:
        before = repr(np.random.get_state(legacy=False))
        with record_draw_sites(dice, batch):
            found = run_trial(
                module,
                blocks,
                dice.enter_block,
                lambda: module(**rows[batch]),
                layers,
                lambda: dice.num_draws,
            )
        found.draws_from_numpy = repr(np.random.get_state(legacy=False)) != before
        return found

    found = forward(PROBE_BATCH)
    wider = None
    if (
        dice.sites.layouts or other
    ):  # a second size tells the batch dim of what is drawn from other dims of the first size
        wider = forward(SECOND_BATCH_SIZE).outputs
    return found, dice.sites, look(found.outputs, wider)


def _check_example(example: Example) -> None:
    shapes = {key: tuple(value.shape) for key, value in example.items()}
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or 0 in rows:
        given = ", ".join(f"{key} of shape {list(shape)}" for key, shape in shapes.items()) or "no tensors"
        text = f"the example batch holds {given}; needed are the same rows along dim 0 of every tensor, at least one"
        raise PlanError(
            text,
            fix="give one batch as the loader makes it, by the names of the forward's arguments",
            location="example",
        )


def _check_declared(declared: Iterable[str], visits: Iterable[str]) -> None:
    called = {block_of(visit) for visit in visits}
    idle = [name for name in declared if name not in called]
    if idle:
        text = f"the declared blocks {', '.join(idle)} are not called in the trial run, or only without gradients"
        fix = "declare modules whose forward the model calls on every batch; one that is used by its parts alone is no block"
        raise PlanError(text, fix=fix, location="model.blocks")


def _forward_error(error: Exception, inputs: Example) -> PlanError:
    given = ", ".join(
        f"{key} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for key, value in inputs.items()
    )
    text = f"the forward fails in a trial run on rows like {given or 'no arguments'}: {type(error).__name__}: {error}"
    fix = "repair the forward (the traceback above is its own), or the example: its keys, less the targets, are the arguments"
    fix = f"{fix}; a model that takes something else than text returns one: meshwright.Model(module, example={{...}})"
    return PlanError(text, fix=fix, location="model")


def _model_notes(unbroken: bool, weights: tuple[ParamSpec, ...], found: TrialFindings) -> Iterator[str]:
    if unbroken:
        yield "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward"
    in_glue = [weight.name for weight in weights if ROOT in weight.block_calls]
    if in_glue:
        yield f"{len(in_glue)} parameters are used outside blocks ({in_glue[0]}...): complete after the last backward"
    if found.written_buffers:
        yield f"{len(found.written_buffers)} buffers are written by the forward ({found.written_buffers[0]}...): every rank writes its own"
    if found.draws_from_numpy:
        yield NUMPY_RANDOM_NOTE


def _missing_loss(outputs: Any, batch: Example) -> torch.Tensor:
    raise NotImplementedError(
        "no loss was given to the reading: it takes all outputs to be used; pass judge=Judge(...)"
    )
