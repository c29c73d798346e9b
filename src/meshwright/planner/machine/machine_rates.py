"""The share of their peaks that devices and links reach: constants of a machine, never of a plan.

    matmul                 of the peak of matmuls, for large ones; matmul_float8, matmul_float8_blocks (a
                           scale for every 32 elements), matmul_float4
    half_rate_dim          the inner dim at which half of that is reached
    cast_passes            how often the inputs of a low-precision matmul are read and written for it;
                           rowwise_cast_factor times as often with a scale per row
    wave_tail              the share of a last, partly filled wave of tiles that is paid for: 1 is all
    attention              of the peak, in fused attention; attention_backward: in its backward
    attention_flash1       times `attention`, with the first kernels; attention_flash3: with those written for
                           the device (arXiv 2407.08608: twice what older ones reach there)
    memory                 of the memory's rate, in operations between matmuls
    kernel_start_s         the least time of a kernel; kernel_launch_s: the time to launch it on the host
    link, nic              of the rates of links inside a host and out of it; latency_s per doubling of ranks
    fabric_half_hosts      hosts at which a fabric's rate has fallen to half, as they share its upper levels;
                           fabric_exponent: how steeply
    tp_overlap             the share of tensor-parallel communication that runs beside matmuls;
                           grad_reduce_overlap: of gradient reduction
    overlap_slowdown       how much a matmul is slowed by a gather beside it
    eager_score_passes     how often unfused attention reads or writes its scores; fused_score_passes: with
                           one kernel for their softmax
    residual_passes        how often the operations between a layer's matmuls read or write the hidden state;
                           unfused_norm_factor: times more with unfused norms
    inner_passes           the same inside attention and MLP; loss_passes: over the logits
    boundary_exposed       the share of a send to the next pp rank that is waited for
    microbatch_overhead_s  seconds per send, whatever its size; step_overhead_s: once per step

Values are in rates.toml, by kind of device, with their sources.
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
    """Returns the rates of a kind of device, by its name in devices.csv.

    A device without a fit has the common rates.
    """
    table = tomllib.loads((files("meshwright.planner.machine") / "rates.toml").read_text(encoding="utf-8"))
    return MachineRates(**{**table["all"], **table.get(device, {})})
