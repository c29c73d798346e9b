"""How far a machine goes: the largest batch, sequence or model that fits, and the fewest devices on which a
model does.

    batch       rows that go through at once: one micro-batch per copy, and along pp as many as ranks. More
                rows go through one
                behind the other, and no memory limits them
    sequence    tokens of a row, at the given batch, in steps of 1,024 (below that, of 64); no more than
                positions were learnt
    layers      of the same hidden size
    devices     whole hosts, or parts of one, at the given batch

Each is found by bisection (of rows, on each mesh by itself: tensor ranks divide tokens only where these come
out even), or by going through all where more of something may fit less well (devices that come out odd), over
the layouts of the search; so at the limit there is a layout that fits, and one step further none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from meshwright.planner.analytic.memory import MemoryEstimate, estimate_memory, memory_by_pp_rank
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    may_fit,
    with_micro_batches,
)
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import Candidate, SearchResult, search

FIT_QUANTITIES = ("batch", "sequence", "layers", "devices")
SEARCH_LIMIT = 1 << 40  # beyond which nobody looks
MAX_DEVICES = 1 << 17


@dataclass(frozen=True)
class NearestMiss:
    """The layout that comes nearest one step beyond a limit: on which rank along pp too much lies, and what
    it holds there.
    """

    config: ParallelConfig
    pp_rank: int
    memory: MemoryEstimate

    @property
    def largest_category(self) -> str:
        """The category that holds most of what a layout could spare: not what driver and allocator take."""
        held: dict[str, float] = vars(self.memory)
        return max(
            (name for name in held if name not in ("fragmentation", "driver_context")), key=held.__getitem__
        )


@dataclass(frozen=True)
class MaxFit:
    """How far it goes: `value` of `what` fits, and `beyond` does not (`stopped`; None: no layout comes out
    even there).

    `wish` is what was searched at the limit, and `found` the best layouts there; `apart` is the best one
    whose rows need not go through at once, where that is the limit. `learnt`: not memory stops it, but the
    positions that the model has learnt.
    """

    quantity: str
    value: int
    request: SearchRequest
    result: SearchResult
    next_value: int
    nearest_miss: NearestMiss | None
    best_sequential: Candidate | None = None
    limited_by_positions: bool = False


def find_max_fit(request: SearchRequest, quantity: str, keep: int = 3) -> MaxFit | None:
    """The limit of `what`, one of LIMITS, for all else as in `wish`; None where not even the least fits."""
    return {"batch": _max_batch, "sequence": _max_sequence, "layers": _max_layers, "devices": _min_devices}[
        quantity
    ](request, keep)


def fits(request: SearchRequest) -> bool:
    """Whether any layout fits."""
    return any(
        estimate_memory(request.shape, layout).total <= request.usable_memory
        for layout in _min_batch_configs(request, fitting=True)
    )


def find_nearest_miss(request: SearchRequest) -> NearestMiss | None:
    """Of all layouts, the one that holds least; None where there is none at all."""
    layout = min(
        _min_batch_configs(request),
        key=lambda layout: estimate_memory(request.shape, layout).total,
        default=None,
    )
    return None if layout is None else _miss_of(request, layout)


def _miss_of(request: SearchRequest, config: ParallelConfig) -> NearestMiss:
    rank, held = max(memory_by_pp_rank(request.shape, config), key=lambda each: each[1].total)
    return NearestMiss(config, rank, held)


def _min_batch_configs(request: SearchRequest, *, fitting: bool = False) -> Iterator[ParallelConfig]:
    """All layouts with the fewest rows at once; with `fitting` those on meshes where any may fit."""
    for mesh in candidate_meshes(request):
        if not fitting or may_fit(request, mesh):
            yield from _min_batch_configs_on(request, mesh)


def _min_batch_configs_on(request: SearchRequest, mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    """All layouts over a mesh with the fewest rows at once."""
    for sized in with_micro_batches(request, mesh):
        lean = [layout for layout, _ in configs_on_mesh(request, sized)]
        yield from lean
        if lean:
            break


def _max_sequence(request: SearchRequest, keep: int) -> MaxFit | None:
    def of(tokens: int) -> SearchRequest:
        return replace(request, shape=replace(request.shape, sequence=tokens), min_tokens_per_rank=1)

    most = request.max_positions
    if most and fits(of(most)):
        return MaxFit(
            "sequence", most, of(most), search(of(most), keep), most + 1, None, limited_by_positions=True
        )
    for unit in (1024, 64):
        longest = 0
        for mesh in candidate_meshes(of(SEARCH_LIMIT)):  # every number of ranks divides some row
            for step in {unit, lcm(unit, mesh.tp * mesh.cp)}:
                longest = max(longest, _longest_sequence(of, mesh, step, longest, most or SEARCH_LIMIT))
        if longest:
            there, beyond = of(longest), min(longest + unit, most or SEARCH_LIMIT)
            return MaxFit(
                "sequence", longest, there, search(there, keep), beyond, find_nearest_miss(of(beyond))
            )
    return None


def _longest_sequence(
    make_request: Callable[[int], SearchRequest], mesh: ParallelConfig, step: int, beyond: int, high: int
) -> int:
    """The longest row over a mesh that is longer than `beyond`, shorter than `most`, and comes in steps of
    `step`; 0: none fits.

    Tensor ranks divide tokens where these come out even: such rows hold less than shorter ones that do not,
    so that each kind is bisected by itself. A row of the other kind that happens to come out even fits all
    the more.
    """
    divided = replace(mesh, sequence_parallel=mesh.tp > 1 and step % (mesh.tp * mesh.cp) == 0)

    def enough(steps: int) -> bool:
        asked = make_request(steps * step)
        return (
            steps * step < high
            and may_fit(asked, divided)
            and any(_fits_memory(asked, layout) for layout in _min_batch_configs_on(asked, divided))
        )

    low = max(beyond, 2 * mesh.cp - 1) // step + 1
    return _bisect(enough, low) * step if enough(low) else 0


def _max_layers(request: SearchRequest, keep: int) -> MaxFit | None:
    def of(layers: int) -> SearchRequest:
        return replace(request, shape=replace(request.shape, layers=layers))

    least = next(
        (layers for layers in range(1, 1 + max(1, request.fixed.get("pp", 8))) if fits(of(layers))), 0
    )
    if not least:
        return None
    layers = _bisect(lambda layers: fits(of(layers)), least)
    return MaxFit(
        "layers", layers, of(layers), search(of(layers), keep), layers + 1, find_nearest_miss(of(layers + 1))
    )


def _max_batch(request: SearchRequest, keep: int) -> MaxFit | None:
    best: tuple[int, int, ParallelConfig] | None = (
        None  # rows of a step, rows of one more row per micro-batch, and the layout
    )
    given = request.fixed.get("micro")
    for mesh in candidate_meshes(
        replace(request, batch=request.machine.num_devices)
    ):  # every number of copies divides it
        micros = mesh.pp
        for layout, _ in configs_on_mesh(
            request, replace(mesh, micro_batch=given or 1, num_microbatches=micros)
        ):
            each = mesh.dp * micros
            least = best[0] // each + 1 if best else 1
            if given is None and _fits_memory(request, layout, least):
                rows = _bisect(partial(_fits_memory, request, layout), least)
                best = rows * each, (rows + 1) * each, replace(layout, micro_batch=rows + 1)
            elif given is not None and given >= least and _fits_memory(request, layout, given):
                best = given * each, (given + 1) * each, replace(layout, micro_batch=given + 1)
    if best is None:
        return None
    there = replace(request, batch=best[0], single_wave=True)
    freely = next(iter(search(replace(request, batch=best[0]), 1).best), None)
    return MaxFit("batch", best[0], there, search(there, keep), best[1], _miss_of(request, best[2]), freely)


def _fits_memory(request: SearchRequest, config: ParallelConfig, micro_batch: float = 0) -> bool:
    """Whether it fits, with so many `rows` at once (0: its own)."""
    return (
        estimate_memory(request.shape, replace(config, micro_batch=micro_batch or config.micro_batch)).total
        <= request.usable_memory
    )


def _bisect(enough: Callable[[int], bool], low: int) -> int:
    """The most of which there is `enough`, as there is of `low`: doubled until there is not, and bisected."""
    high = 2 * low
    while high < SEARCH_LIMIT and enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _min_devices(request: SearchRequest, keep: int) -> MaxFit | None:
    def of(count: int) -> SearchRequest:
        return replace(request, machine=replace(request.machine, num_devices=count))

    host = request.machine.devices_per_host
    states = request.shape.numel * 2  # bytes of nothing but weights, in 16 bits
    before = 0
    for count in _device_counts(host):
        if count * request.usable_memory < states:
            before = count
            continue
        if fits(of(count)):
            there = of(count)
            return MaxFit(
                "devices",
                count,
                there,
                search(there, keep),
                before,
                find_nearest_miss(of(before)) if before else None,
            )
        before = count
    return None


def _device_counts(host: int) -> Iterator[int]:
    """Numbers of devices that people have: parts of a host, then hosts; of many hosts,
    ever larger multiples.
    """
    yield from (count for count in range(1, host) if host % count == 0)
    hosts = 1
    while hosts * host <= MAX_DEVICES:
        yield hosts * host
        hosts += max(1, 2 ** (hosts.bit_length() - 5))  # steps of a sixteenth at most
