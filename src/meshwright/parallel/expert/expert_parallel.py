"""Expert parallelism: each rank along `ep` has some of the experts, and tokens travel to them.

Why it works: an expert computes on each token by itself, so it does not matter on which rank. A router gives
a token k experts; the token is sent once to each other rank that has some of them, with their index and
weight. There each of these experts computes, the results are weighted and added, and one sum returns. So the
traffic counts ranks, not experts: with 64 experts of which 8 are chosen, on 2 ranks, a token is sent at most
once, where a copy per expert would be sent 4 times.

    rank 0   tokens --router--> own -------------+--> experts 0 1 --> weighted sums --+--> tokens
                        |  for rank 1            |  from rank 1          for rank 1 |  | from rank 1
                        +---- all_to_all_v ----> | <-+                              v  |
    rank 1   tokens --router--> ...                  experts 2 3 --> ...         all_to_all_v

    weights of experts S(expert) along ep; the batch is split along it, so all other weights are R there, and
    their gradients are summed. The gradient of an expert is complete: the tokens of all ranks came to it.

    sent per rank, microbatch and call, r rows to other ranks and q rows from them, w bytes per element:
      forward     16 (n-1)  +  r (D w + 4 k + 4 k)  +  q D w    (counts; rows with weights and indices; sums)
      backward                 r D w  +  q (D w + 4 k)          (gradients of sums; of rows and weights)
    expected rows, for T tokens and E experts, e_j of them on rank j, if all are chosen alike:
      r = T sum_(j other) p_j      q = (n-1) T p      p_j = 1 - C(E - e_j, k) / C(E, k)

Rows travel in the compute dtype, weights in float32 and indices in int32 (float64 and int64 in a float64
job), as one message. No token is dropped: the numbers of rows are known at run time (`RuntimeSize`), and
ranks tell each other how many rows come, and how many (token, expert) pairs these are. Ranks along other
axes hold further copies or slices of the same experts; a token that ranks along tp share is sent by each of
them. Experts need not divide by the ranks: the first ranks get one more. The model's own code of the experts
runs, on one (token, expert) pair per row, whatever kernel it chooses.
Memory: a rank expects n T k e_j / E (token, expert) pairs; if all tokens choose its experts, it has up to
n T min(k, e_j). A rank with more than `checkpoint_load` times those expected computes them in chunks and once
more in backward, so it saves the rows and the activations of one chunk at most (chunked_experts.py). `plan`
says both: the peak that is expected, and the most. Results are the same up to rounding.
Cost: three messages forward and two backward per call, all exposed; on a GPU one read of counts by the host.
A rank waits for the one whose experts are chosen most.
Limits: the experts are one module with weights [experts, ...], called with rows, indices and weights
(transformers' experts interface, `meshwright.nn.MixtureOfExperts`); or on every token each, with zeros where
an expert is not chosen (Llama 4): then a row goes to each chosen expert, not to each rank.
Paper: Lepikhin et al. 2020, "GShard", arXiv 2006.16668 (section 3.2); Fedus et al. 2021, "Switch
Transformers", arXiv 2101.03961; DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437 (section 3.2.2: one copy of
a token per node).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright.comm.collectives.comm_volume import DTYPE_NBYTES
from meshwright.model.trial.shardable_layers import VALUE_DEPENDENT_REASON
from meshwright.parallel.expert.dense_experts import DenseExperts
from meshwright.parallel.expert.dispatch import (
    COUNT_DTYPE,
    NUM_COUNTS,
    ExpertDispatch,
    count_names,
    expected_rows,
    weights_dtype,
)
from meshwright.parallel.expert.expert_memory import add_experts_memory
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ExpertsCall, ModelSpec, ParamSpec, block_of
from meshwright.plan.sharding.expert_load import EXPERT_LOAD
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, RuntimeSize, Transfer
from meshwright.plan.step.single_device_program import (
    FORWARD_KINDS,
    runs_input_backward,
    samples_per_microbatch,
)
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

NO_EXPERTS = (
    "no module of this model is called as experts are: with rows [tokens, features], and the index and the "
    "weight [tokens, k] of the chosen experts"
)


@dataclass(frozen=True)
class ExpertParallel(Strategy):
    """Distributes the experts of a mixture of experts along `axis`.

    A rank with more than `checkpoint_load` times the pairs of a token and an expert that it expects computes
    them in chunks, and once more in backward.
    """

    name: ClassVar[str] = "expert_parallel"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="ep", metadata=one_of("ep"))
    checkpoint_load: float = field(
        default=EXPERT_LOAD, metadata=at_least(1, "write a number from 1 up; mesh.ep never recomputes")
    )

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        calls, num_ranks = sharding.model_spec.experts_calls, sharding.mesh.size(self.axis)
        location = f"strategies.{self.name}"
        if not calls:
            yield _no_experts(sharding.model_spec, location)
        fewest = min((call.num_experts for call in calls), default=num_ranks)
        if fewest < num_ranks:
            text = f"{num_ranks} ranks along {self.axis}, and a layer has {fewest} experts"
            yield Diagnostic(text, f"set mesh.{self.axis} to at most {fewest}", f"mesh.{self.axis}")
        names = [call.name for call in calls]
        for name in sorted({name for name in names if names.count(name) > 1}):
            text = f"the experts {name} are called {names.count(name)} times in a forward"
            yield Diagnostic(text, "give each layer experts of its own, or set mesh.ep = 1", location)
        if job.train.noise_scale:
            text = (
                "the noise scale compares gradients of ranks, and that of an expert is of all ranks' tokens"
            )
            yield Diagnostic(text, "set train.noise_scale = false", "train.noise_scale")
        if job.guard.action != "off":
            text = (
                "the guard looks for the rank that caused a loss spike, and an expert has all ranks' tokens"
            )
            yield Diagnostic(text, 'set guard.action = "off"', "guard.action")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}"
        if self.axis not in sharding.data_axes:
            text = f"the ranks along {self.axis} would all see the same samples: no strategy splits the batch"
            fix = f'add [[strategies]] name = "batch_split", axis = "{self.axis}"'
            yield Diagnostic(f"{text} there", fix, location)
        if sharding.primary_rank_axes:
            text = "with data_parallel_master one rank steps for all others, and none has all experts"
            yield Diagnostic(text, "use ddp or zero in its place", location)
        if sharding.residual_layout.axes_with("S"):
            axes = " and ".join(sharding.residual_layout.axes_with("S"))
            text = f"experts take whole tokens, and the residual stream is sharded along {axes}"
            fix = "use tensor_parallel in mode 1d, without sequence_parallel; or set mesh.ep = 1"
            yield Diagnostic(text, fix, location)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        names = {name for call in sharding.model_spec.experts_calls for name in call.params}

        def distribute(param_sharding: ParamSharding) -> ParamSharding:
            if names.isdisjoint(param_sharding.param.names):
                return param_sharding
            return param_sharding.sliced(self.axis, 0)

        return sharding.map_param_shardings(distribute).map_param_shardings(distribute, frozen=True)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if view.plan.mesh.size(self.axis) == 1:
            return program
        program = program.edit(lambda actions: self._add_transfers(actions, view, job))
        calls = list(_numbered(view.model_spec.experts_calls))
        return program.edit(
            lambda actions: add_experts_memory(actions, calls, view, job, self.axis, self.checkpoint_load)
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        view = runtime.state.plan.view
        if view.plan.mesh.size(self.axis) > 1:
            microbatches = {action.name: action.microbatch for action in runtime.state.plan.actions}
            for number, call in _numbered(view.model_spec.experts_calls):
                dispatch = ExpertDispatch(
                    runtime, self.axis, call.routed, number, microbatches, self.checkpoint_load
                )
                run = dispatch.run if call.form == "choice" else DenseExperts(dispatch, call).run
                forward = runtime.state.trained_module.module.get_submodule(call.name).forward
                runtime.state.patches.replace_forward(call.name, partial(_dispatched, run, forward))
        return {}

    def _add_transfers(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        num_samples = samples_per_microbatch(actions, view.plan, job)
        by_block_call: dict[str, list[_Traffic]] = {}
        for number, call in _numbered(view.model_spec.experts_calls):
            traffic = self._traffic(call.routed, number, view, job, num_samples)
            by_block_call.setdefault(call.block_call, []).append(traffic)

        def add(action: Action) -> Action:
            own = by_block_call.get(action.subject, [])
            if action.kind in (*FORWARD_KINDS, "RECOMPUTE"):
                transfers = [each for traffic in own for each in traffic.forward(action.microbatch)]
            elif own and runs_input_backward(action, view.plan):
                transfers = [each for traffic in own[::-1] for each in traffic.backward(action.microbatch)]
            else:
                transfers = []
            return action.with_inner_transfers(transfers)

        return list(map(add, actions))

    def _traffic(
        self, call: ExpertsCall, number: int, view: RankView, job: Job, num_samples: int
    ) -> "_Traffic":
        num_ranks, index = view.plan.mesh.size(self.axis), view.coordinate[self.axis]
        share = view.work_share.token_fraction(call.block_call, call.name)
        num_tokens = int(call.num_tokens * share) * num_samples
        sent, received = expected_rows(call, num_tokens, num_ranks, index)
        return _Traffic(
            view.plan.mesh,
            self.axis,
            call,
            number,
            (sent, num_tokens * min(call.top_k, num_ranks - 1)),
            (received, num_tokens * (num_ranks - 1)),
            job.precision.compute,
            call_position(call, view),
        )


def _dispatched(
    run: Callable[..., torch.Tensor],
    forward: Callable[..., torch.Tensor],
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    return run(forward, *args, **kwargs)


def _no_experts(model_spec: ModelSpec, location: str) -> Diagnostic:
    by_rows = (each for each in model_spec.params if each.not_shardable_reason == VALUE_DEPENDENT_REASON)
    lists = Counter(name for name, _ in {_list_and_number(param) for param in by_rows})
    if lists:
        name, number = min(lists.items())
        more = f" (and so in {len(lists) - 1} more blocks)" if len(lists) > 1 else ""
        text = f"{name} is a list of {number} modules, each called with the tokens that chose it{more}: only "
        text += "experts whose weights are one parameter [experts, ...] can be distributed"
        fix = "put mw.nn.MixtureOfExperts in its place, with the weights of the list stacked; or set "
        fix += "mesh.ep = 1: mesh.dp_shard shards the weights of the list too"
    else:
        text = NO_EXPERTS
        fix = "use a transformers mixture of experts or mw.nn.MixtureOfExperts; or set mesh.ep = 1"
    return Diagnostic(text, fix, location)


def _list_and_number(param: ParamSpec) -> tuple[str, str]:
    """Returns the list of modules in its block that a parameter belongs to, and which of them."""
    block = block_of(param.block_calls[0])
    parts = param.name.removeprefix(f"{block}.").split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join([block, *parts[:number]]), parts[number]


def _numbered(calls: Sequence[ExpertsCall]) -> Iterator[tuple[int, ExpertsCall]]:
    """Yields each call with its number within its block call."""
    seen: dict[str, int] = {}
    for call in calls:
        seen[call.block_call] = seen.get(call.block_call, -1) + 1
        yield seen[call.block_call], call


def call_position(call: ExpertsCall, view: RankView) -> float:
    """Returns the position of the call among the collectives of sharded layers in its block."""
    before = [
        at
        for at, layer in enumerate(view.model_spec.layer_calls)
        if layer.block_call == call.block_call and layer.name in call.prior_layers
    ]
    return max(before, default=-1) + 0.5


@dataclass(frozen=True)
class _Traffic:
    """The collectives of one call, the `number`-th in its block call, in any microbatch.

    `sent` and `received` are each the rows that are expected, and the most.
    """

    mesh: Mesh
    axis: str
    call: ExpertsCall
    number: int
    sent: tuple[int, int]
    received: tuple[int, int]
    dtype: str
    position: float

    def forward(self, microbatch: int | None) -> Iterator[Transfer]:
        """Yields the counts, the rows with weights and indices of their experts, and the sums."""
        to_experts, from_tokens = count_names(self.call, self.number, microbatch)
        nbytes = DTYPE_NBYTES[COUNT_DTYPE] * NUM_COUNTS * self.mesh.size(self.axis)
        yield Transfer("all_to_all", (self.axis,), nbytes, dtype=COUNT_DTYPE, position=self.position)
        row, weights = self._nbytes
        yield self._rows(to_experts, self.sent, row + 2 * weights, self.dtype, self.position)
        yield self._rows(from_tokens, self.received, row, self.dtype, self.position)

    def backward(self, microbatch: int | None) -> Iterator[Transfer]:
        """Yields the gradients of the sums, and those of rows and weights."""
        to_experts, from_tokens = count_names(self.call, self.number, microbatch)
        row, weights = self._nbytes
        yield self._rows(to_experts, self.sent, row, self.dtype, -self.position)
        dtype = self.dtype if self.call.input_needs_grad else weights_dtype(self.dtype)
        nbytes = row * self.call.input_needs_grad + weights * self.call.weights_need_grad
        if nbytes:
            yield self._rows(from_tokens, self.received, nbytes, dtype, -self.position)

    @property
    def _nbytes(self) -> tuple[int, int]:
        """The bytes of a row, and of its weights; its indices have as many as its weights."""
        weights = self.call.top_k * DTYPE_NBYTES[weights_dtype(self.dtype)]
        return self.call.hidden_size * DTYPE_NBYTES[self.dtype], weights

    def _rows(self, count: str, rows: tuple[int, int], nbytes: int, dtype: str, position: float) -> Transfer:
        size = RuntimeSize(count, nbytes, *rows)
        return Transfer(
            "all_to_all_v", (self.axis,), size.expected, dtype=dtype, position=position, runtime_size=size
        )
