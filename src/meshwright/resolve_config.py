"""Resolves a config: from a request to a plan, its model, data and loss.

Everything that can be refused is refused here, at once, before a process starts: the job, the mesh, the
model, the data, and combinations of them (a token id that the vocabulary does not have, a sample longer than
the model's positions).
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from meshwright.api import default_strategies
from meshwright.device.local_device import target_platform
from meshwright.device.platforms import CPU
from meshwright.engine.forward_backward.evaluation import whole_batch_diagnostics
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.analyze import analyze as read_model
from meshwright.model.analysis.find_model_loss import LabelledForward, run_with_labels
from meshwright.model.analysis.plan_for_model import EXAMPLE_SOURCE, plan_for_model
from meshwright.model.hf.hub import pin_revision
from meshwright.model.hf.model_from_config import text_limits
from meshwright.model.loading.loader import LoadedModel, load_model
from meshwright.model.loss.as_loss import as_loss
from meshwright.model.loss.loss_definition import Loss, empty_loss_error
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.tensor.layer_split_checks import uneven_split_notes
from meshwright.parallel.tensor.vocab_parallel import unsharded_vocab_notes
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    collect_diagnostics,
    diagnostics_in,
    raise_diagnostics,
)
from meshwright.plan.job.field_constraints import with_valid_fields
from meshwright.plan.job.job import Job, missing_data_diagnostics
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.terminal.data_line import DataSummary
from meshwright.run.config.config_and_plan_files import PlanRequest
from meshwright.run.data.data_loader import (
    Dataset,
    ExampleDataset,
    LocalBatches,
    count_tokens,
    open_dataset,
    open_local_batches,
)
from meshwright.run.data.eval_samples import EvalSamples, open_eval_dataset, split_held_out
from meshwright.run.data.mixture import Mixture
from meshwright.run.data.shuffle import ABSENT_SAMPLE
from meshwright.run.data.streaming import TokenStream
from meshwright.run.data.token_dataset import TokenDataset
from meshwright.run.data.tokenizer import ByteTokenizer, Tokenizer, resolve_tokenizer, tokenizer_notes
from meshwright.run.launch.host_memory_check import check_ranks_fit_here
from meshwright.run.measure.resolve_auto_allreduce import choose_algorithms
from meshwright.run.telemetry.callbacks import Callback

DatasetT = TypeVar("DatasetT", bound="Dataset | None")
NEITHER_FOUND_NOR_REFUSED = (
    "a model and data were neither found nor refused; this is a bug: report the config file"
)


@dataclass(frozen=True)
class ResolvedRun:
    """A resolved request: its plan, the analyzed model, data and loss.

    `eval_dataset` are the samples of a separate evaluation source, `callbacks` those of the model's factory,
    `notes` the choices that were made for the plan, with reasons. Without `has_data` the config names no data
    yet, and one sample stands for them.
    """

    plan: Plan
    analyzed: AnalyzedModel
    dataset: Dataset
    loss: Loss
    eval_dataset: Dataset | None = None
    callbacks: tuple[Callback, ...] = ()
    notes: tuple[str, ...] = ()
    has_data: bool = True

    def check_host_memory(self, ranks: Sequence[int]) -> None:
        """Raises PlanError if this host has less free memory than `ranks` keep in it."""
        check_ranks_fit_here(self.analyzed, self.plan, ranks)

    def check_last_round(self) -> None:
        """Raises PlanError if the data end in the middle of a round of sites that train apart."""
        period = self.plan.program.period
        if period is None:
            return
        num_steps = self.local_batches(self.plan, 0).num_steps
        if num_steps is None or num_steps >= self.plan.job.train.steps:
            return
        if not period.ends_with(num_steps - 1):
            text = f"the data end after {num_steps} steps, in the middle of a round: sites would stay apart"
            fix = f"set train.steps = {num_steps}: the last step of a run ends a round"
            raise PlanError(text, fix=fix, location="train.steps")

    def local_batches(self, plan: Plan, rank: int) -> LocalBatches:
        """Returns the samples of `rank` under `plan` (this one, or the same job on another mesh), without
        the held-out ones.
        """
        return open_local_batches(split_held_out(self.dataset, plan.job.evaluate)[0], plan, rank)

    def eval_samples(self, rank: int) -> EvalSamples | None:
        """Returns the evaluation samples of `rank`; None if nothing is evaluated."""
        kept = self.eval_dataset or split_held_out(self.dataset, self.plan.job.evaluate)[1]
        return None if kept is None else EvalSamples(kept, self.plan, self.plan.data_index(rank))

    def data_summary(self) -> DataSummary:
        """Returns what the run reads: tokenizer, samples, tokens, epochs, and repeats within a batch."""
        job, dataset = self.plan.job, self.dataset
        if not self.has_data:
            return DataSummary("", job.train.batch, is_absent=True)
        tokenizer = _short_name(dataset.tokenizer.name) if isinstance(dataset, TokenDataset) else ""
        if isinstance(dataset, TokenStream):
            return DataSummary(tokenizer, job.train.batch)
        batches = self.local_batches(self.plan, 0)
        count, num_samples = count_tokens(dataset), len(batches.dataset)
        num_read = min(job.train.steps * job.train.batch, batches.order.num_total or sys.maxsize)
        epochs = dataset.epochs(num_read) if isinstance(dataset, Mixture) else (num_read / num_samples,)
        first = Counter(i for i in batches.order.ids(0, job.train.batch) if i != ABSENT_SAMPLE)
        repeated, num_repeats = first.most_common(1)[0]
        summary = DataSummary(
            tokenizer,
            job.train.batch,
            num_samples,
            num_held_out=job.evaluate.hold_out,
            epochs=epochs,
            num_repeats=num_repeats,
            num_candidates=dataset.source_size(repeated) if isinstance(dataset, Mixture) else num_samples,
        )
        if count is None:
            return summary
        padding, ignored = (1 - known / count.num_positions for known in (count.num_tokens, count.num_labels))
        return replace(summary, num_tokens=count.num_tokens, padding=padding, ignored=ignored)


def resolve_request(
    request: PlanRequest, world: int | None = None, *, needs_data: bool = True
) -> ResolvedRun:
    """Resolves `request`; `world` is the number of ranks if known.

    Without `needs_data`, a request that names no data is planned with a sample of zeros. Raises PlanError
    with the diagnostics of job, mesh, model, data, strategies and plan together.
    """
    diagnostics = _request_diagnostics(request, needs_data=needs_data)
    world_size = world if world is not None or -1 in request.mesh.values() else None
    mesh = collect_diagnostics(diagnostics, Mesh.infer, request.mesh, world_size)
    opened = open_request(request, diagnostics, needs_data=needs_data)
    resolved = None
    try:
        if mesh is not None and opened is not None:
            resolved = plan_request(request, mesh, opened)
    except PlanError as error:
        if not diagnostics:
            raise  # as it is: its cause may be an error in the user's own file
        diagnostics += error.diagnostics
    raise_diagnostics(dict.fromkeys(diagnostics))
    if resolved is None:
        raise RuntimeError(NEITHER_FOUND_NOR_REFUSED)
    return resolved


def _request_diagnostics(request: PlanRequest, *, needs_data: bool) -> list[Diagnostic]:
    missing = missing_data_diagnostics(request.job.data) if needs_data else ()
    return [*missing, *request.job_diagnostics, *request.strategy_diagnostics]


@dataclass(frozen=True)
class OpenedRequest:
    """The model and the data of a request, which are the same for every mesh and all strategies.

    `job` is that of the request with a commit of the hub and a tokenizer. If the data cannot be read, or the
    request `has_data` not, one sample stands for them. The model is analyzed once, when it is first asked
    for.
    """

    job: Job
    loaded: LoadedModel
    dataset: Dataset
    eval_dataset: Dataset | None
    has_data: bool
    notes: tuple[str, ...] = ()

    @cached_property
    def example(self) -> Mapping[str, torch.Tensor]:
        """A batch as the data give it."""
        return self.loaded.example or self.dataset.batch([0])

    @cached_property
    def labelled(self) -> LabelledForward:
        """The forward that tells the loss which the model computes itself."""
        return run_labelled(self.loaded, self.example)

    @cached_property
    def loss(self) -> Loss:
        """The loss of the run. Raises PlanError if no sample has a token that counts."""
        loss = choose_loss(self.loaded, self.labelled.loss, self.job.data)
        data = self.dataset
        if isinstance(data, ExampleDataset):
            batch = loss.prepare(data.batch(range(len(data))))
            if not loss.count_weight_and_tokens(batch)[0]:
                raise empty_loss_error(f"of the {len(data)} samples of the example batch")
        return loss

    @cached_property
    def analyzed(self) -> AnalyzedModel:
        """The analysis of the model with its loss."""
        example, loss = self.loss.prepare(self.example), self.loss
        return read_model(self.loaded, example, loss, self.labelled.resized)

    def prepared(self, data: DatasetT) -> DatasetT | ExampleDataset:
        """Returns `data` as the model and the loss read it."""
        if not isinstance(data, ExampleDataset):
            return data
        return ExampleDataset(self.loss.prepare(data.batch(range(len(data)))))


def open_valid_request(request: PlanRequest, *, needs_data: bool = True) -> OpenedRequest:
    """Returns the model and the data of `request`. Raises PlanError with every diagnostic of both and of the
    job.
    """
    diagnostics = _request_diagnostics(request, needs_data=needs_data)
    opened = open_request(request, diagnostics, needs_data=needs_data)
    raise_diagnostics(dict.fromkeys(diagnostics))
    if opened is None:
        raise RuntimeError(NEITHER_FOUND_NOR_REFUSED)
    return opened


def open_request(
    request: PlanRequest, diagnostics: list[Diagnostic], *, needs_data: bool
) -> OpenedRequest | None:
    """Returns the model and the data of `request`, and appends to `diagnostics`, those of the job, what is
    wrong with them.

    Returns None without a model, and if no samples can stand for data that cannot be read.
    """
    job, cache = request.job, token_cache_folder(request.run)
    has_data, loaded, eval_dataset = needs_data or job.data.is_named, None, None
    is_readable = job.data.source == EXAMPLE_SOURCE or not diagnostics_in("data", diagnostics)
    try:
        if not diagnostics_in("model", diagnostics):
            job = replace(job, model=pin_revision(job.model))
            loaded = load_model(job.model, job.train.seed)
    except PlanError as error:
        if not diagnostics:
            raise
        diagnostics += error.diagnostics
    data = readable = None
    if has_data:
        tokenizer: str | None = job.data.tokenizer
        if loaded is not None and job.data.source != EXAMPLE_SOURCE:  # the example batch has none
            vocab_size = vocab_size_of(loaded.deferred_init.instantiate())
            tokenizer = collect_diagnostics(diagnostics, resolve_tokenizer, job, vocab_size)
        if tokenizer is not None:
            job, readable = replace(job, data=replace(job.data, tokenizer=tokenizer)), loaded
    notes = () if loaded is None else tuple(tokenizer_notes(job))
    if has_data and is_readable:
        data = collect_diagnostics(diagnostics, _open_data, job.data, readable, cache, tuple(diagnostics))
    if loaded is None:
        return None
    if data is not None:
        eval_dataset = collect_diagnostics(diagnostics, open_eval_dataset, job, data, loaded.example, cache)
    elif loaded.example is None and job.data.source == EXAMPLE_SOURCE:
        return None
    else:  # the mesh and the strategies are checked with a sample that stands for the data
        data = ExampleDataset(_stand_in_sample(loaded, job.data))
    return OpenedRequest(job, loaded, data, eval_dataset, has_data, notes)


def plan_request(request: PlanRequest, mesh: Mesh, opened: OpenedRequest) -> ResolvedRun:
    """Returns the run of `request` on `mesh`.

    Raises PlanError with every diagnostic of the plan, and if `request` is a plan file of another plan.
    """
    job, analyzed = opened.job, opened.analyzed
    given = request.strategies
    strategies = default_strategies(mesh, analyzed.model_spec) if given is None else given
    strategies, notes = choose_algorithms(strategies, mesh, request.cluster, Path(request.run.folder))
    if given is None and mesh.tp > 1:
        notes = [*notes, *unsharded_vocab_notes(analyzed.model_spec)]
    notes = [*notes, *job.precision.notes(), *_accelerator_notes(request), *opened.notes]
    plan = plan_for_model(
        analyzed,
        job,
        mesh,
        strategies,
        request.micro_batch,
        request.run,
        request.job_diagnostics,
        request.align_bytes,
    )
    notes = [*notes, *uneven_split_notes(plan.sharding)]
    made_from = request.extra.get("plan_hash", plan.hash)
    if made_from != plan.hash:
        raise PlanError(
            f"plan_hash is {made_from}, the contents make {plan.hash}: the file was edited, or the model "
            "changed",
            fix="remove the line plan_hash, or make the plan again with `meshwright plan`",
            location="plan_hash",
        )
    raise_diagnostics(whole_batch_diagnostics(opened.loss) if job.evaluate.is_enabled else ())
    if not opened.has_data and opened.loaded.example is None:  # a text will come, not an example batch
        plan = replace(plan, job=replace(plan.job, data=job.data))
    return ResolvedRun(
        plan,
        analyzed,
        opened.prepared(opened.dataset),
        opened.loss,
        eval_dataset=opened.prepared(opened.eval_dataset),
        callbacks=factory_callbacks(opened.loaded.callbacks),
        notes=tuple(notes),
        has_data=opened.has_data,
    )


def _accelerator_notes(request: PlanRequest) -> Iterator[str]:
    """Yields what would be faster on the device of the plan: `run.hardware`, or that of this host. Of a slow
    dtype the ranks warn themselves.
    """
    if target_platform(request.run.hardware) == CPU:
        return
    if request.align_bytes == 1:
        yield (
            "parameters and shards lie in buffers without padding, which slows a GPU where sizes are odd; "
            "set align_bytes = 128"
        )


def _short_name(tokenizer: str) -> str:
    """Returns the last part of a path, or a hub id without its revision."""
    return Path(tokenizer).name if Path(tokenizer).is_absolute() else tokenizer.partition("@")[0]


def vocab_size_of(module: nn.Module) -> int | None:
    """Returns the number of tokens of a model: that of its config, else the size of its largest table."""
    tables = (part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding))
    return text_limits(module).vocab_size or max(tables, default=None)


def _open_data(
    source: DataConfig, loaded: LoadedModel | None, cache: Path, model_diagnostics: Sequence[Diagnostic]
) -> Dataset | None:
    """Returns the training samples; without a model, checks that they can be read."""
    if loaded is None:
        if source.source != EXAMPLE_SOURCE:
            open_dataset(source, None, cache, lambda tokenizer: model_diagnostics)
        return None
    module = loaded.deferred_init.instantiate()
    return open_dataset(
        source, loaded.example, cache, lambda tokenizer: _text_diagnostics(module, source, tokenizer)
    )


def _stand_in_sample(loaded: LoadedModel, source: DataConfig) -> Mapping[str, torch.Tensor]:
    """Returns samples like those of data that cannot be read: of the model's factory, or zeros."""
    return loaded.example or zero_tokens(loaded, with_valid_fields(source))


