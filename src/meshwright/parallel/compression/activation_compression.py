"""Compressed activations: what ranks send of activations, and of their gradients, travels as codes.

Why it works: an activation tolerates rounding as gradients do: bfloat16 training rounds each of them anyway.
As codes of one byte they are a quarter of float32's bytes, or half of bfloat16's. `axis` says where, once for
each axis; blocks compute in the compute dtype, on what codes say.

    pp    stage 0    F --> x --> encode --> codes ~~SEND~~> decode --> x' --> F          stage 1, x' = code(x)
                     B <-- g' <-- decode <~~SEND_GRAD~~ codes <-- encode <-- g <-- B      g' = code(g)
    tp    each summand of a sum is coded, decoded and added up in float32, in the order of ranks:
          2 ranks    y = code(y_0) + code(y_1)                     codes of all of y to the other rank
          n ranks    y = code(code(y_0) + ... + code(y_n-1))       codes of slices, then those of their sums
          sequence parallelism: slices x' = code(x) are gathered; sums of slices are not coded once more
    cp    ulysses exchanges code(q), code(k), code(v), and code(o) back; round a ring travels code(k, v), made
          once by the rank that has them, and all ranks compute with it; the hybrid does both, one after the
          other. Each head is coded apart, so that one that goes to several ranks is the same there

    code(x) = decode(encode(x)): of each rank's slice of a value, flat, in blocks of 256 (int8, float8)
    actions, and collectives inside blocks, mean what they meant; `carried_by` says which codes carry them

The backward of a coded move is the coded move back: the derivative of rounding, which is zero nearly
everywhere, is taken as one (straight through), and the gradient is coded as the value was. A value that a
stage forwards is coded again, which changes nothing more: code(code(x)) = code(x). Its gradient is the sum of
what arrives and the stage's own, coded at each hop. In a ring each rank's summand of a gradient is coded
once, and the rank that has the keys adds up what codes say. Nothing is owed: what codes lose is lost.

What travels as codes between stages: floating-point values of samples that need a gradient. Along tp: the
sums in which pairs of 1-D tensor parallelism end, those of the gradients that their first layers share, and
the gathers and scatters of `sequence_parallel`. Along cp: queries, keys, values and outputs of attention. Of
all these, messages of at least `min_numel` elements on the sending rank, after the first `exact_steps` steps.
Others travel as they are: token ids, masks, a learnt bias of positions; sums of the gradients of parameters;
what `vocab_parallel` sends, so that logits and loss are exact; the tokens of experts; what glue, convolutions
and masks gather; and CONCAT of `scatter`. An evaluation sends values as they are. Recomputation starts from
the decoded value, and makes the same codes as the first forward.

    sent per rank, forward and backward alike, of a value of N elements; c(m) bytes for m elements
    pp, between two stages                       c(N)                   in place of 4 N or 2 N
    tp, sum over 2 ranks                         c(N)                                4 N
    tp, sum over n ranks                         2 (n-1) c(ceil(N/n))                8 N (n-1)/n
    tp, gather or scatter of the sequence        (n-1) c(N/n)                        4 N (n-1)/n
    cp, exchange of the tokens of h heads        h (n-1)/n c(N/h), N of a rank       4 N (n-1)/n
    cp, ring, N keys and values of h heads       h (n-1) c(N/h); backward twice      4 N (n-1); backward twice
    c(m) = 2 m (bfloat16, float16), m + 4 ceil(m / 256) (float8, int8)

    codec      largest error of code(x)                        c(N) / 4 N
    bfloat16   2^-8 |x|                                        0.5
    float16    2^-11 |x|, and 2^-25                            0.5
    float8     2^-4 |x|, and 2^-10 of the block's step         0.2539
    int8       1/254 of the largest |x| of 256                 0.2539

Tolerance: at equal weights the loss is off by no more than u per code that a value goes through, relative: u
= 2^-8, 2^-11, 2^-4, 1/254; one for each boundary and gather, n for a sum over n ranks, and one more if its
sum is coded too; 8 u for a call of attention under ulysses, whose scores s are off by 2 u |s|, |s| up to 1.5;
4 u for one in a ring, where keys and values alone are coded; 12 u in the hybrid. `verify`
checks this in each step, but beside weight versions (PipeDream), and to 1e-10 that every number of every rank
is that of one device whose values and gradients lose what the codes lost (docs/concepts/verification.md).

Cost: two passes over each value for coding; c(N) bytes for codes at both ends, between stages from the
receive to the forward, and from a send to the next one of that value; along tp for the moment of the sum,
beside the sum in float32, along cp for that of the exchange: working memory of the block, which `plan` does
not list (live bytes along cp with int8: 0.6 % below the plan to 2.3 % above it, as measured on 4 ranks). In a
ring two messages of codes stand in place of those in flight, beside what they say.
Limits: lossy. float16 clamps at 65504 and loses gradients below 6e-8, which a mean over many tokens may have:
use bfloat16, or int8, whose steps follow the block. What is not finite stays so (in int8 and float8 with its
block), so that the loss guard sees it. Along tp it goes with mode 1d: the products of 2d, 2.5d and 3d are
sums of another kind. With bfloat16 compute, bfloat16 and float16 save nothing and are refused.
Paper: Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression with
Guarantees", arXiv 2206.01299; Bian et al. 2023, "Does compressing activations help model parallel training?",
arXiv 2301.02654 (tensor and pipeline parallelism); Bengio et al. 2013, arXiv 1308.3432 (straight-through
gradients).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from meshwright.comm.collectives.coded_redistribution import coded_messages
from meshwright.parallel.compression.codecs.block_codes import BLOCK, BlockCodec, in_blocks
from meshwright.parallel.compression.codecs.cast import CastCompression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.sequence_info import AttentionSpec
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import TOKEN_DIM
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.single_device_program import FORWARD_KINDS, RECOMPUTE_KINDS
from meshwright.plan.strategy_interface import ActivationCodec, Handler, Runtime, Strategy, StrategyPhase

CodecName = Literal["bfloat16", "float16", "float8", "int8"]
# half a step, of the largest element that shares a scale
UNIT_ERROR: Mapping[str, float] = MappingProxyType(
    {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-4, "int8": 1 / 254}
)
CodedAxis = Literal["pp", "tp", "cp"]
# what codes of queries, keys, values and output do to an output of attention, in units, with scores up to 1.5
CODES_PER_EXCHANGE = 8
CODES_PER_RING = 4  # of keys and values

RUN_KINDS = (*FORWARD_KINDS, *RECOMPUTE_KINDS)
BOUNDARY_KINDS = ("SEND", "RECV", "SEND_GRAD", "RECV_GRAD")
OR_REMOVE = "or remove compress_activations"
LOCATION = "strategies.compress_activations"


@dataclass(frozen=True)
class ActivationCompression(Strategy):
    """Sends activations and their gradients along `axis` as codes of `codec`: between pipeline stages ("pp"),
    in the sums, gathers and scatters of 1-D tensor parallelism ("tp"), or of context parallelism ("cp"): the
    exchanges of Ulysses, the keys and values of a ring.

    Values of fewer than `min_numel` elements, and all in the first `exact_steps` steps, travel as they are.
    """

    name: ClassVar[str] = "compress_activations"
    phase: ClassVar[StrategyPhase] = "comm"
    exact: ClassVar[bool] = False
    is_per_axis: ClassVar[bool] = True
    axis: CodedAxis = "pp"
    codec: CodecName = "bfloat16"
    min_numel: int = field(default=0, metadata=at_least(0))
    exact_steps: int = field(default=0, metadata=at_least(0))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        reason = _nothing_sent(self.axis, sharding)
        if reason is not None:
            yield Diagnostic(*reason, LOCATION)
            return
        where, numels = "between stages" if self.axis == "pp" else f"along {self.axis}", list[int]()
        if self.axis == "pp":
            numels = [value.numel(job.train.batch) for value in coded_values(sharding)]
        elif self.axis == "tp":
            calls = [call for call in sharding.model_spec.layer_calls if call.role == "rowwise"]
            numels = [call.out_numel * job.train.batch for call in calls]
        else:
            numels = [_sent_along_cp(attend) * job.train.batch for attend in _attention_calls(sharding)]
        largest = max(numels)
        if largest < self.min_numel:
            text = f"no value {where} has {self.min_numel} elements; the largest has {largest}"
            yield Diagnostic(text, f"set min_numel to {largest} or less", f"{LOCATION}.min_numel")
        width = FLOAT_NBYTES[job.precision.compute]
        if self._codec.slice_nbytes(largest) >= width * largest:
            text = f"values travel in {job.precision.compute}, and codes of {self.codec} are as large"
            yield Diagnostic(text, 'set codec to "int8" or "float8"', f"{LOCATION}.codec")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if self.axis == "pp":
            names = {value.name for value in coded_values(view.plan)}
            return program.edit(lambda actions: self._code_boundaries(actions, names))
        return program.edit(lambda actions: [self._code_inside(action, view) for action in actions])

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        runtime.state.activation_codecs[self.axis] = self.flat_codec
        return {}

    def coding_passes(self, action: Action, view: RankView) -> Mapping[str, int]:
        if self.axis != "pp":
            return self._passes_inside(action, view)
        transfer = action.transfer
        if transfer is None or not transfer.carried_by or action.kind not in BOUNDARY_KINDS:
            return {}
        way = "decode" if action.stream == "recv" else "encode"
        return {f"{way} {self.codec}": transfer.nbytes // FLOAT_NBYTES[transfer.dtype]}

    def _passes_inside(self, action: Action, view: RankView) -> Mapping[str, int]:
        """Returns the elements that a rank codes and decodes along the axis inside `action`."""
        num_encoded = num_decoded = 0.0
        for transfer in action.inner_transfers:
            if not transfer.carried_by or not transfer.code_parts or transfer.axes != (self.axis,):
                continue
            numel = transfer.nbytes // FLOAT_NBYTES[transfer.dtype]
            num_ranks = transfer.num_ranks(view.plan.mesh)
            sums_slices = transfer.collective == "all_reduce" and num_ranks > 2
            is_gathered = len(transfer.carried_by) == 1 and transfer.carried_by[0].collective == "all_gather"
            if transfer.collective == "shift":
                encoded, decoded = _passes_in_ring(view.plan, numel, is_forward=action.kind in RUN_KINDS)
                num_encoded, num_decoded = num_encoded + encoded, num_decoded + decoded
                continue
            num_encoded += numel + (numel // num_ranks if sums_slices else 0)
            num_decoded += numel * (num_ranks if is_gathered else 2 if sums_slices else 1)
        found = {f"encode {self.codec}": round(num_encoded), f"decode {self.codec}": round(num_decoded)}
        return {name: count for name, count in found.items() if count}

    def loss_tolerance(self, sharding: ShardingPlan) -> float:
        if self.axis == "pp":
            return UNIT_ERROR[self.codec] * max(1, len(sharding.stages) - 1)
        if self.axis == "tp":
            return UNIT_ERROR[self.codec] * _num_codes_in_forward(sharding)
        near, around = _exchange_and_ring(sharding)
        codes = (near > 1) * CODES_PER_EXCHANGE + (around > 1) * CODES_PER_RING
        return UNIT_ERROR[self.codec] * codes * len(_attention_calls(sharding))

    @property
    def flat_codec(self) -> "FlatCodec":
        """How values travel, the same on all ranks."""
        return FlatCodec(self._codec, self.codec, self.min_numel, self.exact_steps)

    @property
    def _codec(self) -> BlockCodec:
        return Int8Compression() if self.codec == "int8" else CastCompression(dtype=self.codec)

    def _code_inside(self, action: Action, view: RankView) -> Action:
        """Returns `action` with codes in place of the activations that it sends along the axis meanwhile."""
        inner = tuple(
            self._coded(transfer, transfer.num_ranks(view.plan.mesh)) or transfer
            if transfer.code_parts and transfer.axes == (self.axis,)
            else transfer
            for transfer in action.inner_transfers
        )
        return replace(action, inner_transfers=inner)

    def _code_boundaries(self, actions: list[Action], names: set[str]) -> list[Action]:
        """Returns `actions` with codes in place of the values `names` between stages, and their memory."""
        edited = list[Action]()
        arriving = dict[str, str]()  # the codes of a receive, until an action has waited for it
        sent = dict[tuple[str, str], str]()  # those of a send, until the next one of that value
        for action in actions:
            frees = [arriving.pop(wait) for wait in action.waits if wait in arriving]
            if action.kind in BOUNDARY_KINDS and action.tensors[0] in names and action.transfer is not None:
                coded = self._coded(action.transfer)
                if coded is not None:
                    codes = Allocation(f"codes of {action.name}", coded.messages[0].nbytes)
                    action = replace(action, transfer=coded, allocations=(*action.allocations, codes))
                    if action.stream == "recv":
                        arriving[action.name] = codes.name
                    else:
                        key = action.kind, action.subject
                        frees += [sent[key]] if key in sent else []
                        sent[key] = codes.name
            edited.append(replace(action, frees=(*action.frees, *frees)) if frees else action)
        if sent:
            edited[-1] = replace(edited[-1], frees=(*edited[-1].frees, *sent.values()))
        return edited

    def _coded(self, transfer: Transfer, num_ranks: int = 2) -> Transfer | None:
        """Returns `transfer` between `num_ranks` ranks, carried by codes; None if it stays as it is."""
        width = FLOAT_NBYTES.get(transfer.dtype, 0)
        numel = transfer.nbytes // width if width else 0
        num_parts = max(1, transfer.code_parts)
        messages = self.flat_codec.messages(transfer.collective, numel, transfer.dtype, num_ranks, num_parts)
        coded = tuple(
            replace(transfer, collective=collective, nbytes=nbytes, dtype="uint8", algorithm="backend")
            for collective, nbytes in messages
        )
        return replace(transfer, carried_by=coded, carried_from=self.exact_steps) if coded else None


@dataclass(frozen=True)
class FlatCodec(ActivationCodec):
    """Codes of whole tensors in the blocks of `codec`, whose values they keep up to `UNIT_ERROR[name]`.

    Messages of fewer than `min_numel` elements, and all before step `first_step`, are sent as they are.
    """

    codec: BlockCodec
    name: str
    min_numel: int = 0
    first_step: int = 0

    def is_used_in(self, step: int) -> bool:
        return step >= self.first_step

    def messages(
        self, collective: str, numel: int, dtype: str, num_ranks: int, num_parts: int = 1
    ) -> tuple[tuple[str, int], ...]:
        width = FLOAT_NBYTES.get(dtype, 0)
        if collective in ("send", "recv"):
            found = ((collective, self.codec.slice_nbytes(numel)),)
        else:
            found = coded_messages(collective, numel, num_ranks, self.codec.slice_nbytes, num_parts)
        saves = all(nbytes < width * numel for _, nbytes in found)
        return found if numel and numel >= self.min_numel and saves else ()

    def empty_codes(self, values: torch.Tensor) -> torch.Tensor:
        nbytes = self.codec.slice_nbytes(values.numel())
        return torch.empty(nbytes, dtype=torch.uint8, device=values.device)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        codes = self.empty_codes(values)
        self.codec.encode_flat(values.view(-1), codes)
        return codes

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        self.codec.decode_sum(codes, values.view(-1))

    def error_in_units(self, values: torch.Tensor, lost: torch.Tensor) -> float:
        if not lost.numel():
            return 0.0
        largest, worst = (in_blocks(each.view(-1).abs(), BLOCK).amax(1) for each in (values, lost))
        smallest = 2.0**-25 if self.name == "float16" else 0.0  # half of its smallest number
        # a scale and its inverse are float32: of up to 127 steps, the half where codes change is off by 2^-16
        allowed = UNIT_ERROR[self.name] * (1 + 2.0**-15) * largest + smallest
        return (worst / allowed).where(worst != 0, 0.0).max().item()


def coded_values(sharding: ShardingPlan) -> list[StageValue]:
    """Returns the values that cross a stage boundary and may travel as codes: activations of samples."""
    values = [value for stage in sharding.stages for value in stage.outputs]
    return [value for value in values if value.needs_grad and value.sample_dim is not None]


def _nothing_sent(axis: CodedAxis, sharding: ShardingPlan) -> tuple[str, str] | None:
    """Returns why nothing that may be coded travels along `axis`, and a repair; None: something does."""
    if axis == "tp":
        return _nothing_sent_along_tp(sharding)
    if axis == "cp":
        return _nothing_sent_along_cp(sharding)
    if not sharding.stages:
        text = f"no value crosses a stage boundary: mesh.pp is {sharding.mesh.pp}, without stages"
        return text, f'set mesh.pp to 2 or more and add the strategy "pipeline", {OR_REMOVE}'
    if not coded_values(sharding):
        text = "no value of samples between stages needs a gradient, and others travel as they are"
        return text, f"train a parameter of an earlier stage, {OR_REMOVE}"
    return None


def _nothing_sent_along_tp(sharding: ShardingPlan) -> tuple[str, str] | None:
    if sharding.mesh.tp == 1:
        text = "no value travels between tensor-parallel ranks: mesh.tp is 1"
        return text, f'set mesh.tp to 2 or more and add the strategy "tensor_parallel", {OR_REMOVE}'
    fix = f'use the strategy "tensor_parallel" of mode "1d" along tp, {OR_REMOVE}'
    by_width = [
        axis
        for axis, placement in sharding.residual_layout.placements
        if placement.dim not in (None, TOKEN_DIM) and sharding.mesh.size(axis) > 1
    ]
    if by_width:
        text = f"the residual stream is sharded by width along {' and '.join(by_width)} (tensor_parallel of "
        return f"{text}mode 2d, 2.5d or 3d), and the sums of its products do not travel as codes", fix
    if not _row_sharded(sharding):
        return "no pair of layers ends in a sum along tp; what other strategies send there stays exact", fix
    return None


def _nothing_sent_along_cp(sharding: ShardingPlan) -> tuple[str, str] | None:
    sequence_sharding, num_ranks = sharding.sequence_sharding, sharding.mesh.cp
    fix = f'set mesh.cp to 2 or more and add the strategy "ulysses" or "ring", {OR_REMOVE}'
    if sequence_sharding is None or num_ranks == 1:
        return f"no value travels between ranks that share sequences: mesh.cp is {num_ranks}", fix
    if not _attention_calls(sharding):
        return "no block calls attention, and what else travels along cp stays exact", fix
    shared = next((each for each in _attention_calls(sharding) if each.num_kv_heads < sharding.mesh.tp), None)
    if shared is not None:
        text = f"{shared.block_call}: tensor-parallel ranks share {shared.num_kv_heads} key heads, and codes "
        text += f"of each would round them otherwise: mesh.tp is {sharding.mesh.tp}"
        return text, f"set mesh.tp to {shared.num_kv_heads} or less, {OR_REMOVE}"
    return None


def _exchange_and_ring(sharding: ShardingPlan) -> tuple[int, int]:
    """Returns how many ranks exchange tokens for heads, and how many groups of them are a ring."""
    sequence_sharding = sharding.sequence_sharding
    near = 1 if sequence_sharding is None else sequence_sharding.num_inner_ranks
    return near, 1 if sequence_sharding is None else sequence_sharding.num_ranks // near


def _sent_along_cp(attend: AttentionSpec) -> int:
    """Returns the most elements of one sample that all ranks together send at once for a call."""
    queries = attend.query_len * attend.num_heads * attend.head_dim
    return max(queries, attend.key_len * attend.num_kv_heads * (attend.head_dim + attend.value_head_dim))


def _passes_in_ring(sharding: ShardingPlan, numel: int, *, is_forward: bool) -> tuple[float, float]:
    """Returns the elements that a rank codes and decodes in a ring, for each message of `numel` that it
    sends: keys and values are coded once and decoded by all, summands of gradients coded for each rank.
    """
    others = _exchange_and_ring(sharding)[1] - 1
    if is_forward:
        return numel / others, numel * (others + 1) / others
    return numel * (others + 1) / (2 * others), numel * (2 * others + 1) / (2 * others)


def _attention_calls(sharding: ShardingPlan) -> tuple[AttentionSpec, ...]:
    tokens = sharding.model_spec.sequence_info
    return () if tokens is None else tokens.attention_calls


def _row_sharded(sharding: ShardingPlan) -> bool:
    sides = [
        (each.sliced_dims.get("tp"), each.param.split_of_side("in"))
        for each in sharding.param_shardings
        if each.param.role == "rowwise"
    ]
    return any(side is not None and dim == side.dim for dim, side in sides)


def _num_codes_in_forward(sharding: ShardingPlan) -> int:
    """Returns how many codes the values of a forward go through along tp, at most."""
    calls, num_ranks = sharding.model_spec.layer_calls, sharding.mesh.tp
    sums = {call.sum_id or -at for at, call in enumerate(calls, 1) if call.role == "rowwise"}
    if not sharding.sequence_sliced_calls:
        return len(sums) * (num_ranks + (num_ranks > 2))
    gathers = {(call.block_call, call.input_id) for call in calls if call.role.startswith("colwise")}
    return len(sums) * num_ranks + len(gathers) + 1
