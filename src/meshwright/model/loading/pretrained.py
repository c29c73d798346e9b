"""Weights in a folder as the initial values of a model: found by name, checked whole, read one parameter at a time.

    stored names --(names of transformers)--> names of the module --(ties)--> logical parameters

What is stored is held against the model by headers alone: everything that is missing, left over or of another shape is
refused at once, before a process starts. A tie needs one stored name; where there are several they must be equal.
Afterwards each parameter is read when it is made, straight into its own memory, whole or a range of its rows: a rank holds
its parameters and, for as long as one of them takes, the pieces that this one is joined from (see `Weights.held`).

Persistent buffers (the statistics of a batch norm) are small; they are read at once.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from meshwright.model.loading.key_mapping import KeyConversion, ignored_patterns, load_conversions
from meshwright.model.loading.safetensors_io import (
    READ_NBYTES,
    WEIGHTS_KEY,
    StoredTensor,
    equal_tensors,
    format_names,
    list_tensors,
    read_tensor,
    weights_digest,
)
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.plan.model_spec.model_spec import PretrainedSource

WeightSource = tuple[
    str, KeyConversion
]  # the name under which a conversion gives a tensor, and that conversion


class PretrainedWeights:
    """Stored weights that fit a model; see `find_weights`.

    `origin` says where they are from, their digest and their size. `held` is what reading the hungriest parameter holds
    besides the parameter itself, in bytes.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        stored_tensors: Mapping[str, StoredTensor],
        sources: Mapping[str, WeightSource],
    ) -> None:
        self._module, self._stored_tensors, self._sources = module, stored_tensors, sources
        self.read_overhead_nbytes = max((self._overhead_nbytes(home) for home in sources.values()), default=0)
        nbytes = sum(each.nbytes for each in stored_tensors.values())
        self.origin = PretrainedSource(
            str(folder), weights_digest(stored_tensors), nbytes, self.read_overhead_nbytes
        )

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def rename(self, names: Mapping[str, str]) -> "PretrainedWeights":
        """These weights by other names: each of `names` leads to one that they have here, several perhaps to the same."""
        other = copy.copy(self)
        other._sources = {name: self._sources[own] for name, own in names.items() if own in self._sources}
        return other

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: range | None = None,
    ) -> torch.Tensor:
        """The parameter or buffer `name`, or its `rows` along dim 0, in `dtype` (None: as stored) on `device`.

        Floating values are cast to `dtype`; others keep their own. Only the files' bytes of these rows are read, unless the
        tensor is joined from others in another way than row by row.
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
        made = conversion.apply(self._module, self._read_stored)[target]
        made = made if rows is None else made[rows.start : rows.stop]
        kept = dtype if dtype is not None and made.is_floating_point() else made.dtype
        return torch.empty(made.shape, dtype=kept, device=device).copy_(
            made
        )  # a view would keep what it is a view of

    def _read_stored(self, name: str) -> torch.Tensor:
        return read_tensor(self._stored_tensors[name], self._stored_tensors[name].dtype)

    def _overhead_nbytes(self, home: WeightSource) -> int:
        sources = sum(self._stored_tensors[name].nbytes for name in home[1].source_names)
        return min(READ_NBYTES, sources) if home[1].converter is None else 2 * sources


def find_weights(
    path: Path, module: nn.Module, logical: Mapping[str, Sequence[str]], skip: Sequence[str] = ()
) -> PretrainedWeights:
    """The weights in `path` (a folder, or a safetensors file) for `module`, which has no values.

    Args:
        logical: the first name of every logical parameter -> its tied names.
        skip: names (with * and ?) that are not loaded, be they of the module or of the files.

    Raises PlanError with everything that is missing, extra or mis-shaped at once.
    """
    stored = list_tensors(path)
    conversions, unknown = load_conversions(module, stored)
    needed = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    made: dict[str, WeightSource] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    faults: list[Diagnostic] = []
    for conversion in conversions:
        try:
            results = conversion.apply(module, lambda name: torch.empty(stored[name].shape, device="meta"))
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            text = f"{format_names(conversion.source_names, 3)} cannot become {conversion.target}: {str(error).splitlines()[0]}"
            faults.append(Diagnostic(text, "give the weights that belong to this config", WEIGHTS_KEY))
            continue
        for name, value in results.items():
            made[name], shapes[name] = (name, conversion), tuple(value.shape)
    groups = {first: (first, *tied) for first, tied in logical.items()}
    tied_names = {name for names in groups.values() for name in names}
    groups |= {name: (name,) for name in needed if name not in tied_names}
    wanted = {first: names for first, names in groups.items() if not _matches(first, names, skip)}
    absent, leftover = ignored_patterns(module)
    missing = [
        first
        for first, names in wanted.items()
        if not any(name in made for name in names)
        and not (absent and all(absent.search(name) for name in names))
    ]
    extra = [*unknown, *(name for name in made if name not in needed)]
    extra = [
        name
        for name in extra
        if not _matches(name, (name,), skip) and not (leftover and leftover.search(name))
    ]
    kept = [name for names in wanted.values() for name in names]
    misshapen = {
        name: (shapes[name], needed[name]) for name in kept if name in made and shapes[name] != needed[name]
    }
    faults += _mismatch_diagnostics(
        missing if not faults else [], extra, misshapen, set(needed) - set(missing)
    )
    homes = {
        first: next((made[name] for name in names if name in made), None) for first, names in wanted.items()
    }
    found = {first: home for first, home in homes.items() if home is not None}
    faults += _untied_diagnostics(wanted, made, stored) if not faults else ()
    raise_diagnostics(faults)
    return PretrainedWeights(
        path, module, {name: stored[name] for home in found.values() for name in home[1].source_names}, found
    )


def _mismatch_diagnostics(
    missing: list[str],
    extra: list[str],
    misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    present: set[str],
) -> Iterator[Diagnostic]:
    if missing:
        text = f"{len(missing)} tensors of the model are missing in the weights: {format_names(missing)}"
        fix = f"give the weights of this architecture, or start these from the seed: model.skip = {_skip_patterns(missing, present)}"
        yield Diagnostic(text, fix, WEIGHTS_KEY)
    if extra:
        text = f"{len(extra)} stored tensors belong to no part of the model: {format_names(extra)}"
        skip = _skip_patterns(extra, present)
        fix = f"give the config (and architecture) that they belong to, or leave them unread: model.skip = {skip}"
        yield Diagnostic(text, fix, WEIGHTS_KEY)
    wrong = [f"{name} is {list(have)}, needed is {list(need)}" for name, (have, need) in misshapen.items()]
    if wrong:
        text = f"{len(wrong)} stored tensors are of another shape than the model's: {format_names(wrong)}"
        fix = (
            "give the config that belongs to the weights; model.overrides may not change sizes that they fix"
        )
        yield Diagnostic(text, fix, WEIGHTS_KEY)


def _untied_diagnostics(
    groups: Mapping[str, Sequence[str]], made: Mapping[str, WeightSource], stored: Mapping[str, StoredTensor]
) -> Iterator[Diagnostic]:
    for names in groups.values():
        plain = [
            made[name][1].source_names[0]
            for name in names
            if name in made and made[name][1].converter is None
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
    """Patterns that cover `names` and none of `kept`, as a list in TOML; few of them."""
    above = {name[:end] for name in kept for end, letter in enumerate(name) if letter == "."}

    def all_below(part: str, otherwise: str) -> str:
        return f"{part}.*" if part and part not in above else otherwise

    words = dict.fromkeys(all_below(name.rpartition(".")[0], name) for name in names)
    if len(words) > 4:
        words = dict.fromkeys(
            all_below(word.partition(".")[0], word) if "." in word else word for word in words
        )
    shown_words = [f'"{word}"' for word in words][:4]
    return f"[{', '.join(shown_words)}{', ...' if len(words) > 4 else ''}]"
