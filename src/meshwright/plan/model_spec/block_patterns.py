"""Patterns by which a technique chooses blocks: "model.layers.*" matches a block, or one of its calls."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from meshwright.plan.job.errors import Diagnostic, suggest_name
from meshwright.plan.model_spec.model_spec import ModelSpec, block_of


def matches_any(block_call: str, patterns: Sequence[str]) -> bool:
    """Returns whether a block call, or its block, matches one of `patterns`."""
    names = block_call, block_of(block_call)
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def unmatched_patterns(patterns: Sequence[str], model_spec: ModelSpec, location: str) -> Iterator[Diagnostic]:
    """Yields a diagnostic at `location` for each pattern that matches no block of the model."""
    for pattern in patterns:
        if not any(matches_any(block_call, [pattern]) for block_call in model_spec.block_calls):
            text = f"'{pattern}' matches no block of {model_spec.name}"
            yield Diagnostic(text, suggest_name(pattern, model_spec.block_calls), location)
