"""Observers: ranks that train nothing; every few steps they run a function of the user on the new weights.

Why it works: what acts with a model while it is trained (a policy that draws actions, a sampler, a scorer)
needs the weights, and neither gradients nor optimizer states. So it need not be a worker: behind the STEP
that ends a period, each worker sends a slice of the weights to every observer, which then has all of them, of
one version. It calls the function, and sends the tensors that this returns to all workers. Workers wait for
them, so a run with observers is as deterministic as its function: version v is what v steps have made.

    worker     F B ... CLIP STEP  SHOW(1) SHOW(0)           ANSWER      the next step: trainer.answers
    observer       ... CLIP STEP  SHOW(1) SHOW(0)  OBSERVE  ANSWER      it has no parameter to step

    SHOW (sends a slice of a parameter group to every observer)
    OBSERVE (calls the function of the user with the weights, on an observer)
    ANSWER (sends what the function has returned to all workers)

    group of 11 elements   worker 0: 0 to 3   worker 1: 4 to 7   worker 2: 8 to 10, pad   observer: all, of v

Slices are the shards of ZeRO, or as long as these: what a worker sends is up to date behind STEP, before any
gather. The last `observers` ranks along `axis` observe: they read no samples and run no forward of a step,
and the global batch divides by the n workers. Between two periods nothing is sent to them but the sums of
counts, losses and norms, which they enter with zeros.

    def choose(model, version, generator):          # bandit.py; function = "bandit.py:choose"
        return {"arm": torch.multinomial(model.policy.exp(), 8, replacement=True, generator=generator)}

The function is called in eval mode and without gradients. `generator` is of the CPU, and its seed follows
from that of the run, the version and the observer: numbers drawn from it are the same in every run, and in
one that goes on from a checkpoint. `answers` names the tensors that are returned, each with its dtype:
"arm:int64"; they may have any shape of at most 8 dims, another one each time, in `answer_bytes` together.
`trainer.answers` has those of the last period that has ended, in the order of the observers, each with its
version; checkpoints keep them.

    n workers, k observers; W bytes of all parameters in their dtype, padded to n equal slices by group;
    A bytes of the answer of an observer; m = 1 + 9 numbers for each of `answers`
                      leaves a rank, at the end of a period          between
    a worker          k W / n  +  8 m (n + k)                        0
    an observer       n A      +  8 m (n + k)                        0

Cost: these bytes, and the time of the function, for which workers wait. A worker copies the slices that it
sends, k W / n. An observer has W from SHOW to OBSERVE, twice where the function copies it, and nothing
between. The prediction of a step does not know the time of the function.
Limits: beside data parallelism alone, with `ddp` or `zero` of stage 1 or 2. Workers wait for the answers;
none may be late. The function sees parameters, and buffers as the model was made with: running statistics are
refused. What else changes in the memory of an observer is lost when a run ends. Refused by name: other axes,
stage 3, other servers, codes, offload, optimizers of matrices, losses over the samples of all ranks, the loss
guard, the gradient noise scale, the loss scale of float16. `search` does not propose it.
Paper: Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures" (ICML), arXiv 1802.01561, section 3 (actors with the learner's weights; here they are not
late).
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from inspect import isfunction
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from meshwright.parallel.observer.observations import (
    FUNCTION,
    AnswerForm,
    ObserverRank,
    ObservingFunction,
    WorkerRank,
    shown_specs,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.job.python_file import import_file
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, INTEGER_NBYTES
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Allocation, Period, Program, RuntimeSize, Transfer
from meshwright.plan.strategy_compatibility import joint_decision_diagnostics
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

OBSERVERS_FIX = "write the number of ranks that observe: 1 or more"
EVERY_FIX = "write after how many steps observers see the weights: 1 or more"
BYTES_FIX = "write the most bytes of all tensors that the function returns at a time: 1 or more"
SERVES = "both have ranks that run no step"
SUMS = "observers are no part of its sums; use ddp or zero"
RESTS = "weights are shown from where they are stepped, on the device"
DTYPES = (*FLOAT_NBYTES, *INTEGER_NBYTES)
FORM = 'function = "file.py:name"'


@dataclass(frozen=True)
class Observer(Strategy):
    """The last `observers` ranks along `axis` call `function`, file.py:name, on the weights every `every`
    steps, and send the tensors `answers` ("name:dtype"), at most `answer_bytes`, to all workers.
    """

    name: ClassVar[str] = "observer"
    phase: ClassVar[StrategyPhase] = "shard"
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("parameter_server", "stale_server", "embedding_host"), SERVES),
            **dict.fromkeys(("data_parallel_master", "naive_ddp", "hpz", "sync_batch_norm"), SUMS),
            **dict.fromkeys(("compress", "compress_activations", "quantized_weights"), SUMS),
            **dict.fromkeys(("offload", "disk_offload"), RESTS),
        }
    )
    function: str = ""
    every: int = field(default=1, metadata=at_least(1, EVERY_FIX))
    observers: int = field(default=1, metadata=at_least(1, OBSERVERS_FIX))
    axis: str = field(
        default="dp_replicate",
        metadata=one_of("dp_replicate", "dp_shard", fix="choose dp_replicate or dp_shard"),
    )
    answers: tuple[str, ...] = ()
    answer_bytes: int = field(default=65536, metadata=at_least(1, BYTES_FIX))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, mesh, ranks = f"strategies.{self.name}", sharding.mesh, sharding.mesh.size(self.axis)
        if self.observers >= ranks:
            text = f"observers = {self.observers} of the {ranks} ranks along {self.axis}: no worker is left"
            fix = f"write observers = {ranks - 1} or fewer, or raise" if ranks > 1 else "raise"
            fix += f" mesh.{self.axis}: workers and observers together"
            yield Diagnostic(text, fix, f"{location}.observers")
        other = [axis for axis in AXES if axis != self.axis and mesh.size(axis) > 1]
        if other:
            text = f"observers stand beside data parallelism, and mesh.{other[0]} is {mesh.size(other[0])}"
            fix = f"set {', '.join(f'mesh.{axis} = 1' for axis in other)}, or leave {self.name} out"
            yield Diagnostic(text, fix, location)
        if self.every > job.train.steps:
            text = f"every = {self.every}, and the run has {job.train.steps} steps: nobody would observe"
            yield Diagnostic(text, f"write every = {job.train.steps} or less", f"{location}.every")
        yield from self._check_answers()
        yield from joint_decision_diagnostics(job, "and observers have none of their own")
        if sharding.model_spec.needs_global_batch or sharding.model_spec.num_batch_sums:
            text = "the loss compares, or adds up, what the forwards of all samples return"
            text += ", and observers run none"
            yield Diagnostic(text, f"use another loss, or leave {self.name} out", location)

    def _check_answers(self) -> Iterator[Diagnostic]:
        location, fix = f"strategies.{self.name}.answers", 'write answers = ["tokens:int64", "score:float32"]'
        if not self.answers:
            yield Diagnostic("the function returns tensors, and answers names none", fix, location)
        names = [each.partition(":")[0] for each in self.answers]
        for answer, name in zip(self.answers, names, strict=True):
            dtype = answer.partition(":")[2]
            if not name.isidentifier() or dtype not in DTYPES:
                text = f"{answer!r} is no name with a dtype ({', '.join(DTYPES)})"
                yield Diagnostic(text, fix, location)
            elif names.count(name) > 1:
                yield Diagnostic(f"{name} stands there {names.count(name)} times", "keep one", location)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, model_spec = f"strategies.{self.name}", sharding.model_spec
        if self.axis not in sharding.data_axes:
            text = f"the workers along {self.axis} would all see the same samples: no strategy splits them"
            fix = f'add [[strategies]] name = "batch_split", axis = "{self.axis}"'
            yield Diagnostic(text, fix, location)
        if any(each.is_stored_sharded for each in sharding.param_shardings):
            text = "zero of stage 3 stores weights in shards alone, of workers and observers alike"
            yield Diagnostic(text, "write stage = 2 in zero, or use ddp", location)
        matrices = [each for each in sharding.param_shardings if each.shard_alignment == "matrix"]
        if any(each.flat_shard_axes or each.owner_axes for each in matrices):
            text = f"the optimizer steps the whole matrix {matrices[0].param.name} on one of the ranks"
            yield Diagnostic(text, 'use ddp, or an optimizer of elements ("adamw")', "optimizer.name")
        norms = [call.name for call in model_spec.batch_norm_calls if call.has_running_stats]
        changing = [*norms, *(each.buffer for each in model_spec.choice_biases)]
        if changing:
            text = f"{changing[0]} changes in training beside the parameters, and observers see these alone"
            yield Diagnostic(text, f"use a model without, or leave {self.name} out", location)

    def check_files(
        self, job: Job, sharding: ShardingPlan, as_dict: Callable[[], dict[str, Any]]
    ) -> Iterator[Diagnostic]:
        problem = _function_problem(self.function)
        if problem:
            yield Diagnostic(problem, f"write {FORM}: a function of a Python file", FUNCTION)

    def file_digests(self) -> tuple[tuple[str, str], ...]:
        path = Path(self.function.rpartition(":")[0])
        return (("function", sha256(path.read_bytes()).hexdigest()[:16]),) if path.is_file() else ()

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        if self.observers >= sharding.mesh.size(self.axis):
            return sharding
        return replace(sharding, server_axis=self.axis, num_servers=self.observers)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        observes = view.coordinate[self.axis] >= view.plan.num_workers
        actions = self._observer_actions(view, job) if observes else self._worker_actions(view, job)
        more = list(actions)
        return program.edit(lambda before: [*before, *more])

    def _worker_actions(self, view: RankView, job: Job) -> Iterator[Action]:
        """Yields what a worker does behind STEP."""
        shows = list[Action]()
        for spec, param in shown_specs(view.plan):
            nbytes = self.observers * spec.shard_numel * param.itemsize(job.precision.parameters)
            transfer = self._message(nbytes, param.dtype_for(job.precision.parameters))
            copies = Allocation(f"copies of {spec.name} for observers", nbytes)
            tensors = tuple(name for name, _, _ in spec.params)
            shows.append(replace(self._show(spec.name, transfer, copies), tensors=tensors))
        yield from shows
        yield self._answer(view, [each.name for each in shows], None, _allocation_names(shows))

    def _observer_actions(self, view: RankView, job: Job) -> Iterator[Action]:
        """Yields the same of an observer."""
        shows = list[Action]()
        for spec, param in shown_specs(view.plan):
            nbytes = spec.numel * param.itemsize(job.precision.parameters)
            transfer = self._message(0, param.dtype_for(job.precision.parameters))
            shows.append(self._show(spec.name, transfer, Allocation(f"shown {spec.name}", nbytes)))
        yield from shows
        names, num_workers = tuple(each.name for each in shows), view.plan.num_workers
        observe = Action("OBSERVE", waits=names, frees=_allocation_names(shows), period=self._period)
        yield observe
        size = RuntimeSize("answer", num_workers, self.answer_bytes, self.answer_bytes)
        yield self._answer(view, [observe.name], size, ())

    def _show(self, name: str, transfer: Transfer, memory: Allocation) -> Action:
        return Action(
            "SHOW",
            name,
            stream="comm",
            waits=("STEP()",),
            transfer=transfer,
            allocations=(memory,),
            period=self._period,
        )

    def _answer(
        self, view: RankView, waits: list[str], size: RuntimeSize | None, frees: tuple[str, ...]
    ) -> Action:
        counts = AnswerForm.of(self.answers).header_nbytes * view.plan.mesh.size(self.axis)
        messages = (
            Transfer("all_to_all", (self.axis,), counts, dtype="int64"),
            self._message(size.expected if size else 0, "uint8", size),
        )
        answer = Action("ANSWER", waits=tuple(waits), frees=frees, period=self._period)
        return answer.with_inner_transfers(messages)

    def _message(self, nbytes: int, dtype: str, size: RuntimeSize | None = None) -> Transfer:
        return Transfer("all_to_all_v", (self.axis,), nbytes, dtype=dtype, runtime_size=size, position=1)

    @property
    def _period(self) -> Period:
        return Period(self.every, of_sites=False)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state, form = runtime.state, AnswerForm.of(self.answers)
        if not state.plan.view.is_server:
            return WorkerRank(state, self.axis, form).handlers
        path, _, name = self.function.rpartition(":")
        function: ObservingFunction = vars(import_file(Path(path), self.name))[name]
        return ObserverRank(state, self.axis, form, function, self.answer_bytes).handlers


def _allocation_names(actions: list[Action]) -> tuple[str, ...]:
    return tuple(each.name for action in actions for each in action.allocations)


def _function_problem(function: str) -> str:
    """Returns why `function` cannot be called, or ""."""
    path, _, name = function.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        return f"function = {function!r}; needed is a Python file, and a function in it"
    if not Path(path).is_file():
        return f"there is no file {path}"
    try:
        found = vars(import_file(Path(path), Observer.name)).get(name)
    except Exception:
        return f"{path} cannot be imported: {traceback.format_exc(limit=-1).strip()}"
    if not isfunction(found):
        return f"{path} has no function {name}" if found is None else f"{name} in {path} is no function"
    return ""
