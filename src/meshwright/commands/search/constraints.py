"""`--set NAME=VALUE` of `search`: choices of mesh and strategies that are given instead of searched.

    dp tp pp cp                 ranks along an axis
    ep                          ranks, of those along dp, cp and tp, with different experts
    expert_tp                   tp ranks that share the matrices of each expert: tp, or 1
    dp_shard                    the data-parallel ranks that share one set of shards
    zero                        the ZeRO stage
    micro_batch                 samples of a microbatch
    virtual_stages              virtual stages per rank along pp
    schedule                    the pipeline schedule, by name
    activation_checkpointing    layers or none
    context_parallel            ring, ulysses or hybrid: the attention algorithm along cp
    intra_host                  tp (default) or dp: the axis whose ranks are neighbors on a host
    offload                     which model states rest in host memory or on disk, and who steps them: none,
                                device_step, host_step, gradients, everything, disk (planner/analytic/
                                offload_cost.py)
    activation_offload          whose activations rest in host memory between forward and backward: none,
                                layers

    lossy                       true: gradients may be summed as codes (int8), so that steps are not those of
                                one device (planner/analytic/compression_cost.py); false

All choices that are not given are searched; offload only where nothing fits without it, and what is lossy
never.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from meshwright.plan.job.errors import Diagnostic, suggest_name
from meshwright.planner.analytic.parallel_config import (
    DUALPIPE,
    GPIPE,
    GRADIENT_CODECS,
    OFFLOAD_MODES,
    ZB_H1,
    ZB_V,
    OffloadMode,
    ParallelConfig,
    RecomputeMode,
    ScheduleProfile,
)
from meshwright.planner.search.request import RECOMPUTE_MODES, SETTABLE_NAMES, SearchRequest

# per schedule: idle time and memory of ranks along pp, and the virtual stages that it needs (0: any number)
SCHEDULES: Mapping[str, tuple[ScheduleProfile, int]] = {
    "1f1b": (ScheduleProfile(), 1),
    "interleaved": (ScheduleProfile(), 0),
    "zb_h1": (ZB_H1, 1),
    "zb_v": (ZB_V, 2),
    "gpipe": (GPIPE, 1),
    "dualpipe": (DUALPIPE, 1),
}
# not searched: gpipe has the bubble of 1f1b and more memory, dualpipe a larger bubble than zb_v and two
# copies of the weights
SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zb_v")
# name of --set -> key of SearchRequest.fixed
NUMBER_KEYS = {key: key for key in SETTABLE_NAMES if key != "zero_stage"} | {"zero": "zero_stage"}
NUMBER_EXAMPLES = {"zero": "3"}
CONTEXT_METHODS: Mapping[str, Literal["none", "all", "some"]] = {
    "ring": "none",
    "ulysses": "all",
    "hybrid": "some",
}
ACTIVATION_CHOICES: Mapping[str, tuple[bool, ...]] = {"none": (False,), "layers": (True,)}
NAME_CHOICES: Mapping[str, Sequence[str]] = {
    "schedule": tuple(SCHEDULES),
    "activation_checkpointing": RECOMPUTE_MODES,
    "context_parallel": tuple(CONTEXT_METHODS),
    "intra_host": ("tp", "dp"),
    "offload": OFFLOAD_MODES,
    "activation_offload": tuple(ACTIVATION_CHOICES),
    "lossy": ("true", "false"),
}


@dataclass(frozen=True)
class SearchConstraints:
    """The given choices: sizes by the keys of `SearchRequest.fixed`, and names by the keys of `--set`."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def fixes_offload(self) -> bool:
        """Whether a mode of offload is given, so that no other is proposed."""
        return bool(self.names.get("offload"))

    @property
    def fixes_activation_offload(self) -> bool:
        """Whether it is given where activations rest."""
        return bool(self.names.get("activation_offload"))

    def apply(self, request: SearchRequest) -> SearchRequest:
        """Returns `request` with these choices fixed."""
        schedule, algorithm = self.names.get("schedule"), self.names.get("context_parallel")
        schedules = (schedule,) if schedule else SEARCHED_SCHEDULES
        modes: dict[str, tuple[RecomputeMode, ...]] = {name: (name,) for name in RECOMPUTE_MODES}
        offloads: dict[str, tuple[OffloadMode, ...]] = {name: (name,) for name in OFFLOAD_MODES}
        pipeline_axes = ("pp",) if schedule or "virtual_stages" in self.sizes else ()
        base_config = replace(request.base_config, tp_across_hosts=self.names.get("intra_host") == "dp")
        return replace(
            request,
            schedules={name: SCHEDULES[name] for name in schedules},
            fixed=self.sizes,
            required_axes=(*pipeline_axes, *(("cp",) if algorithm else ())),
            head_exchange=CONTEXT_METHODS[algorithm] if algorithm else "",
            recompute_modes=modes.get(self.names.get("activation_checkpointing", ""), RECOMPUTE_MODES),
            min_tokens_per_rank=1 if algorithm else request.min_tokens_per_rank,
            offload_modes=offloads.get(self.names.get("offload", ""), request.offload_modes),
            activation_offload=ACTIVATION_CHOICES.get(
                self.names.get("activation_offload", ""), request.activation_offload
            ),
            codecs=GRADIENT_CODECS if self.names.get("lossy") == "true" else request.codecs,
            base_config=base_config,
        )


