"""Finds the loss of a model for which none was given: the one that it computes itself, if it takes labels.

It runs a forward of its own: all other forwards are without labels, and a recording holds no values, with
which the model's code must be run to tell whether it shifts the labels.
"""

from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.sharding_trials import Example, make_trial_module, repeat_samples
from meshwright.model.hf.model_from_config import use_eager_experts
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.loss_inputs import loss_inputs
from meshwright.model.loss.model_loss import OWN_LOSS_FIX, label_keys, read_model_loss
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.fake_tensor_limits import depends_on_values, without_fake_tensor_log
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH, RecordedTrial, make_fake
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor


def find_model_loss(loaded_model: LoadedModel, example: Example) -> Loss | None:
    """Returns the loss of the model on batches like `example`; None if its forward takes no labels or
    computes no loss.

    Raises PlanError for a forward that fails with labels, and for a loss that is no sum over tokens or
    samples.
    """
    deferred_init = loaded_model.deferred_init
    module = make_trial_module(deferred_init)
    if not label_keys(module, example):
        return None
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
