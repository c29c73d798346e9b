"""Seconds of matmuls, attention, memory operations and collectives, by the roofline model.

    seconds of a matmul of [m, k] by [k, n]     the larger of    2 m n k / (peak x share),    bytes / (memory
                                                                 rate x share)

The share of a matmul is less for a short inner dim (a tile's pipeline fills and drains once) and for a last
wave of tiles that leaves units idle:

    share = matmul / (1 + half_rate_dim / k) / waves
    waves = 1 + wave_tail (ceil(tiles / units) units / exact tiles - 1)

Every kernel takes at least `kernel_start_s`. A gather of S bytes among n ranks sends (n - 1) / n S through
each; across hosts it is a ring, and the bytes that leave a host share its cards.

Paper: S. Williams et al. 2009, Roofline, doi:10.1145/1498765.1498785; rings: R. Thakur et al. 2005,
doi:10.1177/1094342005051521.
"""

from math import ceil, log2

from meshwright.planner.machine.machine import Machine

MATMUL_TILE = (128, 256)  # rows and columns that one unit computes at once
HALF_NBYTES = 2  # bytes of a 16-bit float


def matmul_seconds(
    machine: Machine, rows: float, columns: float, inner: float, dtype: str = "bfloat16"
) -> float:
    """Returns the seconds of [rows, inner] by [inner, columns]."""
    if rows * columns * inner <= 0:
        return 0.0
    rates, exact = machine.rates, rows * columns / (MATMUL_TILE[0] * MATMUL_TILE[1])
    whole = ceil(rows / MATMUL_TILE[0]) * ceil(columns / MATMUL_TILE[1])
    units = machine.device.num_compute_units
    waves = 1 + rates.wave_tail * (ceil(whole / units) * units / exact - 1)
    kinds = {
        "float8": rates.matmul_float8,
        "float8_rowwise": rates.matmul_float8,
        "float8_blocks": rates.matmul_float8_blocks,
        "float4": rates.matmul_float4,
    }
    best = kinds.get(dtype, rates.matmul)
    computed = (
        2
        * rows
        * columns
        * inner
        / (machine.peak_flops(dtype.partition("_")[0]) * best)
        * (1 + rates.half_rate_dim / inner)
        * waves
    )
    moved = (
        HALF_NBYTES
        * (rows * columns + rows * inner + columns * inner)
        / (machine.device.memory_rate * rates.memory)
    )
    return max(computed, moved) + rates.kernel_start_s


def attention_seconds(machine: Machine, flops: float, *, backward: bool, kernel: str = "flash2") -> float:
    """Returns the seconds of fused attention of `flops` forward (2.5 times as many backward).

    By a `kernel`.
    """
    rates = machine.rates
    made = {"flash1": rates.attention_flash1, "flash3": rates.attention_flash3}.get(kernel, 1.0)
    share = rates.attention * made * (rates.attention_backward if backward else 1.0)
    times, starts = (2.5, 2) if backward else (1.0, 1)
    return times * flops / (machine.peak_flops("bfloat16") * share) + starts * rates.kernel_start_s


def memory_op_seconds(machine: Machine, nbytes: float, num_kernels: int = 1) -> float:
    """Returns the seconds of `num_kernels` kernels that read and write `nbytes` and compute little."""
    return (
        nbytes / (machine.device.memory_rate * machine.rates.memory)
        + num_kernels * machine.rates.kernel_start_s
    )


def all_gather_seconds(
    machine: Machine, nbytes: float, num_ranks: float, stride: float, num_devices: float
) -> float:
    """Returns the seconds of an all_gather to, or a reduce_scatter of, `nbytes` among `num_ranks` ranks.

    `stride` apart. `num_devices` is how many there are in all: those that share the fabric with them.
    """
    if num_ranks <= 1:
        return 0.0
    rates, sent = machine.rates, (num_ranks - 1) / num_ranks * nbytes
    if num_ranks * stride <= machine.devices_per_host:
        return sent / machine.link_rate + rates.latency_s * log2(num_ranks)
    together = max(
        1.0, min(num_ranks, machine.devices_per_host // max(1, stride))
    )  # ranks of the group on one host: its ring has so many cards
    nic = machine.nic_rate(max(1.0, num_devices / machine.devices_per_host)) * together
    return max(sent / nic, sent / machine.link_rate) + 2 * rates.latency_s * log2(num_ranks)


def send_seconds(machine: Machine, nbytes: float, stride: float) -> float:
    """Returns the seconds of sending `nbytes` to a rank `stride` ranks further."""
    rate = machine.link_rate if stride < machine.devices_per_host else machine.nic_rate(1)
    return nbytes / rate + 2 * machine.rates.latency_s
