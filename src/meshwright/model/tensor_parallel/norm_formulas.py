"""Norms over the last dim whose formula is known: ranks that have a slice of that dim can compute them
together.

    y = (x - mean) / sqrt(variance + eps) * (weight + offset) + bias        LayerNorm
    y = x / sqrt(mean of squares + eps) * (weight + offset)                 RMSNorm

Mean and variance of a row are one or two numbers: its *statistics*. Those of slices of one size give those of
the whole. That a layer follows one of the two is not read off its name: it is tried on a few random rows,
some of them so small that eps shows.
"""

from itertools import product

import torch
from torch import nn

from meshwright.plan.model_spec.layer_calls import NormFormula

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
TOLERANCE = 1e-4  # rounding of float32 sums over some thousand elements


def find_norm_formula(layer: nn.Module) -> NormFormula | None:
    """The formula of `layer`, a norm with a weight over the last dim; None where it follows neither."""
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
    held = {"weight": torch.rand(width, generator=generator) + 0.5}
    held |= {} if bias is None else {"bias": torch.randn(width, generator=generator)}
    y = _run_norm(layer, held, x)
    for centred, offset in product((False, True), (0.0, 1.0)):
        formula = NormFormula(centred, eps[0], offset, width)
        mine = apply_norm(formula, x, norm_statistics(formula, x), held["weight"], held.get("bias"))
        if y is not None and y.shape == mine.shape and torch.allclose(y, mine, TOLERANCE, TOLERANCE):
            return formula
    return None


def norm_statistics(formula: NormFormula, x: torch.Tensor) -> torch.Tensor:
    """Those of the rows of `x` [..., width]: [..., formula.statistics]."""
    if formula.subtracts_mean:
        return torch.stack((x.mean(-1), x.var(-1, unbiased=False)), -1)
    return x.square().mean(-1, keepdim=True)


def combine_statistics(formula: NormFormula, slices: torch.Tensor) -> torch.Tensor:
    """The statistics of whole rows, of those of their slices, which are of one size: [..., slices * k] ->
    [..., k].
    """
    each = slices.unflatten(-1, (-1, formula.num_statistics))
    whole = each.mean(-2)
    if not formula.subtracts_mean:
        return whole
    apart = (each[..., 0] - whole[..., :1]).square().mean(-1)
    return torch.stack((whole[..., 0], whole[..., 1] + apart), -1)


def apply_norm(
    formula: NormFormula,
    x: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """What the norm gives out for `x`, rows or slices of rows whose statistics are `known`; weight and bias
    likewise.
    """
    eps = torch.finfo(x.dtype).eps if formula.eps is None else formula.eps
    x = x - statistics[..., :1] if formula.subtracts_mean else x
    y = x * torch.rsqrt(statistics[..., -1:] + eps)
    if weight is not None:
        y = y * (weight + formula.weight_offset if formula.weight_offset else weight)
    return y if bias is None else y + bias


def _run_norm(layer: nn.Module, held: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    """What `layer` makes of `x` with the parameters `held`; None where it takes in something else,
    or more.
    """
    before = dict(layer._parameters)
    try:
        layer._parameters.update({leaf: nn.Parameter(value) for leaf, value in held.items()})
        with torch.no_grad():
            y = type(layer).forward(layer, x)
    except (TypeError, RuntimeError):
        return None
    finally:
        layer._parameters.update(before)
    return y if isinstance(y, torch.Tensor) else None
