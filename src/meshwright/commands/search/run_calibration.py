"""--calibrate-from: compares a run with the analytic estimate of its own plan.

The estimate is for the machine without the correction; the ratios of compute time and of message times
correct the machine (planner/machine/run_calibration.py).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshwright.commands.search.constraints import schedule_costs
from meshwright.parallel import STRATEGIES
from meshwright.plan.hardware.device_specs import DeviceSpec, find_device
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.sharding.mesh import Mesh, axes_with
from meshwright.plan.step.program import Transfer
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.run_calibration import RunCalibration
from meshwright.planner.program_cost.network_time import RatedNetworkTime
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request
from meshwright.run.config.plan_file import PLAN_FILE
from meshwright.run.measure.previous_run import PreviousRun, TimedCollective

WHERE = "--calibrate-from"


MODELED_STRATEGIES = (
    "batch_split",
    "ddp",
    "zero",
    "tensor_parallel",
    "sequence_parallel",
    "vocab_parallel",
    "ring",
    "ulysses",
    "hybrid_context_parallel",
    "pipeline",
    "activation_checkpointing",
)


MIN_MESSAGE_NBYTES = 1 << 16  # bytes of a message whose rate says something of a link


ShapeLookup = Callable[[str, int], ModelShape]


def calibrate_from_run(
    folder: Path, previous: PreviousRun, base_machine: Machine, shape_lookup: ShapeLookup
) -> RunCalibration:
    """Returns the ratio of measured to estimated compute and message time of the run in `folder` on
    `base_machine`.

    Raises PlanError when the run used another device, or its plan is outside the analytic model.
    """
    if not _is_kind(base_machine.device, previous.device):
        text = f"the run used {previous.device}, and the plan is for {base_machine.device.name}"
        fix = (
            "name a run on such a device, or plan for the device of the run; a [device] table "
            "says with `like` or `measured`"
        )
        raise PlanError(text, fix=f"{fix} which kind it is", location=WHERE)
    path = folder / PLAN_FILE
    if not path.is_file():
        raise PlanError(
            f"there is no {PLAN_FILE} in {folder}",
            fix="name the folder of a run of `meshwright train`",
            location=WHERE,
        )
    request = read_request(path, (), STRATEGIES)
    mesh = Mesh.infer(request.mesh)
    config = parallel_config_of(request, mesh)
    shape = shape_lookup(request.job.model.source, request.job.data.sequence)
    machine = replace(
        base_machine,
        num_devices=mesh.world_size,
        host_size_override=min(base_machine.devices_per_host, mesh.world_size),
    )
    planned = step_time(shape, config, machine)
    if previous.compute_s is None:
        factor = previous.step_s / planned.seconds
        return RunCalibration(
            str(folder),
            previous.num_steps,
            factor,
            factor if mesh.world_size > 1 else None,
            is_traced=mesh.world_size == 1,
        )
    computing = previous.compute_s / (planned.compute + planned.optimizer + planned.fixed)
    return RunCalibration(
        str(folder),
        previous.num_steps,
        computing,
        _sending(previous, mesh, machine),
        is_traced=True,
        crosses_hosts=mesh.world_size > base_machine.devices_per_host,
    )


def parallel_config_of(request: PlanRequest, mesh: Mesh) -> ParallelConfig:
    """Returns the parallel config of a plan's mesh and strategies. Raises PlanError where the analytic model
    has none.
    """
    fields = {strategy.name: strategy.as_dict() for strategy in request.strategies or ()}
    diagnostics = [
        Diagnostic(
            f"the run has '{name}', which `search` does not model",
            "calibrate with a run without it",
            WHERE,
        )
        for name in fields
        if name not in MODELED_STRATEGIES
    ]
    pipeline, zero = fields.get("pipeline", {}), fields.get("zero", {})
    schedule_profile = schedule_costs(pipeline.get("schedule", "1f1b"))
    if schedule_profile is None:
        text = f"the run's schedule is '{pipeline['schedule']}', which `search` does not model"
        diagnostics.append(Diagnostic(text, "calibrate with a run with 1f1b", WHERE))
    if diagnostics or schedule_profile is None:
        raise PlanError.from_diagnostics(diagnostics)
    dp, batch = mesh.group_size(axes_with("samples")), request.job.train.batch
    micro_batch = request.micro_batch or batch // dp
    grouped = bool(zero) and mesh.size("dp_replicate") > 1 and mesh.size("dp_shard") > 1
    return ParallelConfig(
        dp=dp,
        tp=mesh.size("tp"),
        pp=mesh.size("pp"),
        cp=mesh.size("cp"),
        zero_stage=zero.get("stage", 0),
        zero_group_size=mesh.size("dp_shard") if grouped else 0,
        ulysses_degree=mesh.size("cp")
        if "ulysses" in fields
        else fields.get("hybrid_context_parallel", {}).get("ulysses_degree", 1),
        virtual_stages=pipeline.get("virtual_stages") or (2 if schedule_profile.is_folded else 1),
        micro_batch=micro_batch,
        num_microbatches=batch // (dp * micro_batch),
        recompute="layers" if "activation_checkpointing" in fields else "none",
        sequence_parallel="sequence_parallel" in fields,
        schedule_profile=schedule_profile,
        dtype=request.job.precision.compute,
    )


def _is_kind(device: DeviceSpec, called: str) -> bool:
    """Whether the driver's name `called` is this kind of device. Names alone do not decide: "H200" is part
    of "GH200".
    """
    known = find_device(called)
    if known is None:
        return device.pattern == re.escape(called)
    bare = device.pattern == re.escape(
        device.name
    )  # a table without `like` and `measured`: its name is all that tells
    return known == find_device(device.name) if bare else known.pattern == device.pattern


def _sending(previous: PreviousRun, mesh: Mesh, machine: Machine) -> float | None:
    network = RatedNetworkTime(machine)
    found = [(each, mesh.peers(0, each.axes)) for each in previous.collectives]
    large = [(each, ranks) for each, ranks in found if len(ranks) > 1 and each.nbytes >= MIN_MESSAGE_NBYTES]
    planned = sum(network.seconds(_transfer(each), ranks) for each, ranks in large)
    return sum(each.seconds for each, _ in large) / planned if planned else None


def _transfer(message: TimedCollective) -> Transfer:
    return Transfer(message.collective, message.axes, int(message.nbytes))
