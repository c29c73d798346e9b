"""Seconds of matmuls, attention, memory operations and collectives, by the roofline model.

    seconds of a matmul of [m, k] by [k, n]     the larger of    2 m n k / (peak x share),    bytes / (memory
                                                                 rate x share)

The share of a matmul is less for a short inner dim (a tile's pipeline fills and drains once) and for a last
wave of tiles that leaves units idle:

    share = matmul / (1 + half_rate_dim / k) / waves
    waves = 1 + wave_tail (ceil(tiles / units) units / exact tiles - 1)

Every kernel takes at least `kernel_start_s`. A gather of S bytes among n ranks sends (n - 1) / n S through
each; across hosts it is a ring, and the bytes that leave a host share its cards. In an exchange (all-to-all)
each rank sends other bytes to every rank, so all that is for other hosts leaves through its own card.

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
    rates, num_tiles = machine.rates, rows * columns / (MATMUL_TILE[0] * MATMUL_TILE[1])
    num_full_tiles = ceil(rows / MATMUL_TILE[0]) * ceil(columns / MATMUL_TILE[1])
    units = machine.device.num_compute_units
    waves = 1 + rates.wave_tail * (ceil(num_full_tiles / units) * units / num_tiles - 1)
    by_dtype = {
        "float8": rates.matmul_float8,
        "float8_rowwise": rates.matmul_float8,
        "float8_blocks": rates.matmul_float8_blocks,
        "float4": rates.matmul_float4,
    }
    efficiency = by_dtype.get(dtype, rates.matmul)
    compute_s = (
        2
        * rows
        * columns
        * inner
        / (machine.peak_flops(dtype.partition("_")[0]) * efficiency)
        * (1 + rates.half_rate_dim / inner)
        * waves
    )
    memory_s = (
        HALF_NBYTES
        * (rows * columns + rows * inner + columns * inner)
        / (machine.device.memory_rate * rates.memory)
    )
    return max(compute_s, memory_s) + rates.kernel_start_s


def attention_seconds(machine: Machine, flops: float, *, backward: bool, kernel: str = "flash2") -> float:
    """Returns the seconds of fused attention of `flops` forward (2.5 times as many backward).

    By a `kernel`.
    """
    rates = machine.rates
    kernel_factor = {"flash1": rates.attention_flash1, "flash3": rates.attention_flash3}.get(kernel, 1.0)
    efficiency = rates.attention * kernel_factor * (rates.attention_backward if backward else 1.0)
    times, starts = (2.5, 2) if backward else (1.0, 1)
    return times * flops / (machine.peak_flops("bfloat16") * efficiency) + starts * rates.kernel_start_s


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
    # ranks of the group on one host: its ring has so many network cards
    cards = ranks_per_host(machine, num_ranks, stride)
    nic = machine.nic_rate(max(1.0, num_devices / machine.devices_per_host)) * cards
    return max(sent / nic, sent / machine.link_rate) + 2 * rates.latency_s * log2(num_ranks)


def exchange_seconds(
    machine: Machine, nbytes: float, num_ranks: float, stride: float, num_devices: float
) -> float:
    """Returns the seconds in which each of `num_ranks` ranks sends its part of `nbytes` to every other one.

    `stride` and `num_devices` as for `all_gather_seconds`.
    """
    if num_ranks <= 1:
        return 0.0
    rates, link_s = machine.rates, (num_ranks - 1) / num_ranks * nbytes / machine.link_rate
    if num_ranks * stride <= machine.devices_per_host:
        return link_s + rates.latency_s * log2(num_ranks)
    nic = machine.nic_rate(max(1.0, num_devices / machine.devices_per_host))
    nic_s = (num_ranks - ranks_per_host(machine, num_ranks, stride)) / num_ranks * nbytes / nic
    return max(nic_s, link_s) + 2 * rates.latency_s * log2(num_ranks)


def ranks_per_host(machine: Machine, num_ranks: float, stride: float) -> float:
    """Returns how many of `num_ranks` ranks, `stride` apart, are on one host."""
    return max(1.0, min(num_ranks, machine.devices_per_host // max(1, stride)))


def send_seconds(machine: Machine, nbytes: float, stride: float) -> float:
    """Returns the seconds of sending `nbytes` to a rank `stride` ranks further."""
    rate = machine.link_rate if stride < machine.devices_per_host else machine.nic_rate(1)
    return nbytes / rate + 2 * machine.rates.latency_s
