"""Turns what data loaders yield into a batch: tensors by the name of the forward's argument, or of a target.

    {"input_ids": ids, "labels": labels, "use_cache": False, "mask": None}     a dict of any kind
    BatchEncoding(...), ModelOutput(...), a dataclass, a named tuple           its fields
    (images, classes)                                                          forward(images), a target

Tensors have one sample per row. Numbers are constants: the model gets the same with every batch. None is
left out. A tuple says no names: its tensors are the forward's required arguments, in order, and then the
targets of the loss; where that is not the only reading it is refused.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass

import torch

from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics

LOCATION = "batch"
NAMES_FIX = "pass a dict from the names of the forward's arguments and of the targets to tensors"


Parameters = Mapping[str, inspect.Parameter]  # of a forward


@dataclass(frozen=True)
class ParsedBatch:
    """The tensors of a batch by name, and the constants that the model gets with them."""

    tensors: dict[str, torch.Tensor]
    constants: dict[str, object] = field(default_factory=dict)


def parse_batch(given: object, parameters: Parameters, targets: Sequence[str] = ()) -> ParsedBatch:
    """Returns the tensors and constants in `given`, a batch of a data loader.

    `parameters` are those of the model's forward, `targets` the keys that the loss reads. Raises PlanError
    for a batch whose tensors cannot be named, and, all at once, for entries that are neither tensors nor
    constants.
    """
    if isinstance(given, Mapping) and all(isinstance(value, torch.Tensor) for value in given.values()):
        return ParsedBatch(dict(given))
    named = _name_entries(given, parameters, targets)
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, object] = {}
    diagnostics: list[Diagnostic] = []
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for key, value in named.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, (bool, int, float)) and (key in parameters or takes_any):
            constants[key] = value
        elif value is not None:
            diagnostics.append(_not_a_tensor(key, value))
    raise_diagnostics(diagnostics)
    return ParsedBatch(tensors, constants)


def _name_entries(given: object, parameters: Parameters, targets: Sequence[str]) -> dict[str, object]:
    if isinstance(given, Mapping):
        return dict(given)
    if is_dataclass(given) and not isinstance(given, type):
        return {each.name: vars(given)[each.name] for each in fields(given)}
    if isinstance(given, torch.Tensor):
        return _name_tensors((given,), parameters, targets)
    if isinstance(given, tuple) and "_fields" in dir(given):
        return given._asdict()  # type: ignore[attr-defined]  a named tuple
    if isinstance(given, (tuple, list)) and given and all(isinstance(each, torch.Tensor) for each in given):
        return _name_tensors(given, parameters, targets)
    text = f"a batch is a {type(given).__name__}"
    if isinstance(given, (tuple, list)):
        text += f" of {', '.join(sorted({type(each).__name__ for each in given})) or 'nothing'}"
    raise PlanError(text, fix=NAMES_FIX, location=LOCATION)


def _name_tensors(
    tensors: Sequence[torch.Tensor], parameters: Parameters, targets: Sequence[str]
) -> dict[str, object]:
    """Returns the tensors of a tuple by name: the required arguments of the forward, then targets."""
    positional = [
        each for each in parameters.values() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    required = [each.name for each in positional if each.default is inspect.Parameter.empty]
    num_targets = len(tensors) - len(required)
    is_clear = required and (num_targets == 0 or len(required) == len(positional))
    if not is_clear or not 0 <= num_targets <= len(targets):
        text = (
            f"a batch of {len(tensors)} tensors without names; the forward takes "
            f"{_format_names(each.name for each in positional)}, of which {_format_names(required)} must be "
            f"given, and the loss reads {_format_names(targets)}"
        )
        raise PlanError(text, fix=NAMES_FIX, location=LOCATION)
    return dict(zip([*required, *targets[:num_targets]], tensors, strict=True))


def _not_a_tensor(key: str, value: object) -> Diagnostic:
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        kind += f" of {', '.join(sorted({type(each).__name__ for each in value})) or 'nothing'}"
    if isinstance(value, (bool, int, float)):
        kind += ", which the forward does not take"
    fix = "leave it out in the collator, or make a tensor of it with one sample per row"
    if isinstance(value, str):
        fix = "leave it out in the collator; an option of the model belongs into its config"
    return Diagnostic(f"is a {kind}; a batch holds tensors, numbers and None", fix, f"{LOCATION}.{key}")


def check_constants(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raises PlanError for a batch with other constants than the example that the model was analyzed with."""
    if found != expected:
        text = f"the constants {found or 'none'}; the model was analyzed with {expected or 'none'}"
        fix = "give every batch the same constants, or leave them out and set them in the model's config"
        raise PlanError(text, fix=fix, location=LOCATION)


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
