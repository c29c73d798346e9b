"""Says what is wrong with a batch, or with a forward, when the forward fails or would train nothing.

A forward that gets an id beyond its embedding table raises "index out of range in self", and one that gets
another key a TypeError. On an error of these kinds the batch is compared with the model and with the example
that the model was analyzed with; if they do not fit, the user reads that, in place of a frame of torch.

    ids from 3 to 64, largest table 64 rows      batch.input_ids: ids from 3 to 64 ...
    128 tokens, positions of the config 64       batch.input_ids: samples of 128 tokens ...
    {"ids"}, analyzed with {"input_ids"}         batch: it has ids and lacks input_ids ...
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.model.hf.model_from_config import text_limits
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name

Batch = Mapping[str, torch.Tensor]
LOCATION = "batch"
EXAMPLE_FIX = "a model with other inputs than text returns one: meshwright.Model(module, example={...})"


@contextmanager
def explain_forward_errors(module: nn.Module, inputs: Batch, example: Batch) -> Iterator[None]:
    """Raises a PlanError in place of an error of the body, a forward of `module` on `inputs`, if they do not
    fit the model.

    `example` are inputs like those that the model was analyzed with.
    """
    try:
        yield
    except (IndexError, KeyError, TypeError, ValueError) as error:
        found = list(_key_diagnostics(inputs, example))
        if not found and isinstance(error, IndexError):
            found = list(_index_diagnostics(module, inputs))
        if not found:
            raise
        try:
            raise_diagnostics(found)
        except Exception as refusal:
            raise refusal from error


def trial_error(error: Exception, inputs: Batch, module: nn.Module) -> PlanError:
    """Returns what to say of `error`, which the forward of `module` raised in a trial on `inputs`."""
    unknown = list(_unknown_key_diagnostics(inputs, module))
    if unknown and isinstance(error, TypeError):
        return PlanError.from_diagnostics(unknown)
    given = ", ".join(
        f"{key} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for key, value in inputs.items()
    )
    text = (
        f"the forward fails in a trial on samples like {given or 'no arguments'}: "
        f"{type(error).__name__}: {error}"
    )
    fix = (
        "repair the forward (the traceback above is its own), or the example: its keys, less "
        "the targets, are the arguments"
    )
    return PlanError(text, fix=f"{fix}; {EXAMPLE_FIX}", location="model")


def _unknown_key_diagnostics(inputs: Batch, module: nn.Module) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each of `inputs` that the forward of `module` does not take."""
    parameters, name = inspect.signature(module.forward).parameters, type(module).__name__
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    for key in inputs:
        if key not in parameters:
            text = (
                f"the forward of {name} takes {', '.join(parameters) or 'nothing'}, and the batch has '{key}'"
            )
            fix = (
                f"if the loss reads it, state that loss: loss=meshwright.Loss(total, count, "
                f"targets=('{key}',)); else leave it out of the batch"
            )
            missing = [
                each.name
                for each in parameters.values()
                if each.default is each.empty and each.name not in inputs
            ]
            if missing:
                fix = (
                    f"give it the name of an argument: {suggest_name(key, missing)} Or, {fix}; {EXAMPLE_FIX}"
                )
            yield Diagnostic(text, fix, f"{LOCATION}.{key}")


def check_outputs_need_grad(outputs: Any) -> None:
    """Raises PlanError if no tensor among `outputs` of a training forward needs a gradient, so that no
    parameter would be trained.
    """
    tensors = [each for each in tree_tensors(outputs) if each.is_floating_point()]
    if tensors and not any(each.requires_grad for each in tensors):
        raise PlanError(
            "no output of the model needs a gradient, so no parameter would be trained",
            fix="remove .detach(), torch.no_grad() or .item() from its forward",
            location="model",
        )


def _key_diagnostics(inputs: Batch, example: Batch) -> Iterator[Diagnostic]:
    missing = [key for key in example if key not in inputs]
    unknown = [key for key in inputs if key not in example]
    if not missing and not unknown:
        return
    has = f"has {', '.join(unknown)}" if unknown else ""
    lacks = f"lacks {', '.join(missing)}" if missing else ""
    text = f"it {' and '.join(filter(None, (has, lacks)))}; the model was analyzed with {', '.join(example)}"
    fix = "give each batch the keys of the example that the model was analyzed with"
    if unknown and missing:
        fix += f": '{unknown[0]}': {suggest_name(unknown[0], missing)}"
    yield Diagnostic(text, fix, LOCATION)


def _index_diagnostics(module: nn.Module, inputs: Batch) -> Iterator[Diagnostic]:
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    num_rows, max_positions = max(tables, default=0), text_limits(module).max_positions
    ids = {key: each for key, each in inputs.items() if each.dtype in (torch.int32, torch.int64)}
    for key, each in ids.items():
        low, high = (int(each.min()), int(each.max())) if each.numel() else (0, 0)
        if num_rows and (low < 0 or high >= num_rows):
            text = (
                f"ids from {low} to {high}, and the largest embedding of the model has {num_rows} rows, "
                "numbered from 0"
            )
            fix = (
                "use the tokenizer that belongs to the model, correct the ids, or enlarge the vocabulary of "
                "the model"
            )
            yield Diagnostic(text, fix, f"{LOCATION}.{key}")
        elif max_positions is not None and each.ndim > 1 and each.shape[1] > max_positions:
            text = f"samples of {each.shape[1]} tokens; the model has {max_positions} positions"
            fix = f"cut samples to {max_positions} tokens, or raise max_position_embeddings in its config"
            yield Diagnostic(text, fix, f"{LOCATION}.{key}")
