"""Who is to blame when a collective does not complete: the statements of all ranks, compared, in words.

Collectives pair by order: the k-th of each rank of a group is one collective. So the statements are compared line by line (a line
is a group, or one rank sending to another), and the first of these that applies is the answer:

    left            a rank failed or ended by itself: its error and its line
    gone            a process has ended without a word: killed, aborted
    disagreement    the k-th collective of a group is not the same on all ranks: who issued what, from which line
    missing         a rank has issued fewer than k: where it is instead. Of ranks that wait for each other in a chain, the last
    circle          every missing rank waits for another of them
    (nothing)       all came and asked for the same: the backend, or the network, is at fault

What follows from another rank's failure is never an answer, and a rank that waits for somebody else is not one either.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile

from meshwright.comm.collectives.flight_recorder import Issued
from meshwright.comm.watchdog.rank_status import Frame, Statement, is_library
from meshwright.plan.sharding.mesh import Mesh

SHOWN_FRAMES = 8
SHOWN_RANKS = 12


@dataclass(frozen=True)
class Blame:
    """The verdict: who, in words and as ranks (none: nobody), and the repair."""

    text: str
    ranks: tuple[int, ...]
    repair: str

    def __str__(self) -> str:
        return f"{self.text}\n  repair: {self.repair}"


@dataclass(frozen=True)
class Unmet:
    """A collective that some ranks of a line wait for, and those that did not come to it."""

    issued: Issued
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float


def blame(statements: Mapping[int, Statement], mesh: Mesh) -> Blame:
    """Who is to blame, by the `statements` of all ranks, those included that could not make one themselves."""
    left = [each for each in statements.values() if each.state == "left" and each.own]
    gone = [each for each in statements.values() if each.state == "gone"]
    unmet = list(_unmet(statements, mesh))
    if left:
        return _blame_left(left, unmet)
    parted = _parted(statements, mesh)
    if parted is not None:
        return _blame_parted(parted, gone)
    if gone:
        return _blame_gone(gone, unmet, statements)
    roots = _roots(unmet, statements)
    if roots:
        return _blame_missing(roots, unmet, statements)
    if any(each.missing for each in unmet):
        return _blame_circle([each for each in unmet if each.missing])
    text = "every rank that answers has come, and asks for the same; the backend or the network did not do its part"
    repair = (
        "look at the backend's own words below, and at the network between the hosts (`meshwright doctor`)"
    )
    return Blame(text, (), repair + "; if ranks are only slow, raise the limits in [run.limits]")


def _ranks_of(issued: Issued, rank: int, mesh: Mesh) -> tuple[int, ...]:
    peers = mesh.peers(rank, issued.axes)
    return issued.pair or tuple(peers[index] for index in issued.among) or peers


def _unmet(statements: Mapping[int, Statement], mesh: Mesh) -> Iterator[Unmet]:
    """What is waited for, each once, with who has not issued as many of its line."""
    found: dict[tuple[tuple[object, ...], int, tuple[int, ...]], list[tuple[Statement, Issued]]] = {}
    for each in statements.values():
        issued = each.waited_for()
        if issued is not None:
            key = (issued.line, issued.number, _ranks_of(issued, each.rank, mesh))
            found.setdefault(key, []).append((each, issued))
    for (_, number, ranks), waiters in found.items():
        _, issued = waiters[0]
        missing = tuple(
            rank for rank in ranks if rank in statements and _count(statements[rank], issued) < number
        )
        waiting = tuple(sorted(each.rank for each, _ in waiters))
        yield Unmet(issued, waiting, missing, max(each.seconds(mine) for each, mine in waiters))


def _count(statement: Statement, issued: Issued) -> int:
    last = statement.last(issued.line)
    return 0 if last is None else last.number


def _roots(unmet: Iterable[Unmet], statements: Mapping[int, Statement]) -> tuple[int, ...]:
    """The missing ranks that do not wait for anybody."""
    missing = {rank for each in unmet for rank in each.missing}
    return tuple(rank for rank in sorted(missing) if statements[rank].waited_for() is None)


def _parted(statements: Mapping[int, Statement], mesh: Mesh) -> dict[int, Issued] | None:
    """The earliest collective of a group that its ranks do not agree on, by rank; None when they agree on all."""
    calls: dict[tuple[object, ...], dict[int, Issued]] = {}
    for each in statements.values():
        for issued in each.recent:
            if not issued.pair:  # a send and its receive differ by nature
                calls.setdefault((_ranks_of(issued, each.rank, mesh), issued.axes, issued.number), {})[
                    each.rank
                ] = issued
    odd = [issued for issued in calls.values() if len({str(each) for each in issued.values()}) > 1]
    return min(odd, key=lambda issued: min(each.order for each in issued.values())) if odd else None


def _blame_left(left: list[Statement], unmet: list[Unmet]) -> Blame:
    first = min(left, key=lambda each: each.at)
    place = first.place()
    text = f"rank {first.rank} left{_doing(first)}: {first.error}" + (f"\n  at {place}" if place else "")
    text += _stack(first.stack) + _needed(unmet, first.rank)
    exits = first.error.startswith(("SystemExit", "its script ended"))
    repair = "a rank must not end while the others go on: let all of them leave at the same step"
    return Blame(
        text,
        (first.rank,),
        repair if exits else f"repair the error of rank {first.rank}; the others only waited for it",
    )


def _blame_gone(gone: list[Statement], unmet: list[Unmet], statements: Mapping[int, Statement]) -> Blame:
    ranks = tuple(each.rank for each in gone)
    text = "\n".join(f"rank {each.rank}: its process is gone, and left no word{_last(each)}" for each in gone)
    text += _needed(unmet, *ranks) or _at_work(statements, ranks)
    repair = "look for a kill, want of memory (dmesg), or a crash in its log; then start all ranks again"
    return Blame(text, ranks, repair)


def _blame_parted(parted: Mapping[int, Issued], gone: list[Statement]) -> Blame:
    """The ranks that differ from most; all of them where there is no majority."""
    votes = Counter(str(issued) for issued in parted.values()).most_common()
    usual = votes[0][0] if len(votes) == 1 or votes[0][1] > votes[1][1] else None
    odd = tuple(rank for rank in sorted(parted) if str(parted[rank]) != usual)
    one = next(iter(parted.values()))
    lines = [f"the ranks do not agree on number {one.number} over {' x '.join(one.axes)}:"]
    sides: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(parted):
        sides.setdefault((str(parted[rank]), parted[rank].place), []).append(rank)
    for (what, place), ranks in sorted(sides.items(), key=lambda side: side[1][0] not in odd):
        lines.append(f"  {_said(ranks)} issued {what}\n    from {place}")
    verdict = (
        f"{_said(odd)} differ{'s' if len(odd) == 1 else ''} from the others"
        if usual
        else "which of them is wrong, the ranks cannot say"
    )
    lines.append(f"  {verdict}")
    lines += [
        f"  rank {each.rank}: its process is gone; a backend may abort on a message of another size"
        for each in gone
    ]
    repair = (
        "every rank must issue the same collectives, on tensors of one shape and dtype, in the same order"
    )
    return Blame("\n".join(lines), odd, repair)


def _blame_missing(roots: tuple[int, ...], unmet: list[Unmet], statements: Mapping[int, Statement]) -> Blame:
    ends = [each for each in unmet if set(each.missing) & set(roots)]
    lines = [_missed(each) for each in ends]
    lines += [f"{_waits(each)}: it waits, too" for each in unmet if each.missing and each not in ends]
    for rank in roots[:SHOWN_RANKS]:
        lines.append(_whereabouts(statements[rank]))
    one = f"rank {roots[0]}" if len(roots) == 1 else "these ranks"
    phase = next((each.phase for each in statements.values() if each.waits and each.phase), "step")
    repair = f"find out why {one} did not go on, by the line where it is: every rank must reach the same collectives"
    return Blame("\n".join(lines), roots, f"{repair}. If it is only slow there, raise run.limits.{phase}_s")


def _missed(unmet: Unmet) -> str:
    """Who did not come to what; of a receive, whose it is."""
    issued, owner = unmet.issued, f"{_said(unmet.waiting)}'s " if unmet.issued.pair else ""
    late = f"{_said(unmet.waiting)} wait{'s' if len(unmet.waiting) == 1 else ''} for it since {unmet.seconds:.1f} s"
    what = f"{owner}{issued}, number {issued.number} over {_over(issued)}"
    return f"{_said(unmet.missing)} did not come to {what}; {late}\n  asked for at {issued.place}"


def _waits(unmet: Unmet) -> str:
    """Who waits for whom in what."""
    waiting = (
        f"{_said(unmet.waiting)} wait{'s' if len(unmet.waiting) == 1 else ''} for {_said(unmet.missing)}"
    )
    return f"{waiting} in {unmet.issued}, number {unmet.issued.number} over {_over(unmet.issued)}, from {unmet.issued.place}"


def _blame_circle(unmet: list[Unmet]) -> Blame:
    lines = ["the ranks wait for each other in a circle:", *(f"  {_waits(each)}" for each in unmet)]
    ranks = tuple(sorted({rank for each in unmet for rank in (*each.waiting, *each.missing)}))
    return Blame(
        "\n".join(lines), ranks, "issue the collectives of different groups in the same order on every rank"
    )


def _whereabouts(statement: Statement) -> str:
    rank, place = statement.rank, statement.place()
    if statement.state == "stopped":
        text = f"rank {rank} did not answer: its process is stopped (SIGSTOP, Ctrl-Z, a debugger), and goes on after SIGCONT"
    elif statement.state == "silent":
        why = "its interpreter is held by native code, its process is stopped, or its host is out of reach"
        text = f"rank {rank} did not answer: {why}"
        text += f"\n  it is at {place}" if place else ""
    else:
        foreign = statement.foreign()
        inside = (
            f"in torch.distributed.{foreign}, which the run did not ask for"
            if foreign
            else "in no collective"
        )
        text = f"rank {rank} is{_doing(statement)} at {place or 'a place unknown'} ({inside})"
    return text + _last(statement) + _stack(statement.stack)


def _doing(statement: Statement) -> str:
    if statement.step is None or statement.phase == "init":
        return ""
    return (
        f" at step {statement.step} ({statement.phase})"
        if statement.phase in ("evaluate", "save")
        else f" at step {statement.step}"
    )


def _last(statement: Statement) -> str:
    if not statement.recent:
        return "\n  it had issued no collective yet" if statement.state in ("answers", "left") else ""
    last = statement.recent[-1]
    return f"\n  its last collective was number {last.number} over {_over(last)}: {last}, from {last.place}"


def _needed(unmet: list[Unmet], *ranks: int) -> str:
    """Who waits for `ranks`, and for what."""
    found = [each for each in unmet if set(each.missing) & set(ranks)] or unmet[:1]
    return "".join(
        f"\n  {_said(each.waiting)} wait{'s' if len(each.waiting) == 1 else ''} in {each.issued}, "
        f"number {each.issued.number} over {_over(each.issued)}, from {each.issued.place}"
        for each in found
    )


def _at_work(statements: Mapping[int, Statement], without: tuple[int, ...]) -> str:
    others = [each for each in statements.values() if each.rank not in without and each.recent]
    return "".join(f"\n  rank {each.rank} issued last: {each.recent[-1]}" for each in others[:SHOWN_RANKS])


def _over(issued: Issued) -> str:
    if issued.pair:
        return f"rank {issued.pair[0]} to rank {issued.pair[1]}"
    return " x ".join(issued.axes)


def _said(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    text = ", ".join(map(str, listed[:SHOWN_RANKS])) + (
        f", ... ({len(listed)} in all)" if len(listed) > SHOWN_RANKS else ""
    )
    return f"rank {text}" if len(listed) == 1 else f"ranks {text}"


def _stack(stack: Iterable[Frame]) -> str:
    shown = (
        list(dropwhile(lambda frame: is_library(frame[0]), stack))[-SHOWN_FRAMES:]
        or list(stack)[-SHOWN_FRAMES:]
    )
    if not shown:
        return ""
    lines = "".join(f'\n    File "{file}", line {row}, in {function}' for file, row, function in shown)
    return f"\n  its main thread (innermost last):{lines}"