def parse_constraints(assignments: Sequence[str], diagnostics: list[Diagnostic]) -> SearchConstraints:
    """Returns the choices of `assignments` (NAME=VALUE); appends to `diagnostics` those that are not
    understood.
    """
    sizes, names = dict[str, int](), dict[str, str]()
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        diagnostics += _assignment_diagnostics(assignment, name, value)
        previous = sizes.get(NUMBER_KEYS.get(name, "")) if name in NUMBER_KEYS else names.get(name)
        if previous is not None and str(previous) != value:
            diagnostics.append(
                Diagnostic(f"{name} is set to {previous} and to {value}", "set it once", "--set")
            )
        if name in NUMBER_KEYS and value.isdecimal():
            sizes[NUMBER_KEYS[name]] = int(value)
        elif name in NAME_CHOICES and value in NAME_CHOICES[name]:
            names[name] = value
    return SearchConstraints(sizes, names)


def _assignment_diagnostics(assignment: str, name: str, value: str) -> Iterator[Diagnostic]:
    if name not in NUMBER_KEYS and name not in NAME_CHOICES:
        yield Diagnostic(
            f"'{assignment}' does not set a known option",
            suggest_name(name, (*NUMBER_KEYS, *NAME_CHOICES)),
            "--set",
        )
    elif not value:
        example = NUMBER_EXAMPLES.get(name, "8") if name in NUMBER_KEYS else NAME_CHOICES[name][0]
        yield Diagnostic(
            f"'{assignment}' has no value", f"write NAME=VALUE, for example {name}={example}", "--set"
        )
    elif name in NUMBER_KEYS and not value.isdecimal():
        yield Diagnostic(f"{name} is '{value}'", f"write a whole number, for example {name}=2", "--set")
    elif name in NAME_CHOICES and value not in NAME_CHOICES[name]:
        yield Diagnostic(f"{name} is '{value}'", suggest_name(value, NAME_CHOICES[name]), "--set")


def schedule_costs(schedule: str) -> ScheduleProfile | None:
    """Returns the idle time and memory of ranks along pp under a schedule; None for one that the search does
    not know.
    """
    return SCHEDULES[schedule][0] if schedule in SCHEDULES else None


def base_config(dtypes: Mapping[str, float]) -> ParallelConfig:
    """Returns what all candidates have in common on devices with these peak rates: the dtype of matrix
    products.

    It is bfloat16, or float16 on devices that have nothing else.
    """
    return ParallelConfig(dtype="float16" if "float16" in dtypes and "bfloat16" not in dtypes else "bfloat16")
