"""Faults planted in plans with offload, and in what the engine does for them; how each is found.

    in the plan      a wait or a copy is left out: the static checks of the plan must name it
    in the engine    a copy is lost, or goes to the wrong place: other bits than without offload

On a CPU a copy is complete when its call returns, so a wait that is missing changes no bit there: it is for
the checks to find. What a copy does is for the bits to find.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from unittest.mock import patch

import torch

from benchmarks.random_plans.random_models import MODELS, analyzed_model
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import Work, World
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.engine.runtime.host_memory import HostMemory
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.offload import Offload
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks

MODEL, NUM_SAMPLES, NUM_STEPS = "llama", 4, 3
MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
DEVICE, HOST = Offload(), Offload(step_on="host")
GRADIENTS = Offload(("optimizer_states", "gradients"), "host")
EVERYTHING = Offload(("optimizer_states", "gradients", "weights"), "host")
Edit = Callable[[list[Action]], list[Action]]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Fault:
    """A fault in plans with `offload`: an `edit` of the plan, or what `plant` does to the engine."""

    offload: Offload
    edit: Edit | None = None
    plant: Callable[[], AbstractContextManager[None]] | None = None


def without_waits(kind: str, *awaited: str) -> Edit:
    """Returns an edit after which actions of `kind` wait for no action of the kinds `awaited`."""

    def change(action: Action) -> Action:
        waits = tuple(name for name in action.waits if name.split("(")[0] not in awaited)
        return replace(action, waits=waits) if action.kind == kind else action

    return lambda actions: [change(action) for action in actions]


def without(kind: str) -> Edit:
    """Returns an edit that leaves out all actions of `kind`."""

    def edit(actions: list[Action]) -> list[Action]:
        gone = {each.name for each in actions if each.kind == kind}
        return [
            replace(each, waits=tuple(name for name in each.waits if name not in gone))
            for each in actions
            if each.kind != kind
        ]

    return edit


@contextmanager
def losing(kind: str, kept: Callable[[Pairs], Pairs]) -> Iterator[None]:
    """Of the copies of `kind`, makes only those that are `kept`."""
    start = HostMemory.start_copies

    def start_some(self: HostMemory, action: Action, pairs: Pairs) -> Work:
        return start(self, action, kept(pairs) if action.kind == kind else pairs)

    with patch.object(HostMemory, "start_copies", start_some):
        yield


@contextmanager
def one_buffer() -> Iterator[None]:
    """Puts the states of all groups into the same buffer."""
    buffer = FlatParamStore.buffer

    def first_buffer(self: FlatParamStore, name: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return buffer(self, "state buffer 0" if name.startswith("state buffer") else name, nbytes, dtype)

    with patch.object(FlatParamStore, "buffer", first_buffer):
        yield


FAULTS: Mapping[str, Fault] = {
    "late fetch: STEP does not wait for the states": Fault(DEVICE, without_waits("STEP", "FETCH_STATES")),
    "early eviction: states leave before STEP has ended": Fault(
        DEVICE, without_waits("OFFLOAD_STATES", "STEP")
    ),
    "buffer filled before its states have left": Fault(
        replace(DEVICE, prefetch=0), without_waits("FETCH_STATES", "OFFLOAD_STATES")
    ),
    "lost write: no copy of the states back": Fault(DEVICE, without("OFFLOAD_STATES")),
    "gradients copied before they are reduced": Fault(
        HOST, without_waits("OFFLOAD_GRAD", "REDUCE", "ACCUMULATE")
    ),
    "the host steps before the gradients have come": Fault(HOST, without_waits("CLIP", "OFFLOAD_GRAD")),
    "no copy of the gradients": Fault(HOST, without("OFFLOAD_GRAD")),
    "weights copied before they are stepped": Fault(HOST, without_waits("FETCH_PARAM", "STEP")),
    "gathered before the shard has come": Fault(EVERYTHING, without_waits("UNSHARD", "FETCH_PARAM")),
    "lost write: one tensor of a group": Fault(
        DEVICE, plant=lambda: losing("OFFLOAD_STATES", lambda pairs: pairs[:-1])
    ),
    "stale states: one tensor is not fetched": Fault(
        DEVICE, plant=lambda: losing("FETCH_STATES", lambda pairs: pairs[1:])
    ),
    "stale weights: what the host has stepped stays there": Fault(
        HOST, plant=lambda: losing("FETCH_PARAM", lambda pairs: ())
    ),
    "stale gradients: not copied": Fault(GRADIENTS, plant=lambda: losing("ACCUMULATE", lambda pairs: ())),
    "one buffer for two groups": Fault(DEVICE, plant=one_buffer),
}


def _plan(offload: Offload | None) -> Plan:
    strategies = (BatchSplit("dp_replicate"), ZeRO("dp_replicate", 3, keep_mb=0.0))
    job = Job(
        data=DataConfig("random", sequence=MODELS[MODEL].sequence_lengths[0]),
        train=TrainConfig(batch=NUM_SAMPLES, clip=0.5),
        optimizer=OptimizerConfig("adamw", lr=0.01),
        precision=MIXED,
    )
    chosen = strategies if offload is None else (*strategies, offload)
    return make_plan(analyzed_model(MODEL), job, Mesh(dp_replicate=2), chosen, 1)


def _trained(plan: Plan) -> list[str]:
    """Returns the digest of the weights of each rank."""
    model = MODELS[MODEL]

    def train_rank(world: World) -> str:
        with parallelize(analyzed_model(MODEL), plan, loss=model.loss(), world=world) as trainer:
            for batch in model.batches(NUM_STEPS, NUM_SAMPLES):
                trainer.step(trainer.local_batch(batch))
            weights = trainer.executor.gather_parameters(use_masters=True)
            numbers = b"".join(
                weights[name].detach().double().contiguous().numpy().tobytes() for name in sorted(weights)
            )
            return sha256(numbers).hexdigest()

    return run_on_threads(train_rank, plan.mesh)


def is_found(fault: Fault) -> str:
    """Returns how `fault` is found: the first message of the static checks, an error, or other bits; else
    "".
    """
    plan = _plan(fault.offload)
    if fault.edit is not None:
        found = static_checks(replace(plan, program=plan.program.edit(fault.edit)))
        return found[0].problem if found else ""
    if fault.plant is None:
        raise ValueError("a fault has an edit or a plant")
    wanted = _trained(_plan(None))
    with fault.plant():
        try:
            return "other bits" if _trained(plan) != wanted else ""
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
