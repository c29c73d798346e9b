"""One rank of a plan, with the user's own loop around it: step, evaluate, save, load, export."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import nn

from meshwright.comm.collectives.group import World
from meshwright.engine.forward.evaluation import Evaluation
from meshwright.engine.runtime.loss import Batch
from meshwright.engine.runtime.microbatches import LocalBatch
from meshwright.engine.runtime.state import Metrics
from meshwright.engine.step.executor import Executor
from meshwright.engine.step.gather_full import gather_full_buffers
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.run.checkpoint.integrity import load_consensus, verify_checkpoint
from meshwright.run.checkpoint.resume import check_model
from meshwright.run.checkpoint.save_load import open_tensors
from meshwright.run.export.hf_export import ExportableModel, ExportResult, export_model
from meshwright.run.training.train_loop import save_checkpoint


class Trainer:
    """One rank of a plan with the user's own loop around it; `reading` says what its model is made of.

    Inside `with telling`, a rank that runs out of memory says what takes less; steps and evaluations are.
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
        """The model that is trained, on this rank; under a sharded plan, call it in `whole` only."""
        return self.executor.state.trained_module.module

    @property
    def steps_done(self) -> int:
        """Global steps taken so far, those before a resume included."""
        return self.executor.steps_done

    def step(self, batch: LocalBatch, *, stop: bool = False) -> Metrics:
        """Train one global step on this rank's rows (see `share`); every rank gets the same metrics back.

        A list is one of micro-batches: each has the plan's number of rows, the last one at most that, and rows of any length.
        Raises OutOfMemory, with the changes of the plan that take less, on a rank that asks for memory and is not given it.
        """
        ledger = self.world.ledger
        ledger.phase, ledger.step = "first_step" if ledger.step is None else "step", self.steps_done + 1
        with self.oom_advisor:
            return self.executor.step(batch, stop=stop)

    def evaluate(self, batches: Iterable[LocalBatch]) -> Evaluation:
        """The loss over `batches`, exact over all ranks, each of which calls this with its own rows (see `share`).

        In eval mode and without gradients; parameters, buffers, modes and random streams are untouched. Ranks that have other
        parts of the model than this one call it with the same rows, as `share` deals them.
        """
        with self.oom_advisor:
            return self.executor.evaluate(batches)

    @contextmanager
    def full_params(self) -> Iterator[nn.Module]:
        """The module, to be called without gradients meanwhile: its weights are brought together as they are needed.

        All ranks enter, and run the same forwards (`generate` too; one that draws words, with the same seed); all get the
        outputs. What a plan with shards or parts has between steps is only this rank's share.
        """
        with torch.no_grad(), self.executor.full_params("GATHER_FULL"):
            yield self.module

    def local_batch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """This rank's rows of a global batch, micro-batch after micro-batch; fewer when the batch is short."""
        return select_local_batch(batch, self.plan, self.world.rank)

    def save(self, folder: Path | str) -> Path:
        """Save a checkpoint of this step into `folder` (all ranks call it); returns its own folder."""
        meta = {"plan_hash": self.plan.hash, "torch": torch.__version__}
        return save_checkpoint(Path(folder), self.executor, meta, self.world)

    def export(
        self, folder: Path | str, dtype: torch.dtype | None = None, *, merge: bool = False
    ) -> ExportResult | None:
        """Write the model as a folder that transformers loads and compare it; nothing stays unless `round_trip.passed`.

        Rank 0 does, all ranks call it, and the others return None. Floating weights are stored in `dtype`, or as they are.
        Of a peft model the adapter is written, as peft does; with `merge`, the model that it makes of its base.
        """
        parameters = self.executor.gather_parameters(keep_result=self.world.rank == 0, use_masters=True)
        with self.world.ledger.pause_recording():
            buffers = gather_full_buffers(self.plan, self.executor.state, "GATHER_FULL")
        if self.world.rank:
            return None
        saved = {f"model/{name}": value for name, value in parameters.items()}
        saved |= {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        return export_model(
            ExportableModel.from_checkpoint(self.analyzed.deferred_init, saved),
            Path(folder),
            dtype,
            merge=merge,
        )

    def load(self, checkpoint: Path | str) -> int:
        """Take up the checkpoint in the folder that `save` returned, saved under this or another plan; returns its step.

        All ranks call it, and each reads a share of the files to see whether they are whole. Raises the same CheckpointError
        on all of them for one that is damaged or of another model.
        """
        path = Path(checkpoint)
        ranks = load_consensus(self.world, f"'{path}' was not taken up")
        manifest = verify_checkpoint(
            path, ranks, lambda manifest, place: check_model(manifest, self.executor, place)
        )
        self.executor.load_state_dict(open_tensors(path, manifest.entries), manifest.step)
        return self.steps_done

    def close(self) -> None:
        """Give the module its own forwards back."""
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def select_local_batch(batch: Batch, plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """The rows of a global batch that `rank` plays under `plan`, micro-batch after micro-batch.

    Raises PlanError when the batch has more rows than the plan's global batch: they would be left out.
    """
    num_rows = len(next(iter(batch.values())))
    if num_rows > plan.job.train.batch:
        text = f"a batch of {num_rows} rows; the plan's global batch is {plan.job.train.batch}"
        raise PlanError(
            text, fix="pass at most that many rows, or make a plan with this train.batch", location="batch"
        )
    rows = [row for row in plan.samples_read(rank) if row < num_rows]
    if len(rows) == num_rows:
        return dict(batch)
    first = rows[0] if rows else 0
    if not rows or rows[-1] - first + 1 == len(rows):  # one stretch: views, no copy
        return {key: value[first : first + len(rows)] for key, value in batch.items()}
    return {key: value[rows] for key, value in batch.items()}