def zero_tokens(loaded: LoadedModel, source: DataConfig) -> dict[str, torch.Tensor]:
    """Returns a sample of zeros, of shape (1, tokens), as long as `source` and the positions of the model
    allow.
    """
    limit = text_limits(loaded.deferred_init.instantiate()).max_positions or source.sequence
    tokens = torch.zeros(1, max(1, min(source.sequence, limit)), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def run_labelled(loaded: LoadedModel, example: Mapping[str, torch.Tensor]) -> LabelledForward:
    """Returns the forward with labels that tells the loss of the model; nothing if its factory states one."""
    return run_with_labels(loaded, example) if loaded.loss is None else LabelledForward()


def choose_loss(loaded: LoadedModel, own: Loss | None, source: DataConfig) -> Loss:
    """Returns the loss of a factory; if it has none, `own`, the one that the model computes itself.

    Texts are read as samples whose labels are the next tokens. Raises PlanError for a loss that is no Loss,
    and for a model whose own loss does not predict the next token of a text.
    """
    given, is_text = as_loss(loaded.loss), source.source != EXAMPLE_SOURCE
    loss = given or own
    if is_text and given is None and loss is not None and not loss.shifts_labels:
        text = f"the labels of texts are the next tokens, and {loaded.name} predicts something else"
        fix = (
            "choose a causal language model; or return the model, an example batch with its labels and "
            "the loss from a factory: meshwright.Model(module, example=..., loss=...)"
        )
        raise PlanError(text, fix=fix, location="data.source")
    loss = loss or token_cross_entropy()
    return loss.of_prepared_batches() if is_text else loss


def factory_callbacks(given: Iterable[object]) -> tuple[Callback, ...]:
    """Returns the callbacks of a factory. Raises PlanError for anything else."""
    found = tuple(callback for callback in given if isinstance(callback, Callback))
    strange = [type(each).__name__ for each in given if not isinstance(each, Callback)]
    if strange:
        fix = "write callbacks=[meshwright.Callback(on_step_end=...)]"
        raise PlanError(
            f"a {strange[0]} among the callbacks of the model", fix=fix, location="model.callbacks"
        )
    return found


def token_cache_folder(run: RunConfig) -> Path:
    """Returns the folder of tokenized data."""
    return Path(run.cache) if run.cache else Path(run.folder) / "cache"


def _text_diagnostics(module: nn.Module, source: DataConfig, tokenizer: Tokenizer) -> Iterator[Diagnostic]:
    limits = text_limits(module)
    vocabulary = vocab_size_of(module)
    if vocabulary is not None and vocabulary < tokenizer.vocab_size:
        how = f"the ids of the tokenizer '{tokenizer.name}' run up to {tokenizer.vocab_size - 1}"
        fix = (
            f"set model.overrides.vocab_size = {tokenizer.vocab_size}, or choose the tokenizer "
            "that belongs to the model: data.tokenizer"
        )
        if isinstance(tokenizer, ByteTokenizer):
            how = f"text is read as bytes, of which there are {tokenizer.vocab_size}"
        elif vocabulary >= ByteTokenizer.vocab_size:
            fix += '; to train on bytes: data.tokenizer = "bytes"'
        if limits.vocab_size is None:
            fix = (
                f"make its embedding and head at least {tokenizer.vocab_size} large, "
                "or choose another tokenizer: data.tokenizer"
            )
        yield Diagnostic(f"the model has {vocabulary} tokens, and {how}", fix, "model.source")
    if limits.max_positions is not None and limits.max_positions < source.sequence:
        text = (
            f"a sample of {source.sequence} tokens; "
            f"the model takes at most {limits.max_positions} (max_position_embeddings)"
        )
        fix = (
            f"set data.sequence = {limits.max_positions}, "
            f"or model.overrides.max_position_embeddings = {source.sequence}"
        )
        yield Diagnostic(text, fix, "data.sequence")
