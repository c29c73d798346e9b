r"""Converts between the state_dict keys of a module and the names of tensors in published files.

The names in a published folder are often not those of the module: a prefix is missing or added, a module was
renamed since, and tensors are concatenated or split.

    in the file                                      in the module
    layers.0.mlp.experts.0.w1.weight   [I, D]  \
    layers.0.mlp.experts.1.w1.weight   [I, D]   >    layers.0.mlp.experts.gate_up_proj   [E, 2I, D]
    layers.0.mlp.experts.0.w3.weight   [I, D]  /

transformers keeps a table of these transforms per model. `load_conversions` and `save_conversions` query it
and return *conversions*: a group of tensors that is turned into another as a whole. A conversion is a pure
function, so it is first applied to tensors without values, which gives names and shapes before anything is
read, and later to one group of values at a time.

A module that is not from transformers has the same names on both sides. Legend: E experts, I inner width, D
width.
"""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.model.hf.declared_tp_plan import is_transformers_model

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

LEGACY_BUFFERS = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}


@dataclass(frozen=True)
class KeyConversion:
    """Tensors that are converted together: `sources`, in order, each a (pattern, name) pair that matched.

    Without a `converter` the one source is renamed to `target`. `renamings` apply to the names of the
    results.
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    converter: "WeightConverter | None" = None
    renamings: "tuple[WeightRenaming, ...]" = ()

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(name for _, name in self.sources)

    @property
    def stacks_rows(self) -> bool:
        """Whether row i of the result is made of the i-th source of each pattern: rows can be made alone."""
        if self.converter is None or len(self.converter.target_patterns) > 1:
            return False
        conversions = _transformers_loading()
        head, *tail = self.converter.operations
        keeps_rows = all(
            (isinstance(op, conversions.Concatenate) and op.dim > 0)
            or (isinstance(op, conversions.Transpose) and min(op.dim0, op.dim1) > 0)
            for op in tail
        )
        return isinstance(head, conversions.MergeModulelist) and head.dim == 0 and keeps_rows

    def select_rows(self, rows: range) -> "KeyConversion":
        """Returns this conversion with only those sources that the `rows` of its result need; see
        `stacks_rows`.
        """
        by_pattern: dict[str, list[str]] = {}
        for pattern, name in self.sources:
            by_pattern.setdefault(pattern, []).append(name)
        kept = tuple(
            (pattern, name) for pattern, names in by_pattern.items() for name in names[rows.start : rows.stop]
        )
        return KeyConversion(self.target, kept, self.converter, self.renamings)

    def apply(self, module: nn.Module, read_tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the results by name, made of `read_tensor(name)` for each source.

        `module` supplies its config and shapes.
        """
        if self.converter is None:
            return {self.target: read_tensor(self.sources[0][1])}
        converter: Any = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, read_tensor(name))
        converted = converter.convert(self.target, model=module, config=module.config)
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        return {
            _transformers_loading().apply_renamings(name, list(self.renamings)): value
            for name, value in tensors.items()
        }


def load_conversions(module: nn.Module, stored_names: Iterable[str]) -> tuple[list[KeyConversion], list[str]]:
    """Returns the conversions from `stored_names` to names in `module`, and the stored names without a
    target.
    """
    if not is_transformers_model(module):
        expected = module.state_dict()
        names = list(stored_names)
        plain = [KeyConversion(name, ((name, name),)) for name in names if name in expected]
        return plain, [name for name in names if name not in expected]
    pretrained: Any = module
    expected, prefix = pretrained.state_dict(), pretrained.base_model_prefix
    transforms, conversions = _conversion_mapping(pretrained), _transformers_loading()
    renamings = [each for each in transforms if isinstance(each, conversions.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, conversions.WeightConverter)]
    groups, unknown = _ConversionGroups(converters), []
    for name in sorted(stored_names, key=conversions.dot_natural_key):
        target, pattern = conversions.rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = conversions.rename_source_key(name, [], [], prefix, expected)
        if target not in expected or not groups.add(target, name, pattern):
            unknown.append(name)
    return groups.conversions(()), unknown


def save_conversions(module: nn.Module, names: Iterable[str]) -> list[KeyConversion]:
    """Returns the conversions from `names` in `module`'s state to the names under which transformers stores
    them.
    """
    if not is_transformers_model(module):
        return [KeyConversion(name, ((name, name),)) for name in names]
    pretrained: Any = module
    conversions = _transformers_loading()
    transforms = _conversion_mapping(pretrained, add_legacy=False)
    # A prefix that was dropped on loading is not put back: it may not have been there.
    backward = [
        each.reverse_transform()
        for each in reversed(transforms)
        if not isinstance(each, conversions.PrefixChange)
    ]
    renamings = [each for each in backward if isinstance(each, conversions.WeightRenaming)]
    converters = [each for each in backward if isinstance(each, conversions.WeightConverter)]
    groups = _ConversionGroups(converters)
    for name in sorted(names, key=conversions.dot_natural_key):
        target, pattern = conversions.apply_converters(name, converters)
        if pattern is None:
            target = conversions.apply_renamings(name, renamings)
        groups.add(target, name, pattern)
    return groups.conversions(tuple(renamings))


def ignored_patterns(module: nn.Module) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Returns the patterns of names that transformers lets a file omit, and of those that it lets a file hold
    unused.

    None stands for no such name. A buffer that is computed (a rotary table, a causal mask) was stored by
    older versions; it is not read.
    """
    computed = {name for name, _ in module.named_buffers()} - module.state_dict().keys()
    patterns = {rf"(^|\.){re.escape(name)}$" for name in computed}
    patterns |= {
        pattern
        for end, pattern in LEGACY_BUFFERS.items()
        if any(name.endswith(end) for name, _ in module.named_buffers())
    }
    absent: set[str] = set()
    if is_transformers_model(module):
        pretrained: Any = module
        absent |= set(pretrained._keys_to_ignore_on_load_missing or ())
        patterns |= set(pretrained._keys_to_ignore_on_load_unexpected or ())
    return _any_pattern(absent), _any_pattern(patterns)


class _ConversionGroups:
    def __init__(self, converters: "list[WeightConverter]") -> None:
        self._by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        self._groups: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}

    def add(self, target: str, name: str, pattern: str | None) -> bool:
        """Adds `name` to the group of `target`; False if that is already taken by another plain tensor."""
        converter = None if pattern is None else self._by_pattern[pattern]
        known, sources = self._groups.setdefault(target, (converter, []))
        if sources and (known is None or converter is None):
            return False
        sources.append((pattern or name, name))
        return True

    def conversions(self, renamings: "tuple[WeightRenaming, ...]") -> list[KeyConversion]:
        return [
            KeyConversion(first, tuple(sources), converter, renamings if converter is not None else ())
            for first, (converter, sources) in self._groups.items()
        ]


def _transformers_loading() -> Any:
    return import_module("transformers.core_model_loading")  # takes a second


def _conversion_mapping(module: Any, **options: bool) -> list[Any]:
    return import_module("transformers.conversion_mapping").get_model_conversion_mapping(module, **options)


def _any_pattern(patterns: Iterable[str]) -> re.Pattern[str] | None:
    joined = "|".join(f"({pattern})" for pattern in sorted(patterns))
    return re.compile(joined) if joined else None
