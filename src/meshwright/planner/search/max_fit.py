"""Finds the largest batch, sequence or model that fits, and the fewest devices on which a model fits.

    batch       samples in flight at once: one microbatch per replica, and under pp one per pp rank. Further
                microbatches run one after the other, and memory does not limit them
    sequence    tokens of a sequence at the given batch, in steps of 1,024 (below that, of 64), up to the
                learned positions of the model
    layers      at the same hidden size
    devices     whole hosts, or parts of one, at the given batch

Most limits are found by bisection over the configurations of the search; samples on each mesh by itself,
because sequence parallelism needs divisible lengths. Devices are tried one count after the other, because
more of them may fit less well. So a configuration fits at the limit, and none fits one step beyond.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from meshwright.planner.analytic.closed_form_memory import MemoryEstimate, estimate_memory, memory_by_pp_rank
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    may_fit,
    with_microbatch_sizes,
)
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import Candidate, SearchResult, search

FIT_QUANTITIES = ("batch", "sequence", "layers", "devices")
SEARCH_LIMIT = 1 << 40  # no quantity is searched beyond it
MAX_DEVICES = 1 << 17


@dataclass(frozen=True)
class NearestMiss:
    """The configuration nearest to fitting one step beyond a limit, and the memory of its fullest rank."""

    config: ParallelConfig
    pp_rank: int
    memory: MemoryEstimate

    @property
    def largest_category(self) -> str:
        """The largest memory category of the device, without driver context and fragmentation."""
        categories: dict[str, float] = vars(self.memory)
        return max(
            (name for name in categories if name not in ("fragmentation", "driver_context", "host", "disk")),
            key=categories.__getitem__,
        )


@dataclass(frozen=True)
class MaxFit:
    """A limit: `value` of `quantity` fits, and `next_value` does not.

    `request` is the search at the limit, and `result` its best configurations. `nearest_miss` is the nearest
    configuration at `next_value`; None: no configuration is valid there. `best_sequential`: for the batch,
    the best configuration that may run its microbatches one after the other. `limited_by_positions`: not
    memory is the limit, but the learned positions of the model.
    """

    quantity: str
    value: int
    request: SearchRequest
    result: SearchResult
    next_value: int
    nearest_miss: NearestMiss | None
    best_sequential: Candidate | None = None
    limited_by_positions: bool = False


def find_max_fit(request: SearchRequest, quantity: str, num_kept: int = 3) -> MaxFit | None:
    """Returns the limit of `quantity`, one of FIT_QUANTITIES; None if not even the least fits."""
    return {"batch": _max_batch, "sequence": _max_sequence, "layers": _max_layers, "devices": _min_devices}[
        quantity
    ](request, num_kept)


def fits(request: SearchRequest) -> bool:
    """Returns whether any configuration fits."""
    return fitting_config(request) is not None


def fitting_config(request: SearchRequest) -> ParallelConfig | None:
    """Returns the first configuration that fits; None if none does."""
    found = (config for config in _min_batch_configs(request, fitting=True) if request.fits(config))
    return next(found, None)


def find_nearest_miss(request: SearchRequest) -> NearestMiss | None:
    """Returns the configuration that needs least memory; None if there is no configuration."""
    config = min(
        _min_batch_configs(request),
        key=lambda config: estimate_memory(request.shape, config).total,
        default=None,
    )
    return None if config is None else _miss_of(request, config)


def _miss_of(request: SearchRequest, config: ParallelConfig) -> NearestMiss:
    rank, memory = max(memory_by_pp_rank(request.shape, config), key=lambda each: each[1].total)
    return NearestMiss(config, rank, memory)


def _min_batch_configs(request: SearchRequest, *, fitting: bool = False) -> Iterator[ParallelConfig]:
    """All configurations with the smallest microbatch; if `fitting`, on meshes where one may fit."""
    for mesh in candidate_meshes(request):
        if not fitting or may_fit(request, mesh):
            yield from _min_batch_configs_on(request, mesh)


def _min_batch_configs_on(request: SearchRequest, mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    for sized in with_microbatch_sizes(request, mesh):
        configs = [config for config, _ in configs_on_mesh(request, sized)]
        yield from configs
        if configs:
            break


def _max_sequence(request: SearchRequest, num_kept: int) -> MaxFit | None:
    def request_for(tokens: int) -> SearchRequest:
        return replace(request, shape=replace(request.shape, sequence=tokens), min_tokens_per_rank=1)

    max_positions = request.max_positions
    if max_positions and fits(request_for(max_positions)):
        return MaxFit(
            "sequence",
            max_positions,
            request_for(max_positions),
            search(request_for(max_positions), num_kept),
            max_positions + 1,
            None,
            limited_by_positions=True,
        )
    for unit in (1024, 64):
        longest = 0
        for mesh in candidate_meshes(
            request_for(SEARCH_LIMIT)
        ):  # some length is divisible by every number of ranks
            for step in {unit, lcm(unit, mesh.tp * mesh.cp)}:
                longest = max(
                    longest,
                    _longest_sequence(request_for, mesh, step, longest, max_positions or SEARCH_LIMIT),
                )
        if longest:
            at_limit, beyond = request_for(longest), min(longest + unit, max_positions or SEARCH_LIMIT)
            return MaxFit(
                "sequence",
                longest,
                at_limit,
                search(at_limit, num_kept),
                beyond,
                find_nearest_miss(request_for(beyond)),
            )
    return None


def _longest_sequence(
    make_request: Callable[[int], SearchRequest], mesh: ParallelConfig, step: int, beyond: int, high: int
) -> int:
    """Returns the longest sequence on a mesh above `beyond` and below `high`; 0: none fits.

    Lengths are multiples of `step`. Sequence parallelism applies to lengths that tp and cp divide. These need
    less memory than shorter ones that they do not divide, so each kind is bisected by itself. A length of the
    other kind that happens to be divisible needs even less.
    """
    sized_mesh = replace(mesh, sequence_parallel=mesh.tp > 1 and step % (mesh.tp * mesh.cp) == 0)

    def enough(steps: int) -> bool:
        longer = make_request(steps * step)
        return (
            steps * step < high
            and may_fit(longer, sized_mesh)
            and any(_fits_memory(longer, config) for config in _min_batch_configs_on(longer, sized_mesh))
        )

    low = max(beyond, 2 * mesh.cp - 1) // step + 1
    return largest_number(enough, low) * step if enough(low) else 0


def _max_layers(request: SearchRequest, num_kept: int) -> MaxFit | None:
    def request_for(layers: int) -> SearchRequest:
        return replace(request, shape=replace(request.shape, layers=layers))

    min_layers = next(
        (layers for layers in range(1, 1 + max(1, request.fixed.get("pp", 8))) if fits(request_for(layers))),
        0,
    )
    if not min_layers:
        return None
    layers = largest_number(lambda layers: fits(request_for(layers)), min_layers)
    return MaxFit(
        "layers",
        layers,
        request_for(layers),
        search(request_for(layers), num_kept),
        layers + 1,
        find_nearest_miss(request_for(layers + 1)),
    )


def _max_batch(request: SearchRequest, num_kept: int) -> MaxFit | None:
    # the batch, the batch with one more sample per microbatch, and the configuration of the latter
    best: tuple[int, int, ParallelConfig] | None = None
    fixed_micro_batch = request.fixed.get("micro_batch")
    # every number of replicas divides this batch
    for mesh in candidate_meshes(replace(request, batch=request.machine.num_devices)):
        num_microbatches = mesh.pp
        for config, _ in configs_on_mesh(
            request, replace(mesh, micro_batch=fixed_micro_batch or 1, num_microbatches=num_microbatches)
        ):
            samples_per_unit = mesh.dp * num_microbatches
            min_micro_batch = best[0] // samples_per_unit + 1 if best else 1
            if fixed_micro_batch is None and _fits_memory(request, config, min_micro_batch):
                micro_batch = largest_number(partial(_fits_memory, request, config), min_micro_batch)
                best = (
                    micro_batch * samples_per_unit,
                    (micro_batch + 1) * samples_per_unit,
                    replace(config, micro_batch=micro_batch + 1),
                )
            elif (
                fixed_micro_batch is not None
                and fixed_micro_batch >= min_micro_batch
                and _fits_memory(request, config, fixed_micro_batch)
            ):
                best = (
                    fixed_micro_batch * samples_per_unit,
                    (fixed_micro_batch + 1) * samples_per_unit,
                    replace(config, micro_batch=fixed_micro_batch + 1),
                )
    if best is None:
        return None
    at_limit = replace(request, batch=best[0], single_wave=True)
    sequential = next(iter(search(replace(request, batch=best[0]), 1).best), None)
    return MaxFit(
        "batch",
        best[0],
        at_limit,
        search(at_limit, num_kept),
        best[1],
        _miss_of(request, best[2]),
        sequential,
    )


def _fits_memory(request: SearchRequest, config: ParallelConfig, micro_batch: float = 0) -> bool:
    return request.fits(replace(config, micro_batch=micro_batch or config.micro_batch))


def largest_number(enough: Callable[[int], bool], low: int) -> int:
    """Returns the largest number that satisfies `enough`, given that `low` does: doubling, then bisection."""
    high = 2 * low
    while high < SEARCH_LIMIT and enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _min_devices(request: SearchRequest, num_kept: int) -> MaxFit | None:
    def request_for(count: int) -> SearchRequest:
        return replace(request, machine=replace(request.machine, num_devices=count))

    devices_per_host = request.machine.devices_per_host
    weight_nbytes = request.shape.numel * 2  # bytes of the weights in 16 bits
    previous = 0
    for count in _device_counts(devices_per_host):
        if count * request.usable_memory < weight_nbytes:
            previous = count
            continue
        if fits(request_for(count)):
            at_limit = request_for(count)
            return MaxFit(
                "devices",
                count,
                at_limit,
                search(at_limit, num_kept),
                previous,
                find_nearest_miss(request_for(previous)) if previous else None,
            )
        previous = count
    return None


def _device_counts(devices_per_host: int) -> Iterator[int]:
    """Yields common numbers of devices: parts of a host, hosts, then multiples of hosts."""
    yield from (count for count in range(1, devices_per_host) if devices_per_host % count == 0)
    num_hosts = 1
    while num_hosts * devices_per_host <= MAX_DEVICES:
        yield num_hosts * devices_per_host
        num_hosts += max(1, 2 ** (num_hosts.bit_length() - 5))  # steps of at most a sixteenth
