"""From a global step to the rows that one rank plays: the same samples in the same order under every plan.

The order of samples belongs to the job, not to the ranks. A rank takes its share of each micro-batch of the global batch,
so nothing about the data needs saving but the step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch

from meshwright.plan.job.data_source import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.plan import Plan
from meshwright.run.data.documents import open_documents
from meshwright.run.data.mixture import Mixture
from meshwright.run.data.readers import open_reader, source_format, unused_field_diagnostics
from meshwright.run.data.shuffle import ABSENT_SAMPLE, ShuffledOrder
from meshwright.run.data.streaming import StreamOrder, TokenStream
from meshwright.run.data.text import TextDataset
from meshwright.run.data.tokenizer import TokenDataset, Tokenizer, make_tokenizer


class Dataset(Protocol):
    """Samples by number: how many, what names their content, and rows for a list of ids (-1: an absent sample).

    `notes` are what a user should know of them, in sentences.
    """

    digest: str
    notes: tuple[str, ...]

    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """One row per id."""
        ...


class SampleOrder(Protocol):
    """Which samples make up each global step; `total` is how many are played in all (None: not known, or without end)."""

    @property
    def num_total(self) -> int | None: ...

    def ids(self, step: int, batch: int) -> list[int]:
        """The sample ids of global step `step`; -1 behind the end."""
        ...


class ExampleDataset:
    """The rows of the example batch that a model's factory returned, as a data set: sample i is row i."""

    notes = ()

    def __init__(self, example: Mapping[str, torch.Tensor]) -> None:
        self._example = dict(example)
        digest = sha256()
        for key in sorted(self._example):
            tensor = self._example[key]
            digest.update(f"{key} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(next(iter(self._example.values())))

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """The rows `ids`; absent samples are left out, so the batch may be short or empty."""
        rows = torch.tensor([i for i in ids if i != ABSENT_SAMPLE], dtype=torch.long)
        return {key: value[rows] for key, value in self._example.items()}


@dataclass(frozen=True)
class Feed:
    """The rows of each step that `rank` reads under `plan`."""

    dataset: Dataset
    order: SampleOrder
    plan: Plan
    rank: int

    def batch(self, step: int) -> dict[str, torch.Tensor] | None:
        """This rank's rows of global step `step` (from 0), micro-batch after micro-batch; None when all are absent."""
        ids = self.order.ids(step, self.plan.job.train.batch)
        mine = [ids[row] for row in self.plan.samples_read(self.rank)]
        return self.dataset.batch(mine) if any(i != ABSENT_SAMPLE for i in mine) else None

    def sample_ids(self, step: int) -> list[list[int]]:
        """The ids of the samples that each data rank plays in global step `step`."""
        plan = self.plan
        ids = self.order.ids(step, plan.job.train.batch)
        rows = [
            [row for first in plan.microbatch_starts(i) for row in range(first, first + plan.micro_batch)]
            for i in range(plan.num_data)
        ]
        return [[ids[row] for row in mine if ids[row] != ABSENT_SAMPLE] for mine in rows]

    @property
    def num_steps(self) -> int | None:
        """The global steps that the samples last; None when they are repeated without end, or cannot be counted.

        The last one may be short.
        """
        total = self.order.num_total
        return None if total is None else -(-total // self.plan.job.train.batch)

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may ask for batches, in any order; a stream has one reader."""
        return not isinstance(self.dataset, TokenStream)

    def has_ended(self, step: int) -> bool:
        """Whether the samples end before global step `step`; a stream is read up to it."""
        if isinstance(self.dataset, TokenStream):
            return not self.dataset.has_sample(step * self.plan.job.train.batch)
        return self.num_steps is not None and step >= self.num_steps


def open_dataset(
    source: DataConfig,
    example: Mapping[str, torch.Tensor] | None,
    cache: Path | None = None,
    check_tokenizer: Callable[[Tokenizer], Iterable[Diagnostic]] = lambda codec: (),
) -> Dataset:
    """The samples that `source` names; what has to be tokenised is kept in the folder `cache`.

    Plain text, read as bytes, and streams need none. `fits` is asked what is wrong with the tokenizer before anything is
    tokenised with it. Raises PlanError for samples that are missing, empty or broken, for a tokenizer that cannot be used,
    and for a missing example.
    """
    if source.source == "example":
        return _example(source, example)
    raise_diagnostics(source.diagnostics())
    codec = make_tokenizer(source.tokenizer)
    faults, parts = list(check_tokenizer(codec)), []
    unfit = bool(faults)
    for part in source.part_configs() or (source,):
        try:
            parts += _tokens(part, codec, cache, unfit=unfit)
        except PlanError as error:
            faults += error.diagnostics
    raise_diagnostics(faults)
    return Mixture(parts, [part.weight for part in source.mixture]) if source.mixture else parts[0]


def _tokens(
    source: DataConfig, tokenizer: Tokenizer, cache: Path | None, *, unfit: bool
) -> list[TokenDataset]:
    """The samples of one source; none when the codec is `unfit`, and then only what can be seen without it is looked at."""
    raise_diagnostics(unused_field_diagnostics(source))
    if source_format(source) == "text" and not source.tokenizer:
        return [TextDataset(source)]
    rows = open_reader(source)
    if unfit:
        return []
    if source.streaming:
        return [TokenStream(source, rows, tokenizer)]
    if cache is None:
        raise ValueError(
            f"'{source.source}' has to be tokenised, and no folder was given for the tokens: pass cache=Path(...)"
        )
    return [open_documents(source, rows, tokenizer, cache)]


def _example(source: DataConfig, example: Mapping[str, torch.Tensor] | None) -> ExampleDataset:
    fix = "remove it, or set data.source to a file, a folder or a data set"
    usual = DataConfig(source.source)
    raise_diagnostics(
        Diagnostic(
            f"{name} = {vars(source)[name]!r} with the example batch, which is taken as it is",
            fix,
            f"data.{name}",
        )
        for name in ("tokenizer", "chat", "streaming", "format", "column", "split")
        if vars(source)[name] != vars(usual)[name]
    )
    if example is None:
        fix = "set data.source to a text file or folder, or return meshwright.Model(module, example=...) from the factory"
        raise PlanError(
            'data.source is "example" and the model comes without an example batch',
            fix=fix,
            location="data.source",
        )
    return ExampleDataset(example)


def open_feed(dataset: Dataset, plan: Plan, rank: int) -> Feed:
    """The feed of `rank` under `plan`."""
    dataset = dataset.reopen() if isinstance(dataset, TokenStream) else dataset
    return Feed(dataset, _order(dataset, plan), plan, rank)


def _order(data: Dataset, plan: Plan) -> SampleOrder:
    seed, epochs = plan.job.train.seed, plan.job.data.epochs
    if isinstance(data, TokenStream):
        return StreamOrder()
    return data.order(seed, epochs) if isinstance(data, Mixture) else ShuffledOrder(len(data), seed, epochs)
