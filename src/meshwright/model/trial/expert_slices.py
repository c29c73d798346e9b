"""Finds how the matrices of each expert split along the features between its first and its last product.

    gate and up [E, 2I, D]       one after the other, or in turn: each half, or each pair, is split
    their bias [E, 2I]           likewise
    down [E, D, I]               the features that it takes
    its bias [E, D]              added once: each slice adds other elements of it

The shapes of the parameters allow a few ways. A trial decides: the module's own forward runs in float64 with
few experts of few such features, once whole and once for each of two slices of unequal size, and the results
of the slices must add up to that of the whole.
Limits: a module of which no way adds up (a norm behind the last product), or which reads its number of
features elsewhere than from its parameters, is not split.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import product
from math import gcd, prod

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.plan.model_spec.model_spec import OUTPUT_BIAS, ExpertsCall
from meshwright.plan.model_spec.param_dim_split import DimSplit

TRIAL_EXPERTS, TRIAL_UNITS, TRIAL_TOKENS, TRIAL_RANKS = 2, 5, 4, 2
ALIGNED_FEATURES = 8  # a grouped product takes rows of whole 16 bytes: 8 elements of bfloat16
Splits = Mapping[str, DimSplit]  # of parameters, by their own names


def with_inner_splits(calls: Iterable[ExpertsCall], model: nn.Module) -> Iterator[ExpertsCall]:
    """Yields `calls`, each with the splits of the parameters of its experts, if they can be split.

    `model` has the modules, on any device; transformers' experts must be set to a kernel for float64.
    """
    found: dict[object, Splits] = {}
    for call in calls:
        module = model.get_submodule(call.name)
        shapes = {leaf: tuple(param.shape) for leaf, param in _own_params(module).items()}
        key = type(module), tuple(shapes.items())
        if key not in found:
            ways = _possible_splits(shapes, call.hidden_size)
            found[key] = next((way for way in ways if _adds_up(module, shapes, way)), {})
        named = tuple((f"{call.name}.{leaf}", split) for leaf, split in found[key].items())
        yield replace(call, inner_splits=named)


def _own_params(module: nn.Module) -> dict[str, nn.Parameter]:
    return {leaf: param for leaf, param in module._parameters.items() if param is not None}


def _possible_splits(shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> Iterator[Splits]:
    """Yields the ways to split parameters of these shapes that agree with `hidden_size` features outside."""
    widths = [prod(shape[1:]) // hidden_size for shape in shapes.values() if len(shape) == 3]
    num_features = min(widths, default=0)
    if num_features > 1:
        ways = [list(_param_splits(shape, hidden_size, num_features)) for shape in shapes.values()]
        yield from (dict(zip(shapes, way, strict=True)) for way in product(*ways))


def _param_splits(shape: tuple[int, ...], hidden_size: int, num_features: int) -> Iterator[DimSplit]:
    num_units = num_features // gcd(num_features, ALIGNED_FEATURES)
    for dim in range(1, len(shape)):
        num_sections, rest = divmod(shape[dim], num_features)
        agrees = len(shape) == 2 or (len(shape) == 3 and shape[3 - dim] == hidden_size)
        if agrees and num_sections and not rest:
            yield DimSplit(dim, num_units, (num_features,) * num_sections)
            if num_sections > 1:
                yield DimSplit(dim, num_units, (shape[dim],))
    if shape[1:] == (hidden_size,):
        yield DimSplit(1, hidden_size, (hidden_size,), OUTPUT_BIAS)


def _adds_up(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], splits: Splits) -> bool:
    """Returns whether the results on slices of parameters add up to that on whole ones."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    small = {leaf: _shrunk(split) for leaf, split in splits.items()}
    whole, hidden_size = {}, 0
    for leaf, shape in shapes.items():
        sizes = [TRIAL_EXPERTS, *shape[1:]]
        sizes[small[leaf].dim] = sum(small[leaf].sections)
        if len(shape) == 3:
            hidden_size = sizes[3 - small[leaf].dim]
        whole[leaf] = draw(*sizes) / (hidden_size**0.5 if len(shape) == 3 else 1)
    hidden, weights = draw(TRIAL_TOKENS, hidden_size), draw(TRIAL_TOKENS, 1)
    index = torch.arange(TRIAL_TOKENS).remainder(TRIAL_EXPERTS).unsqueeze(1)

    def run(params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        trial = copy(module)
        given = {  # as when it trains: all but a bias between zeros are parameters
            leaf: each if small[leaf].side == OUTPUT_BIAS else nn.Parameter(each)
            for leaf, each in params.items()
        }
        trial.__dict__["_parameters"] = {**module._parameters, **given}
        if "num_experts" in trial.__dict__:
            trial.__dict__["num_experts"] = TRIAL_EXPERTS
        return trial.forward(hidden, index, weights)

    try:
        with torch.no_grad():
            expected = run(whole)
            sums = sum(
                run({leaf: _slice(each, small[leaf], rank) for leaf, each in whole.items()})
                for rank in range(TRIAL_RANKS)
            )
    except Exception:  # a module that does not run on slices: any failure is a result
        return False
    return isinstance(sums, torch.Tensor) and sums.shape == hidden.shape and torch.allclose(sums, expected)


def _shrunk(split: DimSplit) -> DimSplit:
    if split.side == OUTPUT_BIAS:
        return split
    each = [length // split.num_units * TRIAL_UNITS for length in split.sections]
    return replace(split, num_units=TRIAL_UNITS, sections=tuple(each))


def _slice(tensor: torch.Tensor, split: DimSplit, rank: int) -> torch.Tensor:
    ranges = split.ranges(rank, TRIAL_RANKS)
    parts = [tensor.narrow(split.dim, first, end - first) for first, end in ranges]
    if split.side != OUTPUT_BIAS:
        return torch.cat(parts, split.dim)
    ((first, end),) = ranges
    return F.pad(parts[0], (first, tensor.shape[1] - end))
