"""Context parallelism in general: layouts, diagnostics and planned collectives of strategies that shard the
sequence.

    batch         every rank along the axis reads the same samples, and runs the model on some tokens of each
    weights       each rank's gradient is a summand: R along the axis, gradients P, as with other samples
    TOKEN_COUNT, LOSS_SUM    summed along the axis: every rank learns of a stop request and of the whole loss
    attention     has collectives within the forwards and backwards of its block calls: Action.inner_transfers
    convolution   likewise, at the ends of its spans (conv_halo.py)
    whole samples likewise: numbers per token that are gathered in a block (nn/whole_samples.py)

Among the collectives of tensor-parallel layers, those of attention stand before the rowwise layer that ends
it; in backwards behind it. Its heads are those of the rank.

Glue between blocks may need tokens of other ranks (model/sequence_analysis/glue_gather_trace.py). These
gathers move within:

    F(block call)       at its end, what the glue behind it needs: all_gather, or all_reduce for a sum;
                        at its begin what it needs itself, if a stage begins with it
    LOSS                what the loss needs; at its end the gradients of the model's outputs
    B(block call), I    at its end the gradients of its inputs: reduce_scatter, all_reduce;
                        at its begin, if a stage ends with it, those of the inputs of later stages

Each rank sends as many tokens as the rank that has most.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.parallel.context.conv_halo import check_convolutions, halo_transfers
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, PARAM_DTYPE_NBYTES, ModelSpec, ParamSpec
from meshwright.plan.model_spec.param_dim_split import DimShard
from meshwright.plan.model_spec.sequence_info import AttentionSpec, ConvSpec, GlueGather, SampleGather
from meshwright.plan.model_spec.stage_transfers import StageSpec
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import S
from meshwright.plan.step.memory.memory_names import output_name
from meshwright.plan.step.program import Action, Program, Transfer, with_extra_memory
from meshwright.plan.step.single_device_program import (
    FORWARD_KINDS,
    INPUT_GRAD_KINDS,
    RECOMPUTE_KINDS,
    runs_input_backward,
    samples_per_microbatch,
)
from meshwright.plan.strategy_interface import Strategy, StrategyPhase

LOSS_SITE = ""  # stands for it among block calls
END_OF_CALL = 1e9  # behind all that a block call itself moves


def add_glue_gathers(program: Program, view: RankView, job: Job, axis: str) -> Program:
    """Returns `program` with the gathers of tokens along `axis` that glue between blocks needs."""
    tokens = view.plan.model_spec.sequence_info
    if tokens is None or not tokens.gathers:
        return program

    def edited(actions: list[Action]) -> list[Action]:
        glue = _GlueTransfers.for_rank(view, job, axis, samples_per_microbatch(actions, view.plan, job))
        return [glue.insert(action) for action in actions]

    return program.edit(edited)


@dataclass(frozen=True)
class _GlueTransfers:
    forward_begin: Mapping[str, Sequence[Transfer]]
    forward_end: Mapping[str, Sequence[Transfer]]
    extra_nbytes: Mapping[str, int]
    backward_begin: Mapping[str, Sequence[Transfer]]
    backward_end: Mapping[str, Sequence[Transfer]]

    @classmethod
    def for_rank(cls, view: RankView, job: Job, axis: str, num_samples: int) -> "_GlueTransfers":
        tokens = view.plan.model_spec.sequence_info
        before, forth, first, last = (defaultdict[str, list[Transfer]](list) for _ in range(4))
        more = defaultdict[str, int](int)
        for each in tokens.gathers if tokens is not None else ():
            param_sharding = _forward_site(each, view.plan.stages)
            if not (
                param_sharding in view.model_spec.block_calls
                or (param_sharding == LOSS_SITE and view.computes_loss)
            ):
                continue
            there, back, nbytes = _gather_and_scatter(each, view.plan, job, axis, num_samples)
            (before if param_sharding != each.block_call else forth)[param_sharding].append(there)
            more[param_sharding] += nbytes
            for place, ends in dict.fromkeys(_backward_sites(each, param_sharding, view.plan.stages)):
                (last if ends else first)[place].insert(0, back)  # what was made last flows first
        return cls(before, forth, more, first, last)

    def insert(self, action: Action) -> Action:
        block_call = LOSS_SITE if action.kind == "LOSS" else action.subject
        early, late = list[Transfer](), list[Transfer]()
        if action.kind in (*FORWARD_KINDS, "LOSS"):
            early += self.forward_begin.get(block_call, ())
            late += self.forward_end.get(block_call, ())
        if action.kind in (*INPUT_GRAD_KINDS, "LOSS"):
            early += self.backward_begin.get(block_call, ())
            late += self.backward_end.get(block_call, ())
        if not early and not late:
            return action
        inner = *_at_time(-END_OF_CALL, early), *action.inner_transfers, *_at_time(END_OF_CALL, late)
        held = output_name(action.subject, action.microbatch or 0)
        more = self.extra_nbytes.get(block_call, 0) if action.kind in FORWARD_KINDS else 0
        return replace(with_extra_memory(action, held, more), inner_transfers=inner)


def _at_time(time: float, moves: Iterable[Transfer]) -> Iterator[Transfer]:
    return (replace(move, position=time, in_glue=True) for move in moves)


def _forward_site(each: GlueGather, stages: Sequence[StageSpec]) -> str:
    begins = {stage.block_calls[0] for stage in stages}
    return each.consumer if each.consumer in begins else each.block_call


def _backward_sites(
    each: GlueGather, param_sharding: str, stages: Sequence[StageSpec]
) -> Iterator[tuple[str, bool]]:
    mine = next((stage for stage in stages if param_sharding in stage.block_calls), None)
    for block_call in each.backward_calls:
        if mine is None or block_call in mine.block_calls or (block_call == LOSS_SITE and mine.is_last):
            yield block_call, True
        else:
            yield mine.block_calls[-1], False


def _gather_and_scatter(
    each: GlueGather, sharding: ShardingPlan, job: Job, axis: str, num_samples: int
) -> tuple[Transfer, Transfer, int]:
    numel, compute = each.numel * (num_samples if each.per_sample else 1), job.precision.compute
    mixed = compute != job.precision.parameters
    own = not each.dtype or (each.dtype in FLOAT_NBYTES and (mixed or compute == "float64"))
    dtype = compute if own else each.dtype
    if not each.num_tokens or sharding.sequence_sharding is None:
        wide = "float64" if "float64" in ((each.dtype if not own or mixed else ""), compute) else "float32"
        move = Transfer("all_reduce", (axis,), numel * FLOAT_NBYTES[wide], dtype=wide)
        return move, move, numel * FLOAT_NBYTES[wide]
    share = (
        numel
        // each.num_tokens
        * max(sharding.sequence_sharding.num_tokens_by_rank(each.num_tokens))
        * PARAM_DTYPE_NBYTES[dtype]
    )
    forth = Transfer("all_gather", (axis,), share, dtype=dtype)
    back = Transfer("reduce_scatter", (axis,), share * sharding.sequence_sharding.num_ranks, dtype=dtype)
    return forth, back, numel * PARAM_DTYPE_NBYTES[dtype]


CP_AXIS = "cp"
FORWARD_KINDS = (*FORWARD_KINDS, *RECOMPUTE_KINDS)  # kinds that run a block call forward

AttentionTransfers = Callable[
    [AttentionSpec, int], Sequence[Transfer]
]  # of one call of attention on so many rows


@dataclass(frozen=True)
class ContextParallel(Strategy):
    """Base of the strategies that shard the tokens of each sample over the ranks along `axis`."""

    phase: ClassVar[StrategyPhase] = "shard"
    needs_sequence_info: ClassVar[bool] = True
    axis: str = field(default=CP_AXIS, metadata=one_of(CP_AXIS))

    @abstractmethod
    def sequence_sharding(self, num_ranks: int) -> SequenceSharding:
        """Returns the tokens of each of `num_ranks` ranks."""

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        sharded = replace(
            sharding.with_batch_placement(CP_AXIS, S(1)),
            sequence_sharding=self.sequence_sharding(sharding.mesh.size(CP_AXIS)),
        )
        return sharded.map_param_shardings(lambda param_sharding: param_sharding.with_partial_grad(CP_AXIS))


def add_attention_comm(
    program: Program,
    view: RankView,
    job: Job,
    forward_transfers: AttentionTransfers,
    backward_transfers: AttentionTransfers,
) -> Program:
    """Returns `program` with the collectives of attention, convolutions and glue: `forward` in runs of a
    block call, `backward` in backwards.

    In a split backward they are in the half of input gradients, or in the other if the block call needs none.
    """

    def call_transfers(
        each: AttentionSpec | ConvSpec | SampleGather, num_samples: int, *, forward: bool
    ) -> Sequence[Transfer]:
        if isinstance(each, SampleGather):
            return _sample_transfers(view.plan, job, each, num_samples)[0 if forward else 1]
        if isinstance(each, ConvSpec):
            return halo_transfers(view.plan, job, CP_AXIS, each, num_samples)[0 if forward else 1]
        return (forward_transfers if forward else backward_transfers)(each, num_samples)

    def add_transfers(action: Action, num_samples: int) -> Action:
        mine = list(_attention_positions(view, action.subject))
        if action.kind in FORWARD_KINDS:
            more = [
                replace(move, position=at)
                for at, each in mine
                for move in call_transfers(each, num_samples, forward=True)
            ]
        else:
            if not runs_input_backward(action, view.plan):
                return action
            needed = [(at, each) for at, each in reversed(mine) if each.needs_grad]
            more = [
                replace(move, position=-at)
                for at, each in needed
                for move in call_transfers(each, num_samples, forward=False)
            ]
        return action.with_inner_transfers(more)

    def edited(actions: list[Action]) -> list[Action]:
        num_samples = samples_per_microbatch(actions, view.plan, job)
        return [
            add_transfers(action, num_samples)
            if action.kind in (*FORWARD_KINDS, *INPUT_GRAD_KINDS, "W")
            else action
            for action in actions
        ]

    return add_glue_gathers(program.edit(edited), view, job, CP_AXIS)


def _sample_transfers(
    sharding: ShardingPlan, job: Job, gather: SampleGather, num_samples: int
) -> tuple[list[Transfer], list[Transfer]]:
    """Returns the collectives of one gather of whole samples: of a forward, and of a backward."""
    forth, back, ranks = list[Transfer](), list[Transfer](), sharding.mesh.size(CP_AXIS)
    if sharding.sequence_sharding is None or ranks == 1:
        return forth, back
    num_rows = num_samples * max(sharding.sequence_sharding.num_tokens_by_rank(gather.num_tokens))
    wide = "float64" if job.precision.compute == "float64" else "float32"
    for value in gather.values:
        dtype = wide if value.is_float else "int64"
        nbytes = num_rows * value.token_numel * PARAM_DTYPE_NBYTES[dtype]
        forth.append(Transfer("all_gather", (CP_AXIS,), nbytes, dtype=dtype))
        if value.needs_grad:
            back.insert(0, Transfer("reduce_scatter", (CP_AXIS,), nbytes * ranks, dtype=dtype))
    return forth, back


def local_heads(view: RankView, attend: AttentionSpec) -> tuple[int, int]:
    """Returns the numbers of query heads and key/value heads of one attention call on the rank of `view`.

    Key/value heads that several ranks share count on each; if the model repeats them for attention, one per
    query head.
    """
    for _, side in _head_sides(view, attend.block_call, "colwise", attend):
        (first, end), units = side.dim_split.units_of(side.index, side.num_ranks), side.dim_split.num_units
        if side.num_ranks <= units or not side.dim_split.num_heads:
            return (end - first) * attend.num_heads // units, (end - first) * attend.num_kv_heads // units
        each = attend.num_heads // units
        alike = attend.num_kv_heads == units and end > first and first // each == (end - 1) // each
        return end - first, 1 if alike else end - first
    return attend.num_heads, attend.num_kv_heads


def check_sequence_sharding(
    name: str, axis: str, sharding: ShardingPlan, sharding_for: Callable[[int], SequenceSharding]
) -> Iterator[Diagnostic]:
    """Yields why the tokens of this model's samples cannot be sharded along `axis` as `sharding_for` says."""
    location, model_spec = f"strategies.{name}", sharding.model_spec
    ranks = sharding.mesh.size(axis)
    other = f"mesh.{CP_AXIS} = 1 and mesh.dp_shard = {ranks} are as many ranks"
    if sharding.sequence_sharding is not None:
        text = f"the tokens of each sample are sharded along {CP_AXIS} already"
        yield Diagnostic(text, "keep one of the strategies that shard them", location)
    if model_spec.sequence_info is None:
        text = (
            f"nothing is known of tokens in {model_spec.name}: no integer input of its example has them, "
            f"as [samples, tokens]"
        )
        text += (
            ", and no block takes [samples, tokens, width] and attends to them by "
            "F.scaled_dot_product_attention"
        )
        yield Diagnostic(
            text,
            f"give it an example batch that has one (input_ids), or declare smaller blocks; or {other}",
            location,
        )
        return
    if model_spec.sequence_info.batch_dependent_reason:
        fix = (
            f"compute it for all samples and tokens at once (hidden[samples, last] for a loop over "
            f"samples); or {other}"
        )
        yield Diagnostic(model_spec.sequence_info.batch_dependent_reason, fix, location)
    for why, block_calls in _token_mixing_calls(model_spec).items():
        more = f" (and so in {len(block_calls) - 1} more blocks)" if len(block_calls) > 1 else ""
        fix = (
            f"compute what needs all tokens between blocks, or by F.scaled_dot_product_attention; or {other}"
        )
        yield Diagnostic(f"a block cannot run on some of the tokens: {why}{more}", fix, location)
    yield from check_convolutions(name, axis, sharding, sharding_for(ranks))
    if model_spec.needs_global_batch:
        text = (
            f"the loss takes the samples of the whole batch at once, and along {CP_AXIS} each rank has some "
            f"of the tokens of a sample"
        )
        yield Diagnostic(text, f"write a loss that is a sum over tokens or samples; or {other}", "loss")


