"""Pretrained weights of a folder as the initial values of a model: matched by name, checked, read on demand.

    stored names --(names of transformers)--> names of the module --(ties)--> logical parameters

Stored tensors are compared with the model by file headers alone: everything that is missing, left over or of
another shape is refused at once, before a process starts. A tied parameter needs one stored name; several
must be equal. Afterwards each parameter is read when it is made, directly into its own memory, whole or a
range of its rows: a rank holds its parameters and, for one parameter at a time, the tensors that it is
concatenated from (see `PretrainedWeights.read_buffer_nbytes`).

Persistent buffers (the statistics of a batch norm) are small; they are read at once.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from meshwright.model.loading.safetensors_reader import (
    READ_NBYTES,
    WEIGHTS_KEY,
    StoredTensor,
    equal_tensors,
    format_names,
    list_tensors,
    read_tensor,
    weights_digest,
)
from meshwright.model.loading.weight_conversion import KeyConversion, ignored_patterns, load_conversions
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.plan.model_spec.model_spec import PretrainedSource

WeightSource = tuple[str, KeyConversion]  # (the name of a result of the conversion, the conversion)


class PretrainedWeights:
    """Stored weights that fit a model; see `find_weights`.

    `pretrained_source` gives their folder, digest and size. `read_buffer_nbytes` is the largest memory that
    reading one parameter takes besides the parameter itself.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        stored_tensors: Mapping[str, StoredTensor],
        sources: Mapping[str, WeightSource],
    ) -> None:
        self._module, self._stored_tensors, self._sources = module, stored_tensors, sources
        self.read_buffer_nbytes = max(
            (self._overhead_nbytes(source) for source in sources.values()), default=0
        )
        nbytes = sum(each.nbytes for each in stored_tensors.values())
        self.pretrained_source = PretrainedSource(
            str(folder), weights_digest(stored_tensors), nbytes, self.read_buffer_nbytes
        )

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def rename(self, names: Mapping[str, str]) -> "PretrainedWeights":
        """Returns these weights under other names: each key of `names` maps to a name here."""
        other = copy.copy(self)
        other._sources = {
            name: self._sources[stored_name]
            for name, stored_name in names.items()
            if stored_name in self._sources
        }
        return other

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: range | None = None,
    ) -> torch.Tensor:
        """Returns the parameter or buffer `name`, or its `rows` along dim 0, in `dtype` (None: stored) on
        `device`.

        Floating-point values are cast to `dtype`; others keep their own. Only the bytes of these rows are
        read, unless the tensor is concatenated in another way than row by row.
        """
        target, conversion = self._sources[name]
        if conversion.converter is None:
            stored = self._stored_tensors[conversion.source_names[0]]
            return read_tensor(
                stored,
                dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype,
                device,
                rows,
            )
        if rows is not None and conversion.stacks_rows:
            conversion, rows = conversion.select_rows(rows), None
        converted = conversion.apply(self._module, self._read_stored)[target]
        converted = converted if rows is None else converted[rows.start : rows.stop]
        result_dtype = dtype if dtype is not None and converted.is_floating_point() else converted.dtype
        return torch.empty(converted.shape, dtype=result_dtype, device=device).copy_(
            converted
        )  # a view would keep its base alive

    def _read_stored(self, name: str) -> torch.Tensor:
        return read_tensor(self._stored_tensors[name], self._stored_tensors[name].dtype)

    def _overhead_nbytes(self, source: WeightSource) -> int:
        sources = sum(self._stored_tensors[name].nbytes for name in source[1].source_names)
        return min(READ_NBYTES, sources) if source[1].converter is None else 2 * sources


