"""Plans when sharded parameters are unsharded: from before their first use until after their last one.

    uses     F0     F1     F2   B2     B1     B0            b1 is used by F1 and by B1
    b1    (prefetch)[ F1 ]       (prefetch)[ B1 ]           two windows: gathered twice, little memory
    b2        (prefetch)[ F2   B2 ]                         consecutive uses share one window

An *unshard window* lasts from one use to another. Joining two windows of the same parameters saves a gather
and costs memory in between. Windows are joined always if no use lies between, within a microbatch or a step
if so planned (`scope`), and else as far as a budget of bytes allows, the shortest gaps first. A window begins
`prefetch` uses early, so that the gather overlaps them.

Memory is a fixed number of buffers: each group has one buffer, and two groups with overlapping windows never
share one. Addresses therefore do not change between steps, and views saved by autograd are valid again after
the gather.

Parameters that stay unsharded on every rank, and are stepped on some, are gathered once, at the begin of the
next step (`gather_before_forward`): each block waits for its own, so that later ones travel while it runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from meshwright.plan.model_spec.model_spec import ROOT
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.step.program import Action, with_waits
from meshwright.plan.step.single_device_program import FORWARD_KINDS, PARAM_USE_KINDS

JoinScope = Literal["use", "microbatch", "step"]


@dataclass(frozen=True)
class ParamUse:
    """One action of microbatch `microbatch` that needs `param_groups` unsharded."""

    param_groups: tuple[str, ...]
    microbatch: int


@dataclass(frozen=True)
class UnshardWindow:
    """`param_group` is unsharded from use `first_use` (gathered before use `fetch_use`) to use `last_use`,
    counted from 0.
    """

    param_group: str
    fetch_use: int
    first_use: int
    last_use: int


def unshard_windows(
    uses: Sequence[ParamUse],
    nbytes: Mapping[str, int],
    scope: JoinScope = "use",
    budget: float = 0.0,
    prefetch: int = 1,
) -> list[UnshardWindow]:
    """Returns the windows of every parameter group in `uses`, in the order in which they are gathered.

    `nbytes` are the bytes of each unsharded group; `budget` is how many bytes more than needed may be
    unsharded at a time.
    """
    by_group: dict[str, list[list[int]]] = {}
    for i, use in enumerate(uses):
        for group in use.param_groups:
            windows_of_group = by_group.setdefault(group, [])
            follows = bool(windows_of_group) and (
                i == windows_of_group[-1][1] + 1 or _same_scope(uses, windows_of_group[-1][1], i, scope)
            )
            if follows:
                windows_of_group[-1][1] = i
            else:
                windows_of_group.append([i, i])
    _join_gaps(by_group, nbytes, budget, len(uses))
    windows = []
    for group, windows_of_group in by_group.items():
        free = 0  # it may be fetched after the last use of its previous window
        for begin, end in windows_of_group:
            windows.append(UnshardWindow(group, max(free, begin - prefetch), begin, end))
            free = end + 1
    return sorted(windows, key=lambda window: (window.fetch_use, window.first_use))


def _same_scope(uses: Sequence[ParamUse], before: int, after: int, scope: JoinScope) -> bool:
    return scope == "step" or (scope == "microbatch" and uses[before].microbatch == uses[after].microbatch)


def _join_gaps(
    by_group: dict[str, list[list[int]]], nbytes: Mapping[str, int], budget: float, num_uses: int
) -> None:
    gaps = [
        (b[0] - a[1], group, a[1], b[0])
        for group, windows_of_group in by_group.items()
        for a, b in pairwise(windows_of_group)
    ]
    extra = [0] * num_uses
    for _, group, last, first in sorted(gaps) if budget else ():
        inside = range(last + 1, first)
        if all(extra[at] + nbytes[group] <= budget for at in inside):
            for at in inside:
                extra[at] += nbytes[group]
            windows_of_group = by_group[group]
            index = next(i for i, span in enumerate(windows_of_group) if span[1] == last)
            windows_of_group[index : index + 2] = [
                [windows_of_group[index][0], windows_of_group[index + 1][1]]
            ]


def assign_buffers(
    windows: Iterable[UnshardWindow], nbytes: Mapping[str, int]
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Returns the buffer number of each group, and the bytes of every buffer. Large groups choose first, so
    that sizes match.
    """
    used_at: dict[str, int] = {}  # per group, the uses at which it takes memory, as bits
    for window in windows:
        used_at[window.param_group] = (
            used_at.get(window.param_group, 0)
            | ((1 << (window.last_use - window.fetch_use + 1)) - 1) << window.fetch_use
        )
    number: dict[str, int] = {}
    occupied: list[int] = []
    sizes: list[int] = []
    for group in sorted(used_at, key=lambda name: (-nbytes[name], name)):
        free = next(
            (i for i, occupied_bits in enumerate(occupied) if not occupied_bits & used_at[group]),
            len(occupied),
        )
        if free == len(occupied):
            occupied.append(0)
            sizes.append(nbytes[group])
        occupied[free] |= used_at[group]
        number[group] = free
    return number, tuple(sizes)


def flat_groups(param_groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Returns those of `param_groups` that lie in flat parameters."""
    return [group for group in param_groups if group.param_shardings[0].flat_shard_axes]


def gather_before_forward(
    actions: Sequence[Action],
    param_groups: Iterable[ParamGroup],
    gathers: Mapping[str, Action],
    block_calls: Sequence[str],
) -> list[Action]:
    """Returns `actions` with `gathers`, by the name of their group, before the first forward, in the order of
    their first use; what uses a group waits for its gather, and glue for those of the root.
    """

    def first_use(group: ParamGroup) -> int:
        return min(-1 if call == ROOT else block_calls.index(call) for call in group.block_calls)

    ordered = sorted((each for each in param_groups if each.name in gathers), key=first_use)
    first = next(i for i, action in enumerate(actions) if action.kind in FORWARD_KINDS)

    def waiting(action: Action) -> Action:
        if action.kind not in PARAM_USE_KINDS:
            return action
        used = (group for group in ordered if action.subject in group.block_calls)
        return with_waits(action, [gathers[group.name].name for group in used])

    ready = [wait_for_gather(gathers[group.name]) for group in ordered if ROOT in group.block_calls]
    started = [gathers[group.name] for group in ordered]
    return [*actions[:first], *started, *ready, *map(waiting, actions[first:])]


def wait_for_gather(gather: Action) -> Action:
    """Returns the wait of glue, which may use the parameters of `gather` at any time."""
    return Action("WAIT", gather.subject, gather.microbatch, waits=(gather.name,), tensors=gather.tensors)
