"""Published runs as the planner sees them: a row of a table becomes a shape, a layout and a machine.

    published_runs.csv     1,321 rows that others measured, each with its source: a paper, a repository at a commit, a page

What a row does not say is filled in as its source does it (`HABITS`), or the row is skipped, and counted under the reason:
experts, states on the host, devices that are not known, no batch, no time. FLOP conventions differ by source: a step's time is
what the row says, or what follows from tokens per second, or from the model FLOP/s that were brought to one convention; where a
source prints hardware FLOPs by a formula of its own that is known (published_times.py), from those.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from benchmarks.published_times import seconds_of
from meshwright.core.hardware import Device, find_device
from meshwright.planner.hardware import Machine
from meshwright.planner.layout import Kernel, Layout, Order, Rerun
from meshwright.planner.rates import rates_of
from meshwright.planner.shapes import Shape

RUNS = Path(__file__).parent / "data" / "published_runs.csv"
GIB, GB = 2**30, 1e9

# (pattern of a row's hardware, bytes per second and device out of a host, devices per host): where a site has another network
NETWORKS: tuple[tuple[str, float, int], ...] = (
    (r"A100.*Jean Zay", 4 * 12.5e9 / 8, 8),
    (r"V100.*Jean Zay", 12.5e9, 4),
    (r"RoCE", 25e9, 8),
)
PLAIN = ("gpt", "mpt", "opt")  # models whose MLP has no gate
# orders by what a row calls them: the closed forms of their papers
ORDERS: Mapping[str, Order] = {
    "1f1b": Order(),
    "gpipe": Order(),
    "interleaved": Order(),
    "zb-1p": Order(1.0, 1.0, -1.0, even=True),
    "zb-2p": Order(0.0, 0.0, 0.0, 2.0, even=True),
    "zb-v": Order(0.0, 0.0, 0.0, even=True, folded=True),
}


@dataclass(frozen=True)
class Habits:
    """What a code base does that its rows do not say."""

    kernel: Kernel = "flash2"
    fused: bool = True
    hidden: bool = False
    sums: int = 2
    dtype: str = "bfloat16"


OLD = Habits(kernel="softmax", fused=True)  # before fused attention: Megatron with its own softmax and norm kernels
HABITS: tuple[tuple[str, Habits], ...] = (
    ("bigscience", replace(OLD, sums=4)),
    ("Narayanan", OLD),
    ("Korthikanti", OLD),
    ("Megatron-LM old", OLD),
    ("Zero Bubble", OLD),
    ("MT-NLG", OLD),
    ("Alpa", OLD),
    ("eth-easl", OLD),
    ("DeepSpeed", OLD),
    ("microsoft/Megatron", OLD),
    ("NVIDIA", Habits(hidden=True)),
    ("NeMo", Habits(hidden=True)),
    ("Megatron", Habits(hidden=True)),
    ("torchtitan", Habits(fused=False)),
    ("", Habits()),
)


@dataclass(frozen=True)
class Run:
    """A row: where it comes from, what was run on what, and what was measured. `seconds` None: it says no time.

    `peak` is in bytes, and `metric` what it was read from; `cited` is the source in full, `precision` what the row says of it.
    """

    key: str
    source: str
    shape: Shape
    layout: Layout
    machine: Machine
    seconds: float | None
    status: str
    peak: float | None
    metric: str
    cited: str = ""
    precision: str = ""

    @property
    def group(self) -> str:
        """The source, model and number of devices: the grain at which constants are fitted on some rows and scored on others."""
        return f"{self.source}|{self.shape.name}|{self.machine.count}"

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


class _Lacks(Exception):
    """What a row lacks."""


def read_runs(file: Path = RUNS) -> tuple[list[Run], list[Skipped]]:
    """The rows of `file`, those that the planner can take and those that it cannot."""
    runs, skipped = [], []
    with file.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            key, source = row.get("row_id") or f"line {number}", _source(row.get("source", ""))
            try:
                runs.append(_run(key, source, row))
            except _Lacks as lack:
                skipped.append(Skipped(key, source, str(lack)))
    return runs, skipped


def _source(text: str) -> str:
    """The short name of a source: its author or repository, without the file and the version."""
    first = re.split(
        r" data/| scripts/| train/| experiments/| docs/| docs | benchmarks/| validation/| \(| et al| v2| README", text
    )[0]
    return first.strip() or "?"


def _number(row: Mapping[str, str], column: str) -> float | None:
    try:
        return float(row.get(column) or "")
    except ValueError:
        return None


def _run(key: str, source: str, row: Mapping[str, str]) -> Run:
    if "single transformer layer" in row.get("notes", ""):
        raise _Lacks("the time of one layer, and of no step")
    if (_number(row, "n_experts") or 0) > 1:
        raise _Lacks("experts, which are not built yet")
    if "ffload" in row.get("zero_fsdp", ""):
        raise _Lacks("memory of the host, which is not built yet")
    device = find_device(row.get("hardware", ""))
    if device is None:
        raise _Lacks(f"a device that is not known: {row.get('hardware')!r}")
    shape, said = _shape(row), {name: _number(row, name) for name in row}
    layout = _layout(source, row, shape, said)
    count = int(said.get("gpus") or layout.ranks)
    seconds = seconds_of(row, said, shape, layout, count)
    peak, metric = said.get("peak_mem"), row.get("mem_metric", "")
    binary = any(word in metric for word in ("nvidia-smi", "Table"))  # MiB / 1024, though they are called GB
    unit = GIB if binary else {"GiB": GIB, "GB": GB, "MiB": 2**20}.get(row.get("mem_unit", ""), GB)
    held = None if peak is None else peak * unit
    machine = _machine(row.get("hardware", ""), device, count)
    if machine.device.peak(layout.dtype.partition("_")[0]) is None and layout.dtype.startswith("float"):
        raise _Lacks(f"a device without {layout.dtype.partition('_')[0]}")
    tokens = layout.micros * layout.micro_batch * layout.dp * shape.sequence
    if seconds and shape.flops(tokens) / 1.15 > seconds * count * machine.peak(layout.dtype.partition("_")[0]):
        raise _Lacks("faster than the peak of its devices: its batch or its time is of another run")
    status, cited, precision = row.get("status", "ok"), row.get("source", ""), row.get("precision", "")
    return Run(key, source, shape, layout, machine, seconds, status, held, metric, cited, precision)


def _machine(called: str, device: Device, count: int) -> Machine:
    for pattern, rate, per_host in NETWORKS:
        if re.search(pattern, called):
            device = replace(device, nic_rate=rate, per_host=per_host)
    return Machine(device, count, rates_of(device.name))


def _shape(row: Mapping[str, str]) -> Shape:
    sizes = {
        name: _number(row, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "params_b")
    }
    lacking = [name for name in ("layers", "hidden", "heads", "seq_len") if not sizes[name]]
    if lacking:
        raise _Lacks(f"no {', '.join(lacking)}")
    plain = Shape(
        name=row.get("model", ""),
        layers=int(sizes["layers"] or 0),
        hidden=int(sizes["hidden"] or 0),
        heads=int(sizes["heads"] or 0),
        kv_heads=int(sizes["kv_heads"] or 0),
        ffn=int(sizes["ffn"] or 0),
        vocab=int(sizes["vocab"] or 51200),
        sequence=int(sizes["seq_len"] or 0),
    )
    gated, known = replace(plain, gated=True), (sizes["params_b"] or 0) * 1e9
    name = plain.name.lower()
    if "llama" in name or (known and not any(word in name for word in PLAIN) and _off(gated, known) < _off(plain, known)):
        return gated
    return plain


def _off(shape: Shape, numel: float) -> float:
    return min(abs(each.numel - numel) for each in (shape, replace(shape, tied=True)))


def _layout(source: str, row: Mapping[str, str], shape: Shape, said: Mapping[str, float | None]) -> Layout:
    tp, pp, cp = (int(said.get(axis) or 1) for axis in ("tp", "pp", "cp"))
    dp = int(said.get("dp") or (said.get("gpus") or 0) // (tp * pp * cp))
    batch, micro, times = said.get("global_batch"), said.get("micro_batch"), said.get("grad_accum")
    if dp < 1:
        raise _Lacks("no number of devices")
    if not micro and batch and times:
        micro = batch / dp / times
    if not batch and micro and times:
        batch = micro * dp * times
    if not micro or not batch:
        raise _Lacks("no micro-batch or no global batch")
    habits = next(habits for name, habits in HABITS if source.startswith(name))
    notes = row.get("notes", "")
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        shards=_shards(row.get("zero_fsdp", "").lower()),
        chunks=_chunks(source, row.get("schedule", "").lower(), said.get("virtual_stages"), shape, pp),
        micro_batch=micro,
        micros=batch / (micro * dp),
        reruns=_reruns(row.get("recompute", "").lower()),
        sequence=row.get("seq_parallel", "").startswith("yes"),
        order=_order(row.get("schedule", "").lower()),
        gathers=1 if source.startswith("torchtitan") and "fp8 tensorwise" in row.get("precision", "").lower() else 2,
        dtype=_dtype(row.get("precision", "").lower(), habits),
        sums=habits.sums,
        kernel=_kernel(notes, habits),
        fused="RMS kernel" in notes if "kernel " in notes else habits.fused,
        compiled=row.get("compile", "") == "yes",
        hidden=habits.hidden or "async tp" in notes.lower(),
        rerun_share=0.5 if "every 2nd" in row.get("recompute", "") else 1.0,
    )


def _chunks(source: str, schedule: str, said: float | None, shape: Shape, pp: int) -> int:
    """Of layers per rank along pp. Zero Bubble PP's interleaved runs have as many as there are (arXiv 2401.10241, section 5)."""
    if not said and source.startswith("Zero Bubble") and "interleaved" in schedule:
        return max(1, round((shape.layers + 2) / pp))
    return int(said or 1)


