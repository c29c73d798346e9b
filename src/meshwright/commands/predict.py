"""Predicts the step time of a plan: its own program on measured or known hardware, with the memory and bytes
of the plan.

`--hardware` names a kind of device, or a file of `bench device`; `--cluster` a file of `bench network`. A
device.toml that n processes of t threads measured on a CPU stands for hosts with n x t cores, which their
ranks share.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.plan.generation_program import Rollout
from meshwright.plan.hardware.device_specs import DeviceSpec
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.hardware.streams import Resource
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from meshwright.plan.plan import Plan
from meshwright.planner.machine.device_profile import DeviceProfile
from meshwright.planner.machine.from_benchmark import with_measured_links
from meshwright.planner.machine.machine import Machine, on_assumed_host
from meshwright.planner.program_cost.action_cost import forward_seconds
from meshwright.planner.program_cost.device_time import ExecutionTarget, RatedDeviceTime
from meshwright.planner.program_cost.generation_cost import GenerationPrediction, predict_generation
from meshwright.planner.program_cost.network_time import (
    MeasuredNetworkTime,
    NetworkTime,
    RatedNetworkTime,
    UnknownNetworkTime,
)
from meshwright.planner.program_cost.prediction import StepPrediction, predict_step
from meshwright.resolve_config import ResolvedRun
from meshwright.run.measure.cluster_file import read_cluster
from meshwright.run.measure.hardware_file import find_profile, read_machine

ATTENTION_BLOCK_KEYS = (
    512  # keys per block of torch's CPU kernel: shorter sequences are computed fully, whatever the mask
)
NOT_PREDICTED = (
    "seconds are not predicted without a device: --hardware h100, or --hardware device.toml, a file of "
    "`meshwright bench device`"
)
UNMEASURED_LINKS = (
    "the links between ranks are unknown, so messages take no time here: measure "
    "them (meshwright bench network)"
)


def predict_plan(plan: Plan, hardware: str, cluster: str) -> StepPrediction | None:
    """Predicts a step of `plan` on this hardware; None without `hardware`.

    Raises PlanError with every diagnostic of the hardware, for a dtype that was not measured, and for links
    of another machine.
    """
    return (
        predict_step(plan, prediction_hardware(hardware, cluster, plan.mesh.world_size)) if hardware else None
    )


def predict_rollout(
    plan: Plan, rollout: Rollout, cached_layers: Sequence[CachedLayer]
) -> GenerationPrediction | None:
    """Predicts `rollout` under `plan` on the hardware of its config; None if that names none."""
    if not plan.run.hardware:
        return None
    target = prediction_hardware(plan.run.hardware, plan.run.cluster, plan.mesh.world_size)
    return predict_generation(plan, target, rollout, cached_layers)


def prediction_hardware(hardware: str, cluster: str, world: int) -> ExecutionTarget:
    """Returns the hardware for `world` ranks. Raises PlanError with every diagnostic."""
    profile = find_profile(hardware)
    links = read_cluster(Path(cluster)) if cluster else None
    if profile is not None and profile.kind == "cpu":
        return _on_cores(profile, links, world)
    return _on_devices(read_machine(hardware, world), profile, links)


def with_forward_times(ready: ResolvedRun) -> ResolvedRun:
    """Returns `ready` with the predicted milliseconds of block calls in a `memory_budget` that has none, if
    the config names its hardware.
    """
    plan = ready.plan
    untimed = [each for each in plan.strategies if isinstance(each, MemoryBudget) and not each.forward_ms]
    if not untimed or not plan.run.hardware:
        return ready
    target = prediction_hardware(plan.run.hardware, plan.run.cluster, plan.mesh.world_size)
    seconds, calls = forward_seconds(plan, target), plan.model_spec.block_calls
    if not all(call in seconds for call in calls):
        return ready
    forward_ms, matmul_ms, attention_ms = (
        tuple(float(f"{1e3 * given.get(call, 0.0):.6g}") for call in calls)
        for given in (seconds, *(forward_seconds(plan, target, op) for op in ("matmul", "attention")))
    )
    copies_already = any(isinstance(each, ActivationOffload) for each in plan.strategies)
    timed = replace(
        untimed[0],
        forward_ms=forward_ms,
        matmul_ms=matmul_ms,
        attention_ms=attention_ms,
        host_gb_per_s=untimed[0].host_gb_per_s or (0.0 if copies_already else _host_gb_per_s(target)),
    )
    strategies = [timed if each == untimed[0] else each for each in plan.strategies]
    other = Plan.make(
        plan.job,
        plan.mesh,
        plan.model_spec,
        strategies,
        plan.micro_batch,
        plan.run,
        found=(),
        align_bytes=plan.align_bytes,
    )
    note = f"memory_budget: forward_ms of {len(calls)} block calls as predicted on {target.name}"
    if timed.offers_offload:
        note += f", which copies {timed.host_gb_per_s:g} GB/s to and from its host"
    return replace(ready, plan=other, notes=(*ready.notes, note))


def _host_gb_per_s(target: ExecutionTarget) -> float:
    """Returns the rate of the host link in 1e9 bytes per second; 0 if it is unknown, or if there is none: on
    cores, whose memory is that of the host.
    """
    rate = 0.0 if target.cores_per_host else target.copy_rates.get("host link", 0.0)
    return float(f"{rate / 1e9:.6g}")


def device_of(hardware: str, world: int) -> DeviceSpec | None:
    """Returns the device whose memory, and whose host, limit a plan; None without `hardware`.

    None also for cores that `bench device` measured, whose memory is a share of that of their host. Raises
    PlanError with every diagnostic.
    """
    profile = find_profile(hardware) if hardware else None
    if not hardware or (profile is not None and profile.kind == "cpu"):
        return None
    return read_machine(hardware, world).device


def _on_cores(profile: DeviceProfile, links: Cluster | None, world: int) -> ExecutionTarget:
    """Hosts whose ranks share the cores that were busy during the measurement."""
    cores = profile.ranks * profile.threads
    per_host = min(world, links.ranks_per_host) if links is not None and links.ranks_per_host else world
    threads = max(1, cores // per_host)
    notes = []
    if per_host > cores:
        notes.append(f"{per_host} ranks share {cores} cores: work at the same time slows down accordingly")
    if threads != profile.threads:
        text = (
            f"a rank has {threads} of its host's cores, and was measured with {profile.threads}: its "
            f"operations take"
        )
        notes.append(f"{text} {profile.threads / threads:.3g} times as long")
    network, link_notes = _network_time(links, world)
    slower = profile.threads / threads
    name = f"{profile.device}, {cores} cores"
    hosts = max(1, world // per_host)
    return ExecutionTarget(
        name,
        profile,
        network,
        False,
        cores,
        threads,
        slower,
        hosts,
        ATTENTION_BLOCK_KEYS,
        notes=(*notes, *link_notes),
        copy_rates=_copy_rates(profile),
    )


def _on_devices(machine: Machine, profile: DeviceProfile | None, links: Cluster | None) -> ExecutionTarget:
    network, notes = _network_time(links, machine.num_devices)
    if links is not None:
        machine, more = with_measured_links(machine, links)
        notes = (*notes, *more)
    else:
        machine, assumed = on_assumed_host(machine)
        if (
            machine.device.link_rate
            and machine.num_devices > 1
            and (machine.device.nic_rate or machine.num_devices <= machine.devices_per_host)
        ):
            network, notes = RatedNetworkTime(machine), assumed
    device_time = RatedDeviceTime(machine) if profile is None else profile
    return ExecutionTarget(
        machine.device.name,
        device_time,
        network,
        peak_flops=machine.device.flops,
        notes=notes,
        copy_rates=_copy_rates(machine.device) | (_copy_rates(profile) if profile else {}),
    )


def _copy_rates(device: DeviceSpec | DeviceProfile) -> dict[Resource, float]:
    """Bytes per second of copies within a rank, as far as they are known."""
    rates: dict[Resource, float] = {
        "host link": device.host_link_rate,
        "disk": device.disk_rate,
        "host memory": device.host_memory_rate,
    }
    return {resource: rate for resource, rate in rates.items() if rate}


def _network_time(links: Cluster | None, world: int) -> tuple[NetworkTime, tuple[str, ...]]:
    if links is None:
        return UnknownNetworkTime(), (UNMEASURED_LINKS,) if world > 1 else ()
    if world > max(links.ranks):
        return MeasuredNetworkTime(links), (
            f"{max(links.ranks)} ranks at most were measured together: of more the model of the links says",
        )
    return MeasuredNetworkTime(links), ()
