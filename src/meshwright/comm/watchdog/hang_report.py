"""Diagnoses a collective that does not complete, by comparing the statuses of all ranks.

Collectives pair by order: the k-th of each rank of a group is one collective. So the statuses are compared
channel by channel (a channel is a group, or one rank sending to another), and the first of these that applies
is the answer:

    exited          a rank failed or ended by itself: its error and its source line
    disagreement    the k-th collective of a group differs between ranks: who issued what, from which line
    dead            a process ended without a report: killed, aborted
    unresponsive    a rank that does not answer, although it has issued what the others wait for: stopped,
                    held by native code, or on a host that is out of reach
    missing         a rank has issued fewer than k: where it is instead; in a chain of waits, the last rank
    cycle           every missing rank waits for another of them
    (nothing)       all ranks arrived and agree: the backend, or the network, failed

The consequence of another rank's failure is never the answer, nor is a rank that waits for somebody else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile

from meshwright.comm.collectives.flight_recorder import IssuedCollective
from meshwright.comm.watchdog.rank_status import RankStatus, StackFrame, is_library
from meshwright.plan.sharding.mesh import Mesh

MAX_SHOWN_FRAMES = 8
MAX_SHOWN_RANKS = 12


@dataclass(frozen=True)
class HangReport:
    """The diagnosis: a text, the ranks that caused the hang (empty: none), and the fix."""

    text: str
    ranks: tuple[int, ...]
    fix: str

    def __str__(self) -> str:
        return f"{self.text}\n  repair: {self.fix}"


@dataclass(frozen=True)
class IncompleteCollective:
    """A collective that some ranks of a channel wait for, and the ranks that have not issued it."""

    issued: IssuedCollective
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    waited_s: float


def diagnose_hang(statuses: Mapping[int, RankStatus], mesh: Mesh) -> HangReport:
    """Returns the diagnosis from the `statuses` of all ranks, including those that others observed."""
    left = [each for each in statuses.values() if each.condition == "exited" and each.is_root_cause]
    gone = [each for each in statuses.values() if each.condition == "dead"]
    incomplete = list(_incomplete_collectives(statuses, mesh))
    if left:
        return _report_failed(left, incomplete)
    mismatch = _first_mismatch(statuses, mesh)
    if mismatch is not None:
        return _report_mismatch(mismatch, gone)
    if gone:
        return _report_dead(gone, incomplete, statuses)
    roots = _root_ranks(incomplete, statuses)
    unresponsive = tuple(rank for rank in sorted(statuses) if statuses[rank].is_unresponsive)
    if not set(unresponsive) <= set(roots):
        return _report_unresponsive(unresponsive, roots, incomplete, statuses)
    if roots:
        return _report_missing(roots, incomplete, statuses)
    if any(each.missing for each in incomplete):
        return _report_deadlock([each for each in incomplete if each.missing])
    text = (
        "every rank answered and issued the same collective; the backend or the network did not complete it"
    )
    fix = (
        "read the backend's error message below, and check the network between the hosts (`meshwright "
        "doctor`)"
    )
    return HangReport(text, (), fix + "; if ranks are only slow, raise the limits in [run.limits]")


def _ranks_of(issued: IssuedCollective, rank: int, mesh: Mesh) -> tuple[int, ...]:
    peers = mesh.peers(rank, issued.axes)
    return issued.pair or tuple(peers[index] for index in issued.member_indices) or peers


def _incomplete_collectives(statuses: Mapping[int, RankStatus], mesh: Mesh) -> Iterator[IncompleteCollective]:
    """Each collective that is waited for, with the ranks that have not issued as many of its channel."""
    found: dict[
        tuple[tuple[object, ...], int, tuple[int, ...]], list[tuple[RankStatus, IssuedCollective]]
    ] = {}
    for each in statuses.values():
        issued = each.awaited_collective()
        if issued is not None:
            key = (issued.channel, issued.number, _ranks_of(issued, each.rank, mesh))
            found.setdefault(key, []).append((each, issued))
    for (_, number, ranks), waiters in found.items():
        _, issued = waiters[0]
        missing = tuple(
            rank for rank in ranks if rank in statuses and _num_issued(statuses[rank], issued) < number
        )
        waiting = tuple(sorted(each.rank for each, _ in waiters))
        yield IncompleteCollective(
            issued, waiting, missing, max(each.waited_s(mine) for each, mine in waiters)
        )


def _num_issued(status: RankStatus, issued: IssuedCollective) -> int:
    last = status.last_collective(issued.channel)
    return 0 if last is None else last.number


def _root_ranks(
    incomplete: Iterable[IncompleteCollective], statuses: Mapping[int, RankStatus]
) -> tuple[int, ...]:
    """The missing ranks that do not wait for anybody."""
    missing = {rank for each in incomplete for rank in each.missing}
    return tuple(rank for rank in sorted(missing) if statuses[rank].awaited_collective() is None)


def _first_mismatch(statuses: Mapping[int, RankStatus], mesh: Mesh) -> dict[int, IssuedCollective] | None:
    """The earliest collective of a group that its ranks do not agree on, by rank.

    None when they agree on all.
    """
    calls: dict[tuple[object, ...], dict[int, IssuedCollective]] = {}
    for each in statuses.values():
        for issued in each.collectives:
            if not issued.pair:  # a send and its receive differ by nature
                calls.setdefault((_ranks_of(issued, each.rank, mesh), issued.axes, issued.number), {})[
                    each.rank
                ] = issued
    odd = [issued for issued in calls.values() if len({str(each) for each in issued.values()}) > 1]
    return min(odd, key=lambda issued: min(each.sequence_id for each in issued.values())) if odd else None


def _report_failed(left: list[RankStatus], incomplete: list[IncompleteCollective]) -> HangReport:
    first = min(left, key=lambda each: each.time_s)
    place = first.location()
    text = f"rank {first.rank} left{_describe_step(first)}: {first.error}" + (
        f"\n  at {place}" if place else ""
    )
    text += _stack_text(first.stack) + _describe_waiters(incomplete, first.rank)
    exits = first.error.startswith(("SystemExit", "its script ended"))
    fix = "a rank must not end while the others go on: let all of them leave at the same step"
    return HangReport(
        text,
        (first.rank,),
        fix if exits else f"repair the error of rank {first.rank}; the others only waited for it",
    )


def _report_dead(
    gone: list[RankStatus], incomplete: list[IncompleteCollective], statuses: Mapping[int, RankStatus]
) -> HangReport:
    ranks = tuple(each.rank for each in gone)
    text = "\n".join(
        f"rank {each.rank}: its process is gone, without a report{_describe_last_collective(each)}"
        for each in gone
    )
    text += _describe_waiters(incomplete, *ranks) or _describe_other_ranks(statuses, ranks)
    fix = "look for a kill, also by the OOM killer (dmesg), or a crash in its log; then start all ranks again"
    return HangReport(text, ranks, fix)


def _report_mismatch(mismatch: Mapping[int, IssuedCollective], gone: list[RankStatus]) -> HangReport:
    votes = Counter(str(issued) for issued in mismatch.values()).most_common()
    usual = votes[0][0] if len(votes) == 1 or votes[0][1] > votes[1][1] else None
    odd = tuple(rank for rank in sorted(mismatch) if str(mismatch[rank]) != usual)
    one = next(iter(mismatch.values()))
    lines = [f"the ranks do not agree on number {one.number} over {' x '.join(one.axes)}:"]
    sides: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(mismatch):
        sides.setdefault((str(mismatch[rank]), mismatch[rank].location), []).append(rank)
    for (what, place), ranks in sorted(sides.items(), key=lambda side: side[1][0] not in odd):
        lines.append(f"  {_ranks_text(ranks)} issued {what}\n    from {place}")
    verdict = (
        f"{_ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} from the others"
        if usual
        else "it cannot be determined which rank is wrong"
    )
    lines.append(f"  {verdict}")
    lines += [
        f"  rank {each.rank}: its process is gone; a backend may abort on a message of another size"
        for each in gone
    ]
    fix = "every rank must issue the same collectives, on tensors of one shape and dtype, in the same order"
    return HangReport("\n".join(lines), odd, fix)


def _report_unresponsive(
    unresponsive: tuple[int, ...],
    roots: tuple[int, ...],
    incomplete: list[IncompleteCollective],
    statuses: Mapping[int, RankStatus],
) -> HangReport:
    lines = [_describe_location(statuses[rank]) for rank in unresponsive[:MAX_SHOWN_RANKS]]
    lines[-1] += _describe_waiters(incomplete, *unresponsive)
    others = tuple(rank for rank in roots if rank not in unresponsive)
    lines += [_describe_missing(each) for each in incomplete if set(each.missing) & set(others)]
    lines += [_describe_location(statuses[rank]) for rank in others[:MAX_SHOWN_RANKS]]
    fix = (
        f"find out why {_ranks_text(unresponsive)} did not answer: continue a stopped process (kill -CONT "
        "PID), look at its host and its log"
    )
    return HangReport("\n".join(lines), (*unresponsive, *others), fix)


def _report_missing(
    roots: tuple[int, ...], incomplete: list[IncompleteCollective], statuses: Mapping[int, RankStatus]
) -> HangReport:
    ends = [each for each in incomplete if set(each.missing) & set(roots)]
    lines = [_describe_missing(each) for each in ends]
    lines += [
        f"{_describe_waiting(each)}: it waits, too"
        for each in incomplete
        if each.missing and each not in ends
    ]
    for rank in roots[:MAX_SHOWN_RANKS]:
        lines.append(_describe_location(statuses[rank]))
    one = f"rank {roots[0]}" if len(roots) == 1 else "these ranks"
    phase = next((each.phase for each in statuses.values() if each.waits and each.phase), "step")
    fix = (
        f"find out why {one} did not proceed from the line where it is: every rank must reach the same "
        "collectives"
    )
    return HangReport("\n".join(lines), roots, f"{fix}. If it is only slow there, raise run.limits.{phase}_s")


def _describe_missing(incomplete: IncompleteCollective) -> str:
    issued, owner = (
        incomplete.issued,
        f"{_ranks_text(incomplete.waiting)}'s " if incomplete.issued.pair else "",
    )
    late = (
        f"{_ranks_text(incomplete.waiting)} wait{'s' if len(incomplete.waiting) == 1 else ''} for it since "
        f"{incomplete.waited_s:.1f} s"
    )
    what = f"{owner}{issued}, number {issued.number} over {_group_text(issued)}"
    return f"{_ranks_text(incomplete.missing)} did not issue {what}; {late}\n  issued at {issued.location}"


def _describe_waiting(incomplete: IncompleteCollective) -> str:
    waiting = (
        f"{_ranks_text(incomplete.waiting)} wait{'s' if len(incomplete.waiting) == 1 else ''} for "
        f"{_ranks_text(incomplete.missing)}"
    )
    return (
        f"{waiting} in {incomplete.issued}, number {incomplete.issued.number} over "
        f"{_group_text(incomplete.issued)}, from {incomplete.issued.location}"
    )


def _report_deadlock(incomplete: list[IncompleteCollective]) -> HangReport:
    lines = [
        "the ranks wait for each other in a cycle:",
        *(f"  {_describe_waiting(each)}" for each in incomplete),
    ]
    ranks = tuple(sorted({rank for each in incomplete for rank in (*each.waiting, *each.missing)}))
    return HangReport(
        "\n".join(lines), ranks, "issue the collectives of different groups in the same order on every rank"
    )


def _describe_location(status: RankStatus) -> str:
    rank, place = status.rank, status.location()
    if status.condition == "stopped":
        text = (
            f"rank {rank} did not answer: its process is stopped (SIGSTOP, Ctrl-Z, a debugger), and "
            "goes on after SIGCONT"
        )
    elif status.condition == "silent":
        why = "its interpreter is held by native code, its process is stopped, or its host is out of reach"
        text = f"rank {rank} did not answer: {why}"
        text += f"\n  it is at {place}" if place else ""
    else:
        collective = status.foreign_collective()
        inside = (
            f"in torch.distributed.{collective}, which meshwright did not issue"
            if collective
            else "in no collective"
        )
        text = f"rank {rank} is{_describe_step(status)} at {place or 'a place unknown'} ({inside})"
    return text + _describe_last_collective(status) + _stack_text(status.stack)


def _describe_step(status: RankStatus) -> str:
    if status.step is None or status.phase == "init":
        return ""
    return (
        f" at step {status.step} ({status.phase})"
        if status.phase in ("evaluate", "save")
        else f" at step {status.step}"
    )


def _describe_last_collective(status: RankStatus) -> str:
    if not status.collectives:
        return "\n  it had issued no collective yet" if status.condition in ("responding", "exited") else ""
    last = status.collectives[-1]
    return (
        f"\n  its last collective was number {last.number} over {_group_text(last)}: {last}, from "
        f"{last.location}"
    )


def _describe_waiters(incomplete: list[IncompleteCollective], *ranks: int) -> str:
    found = [each for each in incomplete if set(each.missing) & set(ranks)] or incomplete[:1]
    return "".join(
        f"\n  {_ranks_text(each.waiting)} wait{'s' if len(each.waiting) == 1 else ''} in {each.issued}, "
        f"number {each.issued.number} over {_group_text(each.issued)}, from {each.issued.location}"
        for each in found
    )


def _describe_other_ranks(statuses: Mapping[int, RankStatus], without: tuple[int, ...]) -> str:
    others = [each for each in statuses.values() if each.rank not in without and each.collectives]
    return "".join(
        f"\n  rank {each.rank} issued last: {each.collectives[-1]}" for each in others[:MAX_SHOWN_RANKS]
    )


def _group_text(issued: IssuedCollective) -> str:
    if issued.pair:
        return f"rank {issued.pair[0]} to rank {issued.pair[1]}"
    return " x ".join(issued.axes)


def _ranks_text(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    text = ", ".join(map(str, listed[:MAX_SHOWN_RANKS])) + (
        f", ... ({len(listed)} in all)" if len(listed) > MAX_SHOWN_RANKS else ""
    )
    return f"rank {text}" if len(listed) == 1 else f"ranks {text}"


def _stack_text(stack: Iterable[StackFrame]) -> str:
    shown = (
        list(dropwhile(lambda frame: is_library(frame[0]), stack))[-MAX_SHOWN_FRAMES:]
        or list(stack)[-MAX_SHOWN_FRAMES:]
    )
    if not shown:
        return ""
    lines = "".join(f'\n    File "{file}", line {row}, in {function}' for file, row, function in shown)
    return f"\n  its main thread (innermost last):{lines}"
