"""Asynchronous parameter server: servers apply the gradients of one worker at a time, as they arrive.

Why it works: a step of one worker does not need those of the others to be done. Each worker pushes its
gradient and pulls parameters alone; a server steps with each gradient as it comes, so that fast workers do
not wait for slow ones. The price is staleness: while a worker computes, others change the parameters that its
gradient was made of. Steps of a size that a stale gradient does not harm still go down, and a bound on the
staleness keeps that so. Under stale synchronous parallel (SSP), a worker that is more than `bound` steps
ahead of the slowest one waits for it.

    worker 0   F B CLIP PUSH ... PULL   F B CLIP PUSH ... PULL          steps of its own, on its own samples
    worker 1   F B ....... CLIP PUSH ... PULL   F B .......             slow: nobody waits, within the bound
    server     TAKE(0) STEP(0) GIVE(0)  TAKE(1) STEP(1) GIVE(1)  ...    n of them are a step of the server

    PUSH   sends the gradient of a parameter group to its server
    PULL   receives the parameters of a group, when their server gives them
    TAKE   receives the gradient of whichever worker comes first; what follows of it from the same worker
    GIVE   sends parameters to all workers that may go on: as soon as they are at most `bound` steps ahead

    x <- x - lr / max(1, t) d          t: the staleness, in updates, if lr is divided by it; d: as optimizers
                                       make it of the gradient of one worker

A worker is a site of one rank (axis `outer`): its loss, gradient norm, clipping and metrics are those of its
own samples, as in rounds (parallel/outer/rounds.py), and the gradient is divided by what counts in them. The
last `servers` ranks along `outer` serve, and nothing else; each steps about 1/k of the bytes, group by group,
as under `parameter_server`. A step of the run is one of each worker, and n updates of each server. The
learning rate is that of the step of the server.

    bound      most staleness           s = 0: n updates, each by one gradient of version v .. v + n - 1;
    0          n - 1                    never the one step of their sum that a synchronous server makes, even
    s          (2 s + 1)(n - 1)         with SGD, except for n = 1, which is one device, whatever the bound
    none       the run's end            so often as it is fast

What order of arrival decides is recorded: with `record`, each server writes into that folder which worker
made each update, in which of its steps, of which version (arrival_record.py). With `replay`, servers take
pushes in the order of such files, whatever the timings are, and the run ends with the same bits. Before a
process starts, a record is refused that is of another plan, too short or edited, or of another run than those
of the other servers.

    S        bytes of the trained parameters, and of their gradients
                                 leaves a rank         arrives
    a worker                     S                     S
    each of k servers, a step    n S / k               n S / k          2 n S / k, as groups are even

Cost: those bytes; masters and optimizer states 1/k on a server and 0 on workers; weights and gradients whole
on workers. A server keeps weights, one gradient, masters and states of what it steps.
Limits: lossy. A run repeats its bits only by a replay. Workers are single ranks: all other axes have size 1.
Messages from whichever rank comes first need gloo, so CPUs. Parameters, gradients and sums have one dtype.
Refused by name: the loss guard, the noise scale and the loss scale of float16 (no step is one of all ranks),
an evaluation before the end, what rests off the device, codes, running statistics. Tied parameters are one
parameter of a worker. `verify` runs the plan once for an order, or takes that of `replay`, plays it in one
process, and compares every worker and server that take pushes in it, in every step. A checkpoint is what the
servers have; a run that goes on from it begins as if all workers had pulled then. That is so where they go on
together (bound = 0, one worker): a record may then be replayed from a checkpoint in its middle. Elsewhere
`meshwright train` refuses that before a process starts, and a run that goes on writes a record of its own.
`search` does not propose it.
Paper: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"
(NeurIPS), section 3; Zhang et al. 2016, "Staleness-Aware Async-SGD for Distributed Deep Learning" (IJCAI),
arXiv 1511.05950, equation 6 (the learning rate divided by the staleness); Li et al. 2014, "Scaling
Distributed Machine Learning with the Parameter Server" (OSDI).
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshwright.parallel.server.arrival_record import (
    REPLAY,
    START_FIX,
    ArrivalRecord,
    RecordHeader,
    WorkerClocks,
    are_of_one_run,
    read_record,
    record_path,
    start_problem,
)
from meshwright.parallel.server.parameter_server import SERVERS_FIX, dtype_diagnostics, with_servers
from meshwright.parallel.server.stale_updates import ServerUpdates, WorkerExchanges
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, S
from meshwright.plan.step.grad_reduce_scatter import GradReduceScatter
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.simulator import qualified_name
from meshwright.plan.step.unshard_windows import flat_groups
from meshwright.plan.strategy_compatibility import joint_decision_diagnostics
from meshwright.plan.strategy_interface import Handler, Runtime, ServerRule, Strategy, StrategyPhase

AXIS = "outer"
BOUND_FIX = "write how many steps a worker may be ahead of the slowest, 0 or more; or leave it out: no bound"


@dataclass(frozen=True)
class StaleServer(Strategy):
    """The last `servers` ranks along `outer` apply the gradients of each worker as they arrive.

    A worker waits when it is more than `bound` steps ahead of the slowest one (left out: never). With
    `lr_by_staleness` "inverse" the learning rate of an update is divided by its staleness. Servers write the
    order of their updates into the folder `record`; they follow the order of those in `replay`.
    """

    name: ClassVar[str] = "stale_server"
    phase: ClassVar[StrategyPhase] = "storage"
    exact: ClassVar[bool] = False
    servers: int = field(default=1, metadata=at_least(1, SERVERS_FIX))
    bound: int | None = field(default=None, metadata=at_least(0, BOUND_FIX))
    lr_by_staleness: Literal["none", "inverse"] = "none"
    record: str = ""
    replay: str = ""

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, mesh = f"strategies.{self.name}", sharding.mesh
        if mesh.size(AXIS) <= self.servers:
            text = f"servers = {self.servers} of the {mesh.size(AXIS)} ranks along {AXIS}: no worker is left"
            yield Diagnostic(text, f"set mesh.{AXIS} to the workers and the servers together", location)
        inner = [axis for axis in AXES if axis != AXIS and mesh.size(axis) > 1]
        if inner:
            sizes = ", ".join(f"mesh.{axis} = 1" for axis in inner)
            text = f"each worker of {self.name} is one rank, and mesh.{inner[0]} is {mesh.size(inner[0])}"
            yield Diagnostic(text, f"set {sizes}, and mesh.{AXIS} to workers + servers", location)
        yield from self._check_job(job)
        sizes = job.precision.roles
        if len({sizes["parameters"], sizes["gradients"], sizes["reduce"]}) > 1:
            text = f"parameters in {sizes['parameters']}, gradients in {sizes['gradients']}, sums in "
            text += f"{sizes['reduce']}: what is pushed is stepped as it is"
            yield Diagnostic(text, "leave precision.gradients and precision.reduce out", "precision.reduce")
        yield from dtype_diagnostics(sharding)

    def _check_job(self, job: Job) -> Iterator[Diagnostic]:
        yield from joint_decision_diagnostics(job, "and workers know nothing of one another's steps")
        is_evaluated = job.evaluate.is_enabled or job.evaluate.tasks
        if is_evaluated and 0 < job.evaluate.every < job.train.steps:
            text = f"an evaluation every {job.evaluate.every} steps, when workers have other parameters"
            yield Diagnostic(text, "set evaluate.every = 0: at the end alone", "evaluate.every")

    def check_files(
        self, job: Job, sharding: ShardingPlan, as_dict: Callable[[], dict[str, Any]]
    ) -> Iterator[Diagnostic]:
        records, where = list[ArrivalRecord](), REPLAY
        digest = _digest(as_dict()) if self.replay else ""
        for server in sharding.server_indices if self.replay else ():
            path = record_path(self.replay, server)
            try:
                record = read_record(path)
            except PlanError as error:
                yield from error.diagnostics
                continue
            needed = RecordHeader(digest, server, sharding.num_workers, self.bound)
            problem = _record_problem(record.header, needed)
            if not problem and (end := record.header.first_step + record.num_steps) < job.train.steps:
                problem = f"ends after step {end} of {job.train.steps}"
            if problem:
                text = f"{path} {problem}"
                yield Diagnostic(text, "replay the record of a whole run, under the plan of that run", where)
            else:
                records.append(record)
        if len(records) == sharding.num_servers and not are_of_one_run(records):
            text = f"the files of servers in {self.replay} are not of one run: each waits for the other"
            yield Diagnostic(text, "replay the files that one run wrote together", where)

    def check_start(self, sharding: ShardingPlan, num_steps: int) -> Iterator[Diagnostic]:
        paths = [record_path(self.replay, each) for each in sharding.server_indices if self.replay]
        problems = {start_problem(read_record(path).header, num_steps) for path in paths}
        yield from (Diagnostic(each, START_FIX, REPLAY) for each in sorted(problems) if each)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, model_spec = f"strategies.{self.name}", sharding.model_spec
        if not sharding.tiers.keeps_states_on_device:
            text = "model states rest off the device, and servers step what rests on theirs"
            yield Diagnostic(text, "remove offload and disk_offload", location)
        coded = [each.param.name for each in sharding.param_shardings if each.is_coded]
        if coded:
            text = f"the gradients of {len(coded)} parameters ({coded[0]}...) travel as codes"
            yield Diagnostic(text, f"remove the compression, or {self.name}", location)
        norms = [call.name for call in model_spec.batch_norm_calls if call.has_running_stats]
        if norms:
            text = f"the running statistics of {len(norms)} batch norms ({norms[0]}...) differ by worker"
            yield Diagnostic(text, "use norms without them (LayerNorm, GroupNorm)", location)
        if model_spec.choice_biases:
            text = f"{model_spec.choice_biases[0].buffer} follows the load of experts of all ranks"
            yield Diagnostic(text, "use the auxiliary loss to balance experts", location)
        if model_spec.needs_global_batch:
            text = "the loss compares what the forwards of all samples return, and workers have some of them"
            yield Diagnostic(text, "use parameter_server, whose steps are those of all ranks", location)
        number = len(flat_groups(sharding.param_groups))
        if number < self.servers < sharding.mesh.size(AXIS):
            text = f"servers = {self.servers}, and there are {number} parameter groups: a server would step"
            yield Diagnostic(f"{text} nothing", f"write servers = {number} or fewer", f"{location}.servers")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        apart = sharding.with_batch_placement(AXIS, S(0)).map_param_shardings(lambda each: each.varying(AXIS))
        placed = apart.map_param_shardings(
            lambda each: replace(each, grad_layout=each.grad_layout.with_placement(AXIS, S(FLAT)))
        )
        if self.servers < sharding.mesh.size(AXIS):
            placed = replace(placed, server_axis=AXIS, num_servers=self.servers)
        return with_servers(placed, self.servers)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        packs = GradReduceScatter(view, job, "", every_microbatch=False)
        return program.edit(lambda actions: _with_pushes(packs.add_to(actions), view, job))

    def server_actions(
        self, worker: str, actions: Sequence[Action], owned: Collection[str], num_workers: int
    ) -> Sequence[Action]:
        own = [action for action in actions if action.tensors and set(action.tensors) <= set(owned)]
        return tuple(_server_actions(worker, own, num_workers, gives_at_end=self.bound == 0))

    def file_digests(self) -> tuple[tuple[str, str], ...]:
        if not self.replay:
            return ()
        files = sorted(Path(self.replay).glob("arrivals-*.txt"))
        return (("arrivals", sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]),)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state
        if state.world.device.type != "cpu":
            text = f"rank {state.world.rank} is on {state.world.device}, and servers take whoever comes first"
            raise PlanError(text, fix='run on CPUs: run.device = "cpu"', location=f"strategies.{self.name}")
        if not state.plan.view.is_server:
            return WorkerExchanges(runtime).handlers
        server, divides_lr = state.world.rank, self.lr_by_staleness == "inverse"
        record = read_record(record_path(self.replay, server)) if self.replay else None
        digest, num_workers = _digest(state.plan.as_dict()), state.plan.sharding.num_workers
        header = RecordHeader(digest, server, num_workers, self.bound)
        return ServerUpdates(state, header, self.record, record, divides_lr=divides_lr).handlers

    def on_servers(self, num_workers: int) -> ServerRule:
        clocks = WorkerClocks(num_workers, self.bound)

        def apply(worker: int) -> float:
            staleness = clocks.num_applied - clocks.apply(worker).version
            return float(max(1, staleness)) if self.lr_by_staleness == "inverse" else 1.0

        return ServerRule(apply, clocks.release)

    def recorded_arrivals(self) -> Mapping[int, Sequence[int]]:
        paths = sorted(Path(self.replay).glob("arrivals-*.txt")) if self.replay else ()
        records = [read_record(path) for path in paths]
        return {each.header.server: [update.worker for update in each.updates] for each in records}

    def without_files(self) -> "StaleServer":
        return replace(self, record="", replay="")


def _record_problem(found: RecordHeader, needed: RecordHeader) -> str:
    """Returns how a record with the header `found` is not one of the run that `needed` describes, or ""."""
    if (found.workers, found.bound) != (needed.workers, needed.bound):
        text = f"is of {found.workers} workers with bound {found.bound}, the plan of {needed.workers}"
        return f"{text} with bound {needed.bound}"
    if found.server != needed.server:
        return f"is of the server {found.server}"
    return "" if found.plan == needed.plan else f"is of another plan, {found.plan}, than {needed.plan}"


def _with_pushes(actions: Sequence[Action], view: RankView, job: Job) -> list[Action]:
    """Returns `actions` of a worker in which PUSH and PULL behind CLIP take the place of the sums of
    gradients, which are packed already.
    """
    packed = {action.name: action for action in actions if action.kind == "REDUCE"}
    norms = {action.name: action for action in actions if action.kind == "GLOBAL_NORM"}
    pushes = [_push(action, view) for action in packed.values()]
    pulls = [_pull(push, view, job) for push in pushes]
    edited = list[Action]()
    for action in actions:
        if action.name in packed or action.name in norms:
            continue
        waits = list[str]()
        for wait in action.waits:  # for what those that are left out waited for
            left_out = packed.get(wait, norms.get(wait))
            waits += [wait] if left_out is None else left_out.waits
        moved = [each.name for each in (*pushes, *pulls)] + ["TOKEN_COUNT()"] if action.kind == "STEP" else []
        edited.append(replace(action, waits=tuple(dict.fromkeys((*waits, *moved)))))
        edited += [*pushes, *pulls] if action.kind == "CLIP" else []
    return edited


def _push(packed: Action, view: RankView) -> Action:
    """Returns the push of the gradients of a group that `packed` would sum."""
    if packed.transfer is None:
        raise ValueError(f"{packed.name} has no transfer: it sums gradients over workers")
    transfer = _message(view, packed, "send", packed.transfer.nbytes, packed.transfer.dtype)
    return replace(packed, kind="PUSH", waits=("CLIP()",), transfer=transfer, allocations=(), frees=())


def _pull(push: Action, view: RankView, job: Job) -> Action:
    """Returns the pull of the parameters whose gradients `push` sends."""
    dtype = job.precision.parameters
    nbytes = view.flat_param_specs[push.subject].numel * FLOAT_NBYTES[dtype]
    return replace(
        push, kind="PULL", waits=(push.name,), transfer=_message(view, push, "recv", nbytes, dtype)
    )


def _message(view: RankView, action: Action, collective: str, nbytes: int, dtype: str) -> Transfer:
    spec = view.flat_param_specs[action.subject]
    return Transfer(
        collective,
        spec.axes,
        nbytes,
        dtype=dtype,
        root=spec.owner_index or 0,
        member_indices=spec.member_indices,
        by_arrival=True,
    )


def _server_actions(
    worker: str, own: Sequence[Action], num_workers: int, *, gives_at_end: bool
) -> Iterator[Action]:
    """Yields a step of the server that `own` actions of a worker concern: for each worker one push, an
    update, and what is given then.

    That is the order if workers come in turn. With `gives_at_end` none goes on before all have pushed.
    """
    pushes = [action for action in own if action.kind == "PUSH"]
    pulls = {action.subject: action for action in own if action.kind == "PULL"}
    packs = {action.subject: action for action in own if action.kind == "PACK"}
    gives, last = list[Action](), num_workers - 1
    yield Action("TOKEN_COUNT")
    for number in range(last + 1):
        takes = [
            replace(
                push,
                kind="TAKE",
                microbatch=number,
                waits=(qualified_name(worker, push.name), *([f"STEP({number - 1})"] if number else [])),
                transfer=replace(push.transfer, collective="recv") if push.transfer else None,
                allocations=() if number else packs[push.subject].allocations,
            )
            for push in pushes
        ]
        yield from takes
        step = Action(
            "STEP",
            microbatch=number,
            waits=("TOKEN_COUNT()", *(take.name for take in takes)),
            tensors=tuple(name for take in takes for name in take.tensors),
            frees=tuple(each.name for push in pushes for each in packs[push.subject].allocations)
            if number == last
            else (),
        )
        yield step
        for push in pushes:
            transfer = pulls[push.subject].transfer
            sent = replace(transfer, collective="send") if transfer else None
            gives.append(replace(push, kind="GIVE", microbatch=number, waits=(step.name,), transfer=sent))
        if not gives_at_end or number == last:
            yield from gives
            gives.clear()


def _digest(table: dict[str, Any]) -> str:
    """Returns the digest of a plan, all that affects its results, but where its records lie."""
    for each in table["strategies"]:
        for key in ("record", "replay", "arrivals") if each["name"] == StaleServer.name else ():
            each.pop(key, None)
    return sha256(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()[:16]
