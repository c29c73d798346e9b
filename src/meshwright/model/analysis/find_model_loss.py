"""Finds the loss of a model for which none was given: the one that it computes itself, if it takes labels.

It runs a forward with labels, before all others, which are without: whether the model shifts the labels is
told by numbers, and a recording holds none. That forward runs on another number of samples, and on other
lengths where the model can: it is also the second of two forwards that are compared (repeated_forward.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.repeated_forward import (
    RESIZED_BATCH_SIZE,
    BlockShapes,
    RepeatedForward,
    ResizedForward,
)
from meshwright.model.analysis.sharding_trials import (
    Example,
    get_blocks,
    make_trial_module,
    repeat_samples,
    tensor_sizes,
)
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.blocks.discovery import find_blocks
from meshwright.model.hf.model_from_config import use_eager_experts
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.loss_inputs import distinct_tensors, loss_inputs
from meshwright.model.loss.model_loss import OWN_LOSS_FIX, label_keys, read_model_loss, returned_loss
from meshwright.model.recording.model_operations import OperationRecorder
from meshwright.model.rng.stateless_dropout import repeat_draw_sites
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.sequence_analysis.analyze_sequence import resize_sequence, sequence_lengths
from meshwright.model.sequence_analysis.token_dims import MIN_PRIME, distinguishing_primes
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.fake_tensor_limits import depends_on_values, without_fake_tensor_log
from meshwright.model.tensors.pytree import named_tensors
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH, RecordedTrial, make_fake
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor


@dataclass(frozen=True)
class LabelledForward:
    """A forward with labels: the loss that it computes, None if none, and what it shows on other sizes, None
    if it ran on those of the example.
    """

    loss: Loss | None = None
    resized: ResizedForward | None = None


def find_model_loss(loaded_model: LoadedModel, example: Example) -> Loss | None:
    """Returns the loss of the model on batches like `example`; see `run_with_labels`."""
    return run_with_labels(loaded_model, example).loss


def run_with_labels(loaded_model: LoadedModel, example: Example) -> LabelledForward:
    """Returns the forward with the labels of `example`; without a loss if the forward takes no labels or
    computes none.

    Raises PlanError for a forward that fails with labels, and for a loss that is no sum over tokens or
    samples.
    """
    deferred_init = loaded_model.deferred_init
    if not deferred_init.read(lambda module: label_keys(module, example)):
        return LabelledForward()
    try:
        return _on_other_sizes(loaded_model, example)
    except Exception:  # a model may take one length: what else is wrong shows with the sizes of the example
        return LabelledForward(_on_own_sizes(deferred_init, example))


def _on_other_sizes(loaded_model: LoadedModel, example: Example) -> LabelledForward:
    deferred_init, rng = loaded_model.deferred_init, StatelessRNG(seed=0)
    keys, names, sizes = deferred_init.read(
        lambda module: (
            label_keys(module, example),
            tuple(find_blocks(module, loaded_model.blocks or ())),
            tensor_sizes(module),
        )
    )
    inputs = {key: value for key, value in example.items() if key not in keys}
    lengths = _other_lengths(inputs, sizes)
    batch = {
        key: repeat_samples(resize_sequence(value, lengths), RESIZED_BATCH_SIZE)
        for key, value in example.items()
    }
    forward = RepeatedForward(deferred_init, batch)
    (loss, outputs, recorder, shapes), sources = forward.run(
        partial(_read_loss, names, rng), rng, draws=repeat_draw_sites
    )
    if loss is None or sources:
        return LabelledForward(loss)
    returned = [each.shape for each in distinct_tensors(outputs) if each is not returned_loss(outputs)]
    of_samples = {key: value.shape[1:] for key, value in inputs.items()}
    return LabelledForward(
        loss,
        ResizedForward(
            names, of_samples, lengths, recorder.operations, recorder.of_labels, rng.sites, shapes, returned
        ),
    )


def _other_lengths(inputs: Example, sizes: frozenset[int]) -> dict[int, int]:
    """Returns a small prime for the length of every input that is a sequence of tokens."""
    lengths = sequence_lengths(inputs)
    primes = distinguishing_primes(sizes.union(lengths, (PROBE_BATCH, RESIZED_BATCH_SIZE)), MIN_PRIME - 1)
    return dict(zip(lengths, islice(primes, len(lengths)), strict=True))


def _read_loss(
    names: tuple[str, ...], rng: StatelessRNG, module: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[Loss | None, Any, OperationRecorder, dict[str, BlockShapes]]:
    labels = [batch[key] for key in label_keys(module, batch)]
    recorder, outputs = OperationRecorder(module, labels), list[Any]()
    begun, shapes = list[str](), dict[str, BlockShapes]()

    def begin(block_call: str) -> None:
        rng.enter_block(block_call)
        begun.append(block_call)

    def note_shapes(name: str, run: Any, args: Any, kwargs: Any) -> Any:
        number, given = len(begun), _shapes((args, kwargs))
        returned = run(*args, **kwargs)
        if len(begun) > number:  # with gradients: it counts as a block call
            shapes[begun[number]] = given, _shapes(returned)
        return returned

    def forward(batch: Mapping[str, torch.Tensor]) -> Any:
        driver = ForwardDriver(get_blocks(module, names), cut_graph=False)
        try:
            with recorder, driver.use_interceptor(note_shapes):
                returned, _, _ = driver.forward(begin, lambda: module(**batch))
        finally:
            driver.detach()
        outputs.append(returned)
        return returned

    try:
        loss = read_model_loss(module, batch, forward)
    finally:
        clear_fake_caches(module)
    return loss, outputs[0], recorder, shapes


def _shapes(value: Any) -> dict[str, torch.Size]:
    with torch._C.DisableTorchFunction():
        return {path: tensor.shape for path, tensor in named_tensors(value)}


def _on_own_sizes(deferred_init: DeferredInit, example: Example) -> Loss | None:
    module = make_trial_module(deferred_init)
    samples = {key: repeat_samples(value, PROBE_BATCH) for key, value in example.items()}
    try:
        return _on_fake_tensors(module, samples)
    except PlanError:
        raise
    except Exception as error:
        if not depends_on_values(error):
            raise _forward_error(error, samples) from error
    try:
        return _on_values(deferred_init, samples)
    except PlanError:
        raise
    except Exception as error:
        raise _forward_error(error, samples) from error


def _on_fake_tensors(module: nn.Module, samples: Example) -> Loss | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(module, mode)
    try:
        with mode, without_fake_tensor_log():
            batch = {key: mode.from_tensor(value) for key, value in samples.items()}
            return read_model_loss(module, batch, lambda batch: module(**batch))
    finally:
        clear_fake_caches(module)


def _on_values(deferred_init: DeferredInit, samples: Example) -> Loss | None:
    """Reads the loss of a model whose forward looks at the values of tensors: it is made in full."""
    module = make_trial_module(deferred_init)
    use_eager_experts(module)
    deferred_init.materialize(module)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return read_model_loss(module, samples, lambda batch: module(**batch))


def _forward_error(error: Exception, samples: Example) -> PlanError:
    given = ", ".join(f"{key} {list(value.shape)}" for key, value in samples.items())
    text = f"the forward of the model fails with labels ({given}): {type(error).__name__}: {error}"
    fix = f"correct the batch: the model must compute its own loss of it; or {OWN_LOSS_FIX}"
    return PlanError(text, fix=fix, location="loss")


def find_loss_inputs(
    loss: Loss, example: Example, first: RecordedTrial, second: RecordedTrial | None
) -> tuple[BatchTensor, ...]:
    """Returns the outputs of a trial, with those that are computed over all samples; `second` has another
    number of samples.
    """
    if second is None:
        return loss_inputs(loss, example, first.outputs)
    columns = loss_inputs(loss, example, first.outputs, second.outputs)
    graphs = zip(columns, first.output_graphs, second.output_graphs, strict=True)
    return tuple(
        replace(column, statistic=graph.statistic(other, whole_batch=loss.whole_batch))
        for column, graph, other in graphs
    )
