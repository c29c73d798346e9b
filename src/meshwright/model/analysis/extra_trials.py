"""Trials of a model behind the first one: what they look for is known only when the layers are.

Each makes the model anew on fake tensors. Of a forward that looks at values, they find nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.blocks.discovery import WHOLE_MODEL
from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.model.hf.config import use_batched_experts
from meshwright.model.loading.meta_init import DeferredInit
from meshwright.model.rng.dropout_mode import record_draw_sites
from meshwright.model.rng.sites import StatelessRNG
from meshwright.model.sequence_analysis.analysis import (
    LARGER_BATCH_SIZE,
    SequenceTrial,
    TrialFactory,
    analyze_sequence,
)
from meshwright.model.tensor_parallel.joint_sums import JointSums
from meshwright.model.tensor_parallel.residual_stream import trace_residual_stream
from meshwright.model.tensor_parallel.slice_plan import SplitProposal
from meshwright.model.trial.divisible_layers import ProposeSplits
from meshwright.model.trial.slice_trial import try_on_slices
from meshwright.model.trial.trial import PROBE_BATCH, depends_on_values, make_fake
from meshwright.plan.model_spec.layer_calls import SizeAttribute
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import SequenceInfo

Example = Mapping[str, torch.Tensor]


def try_splits_on_slices(
    deferred_init: DeferredInit, block_names: tuple[str, ...], inputs: Example, propose: ProposeSplits
) -> tuple[SplitProposal, tuple[SizeAttribute, ...], tuple[str, ...]]:
    """What runs on slices of what is proposed."""
    mode, dice = FakeTensorMode(allow_non_fake_inputs=True), StatelessRNG(seed=0)

    def made() -> nn.Module:
        module = make_trial_module(deferred_init)
        make_fake(module, mode)
        return module

    @contextmanager
    def ready(module: nn.Module) -> Iterator[Callable[[], object]]:
        rows = {key: mode.from_tensor(repeat_samples(value, PROBE_BATCH)) for key, value in inputs.items()}
        with mode, record_draw_sites(dice, PROBE_BATCH):
            yield lambda: module(**rows)

    return try_on_slices(propose, made, ready, () if block_names == (WHOLE_MODEL,) else block_names)


def add_residual_stream(
    model_spec: ModelSpec, deferred_init: DeferredInit, block_names: tuple[str, ...], inputs: Example
) -> ModelSpec:
    """`anatomy` with the way of the stream and the sums that layers end in, where there are pairs of layers on it.

    That is what a second trial shows that knows them.

    Of a model whose forward looks at values, nothing is found.
    """
    if not any(call.role == "colwise" for call in model_spec.layer_calls):
        return model_spec
    mode, dice, summands = FakeTensorMode(allow_non_fake_inputs=True), StatelessRNG(seed=0), JointSums()
    module = make_trial_module(deferred_init)
    make_fake(module, mode)
    try:
        rows = {key: mode.from_tensor(repeat_samples(value, PROBE_BATCH)) for key, value in inputs.items()}
        with mode, record_draw_sites(dice, PROBE_BATCH):
            blocks, forward = get_blocks(module, block_names), lambda: module(**rows)
            summing = [call.name for call in model_spec.layer_calls if call.role == "rowwise"]
            with summands.follow_layers(module, blocks, summing):
                calls, passages = trace_residual_stream(
                    module,
                    blocks,
                    model_spec.layer_calls,
                    dice.enter_block,
                    forward,
                    writes_in_place=model_spec.writes_in_place,
                )
    except Exception as error:
        if not depends_on_values(error):
            raise
        return model_spec
    return replace(model_spec, layer_calls=summands.mark_calls(calls), residual_flows=passages)


def find_sequence_info(
    block_calls: tuple[str, ...],
    deferred_init: DeferredInit,
    block_names: tuple[str, ...],
    inputs: Example,
    targets: Example,
    loss_spec: LossSpec | None,
) -> SequenceInfo | None:
    """What the model does with tokens (core/tokens.py), where its inputs have any.

    What glue computes of rows alone, positions and masks, has values: whether there is a mask at all may depend on them.
    """
    return analyze_sequence(
        inputs,
        targets,
        block_calls,
        deferred_init.instantiate(),
        make_trial_factory(deferred_init, block_names),
        loss_spec,
    )


def make_trial_factory(deferred_init: DeferredInit, block_names: tuple[str, ...]) -> TrialFactory:
    """What makes trials of the model; the rows in them are real."""
    dice = StatelessRNG(seed=0)

    @contextmanager
    def ready(batch: Example, rows: int) -> Iterator[SequenceTrial]:
        mode, module, wide = (
            FakeTensorMode(allow_non_fake_inputs=True),
            make_trial_module(deferred_init),
            rows == LARGER_BATCH_SIZE,
        )
        make_fake(
            module, mode, (lambda name: deferred_init.init_dtype(name, torch.float64)) if wide else None
        )
        with record_draw_sites(dice, rows):
            some = {key: repeat_samples(value, rows) for key, value in batch.items()}
            some = {
                key: value.double() if wide and value.is_floating_point() else value
                for key, value in some.items()
            }
            yield SequenceTrial(module, get_blocks(module, block_names), dice.enter_block, some, mode)

    return ready


def make_trial_module(deferred_init: DeferredInit) -> nn.Module:
    """A module on blank parameters, in training mode, that fake tensors can pass."""
    module = set_training_mode(deferred_init.instantiate())
    use_batched_experts(module)  # the grouped product takes no fake float32, and says so on the terminal
    return module


def repeat_samples(value: torch.Tensor, num_samples: int) -> torch.Tensor:
    """`batch` rows like those of `value`."""
    repeats = -(-num_samples // len(value))
    rows = value.detach().repeat(repeats, *[1] * (value.ndim - 1))[:num_samples]
    return rows.requires_grad_(value.requires_grad)


def get_blocks(module: nn.Module, block_names: tuple[str, ...]) -> dict[str, nn.Module]:
    """The blocks of `module` by name."""
    return (
        {WHOLE_MODEL: module}
        if block_names == (WHOLE_MODEL,)
        else {name: module.get_submodule(name) for name in block_names}
    )


def set_training_mode(module: nn.Module) -> nn.Module:
    """`module`, in training mode unless it came so: then what it set itself stays."""
    return module if module.training else module.train()
