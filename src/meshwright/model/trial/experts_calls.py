"""Finds the calls of experts in a recorded forward: modules with the weights of many experts, given a choice.

    experts(hidden [tokens, features], index [tokens, k], weights [tokens, k]) -> [tokens, features]

That is the experts interface of transformers, and of `meshwright.nn.MixtureOfExperts`. Every parameter of the
module itself has the experts along dim 0.
Limits: experts that are called otherwise (each with all tokens, or one module per expert) are not found.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from meshwright.model.recording.forward_recording import (
    BlockStart,
    ModuleEnd,
    ModuleStart,
    Recording,
    TensorRecord,
)
from meshwright.plan.model_spec.model_spec import ChoiceBias, ExpertsCall

BIAS_NAMES = ("e_score_correction_bias", "choice_bias")  # of transformers, and of meshwright.nn.Router


def experts_calls(recording: Recording) -> Iterator[ExpertsCall]:
    """Yields the calls of experts in block calls, in order."""
    open_calls: list[ModuleStart] = []
    ended: list[str] = []  # in the block call
    own_params = _own_params(recording)
    for event in recording.events:
        if type(event) is BlockStart:
            ended.clear()
        elif type(event) is ModuleStart:
            open_calls.append(event)
        elif type(event) is ModuleEnd:
            start = open_calls.pop() if open_calls else None
            if start is None or start.name != event.name:  # the call of the whole model began before
                continue
            call = _experts_call(start, event.results, own_params.get(start.name, {}), recording.num_samples)
            if call is not None:
                yield replace(call, prior_layers=tuple(ended))
            ended.append(event.name)


def choice_biases(module: nn.Module, calls: Iterable[ExpertsCall]) -> Iterator[ChoiceBias]:
    """Yields the saved buffers beside the experts of `calls` that are biases of the choice."""
    saved = module.state_dict().keys()
    for name, call in {call.name: call for call in calls}.items():
        parent = name.rpartition(".")[0]
        for path, buffer in module.get_submodule(parent).named_buffers():
            full = f"{parent}.{path}" if parent else path
            is_bias = path.rpartition(".")[2] in BIAS_NAMES and buffer.shape == (call.num_experts,)
            if is_bias and full in saved:
                yield ChoiceBias(full, name, call.block_call, call.num_experts)


def _own_params(recording: Recording) -> dict[str, dict[str, TensorRecord]]:
    found: dict[str, dict[str, TensorRecord]] = {}
    for name, record in recording.parameters.items():
        found.setdefault(name.rpartition(".")[0], {})[name] = record
    return found


def _experts_call(
    start: ModuleStart, result: object, params: dict[str, TensorRecord], num_samples: int
) -> ExpertsCall | None:
    given = [each for each in (*start.args, *start.kwargs.values()) if isinstance(each, TensorRecord)]
    counts = {record.shape[0] if record.shape else 0 for record in params.values()}
    has_matrices = any(len(record.shape) == 3 for record in params.values())
    if not start.block_call or len(given) != 3 or len(counts) != 1 or not has_matrices:
        return None
    rows, index, weights = given
    num_rows = rows.shape[0]
    fits = (
        len(rows.shape) == len(index.shape) == 2
        and index.shape == weights.shape
        and index.shape[0] == num_rows
        and not index.dtype.is_floating_point
        and isinstance(result, TensorRecord)
        and result.shape == rows.shape
    )
    if not fits or num_rows % num_samples:
        return None
    return ExpertsCall(
        start.name,
        start.block_call,
        tuple(params),
        counts.pop(),
        index.shape[1],
        num_rows // num_samples,
        rows.shape[1],
        rows.requires_grad,
        weights.requires_grad,
    )
