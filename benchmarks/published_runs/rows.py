"""Reads published runs: a row of a table becomes a model shape, a layout and a machine.

    published_runs.csv     1,321 rows that others measured, each with its source: a paper, a repository at a
                           commit, a page

What a row does not state is filled in with the defaults of its source (layouts.py), or the row is skipped and
counted under the reason: experts, states on the host, unknown devices, no batch, no time. FLOP conventions
differ by source: the time of a step is stated, or follows from tokens per second, or from the model FLOP/s
that were converted to one convention; if a source prints hardware FLOPs by a known formula of its own
(times.py), from those.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path

from benchmarks.published_runs.experts import expert_layout, expert_shape
from benchmarks.published_runs.layouts import MissingInfo, layout_of, with_assumed_recompute
from benchmarks.published_runs.machines import machine_of
from benchmarks.published_runs.times import seconds_of
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine

RUNS = Path(__file__).parents[1] / "data" / "published_runs.csv"
GIB, GB = 2**30, 1e9

SIZES = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "gpus",
    "dp",
    "tp",
    "pp",
    "cp",
    "virtual_stages",
)
SIZES += ("micro_batch", "global_batch", "grad_accum", "step_time_s")
ZERO_IS_UNKNOWN = ("kv_heads", "ffn", "vocab", "virtual_stages")  # columns in which 0 means unknown
UNGATED_MODELS = ("gpt", "mpt", "opt")  # models whose MLP has no gate


@dataclass(frozen=True)
class Run:
    """A row: its source, shape, layout and machine, and the measurements; `seconds` is None if it states no
    time.

    `peak` is in bytes, `metric` the tool that measured it; `full_source` is the source in full, `precision`
    the text of that column.
    """

    key: str
    source: str
    shape: ModelShape
    layout: ParallelConfig
    machine: Machine
    seconds: float | None
    status: str
    peak: float | None
    metric: str
    full_source: str = ""
    precision: str = ""

    @property
    def group(self) -> str:
        """Source, model and number of devices: the rows of a group are all fitted on, or all scored."""
        return f"{self.source}|{self.shape.name}|{self.machine.num_devices}"

    @property
    def fitted(self) -> bool:
        """Whether constants may be fitted on it: half of the groups, by a hash."""
        return sha256(self.group.encode()).digest()[0] % 2 == 0


@dataclass(frozen=True)
class Skipped:
    """A row that is not scored, and why."""

    key: str
    source: str
    why: str


def read_runs(file: Path = RUNS, *, experts: bool = False) -> tuple[list[Run], list[Skipped]]:
    """Returns the rows of `file` that the planner can predict, and those that are skipped.

    `experts`: the models with experts, and not those without.
    """
    runs, skipped = [], []
    with file.open(encoding="utf-8", newline="") as lines:
        for number, read in enumerate(csv.DictReader(lines), start=2):
            row = {
                name: text for name, text in read.items() if isinstance(name, str) and isinstance(text, str)
            }
            key, source = row.get("row_id") or f"line {number}", _source(row.get("source", ""))
            try:
                runs.append(_run(key, source, row, experts=experts))
            except MissingInfo as missing:
                skipped.append(Skipped(key, source, str(missing)))
    return runs, skipped


def _source(text: str) -> str:
    """Returns the short name of a source: its author or repository, without the file and the version."""
    first = re.split(
        (
            r" data/| scripts/| train/| experiments/| docs/| docs | benchmarks/| validation/| \(| "
            r"et "
            r"al| v2| README"
        ),
        text,
    )[0]
    return first.strip() or "?"


def _number(row: Mapping[str, str], column: str) -> float | None:
    try:
        value = float(row.get(column) or "")
    except (TypeError, ValueError):
        return None
    return value if isfinite(value) else None


def _run(key: str, source: str, row: Mapping[str, str], *, experts: bool) -> Run:
    if ((_number(row, "n_experts") or 0) > 1) != experts:
        raise MissingInfo("no experts" if experts else "experts, which planner_experts scores")
    if "single transformer layer" in row.get("notes", ""):
        raise MissingInfo("the time of one layer, and of no step")
    if "ffload" in row.get("zero_fsdp", ""):
        raise MissingInfo("memory of the host, which is not built yet")
    machine = machine_of(row.get("hardware", ""))
    if machine is None:
        raise MissingInfo(f"a device that is not known: {row.get('hardware')!r}")
    _check_sizes(row)
    shape, numbers = _shape(row), {name: _number(row, name) for name in row}
    layout = layout_of(source, row, shape, numbers, machine.devices_per_host)
    if experts:
        layout = expert_layout(row, layout, int(numbers.get("ep") or 1))
    if faults := [fault.problem for fault in shape.diagnostics()]:
        raise MissingInfo(faults[0])
    if layout.pp > shape.layers:
        raise MissingInfo(f"pp {layout.pp} for {shape.layers} layers")
    count = int(numbers.get("gpus") or layout.num_ranks)
    seconds = seconds_of(row, numbers, shape, layout, count)
    peak, metric = numbers.get("peak_mem"), row.get("mem_metric", "")
    binary = any(
        word in metric for word in ("nvidia-smi", "Table")
    )  # MiB / 1024, although the unit is called GB
    unit = GIB if binary else {"GiB": GIB, "GB": GB, "MiB": 2**20}.get(row.get("mem_unit", ""), GB)
    peak_nbytes = None if peak is None else peak * unit
    machine = replace(machine, num_devices=count)
    layout = with_assumed_recompute(row, shape, layout, machine)
    if machine.device.peak(layout.dtype.partition("_")[0]) is None and layout.dtype.startswith("float"):
        raise MissingInfo(f"a device without {layout.dtype.partition('_')[0]}")
    tokens = layout.num_microbatches * layout.micro_batch * layout.dp * shape.sequence
    if seconds and shape.flops(tokens) / 1.15 > seconds * count * machine.peak_flops(
        layout.dtype.partition("_")[0]
    ):
        raise MissingInfo("faster than the peak of its devices: its batch or its time is of another run")
    status, full_source, precision = row.get("status", "ok"), row.get("source", ""), row.get("precision", "")
    return Run(
        key, source, shape, layout, machine, seconds, status, peak_nbytes, metric, full_source, precision
    )


def _check_sizes(row: Mapping[str, str]) -> None:
    """Raises MissingInfo if a size is not a valid number: it would be taken for an unknown one."""
    for column in SIZES:
        text, number = row.get(column, "").strip(), _number(row, column)
        least = 1 if column not in ("micro_batch", "step_time_s") else 1e-9
        if (
            text.strip("?-")
            and text != "MLA"  # latent attention: expert_shape
            and (number is None or number < least)
            and not (column in ZERO_IS_UNKNOWN and number == 0)
        ):
            raise MissingInfo(f"{column} is '{text}', no number above 0")


def _shape(row: Mapping[str, str]) -> ModelShape:
    sizes = {
        name: _number(row, name)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "params_b")
    }
    missing_columns = [name for name in ("layers", "hidden", "heads", "seq_len") if not sizes[name]]
    if missing_columns:
        raise MissingInfo(f"no {', '.join(missing_columns)}")
    plain = ModelShape(
        name=row.get("model", ""),
        layers=int(sizes["layers"] or 0),
        hidden=int(sizes["hidden"] or 0),
        heads=int(sizes["heads"] or 0),
        kv_heads=int(sizes["kv_heads"] or 0),
        ffn=int(sizes["ffn"] or 0),
        vocab=int(sizes["vocab"] or 51200),
        sequence=int(sizes["seq_len"] or 0),
    )
    experts, top_k = _number(row, "n_experts") or 0, _number(row, "top_k") or 0
    if experts > 1:
        return expert_shape(row, plain, int(experts), int(top_k))
    gated, num_params = replace(plain, gated=True), (sizes["params_b"] or 0) * 1e9
    name = plain.name.lower()
    if "llama" in name or (
        num_params
        and not any(word in name for word in UNGATED_MODELS)
        and _off(gated, num_params) < _off(plain, num_params)
    ):
        return gated
    return plain


def _off(shape: ModelShape, numel: float) -> float:
    return min(abs(each.numel - numel) for each in (shape, replace(shape, tied=True)))


def sources(runs: Iterable[Run]) -> Iterator[str]:
    """Returns the short names of all sources, those with most rows first."""
    names = [run.source for run in runs]
    return iter(sorted(set(names), key=lambda name: (-names.count(name), name)))