def _token_mixing_calls(model_spec: ModelSpec) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for passing in model_spec.sequence_info.block_calls if model_spec.sequence_info is not None else ():
        if passing.not_sequence_parallel:
            found.setdefault(LAYER_NUMBER.sub("*", passing.not_sequence_parallel), []).append(
                passing.block_call
            )
    return found


def _attention_positions(
    view: RankView, block_call: str
) -> Iterator[tuple[float, AttentionSpec | ConvSpec | SampleGather]]:
    tokens = view.plan.model_spec.sequence_info
    mine = (
        [
            attention_call
            for attention_call in tokens.attention_calls
            if attention_call.block_call == block_call
        ]
        if tokens is not None
        else []
    )
    others = list[ConvSpec | SampleGather]()
    if tokens is not None:
        others += [each for each in tokens.conv_calls if each.block_call == block_call and each.halo]
        others += [each for each in tokens.sample_gathers if each.block_call == block_call]
        others.sort(key=lambda each: len(each.prior_layers))
    calls = (
        [
            (at, call.name)
            for at, call in enumerate(view.model_spec.layer_calls)
            if call.block_call == block_call
        ]
        if others
        else []
    )
    last = calls[0][0] - 0.5 if calls else 0.0
    for number in range(len(mine) + 1):
        for each in (each for each in others if each.num_prior_attention_calls == number):
            last = max([last, *(at + 0.5 for at, name in calls if name in each.prior_layers)])
            yield last + _behind_experts(view, each), each
        if number < len(mine):
            ends = [at for at, _ in _head_sides(view, block_call, "rowwise", mine[number])]
            last = ends[number] - 0.5 if number < len(ends) else last
            yield last, mine[number]


