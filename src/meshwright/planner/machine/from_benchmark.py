"""A machine's rates from measurements of one of its devices, and of its links.

    device.toml     matmuls, attention, memory, calls of one device (planner/machine/device_profile.py)
    cluster.toml    all-reduces among a few ranks (plan/hardware/measured_cluster.py): rates and latencies

What no measurement covers keeps the values of the kind of device (machine_rates.py): memory passes between
matmuls, overlap. Efficiencies are relative to the maker's peaks, or to the best measurement if these are
unknown.

An all-reduce is a reduce-scatter and an all-gather of equal bytes, so each is half of it:

    seconds of an all-reduce of S bytes among n ranks / 2  =  latency log2(n)  +  (n - 1) / n S / rate
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log, log2
from statistics import median

from scipy.optimize import least_squares

from meshwright.comm.allreduce import BACKEND
from meshwright.comm.tuning.choose_size_rule import predict_all_reduce_s
from meshwright.plan.hardware.device_specs import DeviceSpec, find_device, known_devices
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.cost_fit import nonnegative_least_squares
from meshwright.planner.machine.device_profile import HALF_DTYPES, DeviceProfile
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.machine_rates import MachineRates, load_rates
from meshwright.planner.machine.roofline import matmul_seconds

HOST_FIGURES = ("host_link_rate", "disk_rate", "host_memory_rate", "host_memory")
FITTED_RATES = ("matmul", "half_rate_dim", "wave_tail")
RATE_BOUNDS = {"matmul": (1e-3, 2.0), "half_rate_dim": (1.0, 1e4), "wave_tail": (1e-3, 1.0)}
MIN_ACTIVATION_NBYTES = 1 << 20  # the smallest activation between matmuls
MAX_BYTES_PER_S = 1e15  # if the time per byte is too short to measure


def measured_device(profile: DeviceProfile) -> DeviceSpec:
    """Returns the measured device: the maker's figures if known, with what was measured of its host.

    Else its best measurements, with unknown links.
    """
    # a CPU is its own host: what leaves it for host memory stays in the same memory
    names = () if profile.kind == "cpu" else HOST_FIGURES
    host = {name: vars(profile)[name] for name in names if vars(profile)[name]}
    known = find_device(profile.device)
    if known is not None:
        return replace(known, **host)
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
        **host,
    )


def measured_codings(profile: DeviceProfile) -> dict[str, float]:
    """Returns the measured seconds of one gradient element, coded, summed and decoded, by codec."""
    return {each.operation: each.seconds for each in profile.codings}


def streaming_rate(profile: DeviceProfile) -> float:
    """Returns the bytes per second of memory operations between matmuls.

    Partly in caches on a CPU, not on a GPU.
    """
    if profile.kind != "cpu":
        return profile.memory_ops[-1].bytes_per_s
    return median(
        [each.bytes_per_s for each in profile.memory_ops if each.nbytes >= MIN_ACTIVATION_NBYTES]
        or [profile.memory_ops[-1].bytes_per_s]
    )


def measured_rates(profile: DeviceProfile, device: DeviceSpec) -> MachineRates:
    """Returns the efficiencies of matmuls and attention in 16 bits, memory and calls that `profile` found.

    Raises PlanError if nothing was measured in 16 bits: plans are chosen for it.
    """
    half_dtype = next((dtype for dtype in profile.dtypes if dtype in HALF_DTYPES), None)
    if half_dtype is None:
        text = (
            f"matmuls were measured in {', '.join(profile.dtypes)} only, and the search needs a 16-bit dtype"
        )
        raise PlanError(text, fix="measure again: meshwright bench device", location="hardware")
    prior = load_rates(device.name)
    memory = streaming_rate(profile) / device.memory_rate
    given = Machine(
        device,
        1,
        replace(prior, memory=memory, kernel_start_s=profile.call_s, kernel_launch_s=profile.call_s),
    )
    given = replace(given, rates=_fit_matmul_rates(profile, given, half_dtype))
    attention = [each for each in profile.attention if each.dtype == half_dtype]
    flops = [
        4.0 * each.batch * each.num_heads * each.query_len * each.key_len * each.head_dim
        for each in attention
    ]
    longest = sorted(zip(flops, attention, strict=True), key=lambda pair: pair[0])[len(attention) // 2 :]
    peak = given.peak_flops(half_dtype)
    forward = median(flops_done / (each.forward_s * peak) for flops_done, each in longest)
    backward = median(2.5 * flops_done / (each.backward_s * peak) for flops_done, each in longest)
    return replace(given.rates, attention=forward, attention_backward=backward / forward)


def _fit_matmul_rates(profile: DeviceProfile, machine: Machine, dtype: str) -> MachineRates:
    points = [each for each in profile.matmuls if each.dtype == dtype and each.batch == 1]

    def rates(point: Sequence[float]) -> MachineRates:
        return replace(
            machine.rates, **{name: exp(value) for name, value in zip(FITTED_RATES, point, strict=True)}
        )

    def errors(point: Sequence[float]) -> list[float]:
        candidate = replace(machine, rates=rates(point))
        return [
            log(matmul_seconds(candidate, each.m, each.n, each.k, dtype) / each.seconds) for each in points
        ]

    limits = [tuple(map(log, RATE_BOUNDS[name])) for name in FITTED_RATES]
    start = [(low + high) / 2 for low, high in limits]
    return rates(
        least_squares(errors, start, bounds=tuple(zip(*limits, strict=True)), loss="soft_l1", f_scale=0.1).x
    )


def with_measured_links(machine: Machine, cluster: Cluster) -> tuple[Machine, tuple[str, ...]]:
    """Returns `machine` with the measured links, and notes on their sources.

    Raises PlanError if `cluster` is another machine, or lacks links that `machine` needs.
    """
    _check_same_machine(machine, cluster)
    known_host_size = machine.devices_per_host  # 0: unknown
    ranks_per_host = cluster.ranks_per_host or known_host_size or machine.num_devices
    intra_host = [
        ranks for ranks in cluster.ranks if not cluster.ranks_per_host or ranks <= cluster.ranks_per_host
    ]
    inter_host = [ranks for ranks in cluster.ranks if ranks not in intra_host]
    rates, device, notes = machine.rates, machine.device, []
    if not intra_host and cluster.network.intra_host is not None and cluster.ranks_per_host > 1:
        # not measured alone, but known from the rounds that stay on a host
        intra_host = [cluster.ranks_per_host]
    if intra_host:
        latency_s, rate = _fit_link(cluster, intra_host)
        rates, device = replace(rates, link=1.0, latency_s=latency_s), replace(device, link_rate=rate)
        notes.append(
            f"links of a host: {rate / 1e9:.3g} GB/s and {1e6 * latency_s:.3g} us, among "
            f"{_join_counts(intra_host)} ranks"
        )
    if inter_host:
        latency_s, rate = _fit_link(cluster, inter_host)
        hosts = max(inter_host) / ranks_per_host
        nic_rate = rate / ranks_per_host * machine.fabric_contention(hosts)
        latency_s = max(latency_s / 2, rates.latency_s if intra_host else 0.0)
        rates, device = replace(rates, nic=1.0, latency_s=latency_s), replace(device, nic_rate=nic_rate)
        notes.append(
            f"between hosts: {nic_rate / 1e9:.3g} GB/s per device, among {_join_counts(inter_host)} ranks "
            f"on hosts of {ranks_per_host}"
        )
    elif machine.num_devices > ranks_per_host:
        if not device.nic_rate:
            text = (
                f"{machine.num_devices} devices on hosts of {ranks_per_host}, but links between hosts were "
                f"not measured"
            )
            fix = (
                "measure them: start `meshwright bench network` on several hosts; or set nic_gb_s in a "
                "[device] table"
            )
            raise PlanError(text, fix=fix, location="--cluster")
        notes.append(
            f"links between hosts were not measured: {device.nic_rate / 1e9:.3g} GB/s per device, the "
            f"figure of {device.name}"
        )
    if not intra_host and not device.link_rate:
        text = (
            f"links inside a host were not measured (among {_join_counts(inter_host)} ranks on hosts of "
            f"{ranks_per_host})"
        )
        raise PlanError(
            text, fix="measure on one host too, or set link_gb_s in a [device] table", location="--cluster"
        )
    max_ranks = max(cluster.ranks)
    if machine.num_devices > max_ranks:
        notes.append(
            f"at most {max_ranks} ranks were measured: links of {machine.num_devices} are assumed to be as "
            f"fast"
        )
    device = replace(device, devices_per_host=ranks_per_host)
    return replace(machine, device=device, rates=rates, host_size_override=ranks_per_host), tuple(notes)


def _check_same_machine(machine: Machine, cluster: Cluster) -> None:
    measured = find_device(cluster.machine)
    is_known = machine.device.name in [each.name for each in known_devices()]
    if is_known and (measured is None or measured.name != machine.device.name):
        text = (
            f"the links were measured on {cluster.machine} (over {cluster.transport}), but the devices are "
            f"{machine.device.name}"
        )
        fix = "run meshwright bench network on that machine, or describe your machine in a [device] table"
        raise PlanError(text, fix=fix, location="--cluster")


def _fit_link(cluster: Cluster, rank_counts: Iterable[int]) -> tuple[float, float]:
    """Seconds per doubling of ranks, and bytes per second, of half an all-reduce.

    Long messages determine the rate, short ones the latency.
    """
    cells = [
        (ranks, nbytes, predict_all_reduce_s(cluster, BACKEND, ranks, nbytes) / 2)
        for ranks in rank_counts
        for nbytes in cluster.sizes
    ]
    middle = median(nbytes for _, nbytes, _ in cells)
    rows = [
        (log2(n) / seconds, (n - 1) / n * nbytes / seconds)
        for n, nbytes, seconds in cells
        if nbytes >= middle
    ]
    _, per_byte = nonnegative_least_squares(rows)
    latencies = [
        max(0.0, seconds - (n - 1) / n * nbytes * per_byte) / log2(n)
        for n, nbytes, seconds in cells
        if nbytes <= middle
    ]
    return median(latencies), 1 / max(per_byte, 1 / MAX_BYTES_PER_S)


def _join_counts(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))
