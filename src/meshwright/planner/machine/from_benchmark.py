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
from meshwright.comm.tuning.autoselect import predict_all_reduce_s
from meshwright.plan.hardware.cost_fit import nonnegative_least_squares
from meshwright.plan.hardware.device_profile import HALF_DTYPES, DeviceProfile
from meshwright.plan.hardware.device_specs import DeviceSpec, find_device, known_devices
from meshwright.plan.hardware.network_model import Cluster
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.efficiency import MachineRates, load_rates
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import matmul_seconds

FITTED_RATES = ("matmul", "half_rate_dim", "wave_tail")
RATE_BOUNDS = {"matmul": (1e-3, 2.0), "half_rate_dim": (1.0, 1e4), "wave_tail": (1e-3, 1.0)}
MIN_ACTIVATION_NBYTES = 1 << 20  # bytes of what lies between products, at least
MAX_BYTES_PER_S = 1e15  # bytes per second, where a byte costs nothing that could be measured


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
        memory_rate=streaming_rate(profile),
        link_rate=0.0,
        nic_rate=0.0,
        devices_per_host=0,
        num_compute_units=profile.threads,
        source=f"bench device, {profile.date}",
    )


def streaming_rate(profile: DeviceProfile) -> float:
    """Bytes per second of what passes through memory between products: on a CPU caches hold some of it, on a GPU none."""
    if profile.kind == "cuda":
        return profile.memory_ops[-1].bytes_per_s
    return median(
        [each.bytes_per_s for each in profile.memory_ops if each.nbytes >= MIN_ACTIVATION_NBYTES]
        or [profile.memory_ops[-1].bytes_per_s]
    )


