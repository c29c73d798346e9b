"""What share of their peaks devices and links reach: constants of a machine, fitted or measured, never of a plan.

    product     of the peak of matrix products, in the limit of large ones; in float8, or that with a scale for every 32
                elements (`blocks`); in float4; `casts`: how often what goes into such a product is read and written for it,
                `casts_rows` times as often with a scale per row;
                `side`: the size of an inner dim at which half of that is reached
    tail        how much of a last wave of tiles that does not fill the device is paid for: 1 is all
    attention   of the peak, in fused attention; `attention_back`: in its backward; `attention_old`: times that by the first
                kernels, `attention_new` by those written for the device (arXiv 2407.08608: twice what older ones reach there)
    memory      of the memory's rate, in what lies between products; `start_s` is what any kernel takes to start,
                `launch_s` what its host takes to ask for it: small kernels wait for that
    link, nic   of the rates of links inside a host and out of it; `latency_s` per doubling of ranks, with what
                they wait for each other
    crowd       hosts at which a fabric's rate has fallen to half, because they share its upper levels; `crowding`: how steeply
    *_hidden    of what tensor ranks, or copies, send: the share that runs beside products
    beside      how much a product is slowed by a gather beside it
    scores_*    how often attention that is not fused reads or writes its scores
    stream      how often what lies between a layer's products reads or writes the hidden state; `unfused`: times more where
                norms are several kernels; `inside`: how often what lies within attention and MLP is; `loss`: logits
    handover    how much of what goes to the next rank along pp is waited for, and `turn_s` beside it, whatever its size;
                `fixed_s`: once per step

Values are in rates.toml: by kind of device, with what they were fitted on.
"""

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class MachineRates:
    """The constants of a machine (see the module)."""

    matmul: float = 0.75
    matmul_float8: float = 0.65
    matmul_float8_blocks: float = 0.6
    matmul_float4: float = 0.5
    cast_passes: float = 1.0
    rowwise_cast_factor: float = 8.0
    half_rate_dim: float = 130.0
    wave_tail: float = 0.75
    attention: float = 0.45
    attention_backward: float = 0.85
    attention_flash1: float = 0.65
    attention_flash3: float = 1.5
    memory: float = 0.85
    kernel_start_s: float = 4e-6
    kernel_launch_s: float = 1e-05
    link: float = 0.75
    nic: float = 0.75
    latency_s: float = 3e-05
    fabric_half_hosts: float = 120.0
    fabric_exponent: float = 2.0
    tp_overlap: float = 0.7
    grad_reduce_overlap: float = 0.5
    overlap_slowdown: float = 0.15
    eager_score_passes: float = 13.0
    fused_score_passes: float = 7.0
    residual_passes: float = 8.0
    unfused_norm_factor: float = 2.0
    inner_passes: float = 2.0
    loss_passes: float = 2.2
    boundary_exposed: float = 0.6
    microbatch_overhead_s: float = 5e-4
    step_overhead_s: float = 0.01


RATE_NAMES = tuple(field.name for field in fields(MachineRates))


@cache
def load_rates(device: str) -> MachineRates:
    """Those of a kind of device, by its name in core/devices.csv; of one that nobody has fitted, those of all."""
    said = tomllib.loads((files("meshwright.planner.machine") / "rates.toml").read_text(encoding="utf-8"))
    return MachineRates(**{**said["all"], **said.get(device, {})})
