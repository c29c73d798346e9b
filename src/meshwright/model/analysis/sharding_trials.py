"""Runs the trials that need the layers of the model, which the first trial finds.

Each trial makes the model again on fake tensors. A model whose forward reads values of tensors gets no
result.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.blocks.discovery import WHOLE_MODEL
from meshwright.model.hf.model_from_config import use_batched_experts
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.rng.stateless_dropout import repeat_draw_sites
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.sequence_analysis.analyze_sequence import (
    LARGER_BATCH_SIZE,
    SequenceTrial,
    TrialFactory,
    analyze_sequence,
)
from meshwright.model.sequence_analysis.trial_lengths import BlockOnTwoLengths
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH, make_fake
from meshwright.model.trial.weight_slice_trial import (
    ProposeSplits,
    RecordedBlocks,
    TriedSplits,
    try_on_slices,
)
from meshwright.plan.model_spec.sequence_info import SequenceInfo

Example = Mapping[str, torch.Tensor]


def try_splits_on_slices(
    deferred_init: DeferredInit, recorded: RecordedBlocks, inputs: Example, propose: ProposeSplits
) -> TriedSplits:
    """Returns the proposed splits that run on slices of fake weights, and what had to be given up."""
    mode, rng = FakeTensorMode(allow_non_fake_inputs=True), StatelessRNG(seed=0)

    def make_module() -> nn.Module:
        module = make_trial_module(deferred_init)
        make_fake(module, mode)
        return module

    @contextmanager
    def make_trial(module: nn.Module) -> Iterator[Callable[[], object]]:
        samples = {key: mode.from_tensor(repeat_samples(value, PROBE_BATCH)) for key, value in inputs.items()}
        with mode, repeat_draw_sites(rng, PROBE_BATCH):
            yield lambda: module(**samples)

    return try_on_slices(propose, make_module, make_trial, recorded)


def find_sequence_info(
    block_calls: tuple[str, ...],
    deferred_init: DeferredInit,
    block_names: tuple[str, ...],
    inputs: Example,
    targets: Example,
    loss: Loss,
    equal_calls: Mapping[str, str],
    on_two_lengths: Mapping[str, BlockOnTwoLengths],
) -> SequenceInfo | None:
    """Returns how the model treats the sequence dim; None if its inputs have no sequences.

    `equal_calls` names the first equal block call of some; `on_two_lengths` holds those that compute the same
    on two lengths.

    Glue that depends on the inputs alone (positions, masks) runs on real values: whether there is a mask at
    all may depend on them.
    """
    return analyze_sequence(
        inputs,
        targets,
        block_calls,
        deferred_init.read(tensor_sizes),
        make_trial_factory(deferred_init, block_names),
        loss,
        equal_calls,
        on_two_lengths,
    )


def tensor_sizes(module: nn.Module) -> frozenset[int]:
    """Returns the sizes of all dims of the parameters and buffers of `module`."""
    return frozenset(size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape)


def make_trial_factory(deferred_init: DeferredInit, block_names: tuple[str, ...]) -> TrialFactory:
    """Returns a factory of sequence trials of the model; the samples in them are real tensors."""
    rng = StatelessRNG(seed=0)

    @contextmanager
    def make_trial(batch: Example, num_samples: int) -> Iterator[SequenceTrial]:
        mode, module, is_float64 = (
            FakeTensorMode(allow_non_fake_inputs=True),
            make_trial_module(deferred_init),
            num_samples == LARGER_BATCH_SIZE,
        )
        make_fake(
            module, mode, (lambda name: deferred_init.init_dtype(name, torch.float64)) if is_float64 else None
        )
        with repeat_draw_sites(rng, num_samples):
            batch = {key: repeat_samples(value, num_samples) for key, value in batch.items()}
            batch = {
                key: value.double() if is_float64 and value.is_floating_point() else value
                for key, value in batch.items()
            }
            yield SequenceTrial(module, get_blocks(module, block_names), rng.enter_block, batch, mode)

    return make_trial


def make_trial_module(deferred_init: DeferredInit) -> nn.Module:
    """Returns a module on meta parameters in training mode that runs on fake tensors."""
    module = set_training_mode(deferred_init.instantiate())
    use_batched_experts(module)  # the grouped matmul does not accept fake float32 and warns about it
    return module


def repeat_samples(value: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Returns `num_samples` samples, repeated from `value`."""
    repeats = -(-num_samples // len(value))
    samples = value.detach().repeat(repeats, *[1] * (value.ndim - 1))[:num_samples]
    return samples.requires_grad_(value.requires_grad)


def get_blocks(module: nn.Module, block_names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Returns the blocks of `module` by name."""
    return (
        {WHOLE_MODEL: module}
        if block_names == (WHOLE_MODEL,)
        else {name: module.get_submodule(name) for name in block_names}
    )


def set_training_mode(module: nn.Module) -> nn.Module:
    """Switches `module` to training mode if it is in eval mode; a module in training mode keeps its own
    settings.
    """
    return module if module.training else module.train()
