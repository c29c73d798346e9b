"""A machine's rates from what was measured on one of its devices, and on its links.

    device.toml     products, attention, memory, calls of one device (core/profile.py): from one cheap device, for any number
    cluster.toml    sums among a few ranks (core/cluster.py): the rate and the latency of links, for any number

What no measurement says stays what the kind of device has (planner/rates.py): how often memory is gone through between products,
what hides what. Shares are of the maker's peaks where these are known, and of the best that was measured where they are not.

A sum is a scatter of sums and a gather, of equal bytes, so that each is half of it:

    seconds of a sum of S bytes among n ranks / 2  =  latency log2(n)  +  (n - 1) / n S / rate
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log, log2
from statistics import median

from scipy.optimize import least_squares

from meshwright.comm.algorithms import BACKEND
from meshwright.comm.tuning.autoselect import predicted
from meshwright.plan.hardware.cost_fit import nonnegative_least_squares
from meshwright.plan.hardware.device_profile import HALF_DTYPES, DeviceProfile
from meshwright.plan.hardware.device_specs import DeviceSpec, find_device, known_devices
from meshwright.plan.hardware.network_model import Cluster
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.efficiency import Rates, rates_of
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import product

FITTED = ("product", "side", "tail")
BOUNDS = {"product": (1e-3, 2.0), "side": (1.0, 1e4), "tail": (1e-3, 1.0)}
ACTIVATION = 1 << 20  # bytes of what lies between products, at least
FASTEST = 1e15  # bytes per second, where a byte costs nothing that could be measured


def measured_device(profile: DeviceProfile) -> DeviceSpec:
    """The device that was measured: its maker's facts where they are known; else its best, and nothing is known of its links."""
    known = find_device(profile.device)
    if known is not None:
        return known
    return DeviceSpec(
        name=profile.device,
        pattern=re.escape(profile.device),
        flops={dtype: profile.best_flops(dtype) for dtype in profile.dtypes},
        memory=profile.memory,
        memory_rate=streamed(profile),
        link_rate=0.0,
        nic_rate=0.0,
        devices_per_host=0,
        num_compute_units=profile.threads,
        source=f"bench device, {profile.date}",
    )


def streamed(profile: DeviceProfile) -> float:
    """Bytes per second of what passes through memory between products: on a CPU caches hold some of it, on a GPU none."""
    if profile.kind == "cuda":
        return profile.memory_ops[-1].bytes_per_s
    return median(
        [each.bytes_per_s for each in profile.memory_ops if each.nbytes >= ACTIVATION]
        or [profile.memory_ops[-1].bytes_per_s]
    )


