"""The error of a search without a result: what is missing, what comes closest, and a repair that works."""

from dataclasses import replace

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.planner.search.candidates import candidate_meshes, empty_search_diagnostic
from meshwright.planner.search.max_fit import fits
from meshwright.planner.search.offload_when_needed import offload_repair
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import SearchResult
from meshwright.report.search.search_result import axis_texts, to_gib

MAX_DOUBLINGS = 7  # of the devices that are tried


def no_result_error(request: SearchRequest, result: SearchResult) -> PlanError:
    """Returns the PlanError that says why `request` has no `result`."""
    shape, kind = request.shape, request.machine
    if result.nearest_miss is None:
        text = (
            f"no mesh of {kind.num_devices} devices takes {request.batch} samples of "
            f"{shape.name} with these choices"
        )
        diagnostic, data_ranks = (
            empty_search_diagnostic(request),
            sorted({mesh.dp for mesh in candidate_meshes(replace(request, batch=kind.num_devices))}),
        )
        if diagnostic is None and data_ranks and not any(request.batch % dp == 0 for dp in data_ranks):
            what = f"{request.batch} samples on {' or '.join(map(str, data_ranks))} data-parallel ranks"
            diagnostic = Diagnostic(
                what,
                "each takes as many samples: choose a batch of "
                f"{data_ranks[0] * (request.batch // data_ranks[0] + 1)}",
            )
        fix = (
            "fix fewer axes, or choose a batch that divides by the data-parallel ranks"
            if diagnostic is None
            else diagnostic.fix
        )
        return PlanError(
            text if diagnostic is None else f"{text}: {diagnostic.problem}", fix=fix, location="search"
        )
    config, kept = result.nearest_miss
    if kept.total <= request.usable_memory:  # then hosts are too small
        if not request.fits_on_disks(config):
            needed, has = map(to_gib, (request.disk_nbytes(config), kind.device.disk_space))
            text = f"no disk holds what the ranks of its host keep there: {needed:,.0f} GiB of {has:,.0f}"
            fix = "free more of it (disk_gb), use more hosts, or leave states in memory (--set offload)"
            return PlanError(text, fix=fix, location="search")
        needed, has = (to_gib(nbytes) for nbytes in (request.host_nbytes(config), kind.device.host_memory))
        text = f"no host holds what its ranks keep there: {needed:,.0f} GiB of {has:,.0f}"
        fix = "use more hosts, hosts with more memory (host_gb), or leave more on the devices (--set offload)"
        fix += "" if config.offload == "disk" else ", or states on disk (--set offload=disk)"
        return PlanError(text, fix=fix, location="search")
    text = (
        f"nothing fits: {shape.name} needs {to_gib(kept.total):.0f} GiB on the fullest device, and "
        f"{kind.device.name}"
    )
    nearest_axes = ", ".join(axis_texts(config)) or "one device"
    repairs = "; or ".join(filter(None, (_repair(request), offload_repair(request))))
    fix = f"{repairs}; the nearest configuration is {nearest_axes}"
    return PlanError(
        f"{text} has {to_gib(request.usable_memory):.0f} GiB available", fix=fix, location="search"
    )


def _repair(request: SearchRequest) -> str:
    """Finds the constraint in the way, or the number of devices (in doublings) that is enough, or says that
    none is.
    """
    count, batch = request.machine.num_devices, request.batch
    free = {axis: size for axis, size in request.fixed.items() if axis != "dp"}
    if request.fixed and fits(replace(request, fixed={})):
        return "fix fewer axes, without which something fits, or take devices with more memory"
    for doubled in range(1, MAX_DOUBLINGS + 1):
        many = count << doubled
        for rows in (batch, max(batch, many)):
            larger = replace(
                request,
                machine=replace(request.machine, num_devices=many),
                batch=rows,
                fixed=free,
                devices_by_kind=(),
            )
            if fits(larger):
                also = f" and {rows} samples" if rows != batch else ""
                also += ", dp not fixed" if "dp" in request.fixed else ""
                return f"more devices ({many}{also}), or ones with more memory"
    return (
        f"ones with more memory, or a smaller model or shorter samples: {count << MAX_DOUBLINGS:,} of "
        f"these devices are not enough"
    )
