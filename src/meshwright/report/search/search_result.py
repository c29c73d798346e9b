"""The result of a search as tables and text: the scenario, the ranking, why the first configuration wins."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.planner.analytic.closed_form_memory import (
    MemoryEstimate,
    estimate_memory,
    estimate_memory_at_most,
)
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.search.data_parallel_first import ESTIMATE_ERROR, DataParallelChoice
from meshwright.planner.search.request import USABLE_MEMORY_FRACTION, SearchRequest
from meshwright.planner.search.search import Candidate, SearchResult
from meshwright.report.search.assumptions_and_cost import (
    ACTIVATIONS_TEXT,
    OFFLOAD_TEXTS,
    TrainingBudget,
    assumptions,
    cost_table,
    cost_text,
    cost_values,
)
from meshwright.report.table import Column, Table

# categories of step time, and their texts
TIME_CATEGORIES = {
    "compute": "computation",
    "tp_comm": "communication within layers",
    "pipeline_wait": "pipeline bubble",
    "dp_comm": "data-parallel communication",
    "optimizer": "optimizer step",
    "host_copies": "copies to and from the host",
    "fixed": "fixed cost per step",
}
# categories of memory on the rank that uses most; what a block's backward needs counts as activations
MEMORY_CATEGORIES = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer_states": ("optimizer_states",),
    "residuals": ("residuals",),
    "activations": ("activations", "block_backward"),
    "gathered": ("gathered_params",),
    "loss": ("logits",),
    "margin": ("fragmentation", "driver_context"),
}


@dataclass(frozen=True)
class SearchAlternatives:
    """Configurations that the best one is compared with.

    Attributes:
        machines: the devices of each kind, where there are several kinds.
        without_memory_limit: the fastest configuration if memory were unlimited, where it is another one.
        swapped_placement_s: seconds of the best configuration, with tensor-parallel instead of data-parallel
            ranks across hosts, or the reverse.
        single_kind: the best configuration on the devices of one kind alone, per kind; None if nothing fits.
        data_parallel: data parallelism alone, for a model that fits on one device; None: not compared.
    """

    machines: tuple[Machine, ...] = ()
    without_memory_limit: Candidate | None = None
    swapped_placement_s: float | None = None
    single_kind: Sequence[tuple[Machine, Candidate | None]] = field(default_factory=tuple)
    data_parallel: DataParallelChoice | None = None


NO_ALTERNATIVES = SearchAlternatives()


def to_gib(nbytes: float) -> float:
    """Returns bytes in GiB."""
    return nbytes / 2**30


def search_view(
    request: SearchRequest,
    result: SearchResult,
    budget: TrainingBudget,
    alternatives: SearchAlternatives = NO_ALTERNATIVES,
) -> RenderableType:
    """Returns the whole result for the terminal."""
    values = search_dict(request, result, budget, alternatives)
    rows = values["configurations"]
    model = f"{request.shape.name}: {_numel_text(request.shape.numel)} parameters"
    cost = [Text("\n" + cost_text(rows[0], budget)), cost_table(rows, budget)] if budget.num_tokens else []
    return Group(
        Text(f"{model} on {_devices(request, alternatives)}", style="bold"),
        Text(values["scenario"]),
        Table.of_pairs(values["assumptions"]),
        "",
        _ranking(rows),
        _memory_table(rows),
        "",
        *map(Text, values["reasons"]),
        *cost,
    )


def search_dict(
    request: SearchRequest,
    result: SearchResult,
    budget: TrainingBudget,
    alternatives: SearchAlternatives = NO_ALTERNATIVES,
) -> dict[str, Any]:
    """Returns the result as plain values: the scenario, the reasons, and one entry per configuration."""
    return {
        "shape": asdict(request.shape),
        "device": request.machine.device.name,
        "devices": request.machine.num_devices,
        "batch": request.batch,
        "scenario": memory_scenario(request, alternatives.machines),
        "assumptions": dict(assumptions(request, alternatives.machines or [request.machine], budget)),
        "reasons": list(ranking_reasons(request, result, alternatives)),
        "num_estimated": result.num_estimated,
        "configurations": [result_row(request, each, budget, alternatives.machines) for each in result.best],
    }


def _devices(request: SearchRequest, alternatives: SearchAlternatives) -> str:
    several = len(alternatives.machines) > 1  # then the machine's name has the numbers
    return (
        request.machine.device.name
        if several
        else f"{request.machine.num_devices} {request.machine.device.name}"
    )


def memory_scenario(request: SearchRequest, machines: Sequence[Machine] = ()) -> str:
    """Returns whether the model fits on each device, on some device, or not even a layer on the largest."""
    one = ParallelConfig(micro_batch=1, num_microbatches=request.batch)
    usable = sorted(
        to_gib(USABLE_MEMORY_FRACTION * each.device.memory) for each in machines or [request.machine]
    )
    least, most = usable[0], usable[-1]
    whole = to_gib(estimate_memory(request.shape, one).total)
    if whole <= least:
        return (
            f"The model fits on each device ({whole:.1f} of {least:.1f} GiB with one sample): "
            f"data parallelism is possible."
        )
    if whole <= most:
        return (
            f"The model fits on at least one device ({whole:.1f} of {most:.1f} GiB with one sample), but "
            f"not on each ({least:.1f}): pipeline stages sized by memory, ZeRO, or data parallelism on the "
            f"large devices alone."
        )
    shape = replace(request.shape, layers=1, dense_layers=0)
    memory = estimate_memory(shape, one)
    single = to_gib(memory.total)
    if single <= most:
        return (
            f"The model does not fit on one device ({whole:.0f} GiB of {most:.1f}), but one layer does "
            f"({single:.1f}): pipeline or tensor parallelism, ZeRO or offload is needed."
        )
    largest = "the largest device" if most > least else "one device"
    text = (
        f"Not even one layer with its output and its optimizer states fits on {largest} "
        f"({single:.0f} GiB of {most:.1f})"
    )
    return f"{text}. {_oversized_parts(shape, memory, most)}"


def _oversized_parts(shape: ModelShape, memory: MemoryEstimate, most: float) -> str:
    layer = to_gib(memory.model_states) * shape.layer_numel / shape.numel
    tables, sample = to_gib(memory.model_states) - layer, to_gib(memory.total - memory.model_states)
    rest = _largest_category(replace(memory, weights=0.0, gradients=0.0, optimizer_states=0.0))
    text = (
        f"Parameters, gradients and optimizer states of the layer take {layer:.1f} GiB, those of embedding "
        f"and LM head {tables:.1f}; one sample of {shape.sequence:,} tokens adds {sample:.1f}, mostly {rest}"
    )
    states = "tensor parallelism or ZeRO"
    needs = {
        "the layer": (layer, states),
        "embedding and LM head": (tables, states),
        "the sample": (sample, "context parallelism or tensor parallelism"),
    }
    over = [f"{part} ({technique})" for part, (gib, technique) in needs.items() if gib > most]
    return f"{text}. To be sharded: {' and '.join(over) or 'any of these, because none is too large alone'}."


def ranking_reasons(
    request: SearchRequest, result: SearchResult, alternatives: SearchAlternatives = NO_ALTERNATIVES
) -> Iterator[str]:
    """Yields lines: the time of the first configuration by category, and what costs the others more."""
    best, choice = result.best[0], alternatives.data_parallel
    is_fastest = choice is None or not choice.is_first or choice.fastest.seconds >= best.seconds
    yield (
        f"{result.num_estimated} configurations were estimated. {config_text(best)} "
        f"{'is the fastest' if is_fastest else 'comes first'}: {_time_shares(best)}."
    )
    if choice is not None:
        yield from data_parallel_reason(request, choice)
    for number, other in enumerate(result.best[1:4], start=2):
        text = f"{number}. {config_text(other)} takes {_longer(other, best)}"
        yield f"{text}: {_differences(best, other)}."
    if alternatives.without_memory_limit is not None:
        faster = alternatives.without_memory_limit
        yield (
            f"Too large for the memory: {config_text(faster)} would be "
            f"{100 * (1 - faster.seconds / best.seconds):.1f} % faster, but needs "
            f"{to_gib(faster.memory.total):.0f} GiB of {to_gib(request.usable_memory):.1f}, mostly "
            f"{_largest_category(faster.memory)}."
        )
    if alternatives.swapped_placement_s is not None:
        more, other = (
            100 * (alternatives.swapped_placement_s / best.seconds - 1),
            "tensor-parallel" if best.config.tp_across_hosts else "data-parallel",
        )
        longer = "longer" if more > 0 else "less"
        yield (
            f"With {other} ranks next to each other on hosts instead, the first configuration takes "
            f"{abs(more):.1f} % {longer}."
        )
    for kind, other in alternatives.single_kind:
        text = f"The {kind.num_devices} {kind.device.name} alone"
        if other is None:
            yield f"{text}: nothing fits."
        else:
            yield (
                f"{text} take {other.seconds:.3g} s, "
                f"{100 * (other.seconds / best.seconds - 1):.0f} % longer: {config_text(other)}."
            )


def _longer(other: Candidate, best: Candidate) -> str:
    more = 100 * (other.seconds / best.seconds - 1)
    return f"{abs(more):.1f} % {'longer' if more > 0 else 'less'}" if abs(more) >= 0.05 else "as long"


def data_parallel_reason(request: SearchRequest, choice: DataParallelChoice) -> Iterator[str]:
    """Yields the reason why data parallelism alone comes first, or why it does not."""
    found, fastest, error = choice.candidate, choice.fastest, f"{100 * ESTIMATE_ERROR:.0f} %"
    if found is not None and choice.is_first:
        if fastest.seconds < found.seconds:
            yield (
                f"Data parallelism alone comes first: {config_text(fastest)} takes "
                f"{_longer(fastest, found)}, and estimates are off by {error}."
            )
        return
    text = "Data parallelism alone does not come first, although the model fits on one device"
    if found is not None:
        yield (
            f"{text}: {config_text(found)} takes {_longer(found, fastest)}, more than the {error} that "
            f"estimates are off by: {_differences(fastest, found)}."
        )
    elif not choice.batch_divides:
        yield (
            f"{text}: a batch of {request.batch:,} sequences does not divide by "
            f"{request.machine.num_devices:,} devices."
        )
    else:
        yield f"{text}: nothing of it fits as it is fixed."


def category_seconds(candidate: Candidate, category: str) -> float:
    """Returns the seconds of a step in one of `TIME_CATEGORIES`."""
    return float(vars(candidate.step)[category])


def category_nbytes(memory: MemoryEstimate, category: str) -> float:
    """Returns the bytes in one of `MEMORY_CATEGORIES`."""
    return float(sum(vars(memory)[each] for each in MEMORY_CATEGORIES[category]))


def _time_shares(best: Candidate) -> str:
    shares = [(category_seconds(best, part) / best.seconds, words) for part, words in TIME_CATEGORIES.items()]
    return ", ".join(
        f"{100 * share:.0f} % {words}" for share, words in sorted(shares, reverse=True) if share >= 0.005
    )


def _differences(best: Candidate, other: Candidate) -> str:
    """The change of each category in percent of the best one's step, largest first; then of memory."""
    changes = [
        ((category_seconds(other, part) - category_seconds(best, part)) / best.seconds, words)
        for part, words in TIME_CATEGORIES.items()
    ]
    shown = [
        f"{words} {100 * change:+.1f} %"
        for change, words in sorted(changes, key=lambda each: -each[0])
        if abs(change) > 5e-4
    ]
    more = to_gib(other.memory.total - best.memory.total)
    shown += [f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'} memory"] if abs(more) >= 0.05 else []
    return ", ".join(shown) or "no visible difference"


def _largest_category(memory: MemoryEstimate) -> str:
    categories = (category for category in MEMORY_CATEGORIES if category != "margin")
    return max(categories, key=lambda category: category_nbytes(memory, category)).replace("_", " ")


def axis_texts(config: ParallelConfig) -> list[str]:
    """Returns the axes with more than one rank, each with its size."""
    sizes = {"dp": config.dp, "ep": config.ep, "tp": config.tp, "pp": config.pp, "cp": config.cp}
    sizes["expert_tp"] = config.expert_tp
    folded = {"cp": config.ep_dispatch // config.ep_dp, "tp": config.ep_tp}
    among = " and ".join(axis for axis, size in folded.items() if size > 1)
    return [
        f"{axis} {size}" + (f" (also along {among})" if axis == "ep" and among else "")
        for axis, size in sizes.items()
        if size > 1
    ]


def config_text(candidate: Candidate) -> str:
    """Returns a configuration as one line: axes, techniques, schedule, micro-batches x sequences."""
    config = candidate.config
    words = axis_texts(config)
    words += [_attention(config)] if config.cp > 1 else []
    words += (
        [
            f"ZeRO {config.zero_stage}"
            + (f" over {config.zero_group_size} ranks" if config.zero_group_size else "")
        ]
        if config.zero_stage
        else []
    )
    stages = f" ({config.virtual_stages} virtual stages)" if config.virtual_stages > 1 else ""
    words += [candidate.schedule + stages] if candidate.schedule else []
    words += [
        {"none": "", "attention": "recompute attention", "layers": "recompute layers"}[config.recompute]
    ]
    words += [OFFLOAD_TEXTS[config.offload], ACTIVATIONS_TEXT if config.activation_offload else ""]
    words += [f"gradients as {config.compress} codes (lossy)" if config.compress else ""]
    words += [_layer_assignment_text(candidate)] if candidate.layer_assignment else []
    words += [
        f"{_count(config.num_microbatches, 'micro-batch', 'es')} x {_count(config.micro_batch, 'sequence')}"
    ]
    return ", ".join(word for word in words if word)


def _count(number: float, noun: str, plural: str = "s") -> str:
    return f"{number:g} {noun}{'' if number == 1 else plural}"


def _numel_text(numel: float) -> str:
    return f"{numel / 1e9:.3g} B" if numel >= 1e8 else f"{numel / 1e6:.3g} M"


def _attention(config: ParallelConfig) -> str:
    if config.ulysses_degree == 1:
        return "ring"
    return "Ulysses" if config.ulysses_degree == config.cp else f"Ulysses {config.ulysses_degree} + ring"


def _layer_assignment_text(each: Candidate) -> str:
    runs = [
        (kind, [count for _, count in group])
        for kind, group in groupby(each.layer_assignment, key=lambda each: each[0])
    ]
    texts = [
        f"{len(counts)} {kind} with {'/'.join(map(str, sorted(set(counts), reverse=True)))}"
        for kind, counts in runs
    ]
    return f"layers per pp rank: {', '.join(texts)}"


def result_row(
    request: SearchRequest, candidate: Candidate, budget: TrainingBudget, machines: Sequence[Machine] = ()
) -> dict[str, Any]:
    """Returns a configuration as plain values: seconds, bytes, shares of the step.

    With a budget also days, cost and energy.
    """
    tokens = request.batch * request.shape.sequence
    peak = sum(
        kind.num_devices * kind.peak_flops(candidate.config.dtype) for kind in machines or [request.machine]
    )
    row = {
        "configuration": asdict(candidate.config),
        "schedule": candidate.schedule,
        "name": config_text(candidate),
        "layer_assignment": list(candidate.layer_assignment),
        "is_lossy": candidate.config.is_lossy,
        "step_s": candidate.seconds,
        "tokens_per_s": tokens / candidate.seconds,
        "mfu": request.shape.flops(tokens) / (candidate.seconds * peak),
        "waiting": candidate.step.pipeline_wait / candidate.seconds,
        "exposed": (candidate.step.tp_comm + candidate.step.dp_comm) / candidate.seconds,
        "seconds": asdict(candidate.step),
        "bytes": {part: category_nbytes(candidate.memory, part) for part in MEMORY_CATEGORIES},
        "peak_bytes": candidate.memory.total,
        "host_bytes": request.host_nbytes(candidate.config),
        "disk_bytes": candidate.memory.disk,
        "peak_bytes_at_most": estimate_memory_at_most(request.shape, candidate.config).total,
    }
    if budget.num_tokens:
        idle_share = row["waiting"] + row["exposed"]
        row |= cost_values(row["tokens_per_s"], idle_share, machines or [request.machine], budget)
    return row


def _ranking(rows: Sequence[Mapping[str, Any]]) -> Table:
    return _number_rows(
        {
            "step_s": Column("s", "{:.3g}"),
            "tokens_per_s": Column("tokens/s", "{:,.0f}"),
            "mfu": Column("mfu %", _percent),
            "waiting": Column("bubble %", _percent),
            "exposed": Column("exposed comm %", _percent),
            "name": Column("configuration"),
        },
        rows,
    )


def _memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = {name: name for name in MEMORY_CATEGORIES} | {"optimizer_states": "states", "total": "total"}
    if not any(row["bytes"]["residuals"] for row in rows):
        del heads["residuals"]
    if any(row["peak_bytes_at_most"] > row["peak_bytes"] for row in rows):
        heads["at_most"] = "at most"
    if any(row["host_bytes"] for row in rows):
        heads["host"] = "each host"
    return _number_rows(
        {name: Column(head, _gib) for name, head in heads.items()},
        [
            {
                **row["bytes"],
                "total": row["peak_bytes"],
                "at_most": row["peak_bytes_at_most"],
                "host": row["host_bytes"],
            }
            for row in rows
        ],
        title="memory in GiB, on the rank that uses most",
    )


def _number_rows(columns: Mapping[str, Column], rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    cells = [(number, *(row[key] for key in columns)) for number, row in enumerate(rows, start=1)]
    return Table([Column("", "{}"), *columns.values()], cells, title=title)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _gib(nbytes: float) -> str:
    return f"{to_gib(nbytes):.1f}"
