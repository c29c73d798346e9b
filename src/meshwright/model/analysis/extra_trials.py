"""Trials of a model behind the first one: what they look for is known only when the layers are.

Each makes the model anew on fake tensors. Of a forward that looks at values, they find nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.blocks.discovery import WHOLE
from meshwright.model.blocks.loss_inputs import Judge
from meshwright.model.hf.config import use_experts_on_trial
from meshwright.model.loading.meta_init import Blueprint
from meshwright.model.rng.dropout_mode import trial
from meshwright.model.rng.sites import Dice
from meshwright.model.sequence_analysis.analysis import MORE, Ready, Trial, tokens_of
from meshwright.model.tensor_parallel.joint_sums import Summands
from meshwright.model.tensor_parallel.residual_stream import followed
from meshwright.model.tensor_parallel.slice_plan import Proposal
from meshwright.model.trial.divisible_layers import Propose
from meshwright.model.trial.slice_trial import tried
from meshwright.model.trial.trial import PROBE_BATCH, depends_on_values, fake_copy
from meshwright.plan.model_spec.layer_calls import Number
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.model_spec.sequence_info import Tokens

Example = Mapping[str, torch.Tensor]


def tried_on(
    plan: Blueprint, names: tuple[str, ...], inputs: Example, propose: Propose
) -> tuple[Proposal, tuple[Number, ...], tuple[str, ...]]:
    """What runs on slices of what is proposed."""
    mode, dice = FakeTensorMode(allow_non_fake_inputs=True), Dice(seed=0)

    def made() -> nn.Module:
        module = on_trial(plan)
        fake_copy(module, mode)
        return module

    @contextmanager
    def ready(module: nn.Module) -> Iterator[Callable[[], object]]:
        rows = {key: mode.from_tensor(rows_of(value, PROBE_BATCH)) for key, value in inputs.items()}
        with mode, trial(dice, PROBE_BATCH):
            yield lambda: module(**rows)

    return tried(propose, made, ready, () if names == (WHOLE,) else names)


def streamed(anatomy: Anatomy, plan: Blueprint, names: tuple[str, ...], inputs: Example) -> Anatomy:
    """`anatomy` with the way of the stream and the sums that layers end in, where there are pairs of layers on it.

    That is what a second trial shows that knows them.

    Of a model whose forward looks at values, nothing is found.
    """
    if not any(call.role == "columns" for call in anatomy.calls):
        return anatomy
    mode, dice, summands = FakeTensorMode(allow_non_fake_inputs=True), Dice(seed=0), Summands()
    module = on_trial(plan)
    fake_copy(module, mode)
    try:
        rows = {key: mode.from_tensor(rows_of(value, PROBE_BATCH)) for key, value in inputs.items()}
        with mode, trial(dice, PROBE_BATCH):
            blocks, forward = blocks_of(module, names), lambda: module(**rows)
            summing = [call.name for call in anatomy.calls if call.role == "rows"]
            with summands.watching(module, blocks, summing):
                calls, passages = followed(module, blocks, anatomy.calls, dice.enter, forward, in_place=anatomy.in_place)
    except Exception as error:
        if not depends_on_values(error):
            raise
        return anatomy
    return replace(anatomy, calls=summands.marked(calls), passages=passages)


def dealt(
    visits: tuple[str, ...], plan: Blueprint, names: tuple[str, ...], inputs: Example, targets: Example, judge: Judge | None
) -> Tokens | None:
    """What the model does with tokens (core/tokens.py), where its inputs have any.

    What glue computes of rows alone, positions and masks, has values: whether there is a mask at all may depend on them.
    """
    return tokens_of(inputs, targets, visits, plan.instance(), ready_on(plan, names), judge)


def ready_on(plan: Blueprint, names: tuple[str, ...]) -> Ready:
    """What makes trials of the model; the rows in them are real."""
    dice = Dice(seed=0)

    @contextmanager
    def ready(batch: Example, rows: int) -> Iterator[Trial]:
        mode, module, wide = FakeTensorMode(allow_non_fake_inputs=True), on_trial(plan), rows == MORE
        fake_copy(module, mode, (lambda name: plan.made_in(name, torch.float64)) if wide else None)
        with trial(dice, rows):
            some = {key: rows_of(value, rows) for key, value in batch.items()}
            some = {key: value.double() if wide and value.is_floating_point() else value for key, value in some.items()}
            yield Trial(module, blocks_of(module, names), dice.enter, some, mode)

    return ready


def on_trial(plan: Blueprint) -> nn.Module:
    """A module on blank parameters, in training mode, that fake tensors can pass."""
    module = in_training(plan.instance())
    use_experts_on_trial(module)  # the grouped product takes no fake float32, and says so on the terminal
    return module


def rows_of(value: torch.Tensor, batch: int) -> torch.Tensor:
    """`batch` rows like those of `value`."""
    repeats = -(-batch // len(value))
    rows = value.detach().repeat(repeats, *[1] * (value.ndim - 1))[:batch]
    return rows.requires_grad_(value.requires_grad)


def blocks_of(module: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """The blocks of `module` by name."""
    return {WHOLE: module} if names == (WHOLE,) else {name: module.get_submodule(name) for name in names}


def in_training(module: nn.Module) -> nn.Module:
    """`module`, in training mode unless it came so: then what it set itself stays."""
    return module if module.training else module.train()
