"""What a search says that found nothing: what is missing, what comes nearest, and a repair that works when it is followed."""

from dataclasses import replace

from meshwright.plan.job.errors import Fault, PlanError
from meshwright.planner.search.candidates import meshes, refused
from meshwright.planner.search.max_fit import fits
from meshwright.planner.search.request import Wish
from meshwright.planner.search.search import Found
from meshwright.report.search.search_result import axes, gib

DOUBLINGS = 7  # of the devices that are tried


def nothing(wish: Wish, found: Found) -> PlanError:
    """Why nothing is `found` for `wish`."""
    shape, kind = wish.shape, wish.machine
    if found.nearest is None:
        text = f"no mesh of {kind.count} devices takes {wish.batch} rows of {shape.name} as it is fixed"
        fault, copies = refused(wish), sorted({mesh.dp for mesh in meshes(replace(wish, batch=kind.count))})
        if fault is None and copies and not any(wish.batch % dp == 0 for dp in copies):
            what = f"{wish.batch} rows on {' or '.join(map(str, copies))} copies"
            fault = Fault(what, f"each copy takes as many: choose a batch of {copies[0] * (wish.batch // copies[0] + 1)}")
        fix = "fix fewer axes, or choose a batch that copies can share" if fault is None else fault.fix
        return PlanError(text if fault is None else f"{text}: {fault.what}", fix=fix, where="plan")
    layout, held = found.nearest
    text = f"nothing fits: {shape.name} needs {gib(held.total):.0f} GiB on the fullest device, and {kind.device.name}"
    nearest_axes = ", ".join(axes(layout)) or "one device"
    fix = f"{_repair(wish)}; the nearest layout is {nearest_axes}"
    return PlanError(f"{text} has {gib(wish.memory):.0f} to give", fix=fix, where="plan")


def _repair(wish: Wish) -> str:
    """What is fixed, where it is in the way; devices, in powers of two times as many; or that no number of them is enough."""
    count, batch = wish.machine.count, wish.batch
    free = {axis: size for axis, size in wish.fixed.items() if axis != "dp"}
    if wish.fixed and fits(replace(wish, fixed={})):
        return "fix fewer axes, without which something fits, or take devices with more memory"
    for doubled in range(1, DOUBLINGS + 1):
        many = count << doubled
        for rows in (batch, max(batch, many)):
            larger = replace(wish, machine=replace(wish.machine, count=many), batch=rows, fixed=free, kinds=())
            if fits(larger):
                also = f" and {rows} rows" if rows != batch else ""
                also += ", dp not fixed" if "dp" in wish.fixed else ""
                return f"more devices ({many}{also}), or ones with more memory"
    return f"ones with more memory, or a smaller model or shorter rows: {count << DOUBLINGS:,} of these devices are not enough"
