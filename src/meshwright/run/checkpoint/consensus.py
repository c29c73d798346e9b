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
from meshwright.plan.job.errors import Diagnostic
from meshwright.run.checkpoint.manifest import CheckpointError

RECORD_NBYTES = 40  # bytes that a rank tells the others after an act
UNKNOWN_ERROR = -1  # the code of a failure that is no OSError
RETRY_SAVE_FIX = "save again, into a folder that every rank can see; earlier checkpoints are untouched"
OK_PREFIX, ERROR_PREFIX = b"+", b"-"  # how a verdict begins


class ConsensusError(CheckpointError):
    """Ranks that read a checkpoint together came to no verdict: one of them failed at something else."""


@dataclass(frozen=True)
class RankConsensus:
    """The ranks of `group`, busy with `what`. `device`: where the collectives of the group take their operands.

    `action` is what the ledger calls it; `again` is the repair of a failure whose cause is said elsewhere.
    """

    group: Group
    device: torch.device
    purpose: str
    action: str = "SAVE"
    retry_fix: str = RETRY_SAVE_FIX

    def run(self, task: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run `work` here; returns what it returned on every rank, each filled up with zeros to RECORD bytes.

        Raises CheckpointError on all ranks when `work` raised on any.
        """
        cause: Exception | None = None
        code, record = 0, b""
        try:
            record = work()
        except OSError as error:
            cause, code = error, error.errno or UNKNOWN_ERROR
        except Exception as error:  # told to the others first, raised below
            cause, code = error, UNKNOWN_ERROR
        told = self._exchange(code.to_bytes(8, "little", signed=True) + record.ljust(RECORD_NBYTES, b"\0"))
        codes = [int.from_bytes(line[:8], "little", signed=True) for line in told]
        failed = {rank: code for rank, code in zip(self.group.ranks, codes, strict=True) if code}
        if failed:
            self._fail(task, failed, cause)
        return [line[8:] for line in told]

    def gather(self, task: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run `work` here; returns what it returned on every rank, of any length. Raises CheckpointError as `do` does."""
        made: list[bytes] = []

        def make() -> bytes:
            made.append(work())
            return len(made[0]).to_bytes(8, "little")

        lengths = [int.from_bytes(record[:8], "little") for record in self.run(task, make)]
        longest = max(lengths)
        lines = self._exchange(made[0].ljust(longest, b"\0")) if longest else [b""] * self.group.size
        return [line[:length] for line, length in zip(lines, lengths, strict=True)]

    def gather_or_raise(self, task: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run `work` here; returns what it returned on every rank, of any length.

        Raises the same CheckpointError on all ranks when `work` raised one on any: the faults of all, each once, and by which
        ranks it was found unless all have found it. Whatever else `work` raised on any rank is Undecided on all of them.
        """

        def verdict() -> bytes:
            try:
                return OK_PREFIX + work()
            except CheckpointError as error:
                return ERROR_PREFIX + json.dumps([asdict(fault) for fault in error.diagnostics]).encode()

        try:
            told = self.gather(task, verdict)
        except CheckpointError as error:
            raise ConsensusError.from_diagnostics(error.diagnostics) from error
        found: dict[Diagnostic, list[int]] = {}
        for rank, line in zip(self.group.ranks, told, strict=True):
            faults = [Diagnostic(**said) for said in json.loads(line[1:])] if line[:1] == ERROR_PREFIX else []
            for fault in dict.fromkeys(faults):
                found.setdefault(fault, []).append(rank)
        if found:
            raise CheckpointError.from_diagnostics(
                _found_by(fault, ranks, self.group.size) for fault, ranks in found.items()
            )
        return [line[1:] for line in told]

    def check_equal(self, task: str, work: Callable[[], bytes], *, fix: str) -> None:
        """Raise CheckpointError on all ranks unless `work` returns the same bytes on each."""
        records = self.run(task, work)
        others = [
            rank for rank, record in zip(self.group.ranks, records, strict=True) if record != records[0]
        ]
        if others:
            what = f"{self.purpose}: {task} differs on ranks {others} from rank {self.group.ranks[0]}"
            raise CheckpointError(what, fix=fix, location="checkpoint")

    def _fail(self, act: str, failed: dict[int, int], cause: Exception | None) -> None:
        reasons = [
            f"rank {rank} ({os.strerror(code) if code > 0 else 'its own message says why'})"
            for rank, code in failed.items()
        ]
        what = f"{self.purpose}: {act} failed on {', '.join(reasons)}"
        if isinstance(cause, CheckpointError):
            raise CheckpointError(
                what, fix=cause.diagnostics[0].fix, location="checkpoint", more=cause.diagnostics
            ) from cause
        detail = f": {cause}" if cause else ""
        raise CheckpointError(
            what + detail, fix=_repair(set(failed.values()), self.retry_fix), location="checkpoint"
        ) from cause

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


def _found_by(diagnostic: Diagnostic, ranks: Sequence[int], size: int) -> Diagnostic:
    """`fault`, with the ranks that have found it unless all have."""
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return (
        diagnostic
        if len(ranks) == size
        else replace(diagnostic, problem=f"{diagnostic.problem} (found by {who})")
    )
