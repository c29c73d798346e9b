"""The public trainer: one rank of a plan, for training loops of your own."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import nn

from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.evaluation import Evaluation
from meshwright.engine.runtime.microbatches import LocalBatch
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.engine.step.broadcast_stage_params import gather_full_buffers
from meshwright.engine.step.executor import Executor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.run.checkpoint.distributed_checkpoint import open_tensors
from meshwright.run.checkpoint.distributed_verification import consensus_for_load, verify_checkpoint
from meshwright.run.checkpoint.resume import check_model
from meshwright.run.export.hf_export import ExportableModel, ExportResult, export_model
from meshwright.run.training.train_loop import save_checkpoint


class Trainer:
    """One rank of a plan: step, evaluate, save, load, export.

    A rank that runs out of memory in a step or an evaluation raises OutOfMemory, with the changes of the
    plan that need less.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        world: World,
        analyzed: AnalyzedModel,
        oom_advisor: AbstractContextManager[object],
    ) -> None:
        self.plan, self.executor, self.world, self.analyzed, self.oom_advisor = (
            plan,
            executor,
            world,
            analyzed,
            oom_advisor,
        )

    @property
    def module(self) -> nn.Module:
        """The model on this rank. Under a sharded plan, call it inside `full_params` only."""
        return self.executor.state.trained_module.module

    @property
    def steps_done(self) -> int:
        """The number of global steps taken, those before a resume included."""
        return self.executor.steps_done

    def step(self, batch: LocalBatch, *, stop: bool = False) -> Metrics:
        """Trains one global step on this rank's samples (see `local_batch`); returns the same metrics on
        every rank.

        A list contains microbatches: each has the plan's number of samples, the last one at most that, and
        any sequence length. Raises OutOfMemory on a rank that runs out of memory.
        """
        ledger = self.world.ledger
        ledger.phase, ledger.step = "first_step" if ledger.step is None else "step", self.steps_done + 1
        with self.oom_advisor:
            return self.executor.step(self._prepare(batch), stop=stop)

    def evaluate(self, batches: Iterable[LocalBatch]) -> Evaluation:
        """Returns the loss over `batches`, exact over all ranks; each rank passes its own samples (see
        `local_batch`).

        It runs in eval mode and without gradients, and does not change parameters, buffers, modes and random
        states. Ranks with other pipeline stages, or other parts of the same samples, pass the same samples.
        """
        with self.oom_advisor:
            return self.executor.evaluate(self._prepare(batch) for batch in batches)

    @contextmanager
    def full_params(self) -> Iterator[nn.Module]:
        """Yields the module for forwards without gradients: its parameters are gathered when they are needed.

        All ranks enter and run the same forwards (`generate` too, with the same seed if it samples), and all
        get the outputs. Outside, a rank under a plan with shards or stages has only its own part.
        """
        with torch.no_grad(), self.executor.full_params("GATHER_FULL"):
            yield self.module

    def local_batch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns this rank's samples of a global batch, microbatch after microbatch; fewer if the batch
        is short.
        """
        return select_local_batch(batch, self.plan, self.world.rank)

    def _prepare(self, batch: LocalBatch) -> LocalBatch:
        """Returns `batch` as the model and the loss read it."""
        prepare = self.executor.state.loss.prepare
        if batch is None:
            return None
        return prepare(batch) if isinstance(batch, Mapping) else [prepare(each) for each in batch]

    def save(self, folder: Path | str) -> Path:
        """Saves a checkpoint of this step into `folder` and returns its path; all ranks call it."""
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
        parameters = self.executor.gather_parameters(keep_result=self.world.rank == 0, use_masters=True)
        with self.world.ledger.pause_recording():
            buffers = gather_full_buffers(self.plan, self.executor.state, "GATHER_FULL")
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

    def load(self, checkpoint: Path | str) -> int:
        """Loads the checkpoint in the folder that `save` returned, saved under this or another plan; returns
        its step.

        All ranks call it; each verifies a share of the files. Raises the same CheckpointError on all ranks
        for a checkpoint that is damaged or of another model.
        """
        path = Path(checkpoint)
        ranks = consensus_for_load(self.world, f"'{path}' was not loaded")
        manifest = verify_checkpoint(
            path, ranks, lambda manifest, place: check_model(manifest, self.executor, place)
        )
        self.executor.load_state_dict(open_tensors(path, manifest.entries), manifest.step)
        return self.steps_done

    def close(self) -> None:
        """Restores the module's own forward methods."""
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def select_local_batch(batch: Batch, plan: Plan, rank: int) -> dict[str, torch.Tensor]:
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
        return dict(batch)
    first = local_ids[0] if local_ids else 0
    if not local_ids or local_ids[-1] - first + 1 == len(local_ids):  # contiguous: views, no copy
        return {key: value[first : first + len(local_ids)] for key, value in batch.items()}
    return {key: value[local_ids] for key, value in batch.items()}
