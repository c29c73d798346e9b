"""Embedding hosts: the rows of embedding tables lie on ranks of their own; workers pull what they look up.

Why it works: a microbatch looks up a few of the rows of a table, and the gradients of all others are zero. So
a worker needs no table: before its lookup it pulls the rows of its ids, each once, and after its backward it
pushes the gradients of these. A host has a stretch of the rows of every table. It adds the gradients of the
workers in their order, and steps its rows, with their optimizer states, as one device would. What is not
looked up is stepped with a zero gradient, so every optimizer of elements is exact: Adam's moments decay,
momentum goes on, and weight decay takes its part of all rows. The dense part of the model is data parallel
over the workers (`ddp`), whose sums the hosts do not enter; that is the split that recommendation models use.

    worker   TOKEN_COUNT  PULL_ROWS(user) F(user) F F LOSS B B B(user)  PUSH_ROWS(user)  ... CLIP STEP
    host     TOKEN_COUNT  PULL_ROWS(user)                               PUSH_ROWS(user)  ... CLIP STEP

    PULL_ROWS (sends ids to the hosts, and the rows of these ids to the workers)
    PUSH_ROWS (sends the gradients of these rows to the hosts, which add them in the order of the workers)

    table of 11 rows       worker 0, 1          host 0: rows 0 to 5          host 1: rows 6 to 10
                           no row               weights, states, gradients   the same

    gradient of row i = sum over microbatches, then over workers in order, of what each has for i

The last `hosts` ranks along `axis` are hosts: they read no samples and run no forward, and have a role and a
list of their own, as dedicated servers have (parallel/server/parameter_server.py). The global batch divides
by the n workers. Each host has ceil(R / k) of the R rows of a table, the last ones fewer. How many rows a
microbatch looks up is known at run time (`RuntimeSize`): ranks tell each other, and the ledger counts them.
`tables` names weights or modules, or patterns of these; left out, every embedding with a trained weight is
meant.

    r distinct rows of W bytes that a worker looks up in one table and microbatch; n workers, k hosts
                 sends                                  receives
    a worker     8 (n + k)  +  8 r  +  r W              r W              (counts; ids; gradients)
    a host       8 (n + k)  +  its rows, W each         8, and W, for each of these
    all hosts    8 k (n + k) +  the sum of r W          the sum of r (W + 8)
    per worker, both ways, beside the counts: r (2 W + 8)
    expected, if all T ids of a microbatch are alike:   r = R (1 - (1 - 1 / R)^T)       at most min(T, R)

Cost: these bytes, where `ddp` sends 2 (n-1)/n R W for the table in each step, and `zero` gathers R W. Pulls
are exposed: a forward waits for its rows, and begins the pull itself. A worker keeps the rows and their
gradients of the microbatches under way, 2 r W each, and no table. A host keeps weights, summed gradients and
optimizer states of R / k rows of each table, and steps all of them: its step takes the time of its rows, not
of those looked up.
Limits: beside data parallelism alone, with `ddp`: no other strategy stores, shards or recomputes. Every
forward calls each table once. A host whose rows are looked up most is the slowest: shuffle ids if popular
ones lie together. Refused by name: tables that are tied, that other blocks use, or whose weight their own
block reads besides; embeddings with `max_norm`, `scale_grad_by_freq` or `sparse`, or a forward of their own;
optimizers of matrices or blocks; sums in 16 bits; losses over the samples of all ranks; the loss guard and
the gradient noise scale. No full parameters are gathered
for forwards of the user (generate, predict): checkpoints have whole tables, which any other plan loads.
`search` does not propose it.
Paper: Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", arXiv 1906.00091, section 2 (sharded tables, data-parallel dense layers); Li et al. 2014, "Scaling
Distributed Machine Learning with the Parameter Server" (OSDI), section 3 (push and pull of ranges of keys).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import ClassVar

from meshwright.parallel.embedding.row_actions import HostedTable, add_row_actions, host_actions
from meshwright.parallel.embedding.row_exchange import HostRows, WorkerRows
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ROOT, ModelSpec, ParamSpec
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, R, S
from meshwright.plan.step.program import Action, Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

LOOKUP_ROLES = ("embedding", "embedding_unsharded")
HOSTS_FIX = "write the number of ranks that have the rows of tables: 1 or more"
NAME_OTHERS = "name the tables that lie on hosts, without it: tables = [...]"
SERVES = "both have ranks that step for others"
SUMS = "hosts are no part of its sums; use ddp"
RERUNS = "a forward that runs again would pull its rows again"
KEEPS = "it does not know of the rows that a block pulls and keeps"
RESTS = "hosts step their rows where they rest, on the device"
Lookup = tuple[LayerCall, ParamSpec]


@dataclass(frozen=True)
class EmbeddingHost(Strategy):
    """The rows of `tables` lie on the last `hosts` ranks along `axis`; the others look them up.

    `tables` are names or patterns of embeddings, or of their weights; empty: all that are trained.
    """

    name: ClassVar[str] = "embedding_host"
    phase: ClassVar[StrategyPhase] = "shard"
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("parameter_server", "stale_server", "data_parallel_master"), SERVES),
            **dict.fromkeys(("zero", "hpz", "naive_ddp", "compress", "sync_batch_norm"), SUMS),
            **dict.fromkeys(("activation_checkpointing", "memory_budget"), RERUNS),
            **dict.fromkeys(("activation_offload", "partitioned_activations", "gist", "compile"), KEEPS),
            **dict.fromkeys(("offload", "disk_offload"), RESTS),
        }
    )
    axis: str = field(
        default="dp_replicate",
        metadata=one_of("dp_replicate", "dp_shard", fix="choose dp_replicate or dp_shard"),
    )
    hosts: int = field(default=1, metadata=at_least(1, HOSTS_FIX))
    tables: tuple[str, ...] = ()

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, mesh, ranks = f"strategies.{self.name}", sharding.mesh, sharding.mesh.size(self.axis)
        if self.hosts >= ranks:
            text = f"hosts = {self.hosts} of the {ranks} ranks along {self.axis}, and no worker is left"
            fix = f"write hosts = {ranks - 1} or fewer, or raise" if ranks > 1 else "raise"
            yield Diagnostic(text, f"{fix} mesh.{self.axis}: workers and hosts together", f"{location}.hosts")
        other = [axis for axis in AXES if axis != self.axis and mesh.size(axis) > 1]
        if other:
            text = f"hosts serve data-parallel workers alone, and mesh.{other[0]} is {mesh.size(other[0])}"
            fix = f"set {', '.join(f'mesh.{axis} = 1' for axis in other)}, or leave {self.name} out"
            yield Diagnostic(text, fix, location)
        yield from self._check_tables(sharding.model_spec)
        yield from self._check_job(job, sharding.model_spec)

    def _check_job(self, job: Job, model_spec: ModelSpec) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}"
        if model_spec.needs_global_batch or model_spec.num_batch_sums:
            text = (
                "the loss compares, or adds up, what the forwards of all samples return, and hosts run none"
            )
            yield Diagnostic(text, f"leave {self.name} out: use ddp or zero", location)
        if job.train.noise_scale:
            text = "the gradient noise scale compares the gradients of ranks, and hosts have those of all"
            yield Diagnostic(text, "set train.noise_scale = false", "train.noise_scale")
        if job.guard.action != "off":
            text = "the guard looks for the rank that caused a loss spike, and hosts have rows of all ranks"
            yield Diagnostic(text, 'set guard.action = "off"', "guard.action")
        parameters, gradients, sums = (
            job.precision.roles[role] for role in ("parameters", "gradients", "reduce")
        )
        if len({parameters, gradients, sums}) > 1 or FLOAT_NBYTES[parameters] < FLOAT_NBYTES["float32"]:
            text = (
                f"parameters in {parameters}, gradients in {gradients}, sums in {sums}: gradients of rows are"
            )
            text += " added in the dtype in which rows are pulled, of 32 bits or more"
            fix = 'set precision.parameters = "float32", and leave precision.gradients and reduce out'
            yield Diagnostic(text, fix, "precision.parameters")

    def _check_tables(self, model_spec: ModelSpec) -> Iterator[Diagnostic]:
        location, lookups = f"strategies.{self.name}.tables", _lookups(model_spec)
        unused = [each for each in self.tables if not any(_matches(each, *pair) for pair in lookups)]
        for pattern in unused:
            known = ", ".join(call.name for call, _ in lookups[:8]) or "there is none"
            text = f"{pattern} is no embedding of {model_spec.name}"
            yield Diagnostic(text, f"name embeddings whose rows a forward looks up: {known}", location)
        chosen = self._chosen(model_spec)
        if not chosen and not unused:
            text = f"{model_spec.name} looks up rows of no embedding that is trained"
            yield Diagnostic(text, f"use nn.Embedding for its tables, or leave {self.name} out", location)
        num_calls = Counter(call.name for call, _ in lookups)
        for call, param in {call.name: (call, param) for call, param in chosen}.values():
            text, fix = _table_problem(call, param, num_calls[call.name])
            if not text and param.shape[0] < self.hosts:
                text = f"hosts = {self.hosts}, and {call.name} has {param.shape[0]} rows"
                fix = f"write hosts = {param.shape[0]} or fewer"
            if text:
                yield Diagnostic(text, "; or ".join(filter(None, (fix, NAME_OTHERS))), location)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if self.axis not in sharding.data_axes:
            text = f"the workers along {self.axis} would all see the same samples: no strategy splits them"
            fix = f'add [[strategies]] name = "batch_split", axis = "{self.axis}"'
            yield Diagnostic(text, fix, f"strategies.{self.name}")
        coarse = [each.param.name for each in sharding.params_on_servers if each.shard_alignment != "element"]
        if coarse:
            text = f"the optimizer steps matrices or blocks of {coarse[0]}, and a host has some of its rows"
            fix = 'use one that steps elements: "sgd", "adamw" or "lion", for all or in optimizer.groups'
            yield Diagnostic(text, fix, "optimizer.name")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        if self.hosts >= sharding.mesh.size(self.axis):
            return sharding
        names = {param.name for _, param in self._chosen(sharding.model_spec)}

        def on_hosts(each: ParamSharding) -> ParamSharding:
            if each.param.name not in names:
                return each
            return replace(
                each,
                layout=each.layout.with_placement(self.axis, R),
                grad_layout=each.grad_layout.with_placement(self.axis, S(FLAT)),
                storage_layout=each.storage_layout.with_placement(self.axis, S(FLAT)),
                rows_on_servers=True,
            )

        placed = sharding.map_param_shardings(on_hosts)
        return replace(placed, server_axis=self.axis, num_servers=self.hosts)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        tables = self._tables(view.plan)
        return program.edit(lambda actions: add_row_actions(actions, tables, self.axis, view, job))

    def server_actions(
        self, worker: str, actions: Sequence[Action], owned: Collection[str], num_workers: int
    ) -> Sequence[Action]:
        return tuple(host_actions(worker, actions, owned))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        plan = runtime.state.plan
        tables = self._tables(plan.sharding)
        rows = HostRows if plan.view.is_server else WorkerRows
        return rows(runtime, self.axis, tables).handlers

    def _chosen(self, model_spec: ModelSpec) -> list[Lookup]:
        """Returns the lookups in tables that lie on hosts."""

        def is_chosen(call: LayerCall, param: ParamSpec) -> bool:
            return any(_matches(each, call, param) for each in self.tables) or (
                not self.tables and param.trainable
            )

        return [pair for pair in _lookups(model_spec) if is_chosen(*pair)]

    def _tables(self, sharding: ShardingPlan) -> list[HostedTable]:
        """Returns the tables that lie on hosts, in the order in which a forward looks them up."""
        order = {name: number for number, name in enumerate(sharding.model_spec.block_calls)}
        specs = sharding.build_flat_params(sharding.param_groups).values()
        shards = {name: spec.shard_numel for spec in specs for name, _, _ in spec.params}
        chosen = sorted(self._chosen(sharding.model_spec), key=lambda pair: order[pair[0].block_call])
        found = list[HostedTable]()
        for call, param in chosen:
            num_rows, width = param.shape
            sizes = call.in_numel, num_rows, width, shards[param.name] // width
            found.append(HostedTable(call.name, param.name, call.block_call, *sizes, self.hosts))
        return found


def _lookups(model_spec: ModelSpec) -> list[Lookup]:
    """Returns the calls of embeddings, each with its weight."""
    params = {name: param for param in model_spec.params for name in param.names}
    calls = (call for call in model_spec.layer_calls if call.role in LOOKUP_ROLES)
    return [(call, params[f"{call.name}.weight"]) for call in calls if f"{call.name}.weight" in params]


def _matches(pattern: str, call: LayerCall, param: ParamSpec) -> bool:
    return any(fnmatchcase(name, pattern) for name in (call.name, *param.names))


def _table_problem(call: LayerCall, param: ParamSpec, num_calls: int) -> tuple[str, str]:
    """Returns why the rows of `param` cannot lie on hosts, and the repair; "" if they can."""
    users = [each if each != ROOT else "the glue between blocks" for each in param.block_calls]
    if param.aliases:
        text = f"{param.name} is tied to {param.aliases[0]}, which needs all of its rows"
        return text, "untie them (model.overrides.tie_word_embeddings = false)"
    if not param.trainable:
        return f"{param.name} is frozen: each worker can keep a copy", ""
    if num_calls > 1:
        return f"{call.name} is called {num_calls} times in a forward", "call it once, with all ids"
    if users != [call.block_call]:
        return (
            f"{param.name} is used by {' and '.join(users)}, and rows are looked up by {call.name} alone",
            "",
        )
    if param.not_plain_lookup:
        fix = "use a plain nn.Embedding there, and give what reads its weight a parameter of its own"
        return f"{param.not_plain_lookup}, and workers look up rows that hosts have sent", fix
    if param.dtype:
        return f"{param.name} is trained in {param.dtype}, and hosts step the dtype of the job", ""
    return "", ""
