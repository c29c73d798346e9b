"""Finds the loss of a model for which none was given: the one that it computes itself, if it takes labels."""

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.sharding_trials import Example, make_trial_module, repeat_samples
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.model_loss import OWN_LOSS_FIX, label_keys, read_model_loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH, make_fake
from meshwright.plan.job.errors import PlanError

# `loss_type` of transformers' models -> whether labels are shifted, for forwards that need values
SHIFTS_LABELS = {"ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}


def find_model_loss(loaded_model: LoadedModel, example: Example) -> Loss | None:
    """Returns the loss of the model on batches like `example`; None if its forward takes no labels or
    computes no loss.

    Raises PlanError for a forward that fails with labels, and for a loss that is no sum over tokens or
    samples.
    """
    deferred_init = loaded_model.deferred_init
    if not label_keys(deferred_init.instantiate(), example):
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = make_trial_module(deferred_init)
    make_fake(module, mode)
    samples = {key: repeat_samples(value, PROBE_BATCH) for key, value in example.items()}
    try:
        with mode:
            batch = {key: mode.from_tensor(value) for key, value in samples.items()}
            return read_model_loss(module, batch, lambda batch: module(**batch))
    except PlanError:
        raise
    except Exception as error:
        if not depends_on_values(error):
            given = ", ".join(f"{key} {list(value.shape)}" for key, value in samples.items())
            text = f"the forward of the model fails with labels ({given}): {type(error).__name__}: {error}"
            fix = f"correct the batch: the model must compute its own loss of it; or {OWN_LOSS_FIX}"
            raise PlanError(text, fix=fix, location="loss") from error
        return _by_loss_type(module, error)
    finally:
        clear_fake_caches(module)


def _by_loss_type(module: nn.Module, error: Exception) -> Loss:
    shifts = SHIFTS_LABELS.get(str(vars(module).get("loss_type") or vars(type(module)).get("loss_type")))
    if shifts is None:
        text = f"the loss that the model computes itself depends on the values of tensors: {error}"
        raise PlanError(text, fix=OWN_LOSS_FIX, location="loss") from error
    return token_cross_entropy(shift_labels=shifts)
