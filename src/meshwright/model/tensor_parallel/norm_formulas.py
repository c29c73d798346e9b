"""Computes norms over a last dim that is sharded over ranks, if their formula is known.

    y = (x - mean) / sqrt(variance + eps) * (weight + offset) + bias        LayerNorm
    y = x / sqrt(mean of squares + eps) * (weight + offset)                 RMSNorm

Mean and variance of a vector are one or two numbers, its *statistics*; those of equal slices give those of
the whole. The formula of a layer is not taken from its name but tested on random vectors, some so small that
eps matters.
"""

from itertools import product

import torch
from torch import nn

from meshwright.plan.model_spec.tensor_parallel_layers import NormFormula

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
TOLERANCE = 1e-4  # rounding of float32 sums over some thousand elements


def find_norm_formula(layer: nn.Module) -> NormFormula | None:
    """Returns the formula of `layer`, a norm with a weight over the last dim; None if it follows neither."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    eps = [
        value
        for key, value in vars(layer).items()
        if key in EPS_NAMES and (value is None or isinstance(value, float))
    ]
    # buffers mean running statistics
    if weight is None or weight.dim() != 1 or len(eps) != 1 or layer._buffers:
        return None
    width, generator = len(weight), torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=generator) + 0.3
    x = torch.cat((x, x * 1e-3))
    params = {"weight": torch.rand(width, generator=generator) + 0.5}
    params |= {} if bias is None else {"bias": torch.randn(width, generator=generator)}
    y = _run_norm(layer, params, x)
    for centred, offset in product((False, True), (0.0, 1.0)):
        formula = NormFormula(centred, eps[0], offset, width)
        own_output = apply_norm(formula, x, norm_statistics(formula, x), params["weight"], params.get("bias"))
        if (
            y is not None
            and y.shape == own_output.shape
            and torch.allclose(y, own_output, TOLERANCE, TOLERANCE)
        ):
            return formula
    return None


def norm_statistics(formula: NormFormula, x: torch.Tensor) -> torch.Tensor:
    """Returns the statistics of `x` [..., width] as [..., num_statistics]."""
    if formula.subtracts_mean:
        return torch.stack((x.mean(-1), x.var(-1, unbiased=False)), -1)
    return x.square().mean(-1, keepdim=True)


def combine_statistics(formula: NormFormula, slices: torch.Tensor) -> torch.Tensor:
    """Returns the statistics of full vectors from those of their equal slices: [..., slices * k] -> [...,
    k].
    """
    by_slice = slices.unflatten(-1, (-1, formula.num_statistics))
    mean = by_slice.mean(-2)
    if not formula.subtracts_mean:
        return mean
    spread = (by_slice[..., 0] - mean[..., :1]).square().mean(-1)
    return torch.stack((mean[..., 0], mean[..., 1] + spread), -1)


def apply_norm(
    formula: NormFormula,
    x: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the output of the norm for `x`, full vectors or slices, with known `statistics`; weight and
    bias likewise.
    """
    eps = torch.finfo(x.dtype).eps if formula.eps is None else formula.eps
    x = x - statistics[..., :1] if formula.subtracts_mean else x
    y = x * torch.rsqrt(statistics[..., -1:] + eps)
    if weight is not None:
        y = y * (weight + formula.weight_offset if formula.weight_offset else weight)
    return y if bias is None else y + bias


def _run_norm(layer: nn.Module, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    """Returns the output of `layer` for `x` with these parameters; None if it takes other or more inputs."""
    before = dict(layer._parameters)
    try:
        layer._parameters.update({leaf: nn.Parameter(value) for leaf, value in params.items()})
        with torch.no_grad():
            y = type(layer).forward(layer, x)
    except (TypeError, RuntimeError):
        return None
    finally:
        layer._parameters.update(before)
    return y if isinstance(y, torch.Tensor) else None
