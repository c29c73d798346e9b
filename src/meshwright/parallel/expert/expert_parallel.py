"""Expert parallelism: each rank along the axes `over` has some of the experts, and tokens travel to them.

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

`over` may name other axes that the mesh has anyway (folding), alone or several together; then a rank has the
experts of its index among them, the first axis outermost. Along `dp_shard` and `cp` ranks have other tokens,
as along `ep`: ZeRO and DDP sum and shard experts along the axes that are left. Along `tp` all ranks have all
tokens. So nothing is sent: each rank computes its experts on all tokens, and one sum replaces both trips.

    over = ["dp_shard", "tp"]         tp 0    tp 1     a token of dp_shard 0 with experts 1 and 6:
    2 x 2 ranks, 8 experts
                     dp_shard 0        0 1     2 3     tp 0 computes expert 1, tp 1 sends it down to 6;
                     dp_shard 1        4 5     6 7     what they have then is summed along tp

    sent per rank, microbatch and call, r rows to other ranks and q rows from them, w bytes per element:
      forward     16 (n-1)  +  r (D w + 4 k + 4 k)  +  q D w    (counts; rows with weights and indices; sums)
      backward                 r D w  +  q (D w + 4 k)          (gradients of sums; of rows and weights)
    expected rows, for T tokens and E experts, e_j of them on rank j, if all are chosen alike:
      r = T sum_(j other) p_j      q = (n-1) T p      p_j = 1 - C(E - e_j, k) / C(E, k)
    along tp, t ranks: one all_reduce of T D w forward; backward of T (D w + 4 k)   (sent: 2 (t-1)/t of it)

Rows travel in the compute dtype, weights in float32 and indices in int32 (float64 and int64 in a float64
job), as one message. No token is dropped: the numbers of rows are known at run time (`RuntimeSize`), and
ranks tell each other how many rows come, and how many (token, expert) pairs these are. Ranks along other
axes hold further copies or slices of the same experts; a token that ranks along tp share is sent by each of
them. Experts need not divide by the ranks: the first ranks get one more. The model's own code of the experts
runs, on one (token, expert) pair per row, whatever kernel it chooses.
Cost: three messages forward and two backward per call; on a GPU one read of counts by the host. A rank waits
for the one whose experts are chosen most. Shared experts are computed while the sums return, and their
backward while the gradients of the sums travel, if the block calls them between the experts and the first
operation on what these return (DeepSeek-V3, GLM-4, `meshwright.nn.MixtureOfExperts`): with one layer on 2
hosts a step took 0.89 x the time at 150 Mbit/s; at 500 no gain was seen (1.05 x, quartiles 0.91 and 1.16).
Limits: all other messages are exposed: the rows on their way to experts; those beside shared experts that the
model calls first (Qwen2-MoE) or that tensor parallelism shards; and no other microbatch computes meanwhile
(DualPipe). Own pairs are not computed apart while others travel: two products in place of one cost 3 to 7 %
of the time of the experts (one thread; 4 experts of 512 features and 32 of 128).
The experts are one module with weights [experts, ...], called with rows, indices and weights
(transformers' experts interface, `meshwright.nn.MixtureOfExperts`); or on every token each, with zeros where
an expert is not chosen (Llama 4): then a row goes to each chosen expert, not to each rank, and `over` is
without `tp`. Experts over `tp` are not sliced along it too (`expert_tensor_parallel`). A list of modules,
each called with the tokens that chose it, is refused: a call must return before the next begins, so each
expert would need an all-to-all of its own, and loops that pass by experts without tokens would run these in
another order on each rank.
Paper: Lepikhin et al. 2020, "GShard", arXiv 2006.16668 (section 3.2); Fedus et al. 2021, "Switch
Transformers", arXiv 2101.03961; DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437 (section 3.2.2: one copy of
a token per node); Liu et al. 2025, "MoE Parallel Folding", arXiv 2504.14960.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
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
    ExpertPlaces,
    call_position,
    count_names,
    expected_rows,
    tokens_per_sample,
    weights_dtype,
)
from meshwright.parallel.expert.expert_memory import RoutedCall, add_experts_memory
from meshwright.parallel.expert.summed_experts import SummedExperts, add_sums
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ExpertsCall, ModelSpec, ParamSpec, block_of
from meshwright.plan.sharding.expert_load import EXPERT_LOAD
from meshwright.plan.sharding.mesh import Mesh, axes_with, in_mesh_order
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, RuntimeSize, Transfer
from meshwright.plan.step.single_device_program import (
    FORWARD_KINDS,
    RECOMPUTE_KINDS,
    runs_input_backward,
    samples_per_microbatch,
)
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

OVER_AXES = ("ep", "dp_shard", "cp", "tp")
NO_EXPERTS = (
    "no module of this model is called as experts are: with rows [tokens, features], and the index and the "
    "weight [tokens, k] of the chosen experts"
)


@dataclass(frozen=True)
class ExpertParallel(Strategy):
    """Distributes the experts of a mixture of experts over the ranks along the axes `over`, all together.

    A rank with more than `checkpoint_load` times the pairs of a token and an expert that it expects computes
    them in chunks, and once more in backward.
    """

    name: ClassVar[str] = "expert_parallel"
    phase: ClassVar[StrategyPhase] = "shard"
    over: tuple[str, ...] = field(default=("ep",), metadata=one_of(*OVER_AXES))
    checkpoint_load: float = field(default=EXPERT_LOAD, metadata=at_least(1, "write a number from 1 up"))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes `over`, outermost first: a rank along them has the experts of its index."""
        return in_mesh_order(self.over)

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Those of `axes` along which ranks have the same tokens: what each computes of them is summed."""
        return tuple(axis for axis in self.axes if axis in axes_with("features"))

    @property
    def dispatch_axes(self) -> tuple[str, ...]:
        """Those of `axes` along which ranks have other tokens: these travel to their experts."""
        return tuple(axis for axis in self.axes if axis not in self.sum_axes)

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        calls, num_ranks = sharding.model_spec.experts_calls, sharding.mesh.group_size(self.axes)
        location = f"strategies.{self.name}"
        yield from self._check_over(sharding)
        if not calls:
            yield _no_experts(sharding.model_spec, location)
        fewest = min((call.num_experts for call in calls), default=num_ranks)
        if fewest < num_ranks:
            text = f"{num_ranks} ranks along {' x '.join(self.axes)}, and a layer has {fewest} experts"
            sizes = [f"mesh.{axis}" for axis in self.axes]
            yield Diagnostic(text, f"set {' x '.join(sizes)} to at most {fewest}", sizes[0])
        names = [call.name for call in calls]
        for name in sorted({name for name in names if names.count(name) > 1}):
            text = f"the experts {name} are called {names.count(name)} times in a forward"
            fix = "set mesh.ep = 1" if self.over == ("ep",) else f"leave {self.name} out"
            yield Diagnostic(text, f"give each layer experts of its own, or {fix}", location)
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

    def _check_over(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}.over"
        twice = sorted({axis for axis in self.over if self.over.count(axis) > 1})
        if twice or not self.over:
            text = f"over contains {twice[0]} twice" if twice else "over contains no axis"
            yield Diagnostic(text, 'name each axis once; over = ["ep"] is the default', location)
        dense = [call.name for call in sharding.model_spec.experts_calls if call.form != "choice"]
        if dense and sharding.mesh.group_size(self.sum_axes) > 1:
            axis = self.sum_axes[0]
            text = (
                f"over contains {axis}, and {dense[0]} returns a row for each token and expert: ranks would "
            )
            yield Diagnostic(f"{text}sum all these", f"take {axis} out of over", location)
        left_out = [axis for axis in axes_with("experts") if axis not in self.over]
        for axis in (axis for axis in left_out if sharding.mesh.size(axis) > 1):
            text = f"over leaves {axis} out, an axis of experts alone, and mesh.{axis} is "
            text += str(sharding.mesh.size(axis))
            fix = f"add it to over, or set mesh.{axis} = 1: ranks with copies of experts are along dp_shard"
            yield Diagnostic(text, fix, location)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}"
        for axis in (axis for axis in self.dispatch_axes if axis not in sharding.grad_sum_axes):
            what, splitter = ("tokens", "ring") if axis in axes_with("tokens") else ("samples", "batch_split")
            text = f"the ranks along {axis} would all see the same {what}: no strategy splits the batch there"
            yield Diagnostic(text, f'add [[strategies]] name = "{splitter}", axis = "{axis}"', location)
        names = {name for call in sharding.model_spec.experts_calls for name in call.params}
        experts = [each for each in sharding.param_shardings if not names.isdisjoint(each.param.names)]
        for axis in self.sum_axes:
            if any(each.sliced_dims.get(axis) != 0 for each in experts):
                yield divided_twice(axis)
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
            return reduce(lambda sliced, axis: sliced.sliced(axis, 0), self.axes, param_sharding)

        return sharding.map_param_shardings(distribute).map_param_shardings(distribute, frozen=True)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        mesh = view.plan.mesh
        if mesh.group_size(self.dispatch_axes) > 1:
            program = program.edit(lambda actions: self._add_transfers(actions, view, job))
        if mesh.group_size(self.axes) > 1:
            program = program.edit(lambda actions: self._add_memory(actions, view, job))
        for axis in (axis for axis in self.sum_axes if mesh.size(axis) > 1):
            program = add_sums(program, view, job, axis)
        return program

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        view = runtime.state.plan.view
        if view.plan.mesh.group_size(self.axes) > 1:
            microbatches = {action.name: action.microbatch for action in runtime.state.plan.actions}
            patches = runtime.state.patches
            for number, call in _numbered(view.model_spec.experts_calls):
                places = self._places(call, view)
                dispatch = ExpertDispatch(
                    runtime, self.dispatch_axes, call.routed, places, number, microbatches
                )
                sum_axes = [axis for axis in self.sum_axes if view.plan.mesh.size(axis) > 1]
                ends = () if sum_axes else _ends_of_return(call, view)
                run = dispatch.start if ends else dispatch.run
                run = run if call.form == "choice" else DenseExperts(dispatch, call).run
                for axis in sum_axes:
                    run = partial(_summed, SummedExperts(runtime, axis), run)
                forward = runtime.state.trained_module.module.get_submodule(call.name).forward
                patches.replace_forward(call.name, partial(_dispatched, run, forward))
                for name in ends:
                    patches.wrap_forward(name, partial(_finished, dispatch))
        return {}

    def _add_transfers(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        num_samples = samples_per_microbatch(actions, view.plan, job)
        by_block_call: dict[str, list[_Traffic]] = {}
        for number, call in _numbered(view.model_spec.experts_calls):
            traffic = self._traffic(call.routed, number, view, job, num_samples)
            by_block_call.setdefault(call.block_call, []).append(traffic)

        def add(action: Action) -> Action:
            own = by_block_call.get(action.subject, [])
            if action.kind in (*FORWARD_KINDS, *RECOMPUTE_KINDS):
                transfers = [each for traffic in own for each in traffic.forward(action.microbatch)]
            elif own and runs_input_backward(action, view.plan):
                transfers = [each for traffic in own[::-1] for each in traffic.backward(action.microbatch)]
            else:
                transfers = []
            return action.with_inner_transfers(transfers)

        return list(map(add, actions))

    def _add_memory(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        num_samples = samples_per_microbatch(actions, view.plan, job)
        index, calls = view.plan.mesh.index(view.coordinate, self.dispatch_axes), list[RoutedCall]()
        for number, call in _numbered(view.model_spec.experts_calls):
            traffic, places = (
                self._traffic(call.routed, number, view, job, num_samples),
                self._places(call, view),
            )
            first, end = places.ranges[index]
            tokens = num_samples * view.work_share.expert_rows(call.routed)
            sizes = tokens, traffic.sent, traffic.received
            calls.append(RoutedCall(call, number, places, end - first, *sizes))
        return add_experts_memory(actions, calls, view, job, self.checkpoint_load)

    def _places(self, call: ExpertsCall, view: RankView) -> ExpertPlaces:
        mesh = view.plan.mesh
        return ExpertPlaces(
            call.num_experts,
            mesh.group_size(self.dispatch_axes),
            mesh.group_size(self.sum_axes),
            mesh.index(view.coordinate, self.sum_axes),
            self.checkpoint_load,
        )

    def _traffic(
        self, call: ExpertsCall, number: int, view: RankView, job: Job, num_samples: int
    ) -> "_Traffic":
        mesh, axes = view.plan.mesh, self.dispatch_axes
        index, peers = mesh.index(view.coordinate, axes), mesh.peers(mesh.rank(view.coordinate), axes)
        views = [RankView(view.plan, mesh.coordinate(rank)) for rank in peers]
        tokens = [num_samples * tokens_per_sample(call, each) for each in views]
        most = [num_samples * each.work_share.expert_rows(call) for each in views]
        sent, received = expected_rows(call, self._places(call, view), tokens, index)
        return _Traffic(
            mesh,
            axes,
            call,
            number,
            (sent, most[index] * min(call.top_k, len(peers) - 1)),
            (received, sum(most) - most[index]),
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


def _ends_of_return(call: ExpertsCall, view: RankView) -> tuple[str, ...]:
    """Returns the modules at whose end sums must have returned: the shared experts, and the one with both;
    none if nothing is computed meanwhile. With slices of layers, shared experts send too.
    """
    around = ".".join(_common_path(call.name, call.shared_experts))
    is_apart = bool(call.shared_experts and around) and call.form == "choice"
    return (call.shared_experts, around) if is_apart and not view.plan.param_slice_axes else ()


def _common_path(one: str, other: str) -> Iterator[str]:
    """Yields the parts of the name of the innermost module with both."""
    for part, same in zip(one.split("."), other.split("."), strict=False):
        if part != same:
            break
        yield part


def _finished(dispatch: ExpertDispatch, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what `forward` returns, when the sums of other ranks have arrived meanwhile."""
    result = forward(*args, **kwargs)
    dispatch.finish()
    return result


