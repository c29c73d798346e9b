"""Acts that all ranks do together and that fail together.

A rank that meets an error and leaves would let the others wait for it in the next collective, for ever. So each act ends
with a vote: every rank tells the others, in a few bytes, whether its part went well and what came of it. One failure is an
error on every rank: on the one that failed it is caused by its own exception, on the others it says which rank and why.
Of what is read together the faults themselves travel, and all ranks raise the same error (`judge`).

The bytes travel through one all_gather of uint8; nothing is pickled.
"""

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from meshwright.comm.collectives.group import Group
from meshwright.plan.job.errors import Fault
from meshwright.run.checkpoint.manifest import CheckpointError

RECORD = 40  # bytes that a rank tells the others after an act
UNKNOWN = -1  # the code of a failure that is no OSError
SAVE_AGAIN = "save again, into a folder that every rank can see; earlier checkpoints are untouched"
GOOD, BAD = b"+", b"-"  # how a verdict begins


class Undecided(CheckpointError):
    """Ranks that read a checkpoint together came to no verdict: one of them failed at something else."""


@dataclass(frozen=True)
class Vote:
    """The ranks of `group`, busy with `what`. `device`: where the collectives of the group take their operands.

    `action` is what the ledger calls it; `again` is the repair of a failure whose cause is said elsewhere.
    """

    group: Group
    device: torch.device
    what: str
    action: str = "SAVE"
    again: str = SAVE_AGAIN

    def do(self, act: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run `work` here; returns what it returned on every rank, each filled up with zeros to RECORD bytes.

        Raises CheckpointError on all ranks when `work` raised on any.
        """
        cause: Exception | None = None
        code, record = 0, b""
        try:
            record = work()
        except OSError as error:
            cause, code = error, error.errno or UNKNOWN
        except Exception as error:  # told to the others first, raised below
            cause, code = error, UNKNOWN
        told = self._exchange(code.to_bytes(8, "little", signed=True) + record.ljust(RECORD, b"\0"))
        codes = [int.from_bytes(line[:8], "little", signed=True) for line in told]
        failed = {rank: code for rank, code in zip(self.group.ranks, codes, strict=True) if code}
        if failed:
            self._fail(act, failed, cause)
        return [line[8:] for line in told]

    def told(self, act: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run `work` here; returns what it returned on every rank, of any length. Raises CheckpointError as `do` does."""
        made: list[bytes] = []

        def make() -> bytes:
            made.append(work())
            return len(made[0]).to_bytes(8, "little")

        lengths = [int.from_bytes(record[:8], "little") for record in self.do(act, make)]
        longest = max(lengths)
        lines = self._exchange(made[0].ljust(longest, b"\0")) if longest else [b""] * self.group.size
        return [line[:length] for line, length in zip(lines, lengths, strict=True)]

    def judge(self, act: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run `work` here; returns what it returned on every rank, of any length.

        Raises the same CheckpointError on all ranks when `work` raised one on any: the faults of all, each once, and by which
        ranks it was found unless all have found it. Whatever else `work` raised on any rank is Undecided on all of them.
        """

        def verdict() -> bytes:
            try:
                return GOOD + work()
            except CheckpointError as error:
                return BAD + json.dumps([asdict(fault) for fault in error.faults]).encode()

        try:
            told = self.told(act, verdict)
        except CheckpointError as error:
            raise Undecided.of(error.faults) from error
        found: dict[Fault, list[int]] = {}
        for rank, line in zip(self.group.ranks, told, strict=True):
            faults = [Fault(**said) for said in json.loads(line[1:])] if line[:1] == BAD else []
            for fault in dict.fromkeys(faults):
                found.setdefault(fault, []).append(rank)
        if found:
            raise CheckpointError.of(_found_by(fault, ranks, self.group.size) for fault, ranks in found.items())
        return [line[1:] for line in told]

    def agree(self, act: str, work: Callable[[], bytes], *, fix: str) -> None:
        """Raise CheckpointError on all ranks unless `work` returns the same bytes on each."""
        records = self.do(act, work)
        others = [rank for rank, record in zip(self.group.ranks, records, strict=True) if record != records[0]]
        if others:
            what = f"{self.what}: {act} differs on ranks {others} from rank {self.group.ranks[0]}"
            raise CheckpointError(what, fix=fix, where="checkpoint")

    def _fail(self, act: str, failed: dict[int, int], cause: Exception | None) -> None:
        reasons = [
            f"rank {rank} ({os.strerror(code) if code > 0 else 'its own message says why'})" for rank, code in failed.items()
        ]
        what = f"{self.what}: {act} failed on {', '.join(reasons)}"
        if isinstance(cause, CheckpointError):
            raise CheckpointError(what, fix=cause.faults[0].fix, where="checkpoint", others=cause.faults) from cause
        detail = f": {cause}" if cause else ""
        raise CheckpointError(what + detail, fix=_repair(set(failed.values()), self.again), where="checkpoint") from cause

    def _exchange(self, line: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(line), dtype=torch.uint8).to(self.device)
        gathered = mine.new_empty(self.group.size * mine.numel())
        self.group.all_gather(gathered, mine, action=self.action).wait()
        told = bytes(gathered.tolist())
        return [told[start : start + len(line)] for start in range(0, len(told), len(line))]


def _repair(codes: set[int], again: str) -> str:
    if codes & {errno.ENOSPC, errno.EDQUOT}:
        return "free space, or keep fewer checkpoints; earlier ones are untouched"
    if codes & {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "allow every rank to write into the checkpoint folder"
    return f"repair the cause and {again}"


def _found_by(fault: Fault, ranks: Sequence[int], size: int) -> Fault:
    """`fault`, with the ranks that have found it unless all have."""
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return fault if len(ranks) == size else replace(fault, what=f"{fault.what} (found by {who})")
