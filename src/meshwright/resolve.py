"""From a config file's request to what a verb needs: a plan, the model behind it, its data and its loss.

Everything that can be refused is refused here, in one go, before a process starts: the job, the mesh, the model, the data,
and what follows from two of them together (a byte that the vocabulary does not hold, a sample longer than the model takes).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from meshwright.api import Engine, build, default_strategies, make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.forward.evaluation import whole_batch_faults
from meshwright.engine.runtime.loss import Loss, judge_of, nothing_counts, token_cross_entropy
from meshwright.model.analysis.analyze import Reading
from meshwright.model.analysis.analyze import read as read_model
from meshwright.model.hf.config import text_limits
from meshwright.model.hf.hub import pinned
from meshwright.model.loading.loader import load_model
from meshwright.parallel.tensor.vocab_parallel import undivided
from meshwright.plan.job.data_source import DataSource
from meshwright.plan.job.errors import Fault, PlanError, raise_faults
from meshwright.plan.job.job import Job
from meshwright.plan.job.run_options import Run
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.config.config_file import Request
from meshwright.run.data.eval_split import Evaluating, divided, source_of
from meshwright.run.data.feed import Data, ExampleData, Feed, open_data, open_feed
from meshwright.run.data.tokenizer import Bytes, Codec
from meshwright.run.measure.allreduce_choice import chosen
from meshwright.run.telemetry.callbacks import Callback


@dataclass(frozen=True)
class Prepared:
    """A request made ready: its plan, the model behind it, its data and its loss.

    `held` are the samples of a source of their own to evaluate on, `callbacks` those that the model's factory gave, `notes`
    what was chosen for the plan, and why.
    """

    plan: Plan
    reading: Reading
    data: Data
    loss: Loss
    held: Data | None = None
    callbacks: tuple[Callback, ...] = ()
    notes: tuple[str, ...] = ()

    def feed(self, plan: Plan, rank: int) -> Feed:
        """The rows of `rank` under `plan` (this one, or the same job on another mesh), without those held out."""
        return open_feed(divided(self.data, plan.job.evaluate)[0], plan, rank)

    def evaluating(self, rank: int) -> Evaluating | None:
        """The rows that `rank` evaluates on; None when nothing is evaluated."""
        held = self.held or divided(self.data, self.plan.job.evaluate)[1]
        return None if held is None else Evaluating(held, self.plan, self.plan.data_index(rank))

    def engine(self, world: World) -> Engine:
        """One rank of the plan."""
        return build(self.reading, self.plan, loss=self.loss, world=world)


def prepared(request: Request, world: int | None = None) -> Prepared:
    """`request` made ready; `world` is the number of ranks if it is known.

    Raises PlanError: the faults of the job, the mesh, the model and the data together, then those of the plan.
    """
    faults = [*request.job.faults(), *request.run.faults()]
    mesh, loaded, data, job = Mesh(), None, None, request.job
    try:
        mesh = Mesh.infer(request.mesh, world if world is not None or -1 in request.mesh.values() else None)
    except PlanError as error:
        faults += error.faults
    try:
        if not list(job.model.faults()):
            job = replace(job, model=pinned(job.model))
            loaded = load_model(job.model, job.train.seed)
    except PlanError as error:
        if not faults:
            raise  # as it is: its cause may be an error in the user's own file
        faults += error.faults
    try:
        source = request.job.data
        if loaded is not None and (source.source or source.mixture) and source.sequence > 0:
            module = loaded.blueprint.instance()
            data = open_data(source, loaded.example, cache_of(request.run), lambda codec: _text_faults(module, source, codec))
    except PlanError as error:
        faults += error.faults
    held, more = (None, []) if loaded is None or data is None else _held(job, data, loaded.example, cache_of(request.run))
    raise_faults(dict.fromkeys([*faults, *more]))
    if loaded is None or data is None:
        raise RuntimeError("a model and data were neither found nor refused; this is a bug: report the config file")
    loss = loss_of(loaded.loss)
    if isinstance(data, ExampleData) and not loss.counted(data.batch(range(len(data))))[0]:
        raise nothing_counts(f"of the {len(data)} samples of the example batch")
    reading = read_model(loaded, loaded.example or data.batch([0]), loss.targets, judge_of(loss))
    strategies = default_strategies(mesh, reading.anatomy) if request.strategies is None else request.strategies
    strategies, notes = chosen(strategies, mesh, request.cluster, Path(request.run.folder))
    notes = [*notes, *(undivided(reading.anatomy) if request.strategies is None and mesh.tp > 1 else ())]
    plan = make_plan(reading, job, mesh, strategies, request.micro_batch, request.run)
    raise_faults(whole_batch_faults(loss) if job.evaluate.asked_for else ())
    return Prepared(plan, reading, data, loss, held, callbacks_of(loaded.callbacks), tuple(notes))


def loss_of(given: object) -> Loss:
    """The loss that a factory gave; cross-entropy over tokens when it gave none. Raises PlanError for anything else."""
    if given is None:
        return token_cross_entropy()
    if not isinstance(given, Loss):
        fix = "return meshwright.Loss(total=..., count=...): a sum over what counts, and how much counts"
        raise PlanError(f"the loss of the model is a {type(given).__name__}", fix=fix, where="model.loss")
    return given


def callbacks_of(given: Iterable[object]) -> tuple[Callback, ...]:
    """The callbacks that a factory gave. Raises PlanError for anything else."""
    found = tuple(callback for callback in given if isinstance(callback, Callback))
    strange = [type(each).__name__ for each in given if not isinstance(each, Callback)]
    if strange:
        fix = "write callbacks=[meshwright.Callback(on_step_end=...)]"
        raise PlanError(f"a {strange[0]} among the callbacks of the model", fix=fix, where="model.callbacks")
    return found


def _held(job: Job, data: Data, example: Mapping[str, torch.Tensor] | None, cache: Path) -> tuple[Data | None, Sequence[Fault]]:
    """The samples of a source of their own to evaluate on (None: there is none), and what is wrong with the evaluation."""
    try:
        divided(data, job.evaluate)
        source = source_of(job)
        held = None if source is None else open_data(source, example, cache)
    except PlanError as error:
        return None, [replace(fault, where=fault.where.replace("data.", "evaluate.", 1)) for fault in error.faults]
    if held is None:
        return None, []
    mine, theirs = list(data.batch([0])), list(held.batch([0]))
    if mine != theirs:
        text = f"its samples have {', '.join(theirs)}, those that are trained on {', '.join(mine)}"
        return None, [Fault(text, "evaluate on samples of the same form", "evaluate.source")]
    return held, []


def cache_of(run: Run) -> Path:
    """Where tokens are kept."""
    return Path(run.cache) if run.cache else Path(run.folder) / "cache"


def _text_faults(module: nn.Module, source: DataSource, codec: Codec) -> Iterator[Fault]:
    limits = text_limits(module)
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    vocabulary = limits.vocabulary or max(tables, default=codec.size)  # of a factory's model: no table is larger than that
    if vocabulary < codec.size:
        how = f"the ids of the tokenizer '{codec.name}' run up to {codec.size - 1}"
        if isinstance(codec, Bytes):
            how = f"text is read as bytes, of which there are {codec.size}"
        fix = f"set model.overrides.vocab_size = {codec.size}, or choose the tokenizer that belongs to the model: data.tokenizer"
        if limits.vocabulary is None:
            fix = f"make its embedding and head at least {codec.size} large, or choose another tokenizer: data.tokenizer"
        yield Fault(f"the model has {vocabulary} tokens, and {how}", fix, "model.source")
    if limits.positions is not None and limits.positions < source.sequence:
        text = f"a sample of {source.sequence} tokens; the model takes at most {limits.positions} (max_position_embeddings)"
        fix = f"set data.sequence = {limits.positions}, or model.overrides.max_position_embeddings = {source.sequence}"
        yield Fault(text, fix, "data.sequence")
