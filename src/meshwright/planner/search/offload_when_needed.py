"""Offload in a search: proposed where nothing fits without it, and priced only where the rates are known.

    nothing fits on the devices alone     the same search once more, with every mode that can be priced: in
                                          host memory, on disk where a host is too small, and activations on
                                          the host where the link hides their copies
    a mode is asked for (offload_modes)   that mode alone; unknown rates are refused
    a rate is not known                   the modes that need it are named, and get no seconds
    host memory is not known              what the ranks of a host keep there is said, and nothing is refused

A search that finds a configuration without offload does no more work than before: devices are faster than
the link to their host, and a host than its disk. `delay = 1` of offload is never proposed: its
numbers are not those of one device.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.plan.job.errors import format_nbytes
from meshwright.planner.analytic.offload_cost import priced_modes, rate_key, unknown_rates
from meshwright.planner.analytic.parallel_config import OFFLOAD_MODES, OffloadMode
from meshwright.planner.search.max_fit import fits
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import SearchResult, search

ON_DEVICES: tuple[OffloadMode, ...] = ("none",)


def search_or_offload(
    request: SearchRequest, num_kept: int = 10, activation_offload: tuple[bool, ...] = (False, True)
) -> tuple[SearchRequest, SearchResult]:
    """Returns the best configurations of `request`, with offload if nothing fits without, and the request
    that found them.

    `activation_offload`: whether activations may be proposed to rest in host memory.
    """
    found = search(request, num_kept)
    modes = priced_modes(request.machine)
    if found.best or request.offload_modes != ON_DEVICES or modes == ON_DEVICES:
        return request, found
    # on the devices alone nothing fits, and with activations on the host something may
    tried_modes = modes if any(activation_offload) else modes[1:]
    offloading = replace(request, offload_modes=tried_modes, activation_offload=activation_offload)
    tried = search(offloading, num_kept)
    return (offloading, tried) if tried.best else (request, found)


def unpriced_modes(request: SearchRequest) -> tuple[OffloadMode, ...]:
    """Returns the modes of offload that lack a rate."""
    known = priced_modes(request.machine)
    return tuple(mode for mode in OFFLOAD_MODES if mode not in known)


def unknown_rate_keys(request: SearchRequest) -> tuple[str, ...]:
    """Returns the keys of a [device] table that would give `unpriced_modes` a price."""
    return tuple(map(rate_key, unknown_rates(request.machine, OFFLOAD_MODES)))


def offload_notes(request: SearchRequest, result: SearchResult) -> Iterator[str]:
    """Yields why there is offload, what has no price, and what hosts of unknown memory keep."""
    best, machine = result.best[0], request.machine
    if not best.config.uses_host:
        return
    lacking = " and ".join(unknown_rate_keys(request))
    if len(request.offload_modes) > 1:
        where = "disk" if best.config.offload == "disk" else "host memory"
        yield f"nothing fits without offload to {where}"
    if lacking:
        modes = ", ".join(unpriced_modes(request))
        yield f"not priced, because {lacking} of {machine.device.name} is not known: offload {modes}"
    if best.config.offload == "disk" and not machine.device.disk_space:
        needed = format_nbytes(request.disk_nbytes(best.config))
        yield (
            f"the ranks of a host keep {needed} on its disk (disk_offload.folder), whose free space is not "
            f"known: write disk_gb in a [device] table"
        )
    if not machine.device.host_memory:
        needed = format_nbytes(request.host_nbytes(best.config))
        yield (
            f"the ranks of a host keep {needed} in its memory, which is not known: write host_gb in a "
            f"[device] table"
        )


def offload_repair(request: SearchRequest) -> str:
    """Returns what is missing for offload to make something fit: a rate, or memory of hosts; otherwise ""."""
    if request.offload_modes != ON_DEVICES:
        return ""
    return "; or ".join(_repairs(request))


def _repairs(request: SearchRequest) -> Iterator[str]:
    for mode in unpriced_modes(request):
        if fits(replace(request, offload_modes=(mode,))):
            keys = " and ".join(map(rate_key, unknown_rates(request.machine, (mode,))))
            where = "disk" if mode == "disk" else "host memory"
            yield f"offload to {where}, which fits and has no price: write {keys} in a [device] table"
            break
    has = request.machine.device.host_memory
    endless = replace(request.machine, device=replace(request.machine.device, host_memory=0.0))
    if has and fits(replace(request, machine=endless, offload_modes=OFFLOAD_MODES[1:])):
        yield f"hosts with more memory than {format_nbytes(has)}, to which offload would fit"
    free = request.machine.device.disk_space
    endless = replace(request.machine, device=replace(request.machine.device, disk_space=0.0))
    if free and fits(replace(request, machine=endless, offload_modes=("disk",))):
        yield f"disks with more than {format_nbytes(free)} free (disk_gb), to which offload would fit"
