"""Sequence parallelism (Megatron): between pairs of sharded matrices, each rank has a slice of the sequence.

Why it works: norms, dropout and additions treat each token by itself, so what 1-D tensor parallelism repeats
on all ranks can be done once, on slices. An all-reduce is a reduce-scatter and an all-gather: with work on
slices between the two, the same bytes travel.

    tensor_parallel     x(I) norm ---I -> R--- A_0 f B_0 ---P -> I--- + norm     all_reduce, back: all_reduce
    sequence_parallel   x(S) norm ---S -> R--- A_0 f B_0 ---P -> S--- + norm     all_gather, reduce_scatter
                     [0 1 2 3 4 5] tokens, 3 ranks: rank 1 has 2 3; A_0, f, B_0 and attention see 0 .. 5

    layouts: residual stream S(tokens) from the first block with a pair to the last, and in norms behind it
    norms and the biases of rowwise layers: used on slices, so I -> R; backward sums their gradients (P -> I)
    sent per rank, microbatch and layer = 4 k b s h (t-1)/t elements, k = (m + d)/2 as in megatron_1d.py:
    m + d gathers and scatters either way; with `regather` d gathers more, 5 k b s h (t-1)/t if m = d
    saved for backward: norms, additions, dropout 1/t; inputs of colwise layers full, with `regather` 1/t

With `regather`, backward gathers the input of colwise layers once more, as the paper does, and the forward
saves the slice alone.
Cost besides: the residual stream is gathered once at the end of the last block (forward) and once at the
begin (backward), b s h (t-1)/t each, unless an LM head that is sharded along the vocabulary takes slices; one
sum per norm, block and microbatch.
Limits: all blocks with pairs treat tokens one by one outside of their pairs, and are called once per
forward; t divides the tokens, but forwards that generate have all tokens on every rank. A module that asks a
slice for its length is given all tokens if all its layers take the same input.
Paper: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198 (section 4.2.2).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from meshwright.parallel.tensor.collective_insertion import add_planned_comm
from meshwright.parallel.tensor.sharded_layer import (
    LayerSharding,
    LayerShardings,
    Redistribution,
    apply_redistribution,
    bind_layers,
    layer_key,
    module_forward,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec, block_of
from meshwright.plan.model_spec.tensor_parallel_layers import ResidualFlow
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import TOKEN_DIM, I, S
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import FORWARD_KINDS, INPUT_GRAD_KINDS, samples_per_microbatch
from meshwright.plan.strategy_interface import ActivationName, Handler, Runtime, Strategy, StrategyPhase

TOKEN_SHARD = S(TOKEN_DIM)  # a slice of the tokens per rank


@dataclass(frozen=True)
class SequenceParallel(Strategy):
    """Shards the residual stream between pairs along the token dim over `axis`. With `regather`, gathered
    inputs are not saved for backward.
    """

    name: ClassVar[str] = "sequence_parallel"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="tp", metadata=one_of("tp"))
    regather: bool = False

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = "strategies.sequence_parallel"
        yield from _check_token_wise(sharding.model_spec, location)
        yield from _check_single_use(self.place(sharding), location)
        ranks, through = sharding.mesh.size(self.axis), _sequence_parallel_calls(sharding.model_spec)
        for tokens in sorted(
            {each.num_tokens for each in sharding.model_spec.residual_flows if each.block_call in through}
        ):
            if tokens % ranks:
                lower = tokens - tokens % ranks
                near = f"{lower} or {lower + ranks}" if lower else str(ranks)
                call = tokens == job.data.sequence
                fix = (
                    f"set data.sequence = {near}"
                    if call
                    else f"have the model make {near} tokens of a sample"
                )
                text = f"{tokens} tokens do not divide by the {ranks} ranks of {self.axis}"
                yield Diagnostic(
                    text, f"{fix}, or change mesh.{self.axis}", "data.sequence" if call else location
                )

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from self._check_with_context_parallel(sharding)
        input_sides = [
            (param_sharding.sliced_dims.get(self.axis), param_sharding.param.split_of_side("in"))
            for param_sharding in sharding.param_shardings
            if param_sharding.param.role == "rowwise"
        ]
        if not any(side is not None and dim == side.dim for dim, side in input_sides):
            text = (
                f"tokens are sharded between column- and row-parallel layers; no strategy shards layers "
                f"along {self.axis}"
            )
            yield Diagnostic(
                text,
                'add [[strategies]] name = "tensor_parallel", or leave sequence_parallel out',
                "strategies.sequence_parallel",
            )

    def _check_with_context_parallel(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        ranks, sequence_sharding = sharding.mesh.size(self.axis), sharding.sequence_sharding
        if sequence_sharding is None:
            return
        for residual_flow in (
            each
            for each in sharding.model_spec.residual_flows
            if each.block_call in sharding.sequence_sliced_calls
        ):
            counts = [
                sequence_sharding.num_padded_tokens(residual_flow.num_tokens, index)
                for index in range(sequence_sharding.num_ranks)
            ]
            if any(count % ranks for count in counts):
                text = (
                    f"{residual_flow.num_tokens} tokens are sharded over "
                    f"{' x '.join(sharding.token_axes)} "
                    f"as {', '.join(map(str, counts))}"
                )
                fix = f"make them a multiple of {2 * sequence_sharding.num_ranks * ranks}"
                yield Diagnostic(
                    f"{text}, which do not divide by the {ranks} ranks of {self.axis}", fix, "data.sequence"
                )
                return

    def layer_shardings(self, sharding: ShardingPlan) -> LayerShardings:
        """Returns the shardings of norms on slices, by layer name."""
        norms = [
            call
            for call in sharding.model_spec.layer_calls
            if call.role == "norm"
            and call.block_call in sharding.sequence_sliced_calls
            and call.takes_residual
        ]
        return {
            layer_key(call.name): LayerSharding({}, shared_param_axes=(self.axis,), compute=module_forward)
            for call in norms
        }

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return sharding.with_residual_placement(
            self.axis, TOKEN_SHARD, _sequence_parallel_calls(sharding.model_spec), regather=self.regather
        )

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        program = add_planned_comm(program, self.layer_shardings(view.plan), view, job)
        return program.edit(lambda actions: self._insert_stream_comm(actions, view, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        view = runtime.state.plan.view
        bind_layers(runtime, self.layer_shardings(view.plan))
        for residual_flow, first, last in self._stream_borders(view):
            runtime.state.patches.wrap_forward(
                residual_flow.block_call,
                partial(_block_with_stream_comm, runtime, residual_flow, first, last),
            )
        return {}

    def _stream_borders(
        self, view: RankView
    ) -> Iterator[tuple[ResidualFlow, Redistribution | None, Redistribution | None]]:
        cut, joined = (
            Redistribution(self.axis, I, TOKEN_SHARD, in_param_dtype=True, codable=True),
            Redistribution(self.axis, TOKEN_SHARD, I, in_param_dtype=True, codable=True),
        )
        boundaries = view.plan.sequence_slice_ends()
        for residual_flow in view.model_spec.residual_flows:
            first, last = boundaries.get(residual_flow.block_call, (False, False))
            if first or last:
                yield residual_flow, cut if first else None, joined if last else None

    def _insert_stream_comm(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        num_samples, met = (
            samples_per_microbatch(actions, view.plan, job),
            dict[tuple[str, bool], list[Transfer]](),
        )
        for residual_flow, first, last in self._stream_borders(view):
            numel = (
                num_samples
                * int(residual_flow.num_tokens * view.work_share.token_fraction(residual_flow.block_call))
                * residual_flow.hidden_size
            )
            if first is not None and residual_flow.input_needs_grad:
                met[residual_flow.block_call, True] = [*first.adjoint.transfers(numel, view.plan, job, at=1)]
            if last is not None:
                met[residual_flow.block_call, False] = [
                    *last.transfers(numel, view.plan, job, at=len(view.model_spec.layer_calls))
                ]

        def add_transfers(action: Action) -> Action:
            back = action.kind in INPUT_GRAD_KINDS
            more = met.get((action.subject, back), []) if back or action.kind in FORWARD_KINDS else []
            return action.with_inner_transfers(more)

        return [add_transfers(action) for action in actions]


def _block_with_stream_comm(
    runtime: Runtime,
    residual_flow: ResidualFlow,
    first: Redistribution | None,
    last: Redistribution | None,
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    block, place = block_of(residual_flow.block_call), residual_flow.output_index
    taken = ActivationName(block, "input", str(residual_flow.arg))
    returned = ActivationName(block, "output", "" if place is None else str(place))
    if isinstance(residual_flow.arg, int):
        args = (
            *args[: residual_flow.arg],
            apply_redistribution(runtime, args[residual_flow.arg], first, name=taken),
            *args[residual_flow.arg + 1 :],
        )
    else:
        kwargs[residual_flow.arg] = apply_redistribution(
            runtime, kwargs[residual_flow.arg], first, name=taken
        )
    given = inner(*args, **kwargs)
    if place is None:
        return apply_redistribution(runtime, given, last, name=returned)
    several = list(given)
    several[place] = apply_redistribution(runtime, several[place], last, name=returned)
    return type(given)(several)


def _sequence_parallel_calls(model_spec: ModelSpec) -> tuple[str, ...]:
    known = {
        each.block_call: each
        for each in model_spec.residual_flows
        if not each.not_sequence_parallel and "#" not in each.block_call
    }
    pairs = {call.block_call for call in model_spec.layer_calls if call.role == "rowwise"}
    found = {block_call for block_call in known if block_call in pairs}
    todo = list(found)
    while todo:
        residual_flow = known[todo.pop()]
        for block_call in (residual_flow.producer, residual_flow.consumer):
            if block_call in known and block_call not in found:
                found.add(block_call)
                todo.append(block_call)
    return tuple(block_call for block_call in model_spec.block_calls if block_call in found)


def _check_single_use(sharding: ShardingPlan, location: str) -> Iterator[Diagnostic]:
    taken: dict[str, set[bool]] = {}
    for call in sharding.model_spec.layer_calls:
        if call.role in ("colwise", "norm"):
            taken.setdefault(call.name, set()).add(sharding.takes_sequence_slices(call))
    both = [name for name, kinds in taken.items() if len(kinds) > 1]
    if both:
        text = (
            f"{both[0]} is called on the residual stream and on another tensor, so its gradients "
            f"would be summed wrongly over the ranks"
        )
        yield Diagnostic(
            text, 'leave name = "sequence_parallel" out, or give each of the two a layer of its own', location
        )


def _check_token_wise(model_spec: ModelSpec, location: str) -> Iterator[Diagnostic]:
    known = {each.block_call: each for each in model_spec.residual_flows}
    reasons: dict[str, tuple[str, str]] = {}
    for block_call in dict.fromkeys(
        call.block_call for call in model_spec.layer_calls if call.role == "rowwise"
    ):
        why = "its output has another shape than its input, or does not depend on it token by token"
        if block_call in known:
            why = known[block_call].not_sequence_parallel
            why = "it is called more than once" if "#" in block_call and not why else why
        if why:
            reasons.setdefault(re.sub(r"\d+", "*", why), (block_call, why))
    for block_call, why in reasons.values():
        text = f"the block '{block_call}' cannot run on a slice of the tokens: {why}"
        yield Diagnostic(
            text,
            'leave name = "sequence_parallel" out, or declare the parts of the block as blocks',
            location,
        )
