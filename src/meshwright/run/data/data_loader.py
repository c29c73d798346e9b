"""From a global step to the samples of one rank: every plan trains on the same samples in the same order.

The order of samples belongs to the job, not to the ranks. A rank reads its part of each microbatch of the
global batch, so the step is the only state of the data that a checkpoint needs.

With `prefetch`, threads prepare batches ahead of their step, so that no rank waits for its data:

    step            0    1    2    3         the main thread trains
    prepared        1 2  3 4  5 ...          `workers` threads prepare the next batches, at most 2 x workers
                                             of them

Threads are enough: samples are slices of arrays in memory or mapped from disk, numpy and the tokenizers
release the GIL, and nothing has to be sent between processes. The samples of a step depend on its number
only, so the order is the same with any number of workers. A stream has one reader, so it uses one thread.

An error in a thread is raised by the step that needs the batch, with the traceback of the thread. On exit,
batches that have not begun are dropped and the others are waited for; after an error, at most
`FAILURE_WAIT_S` seconds, so that a thread that waits for a network does not delay the error.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.model.loss.loss_definition import IGNORE_INDEX, Batch
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.plan import Plan
from meshwright.run.data.byte_text import TextDataset
from meshwright.run.data.documents_to_samples import open_documents
from meshwright.run.data.mixture import Mixture
from meshwright.run.data.readers import open_reader, source_format, unused_field_diagnostics
from meshwright.run.data.shuffle import ABSENT_SAMPLE, ShuffledOrder
from meshwright.run.data.streaming import StreamOrder, TokenStream
from meshwright.run.data.token_dataset import TokenCount, TokenDataset
from meshwright.run.data.tokenizer import Tokenizer, make_tokenizer

FAILURE_WAIT_S = 1.0
MaybeBatch = dict[str, torch.Tensor] | None


class Dataset(Protocol):
    """Samples by index: their number, a digest of their content, and a batch for a list of ids (-1: an
    absent sample).

    `notes` are sentences for the user.
    """

    digest: str
    notes: tuple[str, ...]

    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns one sample per id."""
        ...


class SampleOrder(Protocol):
    """The samples of each global step; `num_total` is how many are read in all (None: unknown, or without
    end).
    """

    @property
    def num_total(self) -> int | None: ...

    def ids(self, step: int, batch: int) -> list[int]:
        """Returns the sample ids of global step `step`; -1 after the end."""
        ...


class ExampleDataset:
    """The samples of the example batch that a model's factory returned."""

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

    def count_tokens(self) -> TokenCount | None:
        """Returns the number of tokens, without those that the attention mask leaves out, and of labels; None
        if the batch does not consist of tokens with a label each.
        """
        tokens, labels, mask = (self._example.get(key) for key in ("input_ids", "labels", "attention_mask"))
        if tokens is None or labels is None or labels.shape != tokens.shape:
            return None
        counted = tokens.numel()
        if mask is not None and mask.shape == tokens.shape:
            counted = int(mask.count_nonzero())
        return TokenCount(labels.numel(), counted, int((labels != IGNORE_INDEX).count_nonzero()))

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns the samples `ids`; absent ones are left out, so the batch may be short or empty."""
        rows = torch.tensor([i for i in ids if i != ABSENT_SAMPLE], dtype=torch.long)
        return {key: value[rows] for key, value in self._example.items()}


class CollatedDataset:
    """The samples of a dataset of torch, which has a length; `collate` makes a batch of some of them.

    The digest names the class, the length and the first sample's form, and not the samples.
    """

    notes = ()

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        first = collate([dataset[0]])
        form = {key: tuple(value.shape) for key, value in first.items()} if isinstance(first, Mapping) else ""
        self.digest = sha256(f"{type(dataset).__name__} {len(dataset)} {form}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, ids: Sequence[int]) -> Any:
        """Returns the samples `ids`, collated; absent ones are left out."""
        return self._collate([self._dataset[index] for index in ids if index != ABSENT_SAMPLE])


class PreparedDataset:
    """The samples of `dataset`, as the loss prepares them (`Loss.prepare`)."""

    def __init__(self, dataset: Dataset | CollatedDataset, prepare: Callable[[Any], Batch]) -> None:
        self._dataset, self._prepare = dataset, prepare
        self.digest, self.notes = dataset.digest, dataset.notes

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns one sample per id, prepared."""
        return dict(self._prepare(self._dataset.batch(ids)))


