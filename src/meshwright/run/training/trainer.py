"""The public trainer: one rank of a plan, for training loops of your own."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import isfinite
from pathlib import Path
from typing import Self, TypeGuard

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from meshwright.comm.collectives.group import World
from meshwright.device.device_memory import available_nbytes
from meshwright.engine.forward_backward.evaluation import Evaluation
from meshwright.engine.generation.answer_logprobs import AnswerLogprobs, LogprobsRequest, answer_logprobs
from meshwright.engine.generation.generate import Decoder, GenerationRequest, OnToken, generate
from meshwright.engine.generation.sampling_params import (
    GeneratedAnswer,
    SamplingParams,
    as_token_ids,
    params_of_prompts,
)
from meshwright.engine.runtime.microbatches import LocalBatch
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.engine.step.broadcast_stage_params import gather_full_buffers
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.as_batch import check_constants, parse_batch
from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.generation_program import Gather
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.field_constraints import with_valid_fields
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Answer
from meshwright.planner.program_cost.kv_cache_memory import gathered_weights_nbytes, kv_cache_nbytes
from meshwright.run.checkpoint.distributed_checkpoint import open_tensors
from meshwright.run.checkpoint.distributed_verification import consensus_for_load, verify_checkpoint
from meshwright.run.checkpoint.resume import check_model
from meshwright.run.export.hf_export import ExportableModel, ExportResult, export_model
from meshwright.run.export.weight_source import WeightIteration, WeightSource
from meshwright.run.training.gathered_predictions import (
    EvalMetric,
    Predict,
    evaluate_with_metrics,
    gathered_predictions,
)
from meshwright.run.training.same_batch_check import check_same_batch
from meshwright.run.training.train_loop import save_checkpoint

logger = logging.getLogger(__name__)


class LocalSamples(dict[str, torch.Tensor]):
    """The samples of one rank: what `Trainer.local_batch` returns of a global batch."""


class Trainer:
    """One rank of a plan: step, evaluate, save, load, export.

    A rank that runs out of memory in a step or an evaluation raises OutOfMemory, with the changes of the
    plan that need less.
    """

    def __init__(
        self,
        plan: Plan,
        executor: StepExecutor,
        world: World,
        analyzed: AnalyzedModel,
        oom_advisor: AbstractContextManager[object],
    ) -> None:
        self.plan, self.executor, self.world = plan, executor, world
        self.analyzed, self.oom_advisor = analyzed, oom_advisor
        self._weights = WeightIteration(executor)
        self._warned = False  # of a step that changed nothing, or whose numbers are not finite
        # the last step, if its numbers were late: checked with the next one
        self._unchecked: tuple[Metrics, LocalBatch] | None = None

    @property
    def module(self) -> nn.Module:
        """The model on this rank. Under a sharded plan, call it inside `full_params` only."""
        return self.executor.state.trained_module.module

    @property
    def steps_done(self) -> int:
        """The number of global steps taken, those before a resume included."""
        return self.executor.steps_done

    @property
    def answers(self) -> tuple[Answer, ...]:
        """What observers have returned for the weights that they saw last, in their order; () at first."""
        return self.executor.state.answers

    def step(self, batch: object, *, stop: bool = False) -> Metrics:
        """Trains one global step on this rank's samples (see `local_batch`); returns the same metrics on
        every rank.

        A batch is a dict of tensors, or what a data loader yields (model/loss/as_batch.py). A list of batches
        contains microbatches: each has the plan's number of samples, the last one at most that, and any
        sequence length. None: this rank has no samples. Raises OutOfMemory on a rank that runs out of memory.
        """
        ledger = self.world.ledger
        ledger.phase, ledger.step = "first_step" if ledger.step is None else "step", self.steps_done + 1
        prepared = self._prepare(batch)
        self._weights.end()
        with self.oom_advisor:
            metrics = self.executor.step(prepared, stop=stop)
        self.check_last_step()
        self._unchecked = metrics, prepared
        if not metrics.numbers.is_late:
            self.check_last_step()
        return metrics

    def _begin_call(self) -> None:
        self._weights.end()
        self.check_last_step()

    def check_last_step(self) -> None:
        """Warns if the last step changed nothing, or made the parameters unusable; once per run.

        On a GPU the numbers of a step are late: the next step, an evaluation, a checkpoint or the end calls
        this.
        """
        if self._unchecked is not None:
            self._warn_once(*self._unchecked)
            self._unchecked = None

    def evaluate(self, data: object, metrics: Mapping[str, EvalMetric] | None = None) -> Evaluation:
        """Returns the loss over the samples of `data`, exact over all ranks, and the `metrics` of the user.

        `data` are batches, such as a DataLoader, or a dataset; every rank passes the same, and each sample
        counts once. Batches of `local_batch` contain this rank's samples already. Each of `metrics` is a
        function of the model's outputs and a batch that returns a sum over samples and the count that
        divides it. Evaluation runs in eval mode and without gradients, and does not change parameters,
        buffers, modes and random states.
        """
        self._begin_call()
        batches = self._eval_batches(data)
        with self.oom_advisor:
            if not metrics:
                found = self.executor.evaluate(batches)
            else:
                found = evaluate_with_metrics(self.executor, self._single_microbatches(batches), metrics)
        self.executor.lr_schedule.report_metric(found.loss)
        return found

    def predict(self, data: object, select: Predict) -> dict[str, torch.Tensor]:
        """Returns what `select` takes of the model's outputs and each batch, by name: of all samples, once
        each, in the order of `data`, on every rank.

        `data` as for `evaluate`; `select(outputs, batch)` returns tensors with one sample per row.
        """
        pieces: dict[str, list[torch.Tensor]] = {}
        self._weights.end()
        with self.oom_advisor:
            rows = self._single_microbatches(self._eval_batches(data))
            for row in gathered_predictions(self.executor, rows, select):
                for piece in row:
                    for name, tensor in piece.items():
                        pieces.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in pieces.items()}

    def generate(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_num_seqs: int = 8,
        gather: Gather = "once",
        tokenizer: Decoder | None = None,
        on_token: OnToken | None = None,
        return_routed_experts: bool = False,
        decode_context_parallel: bool = False,
    ) -> list[GeneratedAnswer]:
        """Returns `n` answers to each of `prompts`, token ids, in order and on every rank; all ranks call it.

        `params` are those of all prompts, or of each. Ranks that have other samples in a step continue other
        prompts, at most `max_num_seqs` sequences at once. Sharded weights are gathered "once" before the
        first token, which needs memory for all weights of this rank's stages, or each "block" in every
        forward. `tokenizer` makes text for `stop_strings`.
        `on_token(index, token)` is called with each token of answer `index` on the ranks that continue it;
        False ends the answer, and an error ends all ranks. With `return_routed_experts` answers have the
        experts of each token (model/recording/router_replay.py). With `decode_context_parallel` ranks along
        cp continue the same prompts, and divide the keys and values of each. Nothing is trained.
        """
        self._begin_call()
        ids = [as_token_ids(prompt, number) for number, prompt in enumerate(prompts)]
        each = params_of_prompts(SamplingParams() if params is None else params, len(ids))
        decode = None if tokenizer is None else tokenizer.decode
        limits = [with_valid_fields(params).max_new_tokens for params in each]
        longest = max((len(prompt) + limit for prompt, limit in zip(ids, limits, strict=True)), default=0)
        divides = decode_context_parallel
        fitting = self.num_fitting_seqs(longest - 1, gather, decode_context_parallel=divides)
        how = (max_num_seqs, gather, decode, on_token, fitting, return_routed_experts, divides)
        request = GenerationRequest(ids, each, *how)
        with self.oom_advisor:
            return generate(self.executor, request)

    def logprobs(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        answers: Sequence[Sequence[int] | torch.Tensor],
        *,
        batch_size: int = 8,
        gather: Gather = "once",
        routed_experts: Sequence[torch.Tensor] | None = None,
    ) -> list[AnswerLogprobs]:
        """Returns the log-probability of each token of `answers`, one to each of `prompts`, in order and on
        every rank; all ranks call it. In eval mode and without gradients; for the rest as `generate`. The
        `routed_experts` that `generate` returned with each answer are replayed.
        """
        self._begin_call()
        asked = [as_token_ids(prompt, number) for number, prompt in enumerate(prompts)]
        given = [as_token_ids(answer, number, "answer") for number, answer in enumerate(answers)]
        with self.oom_advisor:
            request = LogprobsRequest(asked, given, batch_size, gather, routed_experts)
            return answer_logprobs(self.executor, request)

    def num_fitting_seqs(
        self, num_tokens: int, gather: Gather = "once", *, decode_context_parallel: bool = False
    ) -> int | None:
        """Returns for the keys and values of how many sequences of `num_tokens` tokens this rank has the
        memory; None if the cache of the model is not known. `decode_context_parallel`: as for `generate`.
        """
        layers, plan = self.analyzed.cached_layers, self.executor.state.plan
        how = {"decode_context_parallel": decode_context_parallel}
        nbytes = kv_cache_nbytes(layers or (), plan, plan.rank, 1, num_tokens, **how)
        if nbytes <= 0:
            return None
        gathered = gathered_weights_nbytes(plan, plan.rank) if gather == "once" else 0
        return max(0, available_nbytes(self.world.device) - gathered) // nbytes

    @contextmanager
    def full_params(self) -> Iterator[nn.Module]:
        """Yields the module for forwards without gradients: its parameters are gathered when they are needed.

        All ranks enter and run the same forwards (transformers' `generate` too, with the same seed if it
        samples; `trainer.generate` divides the prompts), and all get the outputs. Outside, a rank under a
        plan with shards or stages has only its own part.
        """
        self._weights.end()
        with torch.no_grad(), self.executor.full_param_forwards.full_params("GATHER_FULL"):
            yield self.module

    def local_batch(self, batch: object) -> LocalSamples:
        """Returns this rank's samples of a global batch, microbatch after microbatch; fewer if the batch
        is short.
        """
        return select_local_batch(batch_tensors(batch, self.analyzed), self.plan, self.world.rank)

    def _warn_once(self, metrics: Metrics, batch: LocalBatch) -> None:
        if self._warned or metrics.overflow or metrics.spike is not None:
            return
        if metrics.is_skipped:
            self._warned = True
            text = "step %d changed nothing: no label of the batch counts (-100, or a weight of 0)"
            logger.warning(text, metrics.step)
        elif not (isfinite(metrics.loss) and isfinite(metrics.grad_norm)):
            self._warned = True
            _warn_of_harm(metrics, batch)

    def _prepare(self, batch: object) -> LocalBatch:
        """Returns `batch` as the model and the loss read it."""
        if batch is None:
            return None
        if _is_microbatches(batch):
            return [self._prepare_one(each) for each in batch]
        return self._prepare_one(batch)

    def _prepare_one(self, batch: object) -> Batch:
        return self.executor.loss.prepare(batch_tensors(batch, self.analyzed))

    def _eval_batches(self, data: object) -> Iterator[LocalBatch]:
        """Yields this rank's samples of each batch of `data`, prepared."""
        size, is_checked = self.plan.job.train.batch, self.world.mesh.world_size == 1
        for batch in _iterate_batches(data, size):
            if _is_local(batch):
                yield self._prepare(batch)
                continue
            tensors = batch_tensors(batch, self.analyzed)
            if not is_checked:
                check_same_batch(tensors, self.world)
                is_checked = True
            for first in range(0, len(next(iter(tensors.values()))), size):
                rows = {key: value[first : first + size] for key, value in tensors.items()}
                local = select_local_batch(rows, self.plan, self.world.rank)
                yield self._prepare_one(local) if len(next(iter(local.values()))) else None

    def _single_microbatches(self, batches: Iterable[LocalBatch]) -> Iterator[Batch | None]:
        """Yields as many microbatches per batch on every rank; None where this one has no samples."""
        size = self.plan.micro_batch
        num_on_each_rank = len(self.plan.samples_read(0)) // size  # the first rank reads most
        for batch in batches:
            given = [batch] if isinstance(batch, Mapping) else batch or []
            found = [
                {key: value[first : first + size] for key, value in each.items()}
                for each in given
                for first in range(0, len(next(iter(each.values()))), size)
            ]
            yield from found
            yield from [None] * (num_on_each_rank - len(found))

    def save(self, folder: Path | str) -> Path:
        """Saves a checkpoint of this step into `folder` and returns its path; all ranks call it."""
        self._begin_call()
        meta = {"plan_hash": self.plan.hash, "torch": torch.__version__}
        return save_checkpoint(Path(folder), self.executor, meta, self.world)

    def export(
        self, folder: Path | str, dtype: torch.dtype | None = None, *, merge: bool = False
    ) -> ExportResult | None:
        """Writes the model as a folder that transformers loads and compares both; removes it unless
        `round_trip.passed`.

        All ranks call it; rank 0 writes, the others return None. Floating-point weights are stored in
        `dtype`, or as they are. Of a peft model the adapter is written, as peft does; with `merge`, the base
        model with the adapter merged into it.
        """
        self._begin_call()
        self.executor.check_sites_agree("export")
        parameters = self.executor.gather_parameters(keep_result=self.world.rank == 0, use_masters=True)
        with self.world.ledger.pause_recording():
            buffers = gather_full_buffers(self.executor.state, "GATHER_FULL")
        if self.world.rank:
            return None
        tensors = {f"model/{name}": value for name, value in parameters.items()}
        tensors |= {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        return export_model(
            ExportableModel.from_checkpoint(self.analyzed.deferred_init, tensors),
            Path(folder),
            dtype,
            merge=merge,
        )

    def weights(self, dtype: torch.dtype | None = None, *, rank: int | None = None) -> WeightSource:
        """Returns the whole tensors as `export` stores them, one at a time, on all ranks:
        `for name, tensor in trainer.weights()`. With `rank`, that one alone gets them. Of a peft model these
        are the tensors of the adapter.
        """
        deferred_init = self.analyzed.deferred_init
        return WeightSource(self.executor, deferred_init, self._weights, dtype, rank)

    def load(self, checkpoint: Path | str) -> int:
        """Loads the checkpoint in the folder that `save` returned, saved under this or another plan; returns
        its step.

        All ranks call it; each verifies a share of the files. Raises the same CheckpointError on all ranks
        for a checkpoint that is damaged or of another model.
        """
        path = Path(checkpoint)
        self._weights.end()
        ranks = consensus_for_load(self.world, f"'{path}' was not loaded")
        manifest = verify_checkpoint(
            path, ranks, lambda manifest, place: check_model(manifest, self.executor, place)
        )
        self.executor.load_state_dict(open_tensors(path, manifest.entries), manifest.step)
        return self.steps_done

    def close(self) -> None:
        """Restores the module's own forward methods."""
        self._begin_call()
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:  # a device that failed has no numbers
            self._unchecked = None
        self.close()


def batch_tensors(batch: object, analyzed: AnalyzedModel) -> dict[str, torch.Tensor]:
    """Returns the tensors of `batch`, which a data loader yielded; see model/loss/as_batch.py.

    Raises PlanError for a batch with other constants than the example of the analysis.
    """
    if isinstance(batch, LocalSamples):
        return batch
    parsed = parse_batch(batch, analyzed.forward_parameters, analyzed.loss.targets)
    check_constants(parsed.constants, analyzed.constants)
    return parsed.tensors


def _warn_of_harm(metrics: Metrics, batch: LocalBatch) -> None:
    """Logs that the parameters are unusable, and which tensors of `batch` are not finite."""
    given = [batch] if isinstance(batch, Mapping) else batch or []
    causes = {key for each in given for key, value in each.items() if not value.isfinite().all()}
    logger.warning(
        "step %d: the loss is %s and the gradient norm %s%s; the parameters are unusable from here on. Load "
        'a checkpoint, and correct the batch, or make the plan with guard.action = "skip", which leaves such '
        "steps out",
        *(metrics.step, metrics.loss, metrics.grad_norm),
        f", and {', '.join(sorted(causes))} of the batch is not finite" if causes else "",
    )


def _iterate_batches(data: object, size: int) -> Iterator[object]:
    """Yields the batches of `data`: a data loader, an iterable of batches, one batch, or a dataset."""
    if isinstance(data, Mapping):
        yield data
        return
    if isinstance(data, TorchDataset) or type(data).__module__.startswith("datasets."):
        data = DataLoader(data, batch_size=size)  # type: ignore[arg-type]  datasets of the hub are read alike
    if not isinstance(data, Iterable):
        text = f"data to evaluate on is a {type(data).__name__}"
        fix = "pass a DataLoader, a dataset, or an iterable of batches"
        raise PlanError(text, fix=fix, location="evaluate")
    yield from data


def _is_microbatches(batch: object) -> TypeGuard[list[object]]:
    """Returns whether `batch` is a list of microbatches; a list of tensors is one batch without names."""
    return isinstance(batch, list) and not all(isinstance(each, torch.Tensor) for each in batch)


def _is_local(batch: object) -> bool:
    """Returns whether `batch` has the samples of this rank only, as a list of microbatches does."""
    return batch is None or isinstance(batch, LocalSamples) or _is_microbatches(batch)


def select_local_batch(batch: Batch, plan: Plan, rank: int) -> LocalSamples:
    """Returns the samples of a global batch that `rank` trains on under `plan`, microbatch after
    microbatch.

    Raises PlanError when the batch has more samples than the plan's global batch.
    """
    num_samples = len(next(iter(batch.values())))
    if num_samples > plan.job.train.batch:
        text = f"a batch of {num_samples} samples; the plan's global batch is {plan.job.train.batch}"
        raise PlanError(
            text, fix="pass at most that many samples, or make a plan with this train.batch", location="batch"
        )
    local_ids = [index for index in plan.samples_read(rank) if index < num_samples]
    if len(local_ids) == num_samples:
        return LocalSamples(batch)
    first = local_ids[0] if local_ids else 0
    if not local_ids or local_ids[-1] - first + 1 == len(local_ids):  # contiguous: views, no copy
        return LocalSamples({key: value[first : first + len(local_ids)] for key, value in batch.items()})
    return LocalSamples({key: value[local_ids] for key, value in batch.items()})
