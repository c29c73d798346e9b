"""Finds the largest model of a family that a machine trains, for each mode of offload to host and disk.

A family keeps the proportions of the given model: depth and width grow together, and with them FFN sizes
and heads; vocabulary, sequence, width of a head, and the numbers of experts stay.

    member    a heads (in steps that tensor ranks divide), L a / a0 layers, hidden size h a / a0

    mode           the model that ...
    none           fits on the devices alone
    device_step    with optimizer states in host memory, stepped on the device
    host_step      stepped on the host
    gradients      and gradients there
    everything     and weights there
    disk           with optimizer states on disk, stepped on the host

In all but the first and those that keep gradients on the host, activations may rest in host memory too.
The largest member is found by bisection over the configurations of the search. Where a rate is not known, the
largest model is still known, and its seconds are not. Where the memory of the host is not known, what a host
would keep is said.

Limits: sizes between two members are not tried; a larger member that happens to fit better (because more
stages divide its layers) is not looked for.
"""

from dataclasses import dataclass, replace
from math import lcm

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.offload_cost import priced_modes
from meshwright.planner.analytic.parallel_config import OFFLOAD_MODES, OffloadMode, ParallelConfig
from meshwright.planner.search.max_fit import fits, fitting_config, largest_number
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import Candidate, search

LEAST_STEPS = 8  # the smallest members that are tried; one of them fits, or none does


@dataclass(frozen=True)
class ModeFit:
    """The largest model with one mode of offload: its `shape`; None: not even the smallest one fits.

    `request` is the search for it, `config` what fits; `best` the fastest, None where rates are not known.
    `host_nbytes`: what the ranks of a host keep in its memory together.
    """

    mode: OffloadMode
    request: SearchRequest
    shape: ModelShape | None = None
    config: ParallelConfig | None = None
    best: Candidate | None = None
    host_nbytes: float = 0.0


def family_member(shape: ModelShape, heads: int) -> ModelShape:
    """Returns the model with the proportions of `shape` that has `heads` attention heads."""
    scale = heads / shape.heads
    sizes = {name: round(scale * vars(shape)[name]) for name in ("ffn", "expert_ffn", "shared_ffn")}
    return replace(
        shape,
        name=f"{shape.name} x {scale:.3g}" if heads != shape.heads else shape.name,
        layers=max(1, round(scale * shape.layers)),
        dense_layers=round(scale * shape.dense_layers),
        hidden=round(scale * shape.hidden),
        heads=heads,
        kv_heads=shape.kv_heads and heads * shape.kv_heads // shape.heads,
        **sizes,
    )


def find_model_fits(request: SearchRequest) -> tuple[ModeFit, ...]:
    """Returns the largest model of the family of `request.shape` for each mode of offload."""
    asked = request.offload_modes if request.offload_modes != ("none",) else OFFLOAD_MODES
    return tuple(_mode_fit(_with_mode(request, mode), mode) for mode in asked)


def _with_mode(request: SearchRequest, mode: OffloadMode) -> SearchRequest:
    is_given = any(request.activation_offload) or mode == "none"
    activations = request.activation_offload if is_given else (False, True)
    return replace(request, offload_modes=(mode,), activation_offload=activations)


def _mode_fit(request: SearchRequest, mode: OffloadMode) -> ModeFit:
    shape, machine = request.shape, request.machine
    step = lcm(shape.heads // shape.num_kv_heads, min(machine.devices_per_host or 1, machine.num_devices))

    def request_for(steps: int) -> SearchRequest:
        return replace(request, shape=family_member(shape, steps * step))

    least = next((steps for steps in range(1, LEAST_STEPS + 1) if fits(request_for(steps))), 0)
    if not least:
        return ModeFit(mode, request_for(1))
    at_limit = request_for(largest_number(lambda steps: fits(request_for(steps)), least))
    best = next(iter(search(at_limit, 1).best), None) if mode in priced_modes(machine) else None
    config = fitting_config(at_limit) if best is None else best.config
    host_nbytes = 0.0 if config is None else at_limit.host_nbytes(config)
    return ModeFit(mode, at_limit, at_limit.shape, config, best, host_nbytes)
