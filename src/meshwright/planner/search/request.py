"""Defines a search: the model, the machine, the batch, what is fixed, and the checks of all these.

    dp tp pp cp       ranks along an axis
    ep                ranks, of those along dp, with different experts
    zero_stage        the ZeRO stage, 0 to 3
    dp_shard          the number of replicas in a ZeRO group
    micro_batch       samples of a microbatch
    virtual_stages    virtual stages per pp rank

Sizes that are fixed are not searched. All contradictions are reported at once, before the search starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from meshwright.plan.job.errors import Diagnostic, suggest_name
from meshwright.planner.analytic.closed_form_memory import (
    MemoryEstimate,
    estimate_host_disk,
    estimate_host_memory,
    estimate_memory,
)
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.offload_cost import rate_key, unknown_rates
from meshwright.planner.analytic.parallel_config import (
    GradientCodec,
    OffloadMode,
    ParallelConfig,
    RecomputeMode,
    ScheduleProfile,
)
from meshwright.planner.machine.machine import Machine

MIN_TOKENS_PER_RANK = 4096  # cp is not tried if it leaves fewer tokens of a sequence on a rank
USABLE_MEMORY_FRACTION = 0.96  # of a device's memory; the driver takes the rest
PARALLEL_AXES = ("dp", "tp", "pp", "cp")
MAX_QUANTITY = 1 << 32  # the largest batch, sequence length or number of devices
SETTABLE_NAMES = (
    *(*PARALLEL_AXES, "ep", "expert_tp"),
    *("zero_stage", "dp_shard", "micro_batch", "virtual_stages"),
)
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("none", "layers")


@dataclass(frozen=True)
class SearchRequest:
    """A search: `batch` samples of `shape` per step on `machine`.

    `schedules`: the pipeline schedules to try, by name, with the virtual stages per rank that each needs (0:
    any number). `fixed`: the fixed sizes (see the module). `required_axes`: the axes, of pp and cp, that must
    have several ranks. `head_exchange`: how many cp ranks exchange tokens for heads ("": any number).
    `recompute_modes`: the modes to try. `single_wave`: no more microbatches than pp ranks.
    `min_tokens_per_rank`: cp leaves at least so many tokens of a sequence on a rank. `max_positions`: the
    longest sequence, for a model with learned positions (0: no limit). `devices_by_kind`: the numbers of
    devices of several kinds; each replica is on one kind. `offload_modes`: what may rest in
    host memory or on disk; `activation_offload`: whether activations rest in host memory, False, True or
    both. `codecs`: those that gradients may be summed with ("": exact sums). `base_config`: what all
    configurations have in common (dtype, kernels, rank order).
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
    offload_modes: tuple[OffloadMode, ...] = ("none",)
    activation_offload: tuple[bool, ...] = (False,)
    codecs: tuple[GradientCodec, ...] = ("",)
    base_config: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def usable_memory(self) -> float:
        """Bytes of a device that a plan may use."""
        return USABLE_MEMORY_FRACTION * self.machine.device.memory

    def host_nbytes(self, config: ParallelConfig) -> float:
        """Returns the bytes that the ranks of a host keep in its memory together, on the fullest host."""
        return estimate_host_memory(self.shape, config, self.machine.devices_per_host)

    def disk_nbytes(self, config: ParallelConfig) -> float:
        """Returns the bytes that the ranks of a host keep on its disk together, on the fullest host."""
        return estimate_host_disk(self.shape, config, self.machine.devices_per_host)

    def fits(self, config: ParallelConfig, memory: MemoryEstimate | None = None) -> bool:
        """Returns whether devices hold `config`, and hosts what their ranks keep there and on disk, if what
        they have is known; `memory` is that of the fullest rank, if it was estimated.
        """
        memory = memory or estimate_memory(self.shape, config)
        if memory.total > self.usable_memory:
            return False
        return self.fits_on_disks(config) and self.fits_on_hosts(config)

    def fits_on_hosts(self, config: ParallelConfig) -> bool:
        """Returns whether the memory of a host holds what its ranks keep there, as far as it is known."""
        has = self.machine.device.host_memory
        return not config.uses_host or not has or self.host_nbytes(config) <= has

    def fits_on_disks(self, config: ParallelConfig) -> bool:
        """Returns whether the disk of a host holds what its ranks keep there, as far as it is known."""
        has = self.machine.device.disk_space
        return config.offload != "disk" or not has or self.disk_nbytes(config) <= has

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields what is invalid or contradictory in it."""
        yield from self.shape.diagnostics()
        if self.batch < 1:
            yield Diagnostic(f"a batch of {self.batch} samples", "write a whole number above 0", "batch")
        sizes = {"batch": self.batch, "sequence": self.shape.sequence, "devices": self.machine.num_devices}
        if large := [
            Diagnostic(f"{size:.3g} is above {MAX_QUANTITY:,}", "choose a smaller number", name)
            for name, size in sizes.items()
            if size > MAX_QUANTITY
        ]:
            yield from large
            return
        for name, size in self.fixed.items():
            if name not in SETTABLE_NAMES:
                yield Diagnostic(
                    f"'{name}' is not a setting of the search", suggest_name(name, SETTABLE_NAMES), name
                )
            elif size < (0 if name == "zero_stage" else 1):
                yield Diagnostic(f"{name} {size}", "write a whole number above 0", name)
        valid = {
            name: size
            for name, size in self.fixed.items()
            if name in SETTABLE_NAMES and (size > 0 or name == "zero_stage")
        }
        valid_request = replace(self, fixed=valid)
        yield from valid_request._axis_diagnostics()
        yield from valid_request._shape_diagnostics()
        yield from valid_request._batch_diagnostics() if self.batch > 0 else ()
        yield from valid_request._zero_diagnostics()
        yield from valid_request._schedule_diagnostics()
        yield from self._offload_diagnostics()
        yield from self._codec_diagnostics()

    def _offload_diagnostics(self) -> Iterator[Diagnostic]:
        """Yields the rates without which a mode of offload has no price."""
        lacking = set(unknown_rates(self.machine, self.offload_modes))
        if any(self.activation_offload) and not self.machine.device.host_link_rate:
            lacking.add("host link")
        for resource in sorted(lacking):
            text = f"offload over the {resource} of {self.machine.device.name}, whose rate is not known"
            fix = f"write {rate_key(resource)} in a [device] table (docs/howto/choose_a_plan.md)"
            yield Diagnostic(text, fix, "offload")

    def _codec_diagnostics(self) -> Iterator[Diagnostic]:
        """Yields the codecs that have no price."""
        lacking = [each for each in self.codecs if each and each not in self.machine.codings]
        if lacking:
            text = f"the seconds to code are not known on {self.machine.device.name}: {', '.join(lacking)}"
            fix = "measure them (`meshwright bench device`) and give its file as hardware, or leave lossy out"
            yield Diagnostic(text, fix, "lossy")

    def _axis_diagnostics(self) -> Iterator[Diagnostic]:
        count = self.machine.num_devices
        given = {axis: self.fixed[axis] for axis in PARALLEL_AXES if axis in self.fixed}
        invalid = [axis for axis, size in given.items() if count % size]
        for axis in invalid:
            yield Diagnostic(
                f"{axis} {given[axis]} does not divide {count} devices",
                "every rank has one device: choose a divisor of their number",
                axis,
            )
        product, axes = prod(given.values()), " x ".join(f"{axis} {size}" for axis, size in given.items())
        all_fixed = len(given) == len(PARALLEL_AXES)
        if not invalid and (product != count if all_fixed else count % product):
            text = f"{axes} are {product} ranks, which does not match {count} devices"
            fix = f"fix fewer axes, or use {count // product * product or product} devices"
            yield Diagnostic(text, fix, " ".join(given))

    def _shape_diagnostics(self) -> Iterator[Diagnostic]:
        shape, tp, pp, cp = self.shape, *(self.fixed.get(axis, 1) for axis in ("tp", "pp", "cp"))
        if shape.heads > 0 and shape.heads % tp:
            text = f"tp {tp} does not divide {shape.heads} attention heads"
            yield Diagnostic(text, "each rank has as many heads: choose a divisor of their number", "tp")
        if pp * self.fixed.get("virtual_stages", 1) > shape.layers > 0:
            virtual_stages = self.fixed.get("virtual_stages")
            times = f" x {virtual_stages} virtual stages" if virtual_stages else ""
            yield Diagnostic(
                f"pp {pp}{times} for {shape.layers} layers",
                "each stage has at least one layer: choose fewer stages",
                "pp",
            )
        if cp > 1 and 2 * cp > shape.sequence > 0:
            text = f"cp {cp} splits sequences of {shape.sequence} tokens into {2 * cp} chunks"
            fix = f"choose cp {shape.sequence // 2} or less, or longer sequences: --sequence"
            yield Diagnostic(text, fix, "cp")
        ep = self.fixed.get("ep", 1)
        if ep > max(1, shape.experts):
            text = f"ep {ep} for {shape.experts or 'no'} experts"
            yield Diagnostic(text, "each rank has an expert: choose a smaller ep", "ep")
        given = {axis: self.fixed.get(axis, 0) for axis in ("dp", "cp", "tp")}
        ranks = prod(given.values()) or self.machine.num_devices
        if ranks % ep:
            axes = " x ".join(f"{axis} {size}" for axis, size in given.items() if size > 1)
            text = f"ep {ep} does not divide {axes if all(given.values()) else f'{ranks} devices'}"
            yield Diagnostic(text, "ep ranks are among those along dp, cp and tp: choose a divisor", "ep")
        if self.head_exchange == "all" and shape.heads > 0 and shape.heads // tp % cp:
            text = f"cp {cp} ranks exchange tokens for {shape.heads // tp} attention heads"
            yield Diagnostic(
                text,
                "each rank gets as many heads: choose a divisor of their number, or ring attention",
                "cp",
            )

    def _batch_diagnostics(self) -> Iterator[Diagnostic]:
        dp, micro_batch = self.fixed.get("dp", 1), self.fixed.get("micro_batch", 1)
        if self.batch % dp:
            text = f"a batch of {self.batch} samples on {dp} data-parallel replicas"
            fix = f"all replicas have as many: choose a batch of {-(-self.batch // dp) * dp}, or another dp"
            yield Diagnostic(text, fix, "batch")
        elif self.batch // dp % micro_batch:
            text = f"{self.batch // dp} samples per replica in microbatches of {micro_batch}"
            text = text if dp > 1 else f"a batch of {self.batch} samples in microbatches of {micro_batch}"
            yield Diagnostic(text, "microbatches are equal: choose a divisor of the samples", "micro_batch")

    def _zero_diagnostics(self) -> Iterator[Diagnostic]:
        zero_stage, group_size = self.fixed.get("zero_stage"), self.fixed.get("dp_shard")
        if zero_stage is not None and zero_stage > 3:
            yield Diagnostic(f"ZeRO stage {zero_stage}", "choose stage 0, 1, 2 or 3", "zero")
        if zero_stage and self.fixed.get("dp") == 1 and self.fixed.get("cp", 1) == 1 and "cp" in self.fixed:
            yield Diagnostic(
                f"ZeRO stage {zero_stage} on one data-parallel replica",
                "do not set both dp and cp to 1, or choose ZeRO stage 0",
                "zero",
            )
        if group_size and self.machine.num_devices % group_size:
            text = f"ZeRO groups of {group_size} replicas on {self.machine.num_devices} devices"
            yield Diagnostic(text, "groups are equal: choose a divisor of the number of devices", "dp_shard")
        if group_size and zero_stage == 0:
            yield Diagnostic(
                f"ZeRO groups of {group_size} replicas with ZeRO stage 0",
                "choose ZeRO stage 1, 2 or 3, or do not set dp_shard",
                "dp_shard",
            )
        if group_size and self.fixed.get("dp", group_size) % group_size:
            text = f"ZeRO groups of {group_size} replicas, of dp {self.fixed['dp']}"
            yield Diagnostic(text, "groups are equal: choose a divisor of dp", "dp_shard")

    def _schedule_diagnostics(self) -> Iterator[Diagnostic]:
        pp, virtual_stages = self.fixed.get("pp"), self.fixed.get("virtual_stages", 0)
        for axis in self.required_axes:
            if self.fixed.get(axis) == 1:
                yield Diagnostic(
                    f"{axis} 1, but another setting needs several ranks along {axis}",
                    f"set {axis} to 2 or more, or do not set it",
                    axis,
                )
        if virtual_stages and not any(
            num_stages in (0, virtual_stages) for _, num_stages in self.schedules.values()
        ):
            stages_by_name = ", ".join(
                f"{name} takes {num_stages}" for name, (_, num_stages) in self.schedules.items()
            )
            yield Diagnostic(
                f"{virtual_stages} virtual stages per rank, but {stages_by_name}",
                "do not set virtual_stages, or choose a schedule that takes any number of virtual stages",
                "virtual_stages",
            )
        if (
            pp
            and pp % 2
            and pp > 1
            and all(profile.is_bidirectional for profile, _ in self.schedules.values())
        ):
            yield Diagnostic(
                f"pp {pp} with the bidirectional schedule {', '.join(self.schedules)}",
                "choose an even pp",
                "pp",
            )