def _summed(
    sum_of_ranks: SummedExperts,
    run: Callable[..., torch.Tensor],
    forward: Callable[..., torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    return sum_of_ranks.run(partial(run, forward), *args, **kwargs)


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


def divided_twice(axis: str) -> Diagnostic:
    """Returns the diagnostic of experts and slices of each along one axis."""
    text = f"expert_parallel distributes experts over {axis}, and expert_tensor_parallel slices each along it"
    return Diagnostic(text, f"leave one of them out, or take {axis} out of over", "strategies")


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


@dataclass(frozen=True)
class _Traffic:
    """The collectives of one call, the `number`-th in its block call, in any microbatch.

    `sent` and `received` are each the rows that are expected, and the most.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    call: ExpertsCall
    number: int
    sent: tuple[int, int]
    received: tuple[int, int]
    dtype: str
    position: float

    def forward(self, microbatch: int | None) -> Iterator[Transfer]:
        """Yields the counts, the rows with weights and indices of their experts, and the sums."""
        to_experts, from_tokens = count_names(self.call, self.number, microbatch)
        nbytes = DTYPE_NBYTES[COUNT_DTYPE] * NUM_COUNTS * self.mesh.group_size(self.axes)
        yield Transfer("all_to_all", self.axes, nbytes, dtype=COUNT_DTYPE, position=self.position)
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
            "all_to_all_v", self.axes, size.expected, dtype=dtype, position=position, runtime_size=size
        )
