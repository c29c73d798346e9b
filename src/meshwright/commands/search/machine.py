"""The machine of a plan that is to be chosen: what --hardware names, with the links of --cluster, as --calibrate-from taught.

A run teaches by its own plan: it is sketched as the search sketches plans, on the machine as it is known without the run, and
what its steps took is held against that (planner/learnt.py).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshwright.commands.search.constraints import order_of
from meshwright.parallel import STRATEGIES
from meshwright.plan.hardware.device_specs import Device, find_device
from meshwright.plan.job.errors import Fault, PlanError, gathered
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.action import Transfer
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.analytic.step_time import step
from meshwright.planner.machine.from_benchmark import with_cluster
from meshwright.planner.machine.from_run import Learnt, taught
from meshwright.planner.machine.machine import Machine
from meshwright.planner.program_cost.network_time import ByRates
from meshwright.planner.search.max_fit import MOST_DEVICES
from meshwright.run.config.config_file import Request, read_request
from meshwright.run.measure.hardware_lookup import linked, machine_of, profile_in
from meshwright.run.measure.network_profile import read_cluster
from meshwright.run.measure.past_run import Message, Past, past

PLAN = "plan.toml"
WHERE = "--calibrate-from"
SKETCHED = ("batch", "replicate", "zero", "line", "sequence", "vocabulary", "ring", "ulysses", "hybrid", "pipeline", "recompute")
LEAST = 1 << 16  # bytes of a message whose rate says something of a link


Shapes = Callable[[str, int], Shape]


def machine_for(
    hardware: str, count: int, cluster: str, run: str, shapes: Shapes, *, more: bool = False
) -> tuple[Machine, list[str]]:
    """`count` devices of what `hardware` names, and in words what was taken from where; with `more`, there may be more of them.

    `cluster` and `run` are paths of a cluster.toml and of a run, "": none. `shapes` gives the sizes of a model by its source and
    the tokens of a row. Raises PlanError for what is not known, or does not fit.
    """
    faults: list[Fault] = []
    found = gathered(faults, machine_of, hardware, MOST_DEVICES if more else count)
    links = gathered(faults, read_cluster, Path(cluster)) if cluster else None
    was = gathered(faults, past, Path(run)) if run else None
    if found is None or faults:
        raise PlanError.of(faults)
    notes: list[str] = []
    if links is not None:
        found, said = with_cluster(found, links)
        notes += said
    found = linked(found, hardware)
    profile = profile_in(hardware)
    if profile is not None and profile.kind == "cpu" and count > 1:
        beside = f", of which {profile.ranks} were at work at once" if profile.ranks > 1 else ", measured alone"
        notes.append(
            f"a device is {profile.threads} threads of {profile.device}{beside}: ranks of a host need as many cores each"
        )
    if was is not None:
        learnt = learn(Path(run), was, found, shapes)
        notes.append(f"learnt from {learnt}")
        found = taught(found, learnt)
        if found.rates.product > 1:
            text = f"products would reach {100 * found.rates.product:.0f} % of the peak of {found.device.name}"
            notes.append(f"{text}: the run was on faster hardware, or the device was measured while it was busy")
    return replace(found, count=count), notes


def learn(folder: Path, was: Past, given: Machine, shapes: Shapes) -> Learnt:
    """How much longer than planned on `given` the run in `folder`, as it `was`, computed and sent.

    Raises PlanError when it computed on another device, or has a plan that is not sketched.
    """
    if not _is(given.device, was.device):
        text = f"the run computed on {was.device}, and the plan is for {given.device.name}"
        fix = "name a run on such a device, or plan for the device of the run; a [device] table says with `like` or `measured`"
        raise PlanError(text, fix=f"{fix} which kind it is", where=WHERE)
    path = folder / PLAN
    if not path.is_file():
        raise PlanError(f"there is no {PLAN} in {folder}", fix="name the folder of a run of `meshwright train`", where=WHERE)
    request = read_request(path, (), STRATEGIES)
    mesh = Mesh.infer(request.mesh)
    layout = layout_of(request, mesh)
    shape = shapes(request.job.model.source, request.job.data.sequence)
    machine = replace(given, count=mesh.world, per_host=min(given.host, mesh.world))
    planned = step(shape, layout, machine)
    if was.computed_s is None:
        factor = was.step_s / planned.seconds
        return Learnt(str(folder), was.steps, factor, factor if mesh.world > 1 else None, apart=mesh.world == 1)
    computing = was.computed_s / (planned.compute + planned.optimizer + planned.fixed)
    return Learnt(str(folder), was.steps, computing, _sending(was, mesh, machine), apart=True, between=mesh.world > given.host)


def layout_of(request: Request, mesh: Mesh) -> Layout:
    """The layout that a plan's mesh and strategies are, as a search would sketch it. Raises PlanError where it would not."""
    fields = {strategy.name: strategy.as_dict() for strategy in request.strategies or ()}
    faults = [
        Fault(f"the run has '{name}', which plans that are chosen do not have", "learn from a run without it", WHERE)
        for name in fields
        if name not in SKETCHED
    ]
    pipeline, zero = fields.get("pipeline", {}), fields.get("zero", {})
    order = order_of(pipeline.get("schedule", "1f1b"))
    if order is None:
        text = f"the run's schedule is '{pipeline['schedule']}', which plans that are chosen do not have"
        faults.append(Fault(text, "learn from a run with 1f1b", WHERE))
    if faults or order is None:
        raise PlanError.of(faults)
    dp, batch = mesh.size("dp_replicate") * mesh.size("dp_shard"), request.job.train.batch
    rows = request.micro_batch or batch // dp
    grouped = bool(zero) and mesh.size("dp_replicate") > 1 and mesh.size("dp_shard") > 1
    return Layout(
        dp=dp,
        tp=mesh.size("tp"),
        pp=mesh.size("pp"),
        cp=mesh.size("cp"),
        shards=zero.get("stage", 0),
        within=mesh.size("dp_shard") if grouped else 0,
        swaps=mesh.size("cp") if "ulysses" in fields else fields.get("hybrid", {}).get("inner", 1),
        chunks=pipeline.get("chunks") or (2 if order.folded else 1),
        micro_batch=rows,
        micros=batch // (dp * rows),
        reruns="layers" if "recompute" in fields else "none",
        sequence="sequence" in fields,
        order=order,
        dtype=request.job.precision.compute,
    )


def _is(device: Device, called: str) -> bool:
    """Whether a driver calls the kind of `device` so; names do not tell: H200 is a part of GH200, and people give their own."""
    known = find_device(called)
    if known is None:
        return device.pattern == re.escape(called)
    bare = device.pattern == re.escape(device.name)  # a table without `like` and `measured`: its name is all that tells
    return known == find_device(device.name) if bare else known.pattern == device.pattern


def _sending(was: Past, mesh: Mesh, machine: Machine) -> float | None:
    """How many times as long as planned the messages of a run took; None where it sent none that says something of a link."""
    wire = ByRates(machine)
    found = [(each, mesh.peers(0, each.axes)) for each in was.messages]
    large = [(each, ranks) for each, ranks in found if len(ranks) > 1 and each.nbytes >= LEAST]
    planned = sum(wire.seconds(_transfer(each), ranks) for each, ranks in large)
    return sum(each.seconds for each, _ in large) / planned if planned else None


def _transfer(message: Message) -> Transfer:
    return Transfer(message.collective, message.axes, int(message.nbytes))
