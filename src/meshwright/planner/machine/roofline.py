"""Seconds of what devices do: products, attention, what only passes through memory, and what ranks send each other.

    seconds of a product of [m, k] by [k, n]     the larger of    2 m n k / (peak x share),    bytes / (memory rate x share)

The share of a product is less for a short inner dim (a tile's pipeline fills and drains once) and for a last wave of tiles that
leaves units idle:

    share = product / (1 + side / k) / waves         waves = 1 + tail (ceil(tiles / units) units / exact tiles - 1)

Every kernel takes `start_s` at least. A gather of S bytes among n ranks sends (n - 1) / n S through each; where they lie on
several hosts, it goes round them all: the bytes that leave a host share its cards.

Paper: S. Williams et al. 2009, Roofline, doi:10.1145/1498765.1498785; rings: R. Thakur et al. 2005, doi:10.1177/1094342005051521.
"""

from math import ceil, log2

from meshwright.planner.machine.machine import Machine

TILE = (128, 256)  # rows and columns that one unit computes at once
HALF = 2  # bytes of a 16-bit float


def product(machine: Machine, rows: float, columns: float, inner: float, dtype: str = "bfloat16") -> float:
    """Seconds of [rows, inner] by [inner, columns]."""
    if rows * columns * inner <= 0:
        return 0.0
    rates, exact = machine.rates, rows * columns / (TILE[0] * TILE[1])
    whole = ceil(rows / TILE[0]) * ceil(columns / TILE[1])
    units = machine.device.num_compute_units
    waves = 1 + rates.tail * (ceil(whole / units) * units / exact - 1)
    kinds = {
        "float8": rates.product_float8,
        "float8_rowwise": rates.product_float8,
        "float8_blocks": rates.product_blocks,
        "float4": rates.product_float4,
    }
    best = kinds.get(dtype, rates.product)
    computed = (
        2
        * rows
        * columns
        * inner
        / (machine.peak(dtype.partition("_")[0]) * best)
        * (1 + rates.side / inner)
        * waves
    )
    moved = (
        HALF * (rows * columns + rows * inner + columns * inner) / (machine.device.memory_rate * rates.memory)
    )
    return max(computed, moved) + rates.start_s


def attention(machine: Machine, flops: float, *, back: bool, kernel: str = "flash2") -> float:
    """Seconds of fused attention that takes `flops` forward (2.5 times as many backward), by a `kernel` of planner/layout.py."""
    rates = machine.rates
    made = {"flash1": rates.attention_old, "flash3": rates.attention_new}.get(kernel, 1.0)
    share = rates.attention * made * (rates.attention_back if back else 1.0)
    times, starts = (2.5, 2) if back else (1.0, 1)
    return times * flops / (machine.peak("bfloat16") * share) + starts * rates.start_s


def passed(machine: Machine, nbytes: float, kernels: int = 1) -> float:
    """Seconds of `kernels` that read and write `nbytes` and compute little."""
    return nbytes / (machine.device.memory_rate * machine.rates.memory) + kernels * machine.rates.start_s


def gathered(machine: Machine, nbytes: float, ranks: float, stride: float, devices: float) -> float:
    """Seconds of an all_gather to, or a reduce_scatter of, `nbytes` among `ranks` ranks, which lie `stride` apart.

    `devices` is how many there are in all: those that share the fabric with them.
    """
    if ranks <= 1:
        return 0.0
    rates, sent = machine.rates, (ranks - 1) / ranks * nbytes
    if ranks * stride <= machine.host:
        return sent / machine.link_rate + rates.latency_s * log2(ranks)
    together = max(
        1.0, min(ranks, machine.host // max(1, stride))
    )  # ranks of the group on one host: its ring has so many cards
    nic = machine.nic_rate(max(1.0, devices / machine.host)) * together
    return max(sent / nic, sent / machine.link_rate) + 2 * rates.latency_s * log2(ranks)


def sent(machine: Machine, nbytes: float, stride: float) -> float:
    """Seconds of `nbytes` to a rank that lies `stride` ranks further."""
    rate = machine.link_rate if stride < machine.host else machine.nic_rate(1)
    return nbytes / rate + 2 * machine.rates.latency_s
