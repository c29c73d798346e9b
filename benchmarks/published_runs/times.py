"""How long a published step took: as its row says, or from what it says instead.

step time     as it is
tokens/s      the tokens of a step over it
model FLOP/s  in the one convention to which they were brought, over the FLOPs of a step
FLOP/s        of hardware, where the source says by which formula it counts them
"""

from collections.abc import Callable, Mapping

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig


def seconds_of(
    row: Mapping[str, str],
    said: Mapping[str, float | None],
    shape: ModelShape,
    layout: ParallelConfig,
    count: int,
) -> float | None:
    """Seconds of a step: said, or by tokens per second, by model FLOP/s in the one convention, or by the
    source's formula.
    """
    tokens = layout.num_microbatches * layout.micro_batch * layout.dp * shape.sequence
    step, rate, samples = (
        said.get("step_time_s"),
        said.get("tokens_per_s_per_gpu"),
        said.get("samples_per_s_per_gpu"),
    )
    model, printed = said.get("std_model_tflops_per_gpu"), said.get("tflops_per_gpu")
    if step:
        return step
    if rate:
        return tokens / (rate * count)
    if samples:
        return tokens / shape.sequence / (samples * count)
    if model:
        return shape.flops(tokens) / (model * 1e12 * count)
    formula = next((each for words, each in FORMULAS if words in row.get("flops_convention", "")), None)
    return formula(shape, tokens) / (printed * 1e12 * count) if formula and printed else None


def _hardware_flops(shape: ModelShape, tokens: float) -> float:
    """With all layers run once more (arXiv 2104.04473, section 5.1)."""
    h, length = shape.hidden, shape.sequence
    return 96 * tokens * shape.layers * h * h * (1 + length / (6 * h) + shape.vocab / (16 * shape.layers * h))


FORMULAS: tuple[tuple[str, Callable[[ModelShape, float], float]], ...] = (
    ("hardware FLOPs incl. full recompute", _hardware_flops),
)
