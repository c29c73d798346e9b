"""Faults planted in plans with rounds or servers, and in what the engine does for them; how each is found.

in the plan      a wait or a message is left out: the static checks of the plan must name it
in the engine    a number is made wrongly: other numbers than the definition, played in one process
in a checkpoint  what a technique keeps is missing: other bits after a resume, or an error
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.memory.planted_offload_faults import Edit, without, without_waits
from benchmarks.random_plans.random_draws import Draw
from benchmarks.random_plans.random_models import MODELS, analyzed_model
from benchmarks.random_plans.random_plans import try_plan
from meshwright.api import parallelize
from meshwright.comm.collectives.group import Rounds, World
from meshwright.engine.losses.token_count import TokenCounter
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.outer.round_averages import RoundAverages
from meshwright.parallel.outer.streaming_diloco import DelayedAverages, StreamingDiLoCo
from meshwright.parallel.server import parameter_server
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.step.program import Period
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks

MODEL = "llama"
SITES = Mesh(outer=2)
LOCAL, OUTER = LocalSGD(sync_every=2), DiLoCo(sync_every=2)
STREAMING = StreamingDiLoCo(sync_every=3, fragments=2, delay=1, mixing=0.25)
SPLIT = BatchSplit()


@dataclass(frozen=True)
class Fault:
    """A fault in plans with `strategies` on `mesh`: an `edit` of the plan, what `plant` does to the engine,
    or what a resume finds no more: tensors whose names begin with `forgets`.
    """

    strategies: tuple[Strategy, ...]
    edit: Edit | None = None
    plant: Callable[[], AbstractContextManager[Any]] | None = None
    forgets: str = ""
    mesh: Mesh = SITES

    @property
    def drawn(self) -> Draw:
        """The plan without the fault, as a random plan."""
        return Draw(0, 0, MODEL, self.mesh, self.strategies, 1, 2, 0.0)


def _upside_down(self: DiLoCo, name: str, stepped: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> None:
    stepped.sub_(kept[f"start/{name}"].view(-1))


def _without_momentum(self: DiLoCo, name: str, mean: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> None:
    start = kept[f"start/{name}"].view(-1)
    start.sub_(mean, alpha=self.outer_lr)
    mean.copy_(start)


@contextmanager
def _another_number_of_sites(number: int) -> Iterator[None]:
    make = RoundAverages.__init__

    def make_wrong(self: RoundAverages, *arguments: Any) -> None:
        make(self, *arguments)
        self._num_sites = number

    with patch.object(RoundAverages, "__init__", make_wrong):
        yield


@contextmanager
def _counts_of_all_sites() -> Iterator[None]:
    count = TokenCounter._step_totals

    def totals(self: TokenCounter) -> list[float]:
        return [2 * each for each in count(self)]

    with patch.object(TokenCounter, "_step_totals", totals):
        yield


@contextmanager
def _fragments_in_another_order() -> Iterator[None]:
    find = StreamingDiLoCo.fragment_of

    def fragment_of(self: StreamingDiLoCo, *arguments: Any) -> int:
        return self.fragments - 1 - find(self, *arguments)

    with patch.object(StreamingDiLoCo, "fragment_of", fragment_of):
        yield


@contextmanager
def _mixed_the_other_way() -> Iterator[None]:
    apply = DelayedAverages._apply

    def apply_wrong(self: DelayedAverages, action: Any, mixing: float) -> None:
        apply(self, action, 1 - mixing if mixing else mixing)

    with patch.object(DelayedAverages, "_apply", apply_wrong):
        yield


@contextmanager
def _a_step_later() -> Iterator[None]:
    periods = StreamingDiLoCo.periods

    def later(self: StreamingDiLoCo, *arguments: Any) -> tuple[Period, Period]:
        begins, ends = periods(self, *arguments)
        return begins, replace(ends, offset=ends.offset + 1)

    with patch.object(StreamingDiLoCo, "periods", later):
        yield


@contextmanager
def _one_push_twice() -> Iterator[None]:
    take = parameter_server.take_rounds

    def take_wrong(
        size: int, root: int, gradient: Any, total: torch.Tensor, sums: torch.Tensor, place: torch.Tensor
    ) -> Rounds:
        rounds = take(size, root, gradient, total, sums, place)
        yield from rounds
        total.add_(place)  # what arrived last

    with patch.object(parameter_server, "take_rounds", take_wrong):
        yield


FAULTS: Mapping[str, Fault] = {
    "sign of the outer gradient": Fault(
        (OUTER,), plant=lambda: patch.object(DiLoCo, "begin_average", _upside_down)
    ),
    "no momentum of the outer optimizer": Fault(
        (OUTER,), plant=lambda: patch.object(DiLoCo, "end_round", _without_momentum)
    ),
    "sum for mean": Fault((LOCAL,), plant=lambda: _another_number_of_sites(1)),
    "mean over the sites of one level with the number of both": Fault(
        (LocalSGD("site", 1), LOCAL),
        plant=lambda: _another_number_of_sites(4),
        mesh=Mesh(outer=2, site=2),
    ),
    "the loss of a site divided by the tokens of all": Fault((LOCAL,), plant=_counts_of_all_sites),
    "optimizer states stay those of the site": Fault(
        (replace(LOCAL, optimizer_states="mean"),),
        plant=lambda: patch.object(RoundAverages, "_states", lambda self, action, flat: iter(())),
    ),
    "order of fragments": Fault((STREAMING,), plant=_fragments_in_another_order),
    "mixing the other way": Fault((STREAMING,), plant=_mixed_the_other_way),
    "an average that ends a step later": Fault((STREAMING,), plant=_a_step_later),
    "outer momentum is not saved": Fault((OUTER,), forgets="state/diloco/momentum"),
    "what travels is not saved": Fault((STREAMING,), forgets="state/diloco/sent"),
    "the round ends before the average has come": Fault((LOCAL,), without_waits("END_ROUND", "AVERAGE")),
    "the average of a group is lost": Fault((LOCAL,), without("AVERAGE")),
    "averaged before it is stepped": Fault((LOCAL,), without_waits("AVERAGE", "STEP", "PACK_ROUND")),
    "one push added twice": Fault(
        (SPLIT, ParameterServer()), plant=_one_push_twice, mesh=Mesh(dp_replicate=3)
    ),
    "servers step before the pushes have come": Fault(
        (SPLIT, ParameterServer()),
        without_waits("LOCAL_NORM", "REDUCE", "ACCUMULATE"),
        mesh=Mesh(dp_replicate=3),
    ),
}


def _trained(drawn: Draw, folder: Path, steps: range, forgets: str = "nothing") -> list[bytes]:
    """Trains the `steps` on every rank, from the checkpoint of the first one, without what begins with
    `forgets`; saves the last one, and returns the bits of each rank's weights.
    """
    plan, model = drawn.plan(), MODELS[drawn.model]
    batches = model.batches(steps.stop, drawn.num_samples)

    def train_rank(world: World) -> bytes:
        with parallelize(analyzed_model(drawn.model), plan, loss=model.loss(), world=world) as trainer:
            if steps.start:
                saved = load_tensors(folder / f"step-{steps.start:08d}")[0]
                kept = {name: each for name, each in saved.items() if not name.startswith(forgets)}
                trainer.executor.load_state_dict(kept, steps.start)
            for step in steps:
                trainer.step(trainer.local_batch(batches[step]))
            tensors = trainer.executor.state_dict()
            save_tensors(folder, steps.stop, tensors, {}, world.group(AXES), keep=9)
            parameters = trainer.executor.state.trained_module.parameters
            return b"".join(each.detach().numpy().tobytes() for each in parameters.values())

    return run_on_threads(train_rank, plan.mesh)


def _resumed(fault: Fault) -> str:
    """Returns how a resume without what the fault forgets is found."""
    begun, steps = 4, 7
    with TemporaryDirectory() as folder:
        _trained(fault.drawn, Path(folder), range(begun))
        wanted = _trained(fault.drawn, Path(folder), range(begun, steps))
        try:
            found = _trained(fault.drawn, Path(folder), range(begun, steps), fault.forgets)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "other bits" if found != wanted else ""


def is_found(fault: Fault) -> str:
    """Returns how `fault` is found: the first message of the static checks, an error, or other numbers; else
    "".
    """
    plan = fault.drawn.plan()
    if fault.edit is not None:
        found = static_checks(replace(plan, program=plan.program.edit(fault.edit)))
        return found[0].problem if found else ""
    if fault.forgets:
        return _resumed(fault)
    if fault.plant is None:
        raise ValueError("a fault has an edit, a plant, or what is forgotten")
    with fault.plant():
        row = try_plan(fault.drawn)
    if row["outcome"] not in ("matched", "differs"):
        raise ValueError(f"the plan with the fault has not run: {row['message']}")
    return str(row["message"]).splitlines()[0] if row["outcome"] == "differs" else ""