def find_weights(
    path: Path, module: nn.Module, logical: Mapping[str, Sequence[str]], skip: Sequence[str] = ()
) -> PretrainedWeights:
    """Returns the weights in `path` (a folder, or a safetensors file) for `module`, which has no values.

    Args:
        logical: the first name of every logical parameter -> its tied names.
        skip: names (with * and ?) that are not loaded, in the module or in the files.

    Raises PlanError with everything that is missing, extra or has another shape at once.
    """
    stored = list_tensors(path)
    conversions, unknown = load_conversions(module, stored)
    needed = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    converted: dict[str, WeightSource] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    diagnostics: list[Diagnostic] = []
    for conversion in conversions:
        try:
            results = conversion.apply(module, lambda name: torch.empty(stored[name].shape, device="meta"))
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            text = (
                f"{format_names(conversion.source_names, 3)} cannot become {conversion.target}: "
                f"{str(error).splitlines()[0]}"
            )
            diagnostics.append(Diagnostic(text, "give the weights that belong to this config", WEIGHTS_KEY))
            continue
        for name, value in results.items():
            converted[name], shapes[name] = (name, conversion), tuple(value.shape)
    groups = {first: (first, *tied) for first, tied in logical.items()}
    tied_names = {name for names in groups.values() for name in names}
    groups |= {name: (name,) for name in needed if name not in tied_names}
    wanted = {first: names for first, names in groups.items() if not _matches(first, names, skip)}
    absent, leftover = ignored_patterns(module)
    missing = [
        first
        for first, names in wanted.items()
        if not any(name in converted for name in names)
        and not (absent and all(absent.search(name) for name in names))
    ]
    extra = [*unknown, *(name for name in converted if name not in needed)]
    extra = [
        name
        for name in extra
        if not _matches(name, (name,), skip) and not (leftover and leftover.search(name))
    ]
    kept = [name for names in wanted.values() for name in names]
    misshapen = {
        name: (shapes[name], needed[name])
        for name in kept
        if name in converted and shapes[name] != needed[name]
    }
    diagnostics += _mismatch_diagnostics(
        missing if not diagnostics else [], extra, misshapen, set(needed) - set(missing)
    )
    sources = {
        first: next((converted[name] for name in names if name in converted), None)
        for first, names in wanted.items()
    }
    present = {first: source for first, source in sources.items() if source is not None}
    diagnostics += _untied_diagnostics(wanted, converted, stored) if not diagnostics else ()
    raise_diagnostics(diagnostics)
    return PretrainedWeights(
        path,
        module,
        {name: stored[name] for source in present.values() for name in source[1].source_names},
        present,
    )


def _mismatch_diagnostics(
    missing: list[str],
    extra: list[str],
    misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    present: set[str],
) -> Iterator[Diagnostic]:
    if missing:
        text = f"{len(missing)} tensors of the model are missing in the weights: {format_names(missing)}"
        fix = (
            "give the weights of this architecture, or start these from the seed: model.skip = "
            f"{_skip_patterns(missing, present)}"
        )
        yield Diagnostic(text, fix, WEIGHTS_KEY)
    if extra:
        text = f"{len(extra)} stored tensors belong to no parameter of the model: {format_names(extra)}"
        skip = _skip_patterns(extra, present)
        fix = f"give the config (and architecture) that they belong to, or skip them: model.skip = {skip}"
        yield Diagnostic(text, fix, WEIGHTS_KEY)
    wrong = [
        f"{name} is {list(have)}, the model needs {list(need)}" for name, (have, need) in misshapen.items()
    ]
    if wrong:
        text = f"{len(wrong)} stored tensors have another shape than in the model: {format_names(wrong)}"
        fix = (
            "give the config that belongs to the weights; model.overrides must not change the sizes of "
            "stored tensors"
        )
        yield Diagnostic(text, fix, WEIGHTS_KEY)


def _untied_diagnostics(
    groups: Mapping[str, Sequence[str]],
    converted: Mapping[str, WeightSource],
    stored: Mapping[str, StoredTensor],
) -> Iterator[Diagnostic]:
    for names in groups.values():
        plain = [
            converted[name][1].source_names[0]
            for name in names
            if name in converted and converted[name][1].converter is None
        ]
        if any(not equal_tensors(stored[plain[0]], stored[other]) for other in plain[1:]):
            text = (
                f"{' and '.join(plain)} are one parameter in the model, and are stored with different values"
            )
            yield Diagnostic(
                text, "set model.overrides.tie_word_embeddings = false, or store one of them", WEIGHTS_KEY
            )


def _matches(first: str, names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (first, *names) for pattern in patterns)


def _skip_patterns(names: Sequence[str], kept: Iterable[str]) -> str:
    """Few patterns that cover `names` and none of `kept`, as a list in TOML."""
    kept_prefixes = {name[:end] for name in kept for end, letter in enumerate(name) if letter == "."}

    def all_below(part: str, otherwise: str) -> str:
        return f"{part}.*" if part and part not in kept_prefixes else otherwise

    patterns = dict.fromkeys(all_below(name.rpartition(".")[0], name) for name in names)
    if len(patterns) > 4:
        patterns = dict.fromkeys(
            all_below(pattern.partition(".")[0], pattern) if "." in pattern else pattern
            for pattern in patterns
        )
    shown_words = [f'"{pattern}"' for pattern in patterns][:4]
    return f"[{', '.join(shown_words)}{', ...' if len(patterns) > 4 else ''}]"
