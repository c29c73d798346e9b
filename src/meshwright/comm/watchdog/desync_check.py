"""Compares collectives across the ranks of a group before they are issued.

In the first step, and always in debug mode. A collective moves bytes without names. Ranks that disagree on
size may hang or abort; ranks that disagree on order with equal sizes, or on two dtypes of one width, get a
wrong sum and no error at all. Every step issues the same calls, so the first one is compared in every run,
and with `run.check_collectives` all are: before each collective an all_gather of eight bytes per rank
compares a digest of (collective, shape, dtype, source, algorithm, action). If the digests differ, the ranks
exchange the texts, and all of them raise the same error, with each rank's call and source line. A rank that
does not arrive at all is handled by the limits (watchdog.py).
"""

from hashlib import blake2b

import torch

from meshwright.comm.collectives.collective_call import POINT_TO_POINT, CollectiveCall
from meshwright.comm.collectives.group import Group
from meshwright.plan.job.errors import CollectiveError

CHECK_ACTION = "CHECK"
CALL_TEXT_NBYTES = 256  # bytes of a rank's text


class DesyncCheck:
    """Compares a call across the ranks of its group before it is issued; the ledger calls it."""

    def __call__(self, group: Group, call: CollectiveCall) -> None:
        """Returns if all ranks of `group` are about to issue the same.

        Raises CollectiveError on all of them otherwise.
        """
        if call.collective in POINT_TO_POINT:
            return  # the other ranks of the group take no part in it
        ledger = group.ledger
        ledger.is_comparing = True
        try:
            digest = int.from_bytes(blake2b(str(call).encode(), digest_size=8).digest(), "big", signed=True)
            digests = _all_gather(group, torch.tensor([digest]))
            if len(set(digests.tolist())) > 1:
                raise _desync_error(group, call)
        finally:
            ledger.is_comparing = False


def _all_gather(group: Group, mine: torch.Tensor) -> torch.Tensor:
    mine = mine.to(group.device or mine.device)
    output = mine.new_empty(group.size * mine.numel())
    group.all_gather(output, mine, action=CHECK_ACTION).wait()
    return output.cpu()


def _desync_error(group: Group, call: CollectiveCall) -> CollectiveError:
    issued = group.ledger.flight_recorder.entries()[-1]
    said = f"{call}\n    from {issued.location}".encode()[:CALL_TEXT_NBYTES].ljust(CALL_TEXT_NBYTES)
    rows = _all_gather(group, torch.frombuffer(bytearray(said), dtype=torch.uint8)).view(
        group.size, CALL_TEXT_NBYTES
    )
    texts = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows]
    usual = max(texts, key=texts.count)
    clear = 2 * texts.count(usual) > len(texts)
    lines = [f"the ranks do not agree on number {issued.number} over {' x '.join(group.axes)}:"]
    for text in dict.fromkeys(sorted(texts, key=texts.count)):
        ranks = [rank for rank, other in zip(group.ranks, texts, strict=True) if other == text]
        lines.append(f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} issued {text}")
    odd = ", ".join(str(rank) for rank, text in zip(group.ranks, texts, strict=True) if text != usual)
    lines.append(
        f"  rank {odd} differs from the others" if clear else "  it cannot be determined which rank is wrong"
    )
    lines.append(
        "  repair: every rank must issue the same collectives, on tensors of one shape and dtype, in the "
        "same order"
    )
    report = "\n".join(lines)
    return CollectiveError(report, report=report, is_reporter=group.index == 0)
