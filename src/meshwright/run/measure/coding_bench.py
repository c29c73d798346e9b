"""Measures how long a rank codes a gradient, sums what arrives, and decodes: seconds per element, by codec;
and how long it encodes, and decodes, weights and activations.

measured    the rounds of an all-reduce of 2^20 elements between the fewest ranks that sum codes, as rank 0
            runs them, with what is owed; messages are not sent: what arrives is what was sent
codecs      each mode of `compress` with its usual options, of one matrix of 1024 x 1024: passes over the
            matrix take most of the time of PowerSGD too, as long as its factors are thin
one way     "encode int8" and "decode int8" of 2^20 elements, and so on: what activations travel as, and
            (int8) weights
"""

from collections.abc import Mapping, Sequence
from math import prod
from statistics import median
from typing import get_args

import torch

from meshwright.comm.tuning.allreduce_bench import relative_spread
from meshwright.parallel import STRATEGIES
from meshwright.parallel.compression.activation_compression import ActivationCompression, CodecName
from meshwright.parallel.compression.codecs.powersgd import FACTOR, PowerSGDCompression
from meshwright.parallel.compression.coded_sum import CodedPart, CodedSum
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.step.program import Transfer
from meshwright.plan.strategy_interface import ActivationCodec
from meshwright.planner.machine.device_profile import ElementwiseTiming
from meshwright.run.measure.operation_timer import Operation

MATRIX, AXIS, PARAM = (1024, 1024), "dp_replicate", "weight"
NUMEL = prod(MATRIX)


def coding_operations(device: torch.device) -> dict[str, Operation]:
    """Returns an operation for each codec, by mode, which codes and decodes NUMEL elements; and two, "encode
    CODEC" and "decode CODEC", for each codec of activations.
    """
    codecs = (strategy_class() for strategy_class in STRATEGIES[GradientCompression.name].values())
    sums = {each.mode: _coding(each, device) for each in codecs if isinstance(each, GradientCompression)}
    return sums | {
        f"{way} {name}": operation
        for name in get_args(CodecName)
        for way, operation in _one_way(ActivationCompression(codec=name).flat_codec, device).items()
    }


def coding_points(samples: Mapping[str, Sequence[float]]) -> list[ElementwiseTiming]:
    """Returns the seconds per element of samples of `coding_operations`."""
    return [
        ElementwiseTiming(name, median(seen) / NUMEL, relative_spread(seen)) for name, seen in samples.items()
    ]


def _one_way(codec: ActivationCodec, device: torch.device) -> dict[str, Operation]:
    values = torch.randn(NUMEL, device=device)
    codes, decoded = codec.encode(values), torch.empty_like(values)
    return {"encode": lambda: codec.encode(values), "decode": lambda: codec.decode(codes, decoded)}


def _coding(codec: GradientCompression, device: torch.device) -> Operation:
    gradient, values = torch.randn(NUMEL, device=device), torch.empty(NUMEL, device=device)
    owed, by_param = {PARAM: torch.zeros_like(values)}, {PARAM: values}
    transfer = Transfer("all_reduce", (AXIS,), NUMEL * values.itemsize)
    coded_sum = CodedSum(transfer, codec.least_ranks, ((CodedPart(PARAM, MATRIX, 0, NUMEL, 0),),))
    states = {}
    if isinstance(codec, PowerSGDCompression):
        states[f"{FACTOR}/{PARAM}"] = torch.randn(codec.rank, MATRIX[1], device=device)

    def run() -> None:
        values.copy_(gradient)
        operand = CodedOperand(
            coded_sum,
            values,
            by_param,
            values,
            0,
            key=0,
            owed=owed,
            kept=owed,
            before=states,
            after=states,
            in_residuals=codec.codes_in_residuals,
        )
        operand.add_owed()
        for sends, receives in codec.sum_rounds(operand):
            sent = dict(sends)
            for peer, place in receives:
                place.copy_(sent[peer])

    return run