def measured_rates(profile: DeviceProfile, device: DeviceSpec) -> Rates:
    """The shares of the peaks of `device` that `profile` found, of products and attention in 16 bits, memory and calls.

    Raises PlanError where nothing was measured in 16 bits: plans are chosen for it.
    """
    half = next((dtype for dtype in profile.dtypes if dtype in HALF_DTYPES), None)
    if half is None:
        text = f"products in {', '.join(profile.dtypes)} were measured, and plans are chosen for 16 bits"
        raise PlanError(text, fix="measure again: meshwright bench device", location="hardware")
    before = rates_of(device.name)
    memory = streamed(profile) / device.memory_rate
    given = Machine(
        device, 1, replace(before, memory=memory, start_s=profile.call_s, launch_s=profile.call_s)
    )
    given = replace(given, rates=_products(profile, given, half))
    seen = [each for each in profile.attention if each.dtype == half]
    flops = [
        4.0 * each.batch * each.num_heads * each.query_len * each.key_len * each.head_dim for each in seen
    ]
    long = sorted(zip(flops, seen, strict=True), key=lambda pair: pair[0])[len(seen) // 2 :]
    peak = given.peak(half)
    forward = median(work / (each.forward_s * peak) for work, each in long)
    back = median(2.5 * work / (each.backward_s * peak) for work, each in long)
    return replace(given.rates, attention=forward, attention_back=back / forward)


def _products(profile: DeviceProfile, given: Machine, dtype: str) -> Rates:
    """The rates of products that explain those in `dtype`, those of a single matrix."""
    points = [each for each in profile.matmuls if each.dtype == dtype and each.batch == 1]

    def rates(place: Sequence[float]) -> Rates:
        return replace(given.rates, **{name: exp(value) for name, value in zip(FITTED, place, strict=True)})

    def off(place: Sequence[float]) -> list[float]:
        there = replace(given, rates=rates(place))
        return [log(product(there, each.m, each.n, each.k, dtype) / each.seconds) for each in points]

    limits = [tuple(map(log, BOUNDS[name])) for name in FITTED]
    start = [(low + high) / 2 for low, high in limits]
    return rates(
        least_squares(off, start, bounds=tuple(zip(*limits, strict=True)), loss="soft_l1", f_scale=0.1).x
    )


def with_cluster(given: Machine, cluster: Cluster) -> tuple[Machine, tuple[str, ...]]:
    """`given` with the links that were measured, and what was taken from where, in words.

    Raises PlanError where `cluster` is another machine, or says nothing of links that `given` needs.
    """
    _refuse_another(given, cluster)
    known = given.host  # 0: nobody has said
    host = cluster.ranks_per_host or known or given.count
    inside = [
        ranks for ranks in cluster.ranks if not cluster.ranks_per_host or ranks <= cluster.ranks_per_host
    ]
    apart = [ranks for ranks in cluster.ranks if ranks not in inside]
    rates, device, notes = given.rates, given.device, []
    if not inside and cluster.network.intra_host is not None and cluster.ranks_per_host > 1:
        inside = [
            cluster.ranks_per_host
        ]  # not measured alone, but its price is known from the rounds that stay on a host
    if inside:
        latency_s, rate = _line(cluster, inside)
        rates, device = replace(rates, link=1.0, latency_s=latency_s), replace(device, link_rate=rate)
        notes.append(
            f"links of a host: {rate / 1e9:.3g} GB/s and {1e6 * latency_s:.3g} us, among {_listed(inside)} ranks"
        )
    if apart:
        latency_s, rate = _line(cluster, apart)
        hosts = max(apart) / host
        card = rate / host * given.crowded(hosts)
        latency_s = max(latency_s / 2, rates.latency_s if inside else 0.0)
        rates, device = replace(rates, nic=1.0, latency_s=latency_s), replace(device, nic_rate=card)
        notes.append(
            f"between hosts: {card / 1e9:.3g} GB/s per device, among {_listed(apart)} ranks on hosts of {host}"
        )
    elif given.count > host:
        if not device.nic_rate:
            text = f"{given.count} devices on hosts of {host}, and links between hosts were not measured"
            fix = "measure them: start `meshwright bench comm` on several hosts; or say nic_gb_s in a [device] table"
            raise PlanError(text, fix=fix, location="--cluster")
        notes.append(
            f"between hosts nothing was measured: {device.nic_rate / 1e9:.3g} GB/s per device, as said of {device.name}"
        )
    if not inside and not device.link_rate:
        text = f"links inside a host were not measured (among {_listed(apart)} ranks on hosts of {host})"
        raise PlanError(
            text, fix="measure on one host too, or say link_gb_s in a [device] table", location="--cluster"
        )
    most = max(cluster.ranks)
    if given.count > most:
        notes.append(f"{most} ranks at most were measured: links of {given.count} are taken to be as fast")
    device = replace(device, devices_per_host=host)
    return replace(given, device=device, rates=rates, per_host=host), tuple(notes)


def _refuse_another(given: Machine, cluster: Cluster) -> None:
    named = find_device(cluster.machine)
    if given.device in known_devices() and (named is None or named.name != given.device.name):
        text = f"the links are those of {cluster.machine} (over {cluster.transport}), and the devices are {given.device.name}"
        fix = "measure there: meshwright bench comm; or describe a machine of yours in a [device] table"
        raise PlanError(text, fix=fix, location="--cluster")


def _line(cluster: Cluster, counts: Iterable[int]) -> tuple[float, float]:
    """Seconds per doubling of ranks, and bytes per second, of half a sum; long messages say the rate, short ones the latency."""
    cells = [
        (ranks, nbytes, predicted(cluster, BACKEND, ranks, nbytes) / 2)
        for ranks in counts
        for nbytes in cluster.sizes
    ]
    middle = median(nbytes for _, nbytes, _ in cells)
    rows = [(log2(n) / took, (n - 1) / n * nbytes / took) for n, nbytes, took in cells if nbytes >= middle]
    _, per_byte = nonnegative_least_squares(rows)
    rest = [
        max(0.0, took - (n - 1) / n * nbytes * per_byte) / log2(n)
        for n, nbytes, took in cells
        if nbytes <= middle
    ]
    return median(rest), 1 / max(per_byte, 1 / FASTEST)


def _listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))
