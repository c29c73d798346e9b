"""What a search for a layout found, in words and tables: the scenario, the ranking,
why the first one wins.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.analytic.memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.search.request import USABLE_MEMORY_FRACTION, SearchRequest
from meshwright.planner.search.search import Candidate, SearchResult

# of a step, by what a reader can change
TIME_CATEGORIES = {
    "compute": "computing",
    "tp_comm": "communication within layers",
    "pipeline_wait": "the bubble along pp",
    "dp_comm": "communication of copies",
    "optimizer": "the optimizer",
    "fixed": "what every step takes",
}
# of the fullest rank, by what they are of; what a block's backward needs is counted with activations
MEMORY_CATEGORIES = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer_states": ("optimizer_states",),
    "activations": ("activations", "block_backward"),
    "gathered": ("gathered_params",),
    "loss": ("logits",),
    "margin": ("fragmentation", "driver_context"),
}


@dataclass(frozen=True)
class TrainingBudget:
    """What training on so many `tokens` costs, at `price` per device and hour; 0: not asked."""

    num_tokens: float = 0.0
    price_per_device_hour: float = 0.0


@dataclass(frozen=True)
class SearchAlternatives:
    """What a winner is compared with: the devices of each kind; the fastest layout if memory were no limit
    (`roomy`), where that
    is another one; seconds of the winner `turned`, copies inside hosts and tensor ranks across; each kind
    `alone`.
    """

    machines: tuple[Machine, ...] = ()
    without_memory_limit: Candidate | None = None
    swapped_placement_s: float | None = None
    single_kind: Sequence[tuple[Machine, Candidate | None]] = field(default_factory=tuple)


NO_ALTERNATIVES = SearchAlternatives()


def to_gib(nbytes: float) -> float:
    """Bytes in GiB."""
    return nbytes / 2**30


def search_view(
    request: SearchRequest,
    result: SearchResult,
    budget: TrainingBudget,
    alternatives: SearchAlternatives = NO_ALTERNATIVES,
) -> RenderableType:
    """All of it."""
    best = result.best[0]
    return Group(
        Text(
            (
                f"{request.shape.name}: {request.shape.numel / 1e9:.3g} B weights on "
                f"{_devices(request, alternatives)}"
            ),
            style="bold",
        ),
        Text(memory_scenario(request, alternatives.machines)),
        "",
        _table(request, result, alternatives.machines),
        "",
        Text("GiB of the fullest rank"),
        _memory_table(result),
        "",
        *(Text(line) for line in ranking_reasons(request, result, alternatives)),
        *(
            ["", Text(_cost_text(request, best, budget)), _cost_table(request, result, budget)]
            if budget.num_tokens
            else []
        ),
    )


def search_dict(
    request: SearchRequest,
    result: SearchResult,
    budget: TrainingBudget,
    alternatives: SearchAlternatives = NO_ALTERNATIVES,
) -> dict[str, Any]:
    """The same as plain values: the scenario, and a row per layout with seconds and bytes by
    where they go.
    """
    return {
        "shape": asdict(request.shape),
        "device": request.machine.device.name,
        "devices": request.machine.num_devices,
        "batch": request.batch,
        "scenario": memory_scenario(request, alternatives.machines),
        "reasons": list(ranking_reasons(request, result, alternatives)),
        "sketched": result.num_priced,
        "layouts": [result_row(request, each, budget, alternatives.machines) for each in result.best],
    }


def _devices(request: SearchRequest, alternatives: SearchAlternatives) -> str:
    several = len(alternatives.machines) > 1  # then the machine's name has the numbers
    return (
        request.machine.device.name
        if several
        else f"{request.machine.num_devices} {request.machine.device.name}"
    )


def memory_scenario(request: SearchRequest, machines: Sequence[Machine] = ()) -> str:
    """Which of the three it is (on each device, on one at least, not even a layer on the largest), and what
    follows.
    """
    one = ParallelConfig(micro_batch=1, num_microbatches=request.batch)
    rooms = sorted(
        to_gib(USABLE_MEMORY_FRACTION * each.device.memory) for each in machines or [request.machine]
    )
    least, most = rooms[0], rooms[-1]
    whole = to_gib(estimate_memory(request.shape, one).total)
    if whole <= least:
        return (
            f"Everything fits on each device ({whole:.1f} of {least:.1f} GiB): copies of it, "
            f"that sum their gradients."
        )
    if whole <= most:
        text = (
            f"Everything fits on at least one device ({whole:.1f} of {most:.1f} GiB), and "
            f"not "
            f"on each ({least:.1f})"
        )
        return f"{text}: layers dealt by memory, shares of states, or copies on the large ones alone."
    shape = replace(request.shape, layers=1)
    held = estimate_memory(shape, one)
    single = to_gib(held.total)
    if single <= most:
        text = (
            f"The model does not fit on a device ({whole:.0f} GiB of {most:.1f}), a layer of "
            f"it "
            f"does ({single:.1f})"
        )
        return f"{text}: layers on several devices, or shares of states."
    largest = "the largest device" if most > least else "a device"
    text = (
        f"Not even a layer with its output and its optimizer's states fits on {largest} "
        f"({single:.0f} GiB of {most:.1f})"
    )
    return f"{text}. {_oversized_parts(shape, held, most)}"


def _oversized_parts(shape: ModelShape, held: MemoryEstimate, most: float) -> str:
    """What of a layer, `held` with its tables and a row, is more than `most` GiB and has to be divided, and
    how.
    """
    layer = to_gib(held.model_states) * shape.layer_numel / shape.numel
    tables, row = to_gib(held.model_states) - layer, to_gib(held.total - held.model_states)
    rest = _largest_category(replace(held, weights=0.0, gradients=0.0, optimizer_states=0.0))
    text = (
        f"Its states are {layer:.1f} GiB, those of embedding and head {tables:.1f}; with a "
        f"row "
        f"of {shape.sequence:,} tokens"
    )
    text += f" come {row:.1f}, the most of them for {rest}"
    states = "matrices among tensor ranks, or shares of their states among copies"
    ways = {
        "the layer": (layer, states),
        "embedding and head": (tables, states),
        "the row": (row, "its tokens along cp, or what is computed of them among tensor ranks"),
    }
    over = [f"{part} ({way})" for part, (nbytes, way) in ways.items() if nbytes > most]
    return f"{text}. To be divided: {' and '.join(over) or 'any of these, as none is too much alone'}."


def ranking_reasons(
    request: SearchRequest, result: SearchResult, alternatives: SearchAlternatives = NO_ALTERNATIVES
) -> Iterator[str]:
    """Why the first layout wins, and what costs the others more: computing, the bubble, communication, or
    memory.
    """
    best = result.best[0]
    yield f"{result.num_priced} layouts were priced. {config_text(best)} wins: {_time_shares(best)}."
    for number, other in enumerate(result.best[1:4], start=2):
        more = 100 * (other.seconds / best.seconds - 1)
        longer = f"{more:.1f} % longer" if more >= 0.05 else "as long"
        yield f"{number}. {config_text(other)} takes {longer}: {_differences(best, other)}."
    if alternatives.without_memory_limit is not None:
        held, saved = (
            alternatives.without_memory_limit.memory,
            100 * (1 - alternatives.without_memory_limit.seconds / best.seconds),
        )
        text = (
            f"Memory stops {config_text(alternatives.without_memory_limit)}: {saved:.1f} % "
            f"faster, and {to_gib(held.total):.0f} "
            f"GiB"
        )
        yield f"{text} of {to_gib(request.usable_memory):.1f}, most of them {_largest_category(held)}."
    if alternatives.swapped_placement_s is not None:
        more, other = (
            100 * (alternatives.swapped_placement_s / best.seconds - 1),
            "tensor ranks" if best.config.tp_across_hosts else "copies",
        )
        longer = "longer" if more > 0 else "less"
        yield f"With {other} side by side on hosts instead the first one takes {abs(more):.1f} % {longer}."
    for kind, other in alternatives.single_kind:
        text = f"The {kind.num_devices} {kind.device.name} alone"
        if other is None:
            yield f"{text}: nothing fits."
        else:
            yield (
                f"{text} take {other.seconds:.3g} s, "
                f"{100 * (other.seconds / best.seconds - 1):.0f} "
                f"% longer: {config_text(other)}."
            )


def category_seconds(candidate: Candidate, category: str) -> float:
    """The seconds of a step that go to one of `PARTS`."""
    return float(vars(candidate.step)[category])


def category_nbytes(memory: MemoryEstimate, category: str) -> float:
    """The bytes that go to one of `HELD`."""
    return float(sum(vars(memory)[each] for each in MEMORY_CATEGORIES[category]))


def _time_shares(best: Candidate) -> str:
    shares = [(category_seconds(best, part) / best.seconds, words) for part, words in TIME_CATEGORIES.items()]
    return ", ".join(
        f"{100 * share:.0f} % {words}" for share, words in sorted(shares, reverse=True) if share >= 0.005
    )


def _differences(best: Candidate, other: Candidate) -> str:
    """What makes another one slower, in hundredths of the best one's step, largest first; what it saves; what
    it holds.
    """
    changes = [
        ((category_seconds(other, part) - category_seconds(best, part)) / best.seconds, words)
        for part, words in TIME_CATEGORIES.items()
    ]
    shown = [
        f"{words} {100 * change:+.1f}"
        for change, words in sorted(changes, key=lambda each: -each[0])
        if abs(change) > 5e-4
    ]
    more = to_gib(other.memory.total - best.memory.total)
    shown += [f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'}"] if abs(more) >= 0.05 else []
    return ", ".join(shown) or "nothing to be seen"


def _largest_category(held: MemoryEstimate) -> str:
    return max(
        (part for part in MEMORY_CATEGORIES if part != "margin"), key=lambda part: category_nbytes(held, part)
    )


def axis_texts(config: ParallelConfig) -> list[str]:
    """The axes of `layout` along which there is more than one rank, each with its size."""
    sizes = {"dp": config.dp, "tp": config.tp, "pp": config.pp, "cp": config.cp}
    return [f"{axis} {size}" for axis, size in sizes.items() if size > 1]


def config_text(candidate: Candidate) -> str:
    """A layout in a line."""
    layout = candidate.config
    words = axis_texts(layout)
    words += [_attention(layout)] if layout.cp > 1 else []
    words += (
        [f"ZeRO {layout.zero_stage}" + (f" among {layout.zero_group_size}" if layout.zero_group_size else "")]
        if layout.zero_stage
        else []
    )
    words += (
        [candidate.schedule + (f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else "")]
        if candidate.schedule
        else []
    )
    words += [{"none": "", "attention": "attention rerun", "layers": "layers rerun"}[layout.recompute]]
    words += [_layer_assignment_text(candidate)] if candidate.layer_assignment else []
    words += [f"{layout.num_microbatches:g} x {layout.micro_batch:g} rows"]
    return ", ".join(word for word in words if word)


def _attention(config: ParallelConfig) -> str:
    if config.ulysses_degree == 1:
        return "ring"
    return "Ulysses" if config.ulysses_degree == config.cp else f"Ulysses {config.ulysses_degree} in rings"


def _layer_assignment_text(each: Candidate) -> str:
    """The layers of ranks along pp, by kind."""
    runs = [
        (kind, [count for _, count in group])
        for kind, group in groupby(each.layer_assignment, key=lambda each: each[0])
    ]
    said = [
        f"{len(counts)} {kind} of {'/'.join(map(str, sorted(set(counts), reverse=True)))}"
        for kind, counts in runs
    ]
    return f"layers on {', '.join(said)}"


def result_row(
    request: SearchRequest, candidate: Candidate, budget: TrainingBudget, machines: Sequence[Machine] = ()
) -> dict[str, Any]:
    """What is known of a layout, as plain values: seconds, bytes, shares of the step; days and cost where
    they are asked for.
    """
    tokens = request.batch * request.shape.sequence
    peak = sum(
        kind.num_devices * kind.peak_flops(candidate.config.dtype) for kind in machines or [request.machine]
    )
    said = {
        "layout": asdict(candidate.config),
        "schedule": candidate.schedule,
        "name": config_text(candidate),
        "dealt": list(candidate.layer_assignment),
        "step_s": candidate.seconds,
        "tokens_per_s": tokens / candidate.seconds,
        "mfu": request.shape.flops(tokens) / (candidate.seconds * peak),
        "waiting": candidate.step.pipeline_wait / candidate.seconds,
        "exposed": (candidate.step.tp_comm + candidate.step.dp_comm) / candidate.seconds,
        "seconds": asdict(candidate.step),
        "bytes": {part: category_nbytes(candidate.memory, part) for part in MEMORY_CATEGORIES},
        "peak_bytes": candidate.memory.total,
    }
    if budget.num_tokens:
        hours = budget.num_tokens / said["tokens_per_s"] / 3600
        said["days"] = hours / 24
        said["hours_waiting"] = hours * (said["waiting"] + said["exposed"])
        said["cost"] = hours * request.machine.num_devices * budget.price_per_device_hour
        said["cost_of_waiting"] = said["cost"] * (said["waiting"] + said["exposed"])
    return said


def _table(request: SearchRequest, result: SearchResult, kinds: Sequence[Machine]) -> Table:
    table = _number_table("", "s", "tokens/s", "mfu %", "waits %", "sends %", "GiB")
    table.add_column("layout", overflow="fold")
    for number, each in enumerate(result.best, start=1):
        said = result_row(request, each, TrainingBudget(), kinds)
        figures = [f"{said['step_s']:.3g}", f"{said['tokens_per_s']:,.0f}"]
        figures += [f"{100 * said[part]:.1f}" for part in ("mfu", "waiting", "exposed")]
        table.add_row(str(number), *figures, f"{to_gib(each.memory.total):.1f}", config_text(each))
    return table


def _cost_table(request: SearchRequest, result: SearchResult, budget: TrainingBudget) -> Table:
    """What so many tokens cost under each layout, and how much of it is waiting."""
    table = _number_table(
        "", "days", "hours waiting", *(["cost", "of it waiting"] if budget.price_per_device_hour else [])
    )
    for number, each in enumerate(result.best, start=1):
        said = result_row(request, each, budget)
        paid = (
            [f"{said[part]:,.0f}" for part in ("cost", "cost_of_waiting")]
            if budget.price_per_device_hour
            else []
        )
        table.add_row(str(number), f"{said['days']:,.1f}", f"{said['hours_waiting']:,.1f}", *paid)
    return table


def _number_table(*heads: str) -> Table:
    """An empty table of figures, which are never cut."""
    table = Table(pad_edge=False, collapse_padding=True, box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _memory_table(result: SearchResult) -> Table:
    table = _number_table("", *MEMORY_CATEGORIES, "all")
    for number, each in enumerate(result.best, start=1):
        parts = [f"{to_gib(category_nbytes(each.memory, part)):.1f}" for part in MEMORY_CATEGORIES]
        table.add_row(str(number), *parts, f"{to_gib(each.memory.total):.1f}")
    return table


def _cost_text(request: SearchRequest, best: Candidate, budget: TrainingBudget) -> str:
    said = result_row(request, best, budget)
    text = (
        f"{budget.num_tokens:.3g} tokens take {said['days']:,.1f} days, "
        f"{said['hours_waiting']:,.0f} hours of them "
        f"waiting"
    )
    cost = (
        f" and cost {said['cost']:,.0f}, of which waiting {said['cost_of_waiting']:,.0f}"
        if budget.price_per_device_hour
        else ""
    )
    return f"{text}{cost}: along pp, and for what nothing hides of the sending."