def measured_rates(profile: DeviceProfile, device: DeviceSpec) -> MachineRates:
    """The shares of the peaks of `device` that `profile` found, of products and attention in 16 bits, memory and calls.

    Raises PlanError where nothing was measured in 16 bits: plans are chosen for it.
    """
    half = next((dtype for dtype in profile.dtypes if dtype in HALF_DTYPES), None)
    if half is None:
        text = f"products in {', '.join(profile.dtypes)} were measured, and plans are chosen for 16 bits"
        raise PlanError(text, fix="measure again: meshwright bench device", location="hardware")
    before = load_rates(device.name)
    memory = streaming_rate(profile) / device.memory_rate
    given = Machine(
        device,
        1,
        replace(before, memory=memory, kernel_start_s=profile.call_s, kernel_launch_s=profile.call_s),
    )
    given = replace(given, rates=_fit_matmul_rates(profile, given, half))
    seen = [each for each in profile.attention if each.dtype == half]
    flops = [
        4.0 * each.batch * each.num_heads * each.query_len * each.key_len * each.head_dim for each in seen
    ]
    long = sorted(zip(flops, seen, strict=True), key=lambda pair: pair[0])[len(seen) // 2 :]
    peak = given.peak_flops(half)
    forward = median(work / (each.forward_s * peak) for work, each in long)
    back = median(2.5 * work / (each.backward_s * peak) for work, each in long)
    return replace(given.rates, attention=forward, attention_backward=back / forward)


def _fit_matmul_rates(profile: DeviceProfile, machine: Machine, dtype: str) -> MachineRates:
    """The rates of products that explain those in `dtype`, those of a single matrix."""
    points = [each for each in profile.matmuls if each.dtype == dtype and each.batch == 1]

    def rates(place: Sequence[float]) -> MachineRates:
        return replace(
            machine.rates, **{name: exp(value) for name, value in zip(FITTED_RATES, place, strict=True)}
        )

    def off(place: Sequence[float]) -> list[float]:
        there = replace(machine, rates=rates(place))
        return [log(matmul_seconds(there, each.m, each.n, each.k, dtype) / each.seconds) for each in points]

    limits = [tuple(map(log, RATE_BOUNDS[name])) for name in FITTED_RATES]
    start = [(low + high) / 2 for low, high in limits]
    return rates(
        least_squares(off, start, bounds=tuple(zip(*limits, strict=True)), loss="soft_l1", f_scale=0.1).x
    )


def with_measured_links(machine: Machine, cluster: Cluster) -> tuple[Machine, tuple[str, ...]]:
    """`given` with the links that were measured, and what was taken from where, in words.

    Raises PlanError where `cluster` is another machine, or says nothing of links that `given` needs.
    """
    _check_same_machine(machine, cluster)
    known = machine.devices_per_host  # 0: nobody has said
    host = cluster.ranks_per_host or known or machine.num_devices
    inside = [
        ranks for ranks in cluster.ranks if not cluster.ranks_per_host or ranks <= cluster.ranks_per_host
    ]
    apart = [ranks for ranks in cluster.ranks if ranks not in inside]
    rates, device, notes = machine.rates, machine.device, []
    if not inside and cluster.network.intra_host is not None and cluster.ranks_per_host > 1:
        inside = [
            cluster.ranks_per_host
        ]  # not measured alone, but its price is known from the rounds that stay on a host
    if inside:
        latency_s, rate = _fit_link(cluster, inside)
        rates, device = replace(rates, link=1.0, latency_s=latency_s), replace(device, link_rate=rate)
        notes.append(
            f"links of a host: {rate / 1e9:.3g} GB/s and {1e6 * latency_s:.3g} us, among {_join_counts(inside)} ranks"
        )
    if apart:
        latency_s, rate = _fit_link(cluster, apart)
        hosts = max(apart) / host
        card = rate / host * machine.fabric_contention(hosts)
        latency_s = max(latency_s / 2, rates.latency_s if inside else 0.0)
        rates, device = replace(rates, nic=1.0, latency_s=latency_s), replace(device, nic_rate=card)
        notes.append(
            f"between hosts: {card / 1e9:.3g} GB/s per device, among {_join_counts(apart)} ranks on hosts of {host}"
        )
    elif machine.num_devices > host:
        if not device.nic_rate:
            text = (
                f"{machine.num_devices} devices on hosts of {host}, and links between hosts were not measured"
            )
            fix = "measure them: start `meshwright bench network` on several hosts; or say nic_gb_s in a [device] table"
            raise PlanError(text, fix=fix, location="--cluster")
        notes.append(
            f"between hosts nothing was measured: {device.nic_rate / 1e9:.3g} GB/s per device, as said of {device.name}"
        )
    if not inside and not device.link_rate:
        text = f"links inside a host were not measured (among {_join_counts(apart)} ranks on hosts of {host})"
        raise PlanError(
            text, fix="measure on one host too, or say link_gb_s in a [device] table", location="--cluster"
        )
    most = max(cluster.ranks)
    if machine.num_devices > most:
        notes.append(
            f"{most} ranks at most were measured: links of {machine.num_devices} are taken to be as fast"
        )
    device = replace(device, devices_per_host=host)
    return replace(machine, device=device, rates=rates, host_size_override=host), tuple(notes)


def _check_same_machine(machine: Machine, cluster: Cluster) -> None:
    named = find_device(cluster.machine)
    if machine.device in known_devices() and (named is None or named.name != machine.device.name):
        text = f"the links are those of {cluster.machine} (over {cluster.transport}), and the devices are {machine.device.name}"
        fix = "measure there: meshwright bench network; or describe a machine of yours in a [device] table"
        raise PlanError(text, fix=fix, location="--cluster")


def _fit_link(cluster: Cluster, rank_counts: Iterable[int]) -> tuple[float, float]:
    """Seconds per doubling of ranks, and bytes per second, of half a sum; long messages say the rate, short ones the latency."""
    cells = [
        (ranks, nbytes, predict_all_reduce_s(cluster, BACKEND, ranks, nbytes) / 2)
        for ranks in rank_counts
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
    return median(rest), 1 / max(per_byte, 1 / MAX_BYTES_PER_S)


def _join_counts(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))
