"""Seconds of a published step.

The first of these that a row has:

    step time              as stated
    tokens/s, samples/s    the tokens or samples of a step divided by it
    model FLOP/s           in the one convention to which they were converted: the FLOPs of a step divided
                           by it
    FLOP/s of experts      of models with experts, with causal attention
    FLOP/s                 of hardware, if the source states the formula by which it counts them
"""

from collections.abc import Callable, Mapping

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig


def seconds_of(
    row: Mapping[str, str],
    numbers: Mapping[str, float | None],
    shape: ModelShape,
    layout: ParallelConfig,
    count: int,
) -> float | None:
    """Returns the seconds of a step: stated, or from tokens per second, from model FLOP/s in the one
    convention, or by the source's formula.
    """
    tokens = layout.num_microbatches * layout.micro_batch * layout.dp * shape.sequence
    step, rate, samples = (
        numbers.get("step_time_s"),
        numbers.get("tokens_per_s_per_gpu"),
        numbers.get("samples_per_s_per_gpu"),
    )
    model, printed = numbers.get("std_model_tflops_per_gpu"), numbers.get("tflops_per_gpu")
    if step:
        return step
    if rate:
        return tokens / (rate * count)
    if samples:
        return tokens / shape.sequence / (samples * count)
    if model:
        return shape.flops(tokens) / (model * 1e12 * count)
    if shape.experts and printed:
        return _causal_flops(shape, tokens) / (printed * 1e12 * count)
    formula = next((each for words, each in FORMULAS if words in row.get("flops_convention", "")), None)
    return formula(shape, tokens) / (printed * 1e12 * count) if formula and printed else None


def _causal_flops(shape: ModelShape, tokens: float) -> float:
    """Returns model FLOPs with half of the attention scores, as Megatron-LM counts them since 2025."""
    return shape.flops(tokens) - 6 * tokens * shape.layers * shape.attention_dim * shape.sequence


def _hardware_flops(shape: ModelShape, tokens: float) -> float:
    """Returns FLOPs with all layers recomputed (arXiv 2104.04473, section 5.1)."""
    h, length = shape.hidden, shape.sequence
    return 96 * tokens * shape.layers * h * h * (1 + length / (6 * h) + shape.vocab / (16 * shape.layers * h))


FORMULAS: tuple[tuple[str, Callable[[ModelShape, float], float]], ...] = (
    ("hardware FLOPs incl. full recompute", _hardware_flops),
)
