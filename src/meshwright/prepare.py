"""From a config file's request to what a verb needs: a plan, the model behind it, its data and its loss.

Everything that can be refused is refused here, in one go, before a process starts: the job, the mesh, the model, the data,
and what follows from two of them together (a byte that the vocabulary does not hold, a sample longer than the model takes).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.api import Engine, build, default_strategies, make_plan
from meshwright.comm.group import World
from meshwright.core.errors import Fault, PlanError, raise_faults
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.engine.loss import Loss, token_cross_entropy
from meshwright.model.configs import text_limits
from meshwright.model.reading import Reading
from meshwright.model.reading import read as read_model
from meshwright.model.sources import Loaded, load_model
from meshwright.run.config import Request
from meshwright.run.feed import Data, Feed, open_data, open_feed
from meshwright.run.text import VOCABULARY, TextData


@dataclass(frozen=True)
class Prepared:
    """A request made ready: its plan, the model behind it, its data and its loss."""

    plan: Plan
    reading: Reading
    data: Data
    loss: Loss

    def feed(self, plan: Plan, rank: int) -> Feed:
        """The rows of `rank` under `plan` (this one, or the same job on another mesh)."""
        return open_feed(self.data, plan, rank)

    def engine(self, world: World) -> Engine:
        """One rank of the plan."""
        return build(self.reading, self.plan, loss=self.loss, world=world)


def prepared(request: Request, world: int | None = None) -> Prepared:
    """`request` made ready; `world` is the number of ranks if it is known.

    Raises PlanError: the faults of the job, the mesh, the model and the data together, then those of the plan.
    """
    faults = [*request.job.faults(), *request.run.faults()]
    mesh, loaded, data = Mesh(), None, None
    try:
        mesh = Mesh.infer(request.mesh, world if world is not None or -1 in request.mesh.values() else None)
    except PlanError as error:
        faults += error.faults
    try:
        loaded = load_model(request.job.model, request.job.train.seed) if request.job.model.source else None
    except PlanError as error:
        if not faults:
            raise  # as it is: its cause may be an error in the user's own file
        faults += error.faults
    try:
        if loaded is not None and request.job.data.source and request.job.data.sequence > 0:
            data = open_data(request.job.data, loaded.example)
    except PlanError as error:
        faults += error.faults
    if loaded is not None and data is not None:
        faults += _text_faults(loaded, data)
    raise_faults(dict.fromkeys(faults))
    if loaded is None or data is None:
        raise RuntimeError("a model and data were neither found nor refused; this is a bug: report the config file")
    loss = loss_of(loaded.loss)
    reading = read_model(loaded, loaded.example or data.batch([0]), loss.targets)
    strategies = default_strategies(mesh) if request.strategies is None else request.strategies
    plan = make_plan(reading, request.job, mesh, strategies, request.micro_batch, request.run)
    return Prepared(plan, reading, data, loss)


def loss_of(given: object) -> Loss:
    """The loss that a factory gave; cross-entropy over tokens when it gave none. Raises PlanError for anything else."""
    if given is None:
        return token_cross_entropy()
    if not isinstance(given, Loss):
        fix = "return meshwright.Loss(total=..., count=...): a sum over what counts, and how much counts"
        raise PlanError(f"the loss of the model is a {type(given).__name__}", fix=fix, where="model.loss")
    return given


def _text_faults(loaded: Loaded, data: Data) -> Iterator[Fault]:
    if not isinstance(data, TextData):
        return
    limits = text_limits(loaded.blueprint.instance())
    if limits.vocabulary is not None and limits.vocabulary < VOCABULARY:
        text = f"the model has {limits.vocabulary} tokens, and text is read as bytes, of which there are {VOCABULARY}"
        yield Fault(text, f"set model.overrides.vocab_size = {VOCABULARY}", "model.source")
    if limits.positions is not None and limits.positions < data.sequence:
        text = f"a sample of {data.sequence} tokens; the model takes at most {limits.positions} (max_position_embeddings)"
        fix = f"set data.sequence = {limits.positions}, or model.overrides.max_position_embeddings = {data.sequence}"
        yield Fault(text, fix, "data.sequence")