@dataclass(frozen=True)
class LocalBatches:
    """The samples of each step that `rank` reads under `plan`."""

    dataset: Dataset
    order: SampleOrder
    plan: Plan
    rank: int

    def batch(self, step: int) -> dict[str, torch.Tensor] | None:
        """Returns this rank's samples of global step `step` (from 0), microbatch after microbatch; None
        when all are absent.
        """
        ids = self.order.ids(step, self.plan.job.train.batch)
        local_ids = [ids[row] for row in self.plan.samples_read(self.rank)]
        return self.dataset.batch(local_ids) if any(i != ABSENT_SAMPLE for i in local_ids) else None

    def sample_ids(self, step: int) -> list[list[int]]:
        """Returns the ids of the samples of each data rank in global step `step`."""
        plan = self.plan
        ids = self.order.ids(step, plan.job.train.batch)
        rows = [
            [row for first in plan.microbatch_starts(i) for row in range(first, first + plan.micro_batch)]
            for i in range(plan.num_data)
        ]
        return [[ids[row] for row in mine if ids[row] != ABSENT_SAMPLE] for mine in rows]

    @property
    def num_steps(self) -> int | None:
        """The number of global steps until the samples end; None without end, or if they cannot be counted.

        The last step may be short.
        """
        total = self.order.num_total
        return None if total is None else -(-total // self.plan.job.train.batch)

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may read batches, in any order; a stream has one reader."""
        return not isinstance(self.dataset, TokenStream)

    def has_ended(self, step: int) -> bool:
        """Returns whether the samples end before global step `step`; reads a stream up to it."""
        if isinstance(self.dataset, TokenStream):
            return not self.dataset.has_sample(step * self.plan.job.train.batch)
        return self.num_steps is not None and step >= self.num_steps


def open_dataset(
    source: DataConfig,
    example: Mapping[str, torch.Tensor] | None,
    cache: Path | None = None,
    check_tokenizer: Callable[[Tokenizer], Iterable[Diagnostic]] = lambda tokenizer: (),
) -> Dataset:
    """Returns the samples of a valid `source`; tokens are kept in the folder `cache`.

    Text files, read as bytes, and streams need no cache. `check_tokenizer` is called before anything is
    tokenized. Raises PlanError for samples that are missing, empty or broken, for a tokenizer that cannot be
    used, and for a missing example.
    """
    if source.source == "example":
        return _example(source, example)
    tokenizer = make_tokenizer(source.tokenizer)
    diagnostics, parts = list(check_tokenizer(tokenizer)), []
    tokenizer_failed = bool(diagnostics)
    for part in source.part_configs() or (source,):
        try:
            parts += _tokens(part, tokenizer, cache, tokenizer_failed=tokenizer_failed)
        except PlanError as error:
            diagnostics += error.diagnostics
    raise_diagnostics(diagnostics)
    return Mixture(parts, [part.weight for part in source.mixture]) if source.mixture else parts[0]


def count_tokens(dataset: Dataset) -> TokenCount | None:
    """Returns the number of tokens of all samples of `dataset`; None if it is a stream or has no labels."""
    if isinstance(dataset, ExampleDataset):
        return dataset.count_tokens()
    return dataset.count_tokens() if isinstance(dataset, TokenDataset) else None


def _tokens(
    source: DataConfig, tokenizer: Tokenizer, cache: Path | None, *, tokenizer_failed: bool
) -> list[TokenDataset]:
    raise_diagnostics(unused_field_diagnostics(source))
    if source_format(source) == "text" and source.reads_bytes:
        return [TextDataset(source)]
    rows = open_reader(source)
    if tokenizer_failed:
        return []
    if source.streaming:
        return [TokenStream(source, rows, tokenizer)]
    if cache is None:
        raise ValueError(
            f"'{source.source}' has to be tokenized, and no folder was given for the tokens: pass "
            f"cache=Path(...)"
        )
    return [open_documents(source, rows, tokenizer, cache)]


def _example(source: DataConfig, example: Mapping[str, torch.Tensor] | None) -> ExampleDataset:
    fix = "remove it, or set data.source to a file, a folder or a dataset"
    usual = DataConfig(source.source)
    raise_diagnostics(
        Diagnostic(
            f"{name} = {vars(source)[name]!r} with the example batch, which is used unchanged",
            fix,
            f"data.{name}",
        )
        for name in ("tokenizer", "chat", "streaming", "format", "column", "split")
        if vars(source)[name] != vars(usual)[name]
    )
    if example is None:
        fix = (
            "set data.source to a text file or folder, or return meshwright.Model(module, "
            "example=...) from the factory"
        )
        raise PlanError(
            'data.source is "example" and the model comes without an example batch',
            fix=fix,
            location="data.source",
        )
    return ExampleDataset(example)


def open_local_batches(dataset: Dataset, plan: Plan, rank: int) -> LocalBatches:
    """Returns the batches of `rank` under `plan`."""
    dataset = dataset.reopen() if isinstance(dataset, TokenStream) else dataset
    return LocalBatches(dataset, _order(dataset, plan), plan, rank)


def _order(data: Dataset, plan: Plan) -> SampleOrder:
    seed, epochs = plan.job.train.seed, plan.job.data.epochs
    if isinstance(data, TokenStream):
        return StreamOrder()
    return data.order(seed, epochs) if isinstance(data, Mixture) else ShuffledOrder(len(data), seed, epochs)


@dataclass
class PrefetchedBatches:
    """Local batches that the threads of `pool` prepare, at most `depth` of them ahead of their step."""

    batches: LocalBatches
    pool: ThreadPoolExecutor
    depth: int
    _first: int = 0  # the step of the first in the queue
    _queue: deque[Future[tuple[bool, MaybeBatch]]] = field(default_factory=deque)

    @property
    def dataset(self) -> Dataset:
        """The samples."""
        return self.batches.dataset

    @property
    def num_steps(self) -> int | None:
        """The number of global steps until the samples end; None if unknown or without end."""
        return self.batches.num_steps

    def sample_ids(self, step: int) -> list[list[int]]:
        """Returns the ids of the samples of each data rank in global step `step`."""
        return self.batches.sample_ids(step)

    def has_ended(self, step: int) -> bool:
        """Returns whether the samples end before global step `step`."""
        return self._prepare(step)[0]

    def batch(self, step: int) -> MaybeBatch:
        """Returns this rank's samples of global step `step` (from 0); None when all are absent."""
        return self._prepare(step)[1]

    def wait_idle(self, timeout_s: float) -> None:
        """Waits until no batch is being prepared, at most `timeout_s` seconds."""
        wait(self._queue, timeout_s)

    def _prepare(self, step: int) -> tuple[bool, MaybeBatch]:
        if step < self._first or step > self._first + len(self._queue):
            self._drop(len(self._queue))
            self._first = step
        self._drop(step - self._first)
        self._first = step
        while len(self._queue) <= self.depth:
            self._queue.append(self.pool.submit(self._make, self._first + len(self._queue)))
        return self._queue[0].result()

    def _make(self, step: int) -> tuple[bool, MaybeBatch]:
        over = self.batches.has_ended(step)
        return over, None if over else self.batches.batch(step)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft().cancel()


@contextmanager
def prefetch(batches: LocalBatches, workers: int) -> Iterator[LocalBatches | PrefetchedBatches]:
    """Yields `batches` with the next ones prepared by `workers` threads; with 0, `batches` itself. All
    threads end on exit.
    """
    if not workers:
        yield batches
        return
    workers = workers if batches.is_thread_safe else 1
    pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
    made = PrefetchedBatches(batches, pool, 2 * workers)
    try:
        yield made
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        made.wait_idle(FAILURE_WAIT_S)
        raise
    pool.shutdown(wait=True, cancel_futures=True)
