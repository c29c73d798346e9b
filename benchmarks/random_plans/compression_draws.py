"""Compresses the gradients of a random plan: any codec with random options, along any axis of sums; or its
activations, with any codec wherever the plan moves some.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

from meshwright.parallel import STRATEGIES
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.plan.strategy_interface import Strategy

ROUNDINGS = ("nearest", "nearest", "stochastic")
OPTIONS: Mapping[str, Callable[[Random], dict[str, object]]] = MappingProxyType(
    {
        "cast": lambda rng: {"dtype": rng.choice(("bfloat16", "float16", "float8"))},
        "int8": lambda rng: {"rounding": rng.choice(ROUNDINGS)},
        "int4": lambda rng: {"rounding": rng.choice(ROUNDINGS)},
        "sign": lambda rng: {},
        "topk": lambda rng: {"density": rng.choice((0.01, 0.1, 0.4))},
        "powersgd": lambda rng: {"rank": rng.choice((1, 2))},
    }
)


def with_compression(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with gradient compression, where gradients are summed on all ranks."""
    axes = [each.axis for each in strategies if isinstance(each, BatchSplit) and each.axis != "ep"]
    if not axes or any(isinstance(each, (DataParallelMaster, ParameterServer)) for each in strategies):
        return tuple(strategies)
    mode = rng.choice([each for each in STRATEGIES["compress"] if each in OPTIONS])
    options = OPTIONS[mode](rng)
    options |= {
        "axis": rng.choice(("", *axes)),
        "exact_steps": rng.choice((0, 0, 1)),
        "min_numel": rng.choice((0, 0, 50)),
        "error_feedback": rng.random() < 0.8,
    }
    mixed = [*strategies, STRATEGIES["compress"][mode](**options)]
    rng.shuffle(mixed)
    return tuple(mixed)


def with_activation_compression(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with compressed activations, if they move any."""
    if not any(isinstance(each, Pipeline | PipeDream) for each in strategies):
        return tuple(strategies)
    mixed = [
        *strategies,
        ActivationCompression(
            codec=rng.choice(("bfloat16", "float16", "float8", "int8", "int8")),
            min_numel=rng.choice((0, 0, 20)),
            exact_steps=rng.choice((0, 0, 1)),
        ),
    ]
    rng.shuffle(mixed)
    return tuple(mixed)