def _behind_experts(view: RankView, each: ConvSpec | SampleGather) -> float:
    """Returns a small distance: rows travel to experts behind what is gathered to choose them, and before
    what is gathered when they have returned.
    """
    has_run = any(call.name in each.prior_layers for call in view.model_spec.experts_calls)
    return 0.1 if has_run else -0.1 if isinstance(each, SampleGather) else 0.0


def _head_sides(
    view: RankView, block_call: str, role: str, attention_call: AttentionSpec
) -> Iterator[tuple[int, DimShard]]:
    for at, call in enumerate(view.model_spec.layer_calls):
        if call.block_call != block_call or call.role != role:
            continue
        found = view.param_shardings_by_layer.get(call.name, [])
        held = [each for each in found if _has_heads(each.param, attention_call)]
        for side in view.dim_shards(held[-1]) if held else ():
            if _is_head_dim(call, held[-1].param, side.dim_split.dim):
                yield at, side


def _has_heads(weight: ParamSpec, attention_call: AttentionSpec) -> bool:
    return any(
        cut.max_ranks == attention_call.num_heads and attention_call.num_kv_heads % cut.num_units == 0
        for cut in weight.dim_splits
    )


def _is_head_dim(call: LayerCall, weight: ParamSpec, dim: int) -> bool:
    cut = weight.split_of_side("out" if call.role == "colwise" else "in")
    return cut is not None and cut.dim == dim