def _shards(text: str) -> int:
    if "fsdp" in text or "full_shard" in text or "zero-3" in text:
        return 3
    if "zero-2" in text or "grad_op" in text:
        return 2
    return 1 if "zero-1" in text or "distributed optimizer" in text else 0


def _reruns(text: str) -> Rerun:
    if text.startswith(("full", "yes")):
        return "layers"
    if "every 2nd" in text:
        return "layers"
    return "attention" if "selective" in text else "none"


def _dtype(text: str, habits: Habits) -> str:
    if "fp4" in text:
        return "float4"
    if "fp8" in text:
        return "float8_rowwise" if "row" in text else "float8"
    return habits.dtype


def _order(text: str) -> Order:
    return next((order for name, order in ORDERS.items() if name in text), ORDERS["1f1b"])


def _kernel(notes: str, habits: Habits) -> Kernel:
    found = re.search(r"kernel (\w+)", notes)
    word = found.group(1) if found else ""
    kernels: Mapping[str, Kernel] = {
        "torch": "eager",
        "fused": "softmax",
        "flash_attentionv1": "flash1",
        "flash_attention": "flash1",
    }
    return kernels.get(word, "flash2" if word.startswith("flash") else habits.kernel)


def sources(runs: Iterable[Run]) -> Iterator[str]:
    """The short names of all sources, those with most rows first."""
    names = [run.source for run in runs]
    return iter(sorted(set(names), key=lambda name: (-names.count(name), name)))
