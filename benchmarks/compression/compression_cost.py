"""The time to code gradients on one core, in casts of the same tensor to bfloat16.

    tensor    25.6 M numbers of float32, normally distributed; what codes lose is left in their place
    unit      tensor.to(torch.bfloat16): it makes its output, as codecs make their codes
    sides     "int8 both ways" codes and decodes; "topk" selects 1 % and writes pairs; "powersgd" adds the
              residual, makes factors of rank 4 of one matrix, keeps the residual and decodes, among two ranks
              whose messages cost nothing; each in turn with the unit and a second instance of it, which shows
              the noise

The figure is that of the side that is furthest above (least below) its bar. Beside the bars: a cast into
memory that is there already, in the same unit.

    python -m benchmarks.compression.compression_cost --quick      three rounds, nothing written
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.harness.interleaved_timing import Cost, Rounds, Window, compare, interval, measure
from benchmarks.harness.rank_processes import InProcess
from benchmarks.harness.result import Result
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.powersgd import PowerSGDCompression
from meshwright.parallel.compression.codecs.sliced_sums import SlicedCodec
from meshwright.parallel.compression.codecs.topk import TopKCompression
from meshwright.parallel.compression.coded_sum import CodedPart, CodedSum
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.step.program import Transfer

NAME = "compression_cost"
CLAIM = (
    "one core, 25.6 M elements: int8 both ways takes at most 3 casts to bfloat16, the selection of the "
    "largest 1 % at most 3.2, and PowerSGD of rank 4 with its residual at most 2.3"
)
NUMEL, MATRIX, RANK = 25_600_000, (5000, 5120), 4
UNIT, TWIN, IN_PLACE = "cast", "twin", "cast into memory that is there"
WINDOW = Window(clean=20, most=60, limit_s=300, warmup=2, threshold=0.5)  # copies between steps take 0.28
QUICK = Window(clean=3, most=3, warmup=1, threshold=float("inf"))
Coding = Callable[[torch.Tensor], object]  # changes the tensor that it is given


@dataclass(frozen=True)
class Coded:
    """A configuration that codes a copy of `gradient`; the copy is not timed."""

    name: str
    coding: Coding
    gradient: torch.Tensor
    operand: torch.Tensor

    def step(self) -> Cost:
        """Codes once."""
        self.operand.copy_(self.gradient)
        return InProcess(self.name, lambda: self.coding(self.operand)).step()


def encoded(codec: SlicedCodec, values: torch.Tensor) -> torch.Tensor:
    """Returns the codes of `values`, in which it leaves what they lose."""
    codes = torch.zeros(codec.slice_nbytes(len(values)), dtype=torch.uint8)
    codec.encode_slice(values, codes, key=1)
    return codes


def both_ways(codec: SlicedCodec) -> Coding:
    """Codes, and decodes into memory that is there."""
    return lambda values: codec.decode_sum(encoded(codec, values), values)


def one_way(codec: SlicedCodec) -> Coding:
    """Codes only."""
    return lambda values: encoded(codec, values)


class PowerSGD:
    """Rounds of PowerSGD of one matrix, with the residual of the call before; what a peer sends is what it
    is sent.
    """

    def __init__(self) -> None:
        self._codec = PowerSGDCompression(rank=RANK)
        transfer = Transfer("all_reduce", ("dp_replicate",), 4 * NUMEL)
        self._sum = CodedSum(transfer, 2, ((CodedPart("matrix", MATRIX, 0, NUMEL, 0),),))
        self._states = {"factor/matrix": torch.randn(RANK, MATRIX[1])}
        self._residual = {"matrix": torch.zeros(0)}  # as long as the gradient, from the first call on

    def __call__(self, values: torch.Tensor) -> None:
        if not len(self._residual["matrix"]):
            self._residual["matrix"] = torch.zeros_like(values)
        operand = CodedOperand(
            self._sum,
            values,
            {"matrix": values},
            values,
            0,
            0,
            owed=self._residual,
            kept=self._residual,
            before=self._states,
            after=self._states,
            in_residuals=self._codec.codes_in_residuals,
        )
        operand.add_owed()
        for sends, receives in self._codec.sum_rounds(operand):
            sent = dict(sends)
            for peer, place in receives:
                place.copy_(sent[peer])


SIDES: Mapping[str, tuple[float, Coding]] = {  # by name: the bar, and what is timed
    "int8 both ways": (3.0, both_ways(Int8Compression())),
    "topk": (3.2, one_way(TopKCompression(density=0.01))),
    "powersgd": (2.3, PowerSGD()),
}


def cast(values: torch.Tensor) -> torch.Tensor:
    """Returns `values` in bfloat16."""
    return values.to(torch.bfloat16)


def measure_all(window: Window) -> Rounds:
    """Returns the rounds of all sides on one thread."""
    torch.set_num_threads(1)
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    operand, narrow = torch.empty_like(gradient), torch.empty(NUMEL, dtype=torch.bfloat16)
    codings = {UNIT: cast, **{name: coding for name, (_, coding) in SIDES.items()}}
    codings |= {IN_PLACE: narrow.copy_, TWIN: cast}
    return measure([Coded(name, coding, gradient, operand) for name, coding in codings.items()], window)


def result(rounds: Rounds) -> Result:
    """Returns the result of these rounds."""
    found = {
        name: (
            rounds,
            compare(rounds, name, base=UNIT, twin=TWIN, bar=bar, figure="cpu_s"),
            compare(rounds, name, base=UNIT, twin=TWIN, bar=bar, figure="wall_s"),
        )
        for name, (bar, _) in SIDES.items()
    }
    return Result.of_comparisons(NAME, CLAIM, found)


def main() -> None:
    """Measures and writes the result; with --quick, only measures a little."""
    parser = argparse.ArgumentParser(description="the time to code gradients, in casts to bfloat16")
    parser.add_argument("--quick", action="store_true", help="three rounds; nothing is written")
    quick = parser.parse_args().quick
    rounds = measure_all(QUICK if quick else WINDOW)
    for name in (*SIDES, IN_PLACE, TWIN):
        print(f"{name}: {interval(rounds.ratios(name, UNIT))} casts", file=sys.stderr)
    if not quick:
        print(result(rounds).write(NAME))


if __name__ == "__main__":
    main()
