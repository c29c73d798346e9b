"""Compresses what a random plan sends: gradients, by any codec with random options along any axis of sums;
outer gradients of sites that train apart; or activations, by any codec along any axes that move some.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from meshwright.parallel import STRATEGIES
from meshwright.parallel.compression.activation_compression import ActivationCompression, CodedAxis
from meshwright.parallel.compression.codecs.two_level_sums import QgZCompression
from meshwright.parallel.context.context_parallel_strategy import ContextParallel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.strategy_interface import Strategy

RANKS_PER_HOST, NUM_HOSTS, NUM_SITES = 2, 2, 2
ROUNDINGS = ("nearest", "nearest", "stochastic")
OPTIONS: Mapping[str, Callable[[Random], dict[str, object]]] = MappingProxyType(
    {
        "cast": lambda rng: {"dtype": rng.choice(("bfloat16", "float16", "float8"))},
        "int8": lambda rng: {"rounding": rng.choice(ROUNDINGS)},
        "int4": lambda rng: {"rounding": rng.choice(ROUNDINGS)},
        "sign": lambda rng: {},
        "topk": lambda rng: {"density": rng.choice((0.01, 0.1, 0.4))},
        "powersgd": lambda rng: {"rank": rng.choice((1, 2))},
        "qgz": lambda rng: {"ranks_per_host": RANKS_PER_HOST, "across": rng.choice(("int8", "int4"))},
    }
)

MOVING: Mapping[CodedAxis, tuple[type[Strategy], ...]] = MappingProxyType(  # what moves activations along it
    {"pp": (Pipeline, PipeDream), "tp": (TensorParallel,), "cp": (ContextParallel,)}
)


def with_compression(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with gradient compression, where gradients are summed on all ranks."""
    axes = [each.axis for each in strategies if isinstance(each, BatchSplit) and each.axis != "ep"]
    if not axes or any(isinstance(each, (DataParallelMaster, ParameterServer)) for each in strategies):
        return tuple(strategies)
    mixed = [*strategies, _codec(rng, list(OPTIONS), rng.choice(("", *axes)))]
    rng.shuffle(mixed)
    return tuple(mixed)


def _codec(rng: Random, modes: Sequence[str], axis: str) -> Strategy:
    mode = rng.choice(modes)
    options = OPTIONS[mode](rng)
    options |= {
        "axis": axis,
        "exact_steps": rng.choice((0, 0, 1)),
        "min_numel": rng.choice((0, 0, 50)),
        "error_feedback": rng.random() < 0.8,
    }
    return STRATEGIES["compress"][mode](**options)


def with_hosts(mesh: Mesh, strategies: Sequence[Strategy]) -> Mesh:
    """Returns `mesh` with several hosts along the axis of the sums that qgz codes; without qgz, as it is."""
    coded = [each for each in strategies if isinstance(each, QgZCompression)]
    split = [each.axis for each in strategies if isinstance(each, BatchSplit) and each.axis != "ep"]
    if not coded or not split:
        return mesh
    axis = coded[0].axis or min(split, key=AXES.index)
    return replace(mesh, **{axis: RANKS_PER_HOST * NUM_HOSTS})


def with_rounds(rng: Random, mesh: Mesh, strategies: Sequence[Strategy]) -> tuple[Mesh, tuple[Strategy, ...]]:
    """Returns `mesh` with sites that train apart, and `strategies` with their rounds, whose outer gradients
    travel as codes.
    """
    rounds = DiLoCo(sync_every=rng.choice((1, 2)))
    codec = _codec(rng, [mode for mode in OPTIONS if mode != "qgz"], rounds.axis)
    return replace(mesh, **{rounds.axis: NUM_SITES}), (*strategies, rounds, codec)


def with_activation_compression(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with compressed activations along one or more of the axes that move any."""
    axes = [axis for axis, moving in MOVING.items() if any(isinstance(each, moving) for each in strategies)]
    chosen = [axis for axis in axes if rng.random() < 0.6] or axes[-1:]
    codecs = [
        ActivationCompression(
            axis=axis,
            codec=rng.choice(("bfloat16", "float16", "float8", "int8", "int8")),
            min_numel=rng.choice((0, 0, 20)),
            exact_steps=rng.choice((0, 0, 1)),
        )
        for axis in chosen
    ]
    mixed = [*strategies, *codecs]
    rng.shuffle(mixed)
    return tuple(mixed)
