"""Compressed activations: values between pipeline stages, and their gradients, travel as codes.

Why it works: an activation tolerates rounding as gradients do: bfloat16 training rounds each of them anyway.
A stage boundary sends the whole residual stream of every microbatch forward, and its gradient back; as codes
of one byte these are a quarter of float32's bytes, or half of bfloat16's.

    stage 0    F ---> x ---> encode ---> codes ~~SEND~~> decode ---> x' ---> F        stage 1, x' = code(x)
               B <--- g' <--- decode <~~SEND_GRAD~~ codes <--- encode <--- g <--- B   g' = code(g)

    code(x) = decode(encode(x)): of each rank's slice of a value, flat, in blocks of 256 (int8, float8)
    SEND, RECV, SEND_GRAD, RECV_GRAD   mean what they meant; `carried_by` says which codes carry them

The backward of a coded move is the coded move back: the derivative of rounding, which is zero nearly
everywhere, is taken as one (straight through), and the gradient that arrives is code(g). A value that a stage
forwards is coded again, which changes nothing more: code(code(x)) = code(x). Its gradient is the sum of what
arrives and the stage's own, coded at each hop.

What travels as codes: floating-point values of samples that need a gradient and have at least `min_numel`
elements on the sending rank. Others stay as they are (token ids, masks, rotary tables, a learnt bias of
positions, whose gradient is that of a parameter), as do the values of evaluation, and CONCAT of `scatter`,
which stays within the stage. The first `exact_steps` steps send values as they are.
Recomputation starts from the decoded value, which is what the first forward saw.

Sent per value of N elements and rank, forward and back: c(N) bytes, in place of 4 N or 2 N. c(N) is 2 N
(bfloat16, float16), N + 4 ceil(N / 256) (float8, int8).

    codec      largest error of code(x)                        c(N) / 4 N
    bfloat16   2^-8 |x|                                        0.5
    float16    2^-11 |x|, and 2^-25                            0.5
    float8     2^-4 |x|, and 2^-10 of the block's step         0.2539
    int8       1/254 of the largest |x| of 256                 0.2539

Tolerance: at equal weights the loss is off by no more than u per coded boundary, relative: u = 2^-8, 2^-11,
2^-4, 1/254. `verify` checks this in each step, but beside weight versions (PipeDream), and to 1e-10 that
every number of every rank is that of one device whose values and gradients lose what the codes lost
(docs/concepts/verification.md).

Cost: two passes over each value for coding; c(N) bytes for codes at both ends, from the receive to the
forward, and from a send to the next one of that value.
Limits: lossy, and nothing is owed: what codes lose is lost. float16 clamps at 65504 and loses gradients below
6e-8, which a mean over many tokens may have: use bfloat16, or int8, whose steps follow the block. What is not
finite stays so (in int8 and float8 with its block), so that the loss guard sees it.
Paper: Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression with
Guarantees", arXiv 2206.01299; Bian et al. 2023, "Does compressing activations help model parallel training?",
arXiv 2301.02654; Bengio et al. 2013, arXiv 1308.3432 (straight-through gradients).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from meshwright.parallel.compression.codecs.block_codes import BLOCK, BlockCodec, in_blocks
from meshwright.parallel.compression.codecs.cast import CastCompression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.strategy_interface import ActivationCodec, Handler, Runtime, Strategy, StrategyPhase

CodecName = Literal["bfloat16", "float16", "float8", "int8"]
# half a step, of the largest element that shares a scale
UNIT_ERROR: Mapping[str, float] = MappingProxyType(
    {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-4, "int8": 1 / 254}
)
BOUNDARY_KINDS = ("SEND", "RECV", "SEND_GRAD", "RECV_GRAD")
LOCATION = "strategies.compress_activations"


@dataclass(frozen=True)
class ActivationCompression(Strategy):
    """Sends values between pipeline stages, and their gradients, as codes of `codec`.

    Values of fewer than `min_numel` elements, and all in the first `exact_steps` steps, travel as they are.
    """

    name: ClassVar[str] = "compress_activations"
    phase: ClassVar[StrategyPhase] = "comm"
    exact: ClassVar[bool] = False
    codec: CodecName = "bfloat16"
    min_numel: int = field(default=0, metadata=at_least(0))
    exact_steps: int = field(default=0, metadata=at_least(0))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if not sharding.stages:
            text = f"no value crosses a stage boundary: mesh.pp is {sharding.mesh.pp}, without stages"
            fix = 'set mesh.pp to 2 or more and add the strategy "pipeline", or remove compress_activations'
            yield Diagnostic(text, fix, LOCATION)
            return
        values = coded_values(sharding)
        if not values:
            text = "no value of samples between stages needs a gradient, and others travel as they are"
            fix = "train a parameter of an earlier stage, or remove compress_activations"
            yield Diagnostic(text, fix, LOCATION)
            return
        largest = max(value.numel(job.train.batch) for value in values)
        if largest < self.min_numel:
            text = f"no value between stages has {self.min_numel} elements; the largest has {largest}"
            yield Diagnostic(text, f"set min_numel to {largest} or less", f"{LOCATION}.min_numel")
        width = FLOAT_NBYTES[job.precision.compute]
        if self._codec.slice_nbytes(largest) >= width * largest:
            text = f"values travel in {job.precision.compute}, and codes of {self.codec} are as large"
            yield Diagnostic(text, 'set codec to "int8" or "float8"', f"{LOCATION}.codec")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        names = {value.name for value in coded_values(view.plan)}
        return program.edit(lambda actions: self._code_boundaries(actions, names))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        runtime.state.activation_codec = self.flat_codec
        return {}

    def coding_passes(self, action: Action, view: RankView) -> Mapping[str, int]:
        transfer = action.transfer
        if transfer is None or not transfer.carried_by or action.kind not in BOUNDARY_KINDS:
            return {}
        way = "decode" if action.stream == "recv" else "encode"
        return {f"{way} {self.codec}": transfer.nbytes // FLOAT_NBYTES[transfer.dtype]}

    def loss_tolerance(self, sharding: ShardingPlan) -> float:
        return UNIT_ERROR[self.codec] * max(1, len(sharding.stages) - 1)

    @property
    def flat_codec(self) -> "FlatCodec":
        """What codes values."""
        return FlatCodec(self._codec, self.codec)

    @property
    def _codec(self) -> BlockCodec:
        return Int8Compression() if self.codec == "int8" else CastCompression(dtype=self.codec)

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

    def _coded(self, transfer: Transfer) -> Transfer | None:
        """Returns `transfer`, a message between two ranks, carried by codes; None if it stays as it is."""
        width = FLOAT_NBYTES.get(transfer.dtype, 0)
        numel = transfer.nbytes // width if width else 0
        nbytes = self._codec.slice_nbytes(numel)
        if not numel or numel < self.min_numel or nbytes >= transfer.nbytes:
            return None
        codes = replace(transfer, nbytes=nbytes, dtype="uint8")
        return replace(transfer, carried_by=(codes,), carried_from=self.exact_steps)


@dataclass(frozen=True)
class FlatCodec(ActivationCodec):
    """Codes of whole tensors in the blocks of `codec`, whose values they keep up to `UNIT_ERROR[name]`."""

    codec: BlockCodec
    name: str

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
        # a scale is rounded to float32 itself
        allowed = UNIT_ERROR[self.name] * (1 + 1e-6) * largest + smallest
        return (worst / allowed).where(worst != 0, 0.0).max().item()


def coded_values(sharding: ShardingPlan) -> list[StageValue]:
    """Returns the values that cross a stage boundary and may travel as codes: activations of samples."""
    values = [value for stage in sharding.stages for value in stage.outputs]
    return [value for value in values if value.needs_grad and value.sample_dim is not None]
