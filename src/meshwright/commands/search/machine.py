"""The machine of a search: what --hardware names, with the links of --cluster, corrected by the run of
--calibrate-from.
"""

from dataclasses import replace
from pathlib import Path

from meshwright.commands.search.run_calibration import ShapeLookup, calibrate_from_run
from meshwright.plan.job.errors import Diagnostic, PlanError, collect_diagnostics
from meshwright.planner.machine.from_benchmark import with_measured_links
from meshwright.planner.machine.machine import Machine, on_assumed_host
from meshwright.planner.machine.run_calibration import apply_calibration
from meshwright.planner.search.max_fit import MAX_DEVICES
from meshwright.run.measure.cluster_file import read_cluster
from meshwright.run.measure.hardware_file import find_profile, read_machine, with_host_links
from meshwright.run.measure.previous_run import read_previous_run


def search_machine(
    hardware: str, count: int, cluster: str, run: str, shape_lookup: ShapeLookup, *, for_max_fit: bool = False
) -> tuple[Machine, list[str]]:
    """Returns `count` devices of `hardware`, and notes on the sources of its data; `for_max_fit`, there may
    be more of them.

    `cluster` and `run` are paths of a cluster.toml and of a run, or "". `shape_lookup` returns the sizes of
    a model by its source and sequence length. Raises PlanError for everything unknown or contradictory.
    """
    diagnostics: list[Diagnostic] = []
    found = collect_diagnostics(diagnostics, read_machine, hardware, MAX_DEVICES if for_max_fit else count)
    links = collect_diagnostics(diagnostics, read_cluster, Path(cluster)) if cluster else None
    previous = collect_diagnostics(diagnostics, read_previous_run, Path(run)) if run else None
    if found is None or diagnostics:
        raise PlanError.from_diagnostics(diagnostics)
    notes: list[str] = []
    if links is not None:
        found, link_notes = with_measured_links(found, links)
        notes += link_notes
    found, assumed = on_assumed_host(found)
    notes += assumed
    found = with_host_links(found, hardware)
    profile = find_profile(hardware)
    if profile is not None and profile.kind == "cpu" and count > 1:
        measured_by = (
            f", of which {profile.ranks} were at work at once" if profile.ranks > 1 else ", measured alone"
        )
        notes.append(
            f"a device is {profile.threads} threads of {profile.device}{measured_by}: ranks of a host need "
            f"as many cores each"
        )
    if previous is not None:
        calibration = calibrate_from_run(Path(run), previous, found, shape_lookup)
        notes.append(f"calibrated with {calibration}")
        found = apply_calibration(found, calibration)
        if found.rates.matmul > 1:
            text = f"products would reach {100 * found.rates.matmul:.0f} % of the peak of {found.device.name}"
            notes.append(
                f"{text}: the run was on faster hardware, or the device was measured while it was busy"
            )
    return replace(found, num_devices=count), notes
