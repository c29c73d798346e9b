"""What a search looks for: rows of a model per step on a machine, what is given of its layout, and what
contradicts itself in it.

    dp tp pp cp    ranks along an axis          shards    0 .. 3, of states; `within` so many copies
    micro          rows that go through at once  chunks    of layers per rank along pp

What is given is not searched. All that cannot be is told at once, before anything is searched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from meshwright.plan.job.errors import Diagnostic, suggest_name
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig, RecomputeMode, ScheduleProfile
from meshwright.planner.machine.machine import Machine

MIN_TOKENS_PER_RANK = 4096  # tokens of a rank below which dividing a row further is not tried
USABLE_MEMORY_FRACTION = 0.96  # of a device's memory that a plan may count on: the rest is the driver's
PARALLEL_AXES = ("dp", "tp", "pp", "cp")
MAX_QUANTITY = 1 << 32  # rows, tokens of a row or devices, beyond which nobody looks
SETTABLE_NAMES = (*PARALLEL_AXES, "shards", "within", "micro", "chunks")
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("none", "layers")


@dataclass(frozen=True)
class SearchRequest:
    """What is looked for: `batch` rows of `shape` per step on `machine`.

    `orders` are those that ranks along pp may take turns in, by name, with the chunks each needs (0: any).
    `fixed` says what is given (see the module), `divided` along which of pp and cp there must be several
    ranks, `exchange` how many of those along cp swap tokens for heads ("": any number), `reruns` what may be
    computed again. With `at_once` no more micro-batches go through than ranks along pp take at once. A row is
    divided while `least` tokens are left on a rank; it has `longest` at most (0: any number), where a model
    has learnt its positions. Of devices of several `kinds`, said by their numbers, each copy takes one.
    `base` is what every layout has (its dtype, its kernels, where ranks stand).
    """

    shape: ModelShape
    machine: Machine
    batch: int
    schedules: Mapping[str, tuple[ScheduleProfile, int]] = field(
        default_factory=lambda: {"1f1b": (ScheduleProfile(), 1)}
    )
    fixed: Mapping[str, int] = field(default_factory=dict)
    required_axes: tuple[str, ...] = ()
    head_exchange: Literal["", "none", "all", "some"] = ""
    recompute_modes: tuple[RecomputeMode, ...] = RECOMPUTE_MODES
    single_wave: bool = False
    min_tokens_per_rank: int = MIN_TOKENS_PER_RANK
    max_positions: int = 0
    devices_by_kind: tuple[int, ...] = ()
    base_config: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def usable_memory(self) -> float:
        """Bytes of a device that a plan may count on."""
        return USABLE_MEMORY_FRACTION * self.machine.device.memory

    def diagnostics(self) -> Iterator[Diagnostic]:
        """What contradicts itself in it."""
        yield from self.shape.diagnostics()
        if self.batch < 1:
            yield Diagnostic(f"a batch of {self.batch} rows", "write a whole number above 0", "batch")
        sizes = {"batch": self.batch, "sequence": self.shape.sequence, "devices": self.machine.num_devices}
        if large := [
            Diagnostic(f"{size:.3g} is beyond {MAX_QUANTITY:,}", "write fewer", name)
            for name, size in sizes.items()
            if size > MAX_QUANTITY
        ]:
            yield from large
            return
        for word, size in self.fixed.items():
            if word not in SETTABLE_NAMES:
                yield Diagnostic(
                    f"'{word}' is nothing that a search divides", suggest_name(word, SETTABLE_NAMES), word
                )
            elif size < (0 if word == "shards" else 1):
                yield Diagnostic(f"{word} {size}", "write a whole number above 0", word)
        able = {
            word: size
            for word, size in self.fixed.items()
            if word in SETTABLE_NAMES and (size > 0 or word == "shards")
        }
        rest = replace(self, fixed=able)
        yield from rest._axis_diagnostics()
        yield from rest._shape_diagnostics()
        yield from rest._batch_diagnostics() if self.batch > 0 else ()
        yield from rest._zero_diagnostics()
        yield from rest._schedule_diagnostics()

    def _axis_diagnostics(self) -> Iterator[Diagnostic]:
        """Axes that do not make up the devices."""
        count = self.machine.num_devices
        given = {axis: self.fixed[axis] for axis in PARALLEL_AXES if axis in self.fixed}
        alone = [axis for axis, size in given.items() if count % size]
        for axis in alone:
            yield Diagnostic(
                f"{axis} {given[axis]} on {count} devices",
                "every rank has a device: write a divisor of their number",
                axis,
            )
        product, words = prod(given.values()), " x ".join(f"{axis} {size}" for axis, size in given.items())
        whole = len(given) == len(PARALLEL_AXES)
        if not alone and (product != count if whole else count % product):
            text = f"{words} are {product} ranks, and there are {count} devices"
            fix = f"fix fewer axes, or give {count // product * product or product} devices"
            yield Diagnostic(text, fix, " ".join(given))

    def _shape_diagnostics(self) -> Iterator[Diagnostic]:
        """Axes that the model cannot be divided along."""
        shape, tp, pp, cp = self.shape, *(self.fixed.get(axis, 1) for axis in ("tp", "pp", "cp"))
        if shape.heads > 0 and shape.heads % tp:
            text = f"tp {tp} ranks share {shape.heads} heads"
            yield Diagnostic(text, "each takes as many: choose a divisor of the heads", "tp")
        if pp * self.fixed.get("chunks", 1) > shape.layers > 0:
            chunks = f" x {self.fixed['chunks']} chunks" if "chunks" in self.fixed else ""
            yield Diagnostic(
                f"pp {pp}{chunks} for {shape.layers} layers", "each part has a layer: choose fewer", "pp"
            )
        if cp > 1 and 2 * cp > shape.sequence > 0:
            text = f"cp {cp} ranks take an early and a late part each of rows of {shape.sequence} tokens"
            yield Diagnostic(
                text, f"choose {shape.sequence // 2} ranks at most, or longer rows: --sequence", "cp"
            )
        if self.head_exchange == "all" and shape.heads > 0 and shape.heads // tp % cp:
            text = f"cp {cp} ranks exchange tokens for {shape.heads // tp} heads"
            yield Diagnostic(
                text, "each takes as many heads: choose a divisor of them, or let keys go round", "cp"
            )

    def _batch_diagnostics(self) -> Iterator[Diagnostic]:
        """Rows that do not come out even."""
        dp, micro = self.fixed.get("dp", 1), self.fixed.get("micro", 1)
        if self.batch % dp:
            text = f"a batch of {self.batch} rows on dp {dp} copies"
            fix = f"each copy takes as many: a batch of {-(-self.batch // dp) * dp}, or another dp"
            yield Diagnostic(text, fix, "batch")
        elif self.batch // dp % micro:
            text = f"{self.batch // dp} rows of a copy in micro-batches of {micro}"
            text = text if dp > 1 else f"a batch of {self.batch} rows in micro-batches of {micro}"
            yield Diagnostic(text, "they are equal: choose a divisor of the rows", "micro")

    def _zero_diagnostics(self) -> Iterator[Diagnostic]:
        """Shares of nothing."""
        shards, within = self.fixed.get("shards"), self.fixed.get("within")
        if shards is not None and shards > 3:
            yield Diagnostic(f"states in shares of stage {shards}", "stages are 0, 1, 2 and 3", "shards")
        if shards and self.fixed.get("dp") == 1 and self.fixed.get("cp", 1) == 1 and "cp" in self.fixed:
            yield Diagnostic(
                f"shares of stage {shards} on one copy",
                "leave one of dp and cp open, or share nothing",
                "shards",
            )
        if within and self.machine.num_devices % within:
            text = f"groups of {within} copies on {self.machine.num_devices} devices"
            yield Diagnostic(text, "groups are equal: choose a divisor of the number of devices", "within")
        if within and shards == 0:
            yield Diagnostic(
                f"groups of {within} copies share nothing",
                "share states, in stage 1 to 3, or fix no group",
                "within",
            )
        if within and self.fixed.get("dp", within) % within:
            text = f"groups of {within} copies of dp {self.fixed['dp']}"
            yield Diagnostic(text, "groups are equal: choose a divisor of dp", "within")

    def _schedule_diagnostics(self) -> Iterator[Diagnostic]:
        """Orders without ranks that could take turns."""
        pp, chunks = self.fixed.get("pp"), self.fixed.get("chunks", 0)
        for axis in self.required_axes:
            if self.fixed.get(axis) == 1:
                yield Diagnostic(
                    f"{axis} 1, and what is fixed needs several ranks along it",
                    f"fix {axis} at 2 or more, or not",
                    axis,
                )
        if chunks and not any(parts in (0, chunks) for _, parts in self.schedules.values()):
            named = ", ".join(f"{name} has {parts}" for name, (_, parts) in self.schedules.items())
            yield Diagnostic(
                f"{chunks} chunks, and {named}",
                "fix no chunks, or an order that takes any number of them",
                "chunks",
            )
        if pp and pp % 2 and pp > 1 and all(order.is_bidirectional for order, _ in self.schedules.values()):
            yield Diagnostic(
                f"pp {pp}, and {', '.join(self.schedules)} enters at both ends",
                "choose an even number of ranks",
                "pp",
            )
