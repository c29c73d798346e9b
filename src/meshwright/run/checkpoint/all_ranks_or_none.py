"""Tasks of all ranks that succeed or fail together.

If a rank meets an error and leaves, the others wait for it in the next collective forever. So after each
task the ranks exchange, in a few bytes, whether it succeeded and what it returned. One failure is an error
on every rank: on the rank that failed it is caused by its own exception, on the others it names the rank and
the reason. When ranks verify files together, the diagnostics themselves are exchanged, and all ranks raise
the same error (`gather_or_raise`).

The bytes are exchanged by one all_gather of uint8; nothing is pickled.
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

RECORD_NBYTES = 40  # bytes that a rank sends after a task
UNKNOWN_ERROR = -1  # the code of a failure that is no OSError
RETRY_SAVE_FIX = "save again, into a folder that every rank can see; earlier checkpoints are untouched"
OK_PREFIX, ERROR_PREFIX = b"+", b"-"  # first byte of the answer of `gather_or_raise`


class ConsensusError(CheckpointError):
    """The ranks that read a checkpoint together did not finish: one of them failed for another reason."""


@dataclass(frozen=True)
class RankConsensus:
    """The ranks of `group`, which work on `purpose`. `device` is the device of the group's collectives.

    `action` is the name in the ledger; `retry_fix` is the repair of a failure whose cause is reported
    elsewhere.
    """

    group: Group
    device: torch.device
    purpose: str
    action: str = "SAVE"
    retry_fix: str = RETRY_SAVE_FIX

    def run(self, task: str, work: Callable[[], bytes]) -> list[bytes]:
        """Runs `work` here; returns the results of all ranks, each padded with zeros to RECORD_NBYTES bytes.

        Raises CheckpointError on all ranks if `work` raised on any.
        """
        cause: Exception | None = None
        code, result = 0, b""
        try:
            result = work()
        except OSError as error:
            cause, code = error, error.errno or UNKNOWN_ERROR
        except Exception as error:  # sent to the other ranks first, raised below
            cause, code = error, UNKNOWN_ERROR
        received = self._exchange(
            code.to_bytes(8, "little", signed=True) + result.ljust(RECORD_NBYTES, b"\0")
        )
        codes = [int.from_bytes(line[:8], "little", signed=True) for line in received]
        failed = {rank: code for rank, code in zip(self.group.ranks, codes, strict=True) if code}
        if failed:
            self._fail(task, failed, cause)
        return [line[8:] for line in received]

    def gather(self, task: str, work: Callable[[], bytes]) -> list[bytes]:
        """Runs `work` here; returns the results of all ranks, of any length. Raises CheckpointError like
        `run`.
        """
        results: list[bytes] = []

        def run_and_measure() -> bytes:
            results.append(work())
            return len(results[0]).to_bytes(8, "little")

        lengths = [int.from_bytes(record[:8], "little") for record in self.run(task, run_and_measure)]
        longest = max(lengths)
        lines = self._exchange(results[0].ljust(longest, b"\0")) if longest else [b""] * self.group.size
        return [line[:length] for line, length in zip(lines, lengths, strict=True)]

    def gather_or_raise(self, task: str, work: Callable[[], bytes]) -> list[bytes]:
        """Runs `work` here; returns the results of all ranks, of any length.

        Raises the same CheckpointError on all ranks if `work` raised a CheckpointError on any: the
        diagnostics of all ranks, each once, with the ranks that found it unless all did. Any other exception
        of `work` is a ConsensusError on all ranks.
        """

        def answer() -> bytes:
            try:
                return OK_PREFIX + work()
            except CheckpointError as error:
                return (
                    ERROR_PREFIX
                    + json.dumps([asdict(diagnostic) for diagnostic in error.diagnostics]).encode()
                )

        try:
            received = self.gather(task, answer)
        except CheckpointError as error:
            raise ConsensusError.from_diagnostics(error.diagnostics) from error
        ranks_of: dict[Diagnostic, list[int]] = {}
        for rank, line in zip(self.group.ranks, received, strict=True):
            diagnostics = (
                [Diagnostic(**said) for said in json.loads(line[1:])] if line[:1] == ERROR_PREFIX else []
            )
            for diagnostic in dict.fromkeys(diagnostics):
                ranks_of.setdefault(diagnostic, []).append(rank)
        if ranks_of:
            raise CheckpointError.from_diagnostics(
                _with_ranks(diagnostic, ranks, self.group.size) for diagnostic, ranks in ranks_of.items()
            )
        return [line[1:] for line in received]

    def check_equal(self, task: str, work: Callable[[], bytes], *, fix: str) -> None:
        """Raises CheckpointError on all ranks unless `work` returns the same bytes on each."""
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
        received = gathered.cpu().numpy().tobytes()
        return [received[start : start + len(line)] for start in range(0, len(received), len(line))]


def _repair(codes: set[int], again: str) -> str:
    if codes & {errno.ENOSPC, errno.EDQUOT}:
        return "free space, or keep fewer checkpoints; earlier ones are untouched"
    if codes & {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "allow every rank to write into the checkpoint folder"
    return f"repair the cause and {again}"


def _with_ranks(diagnostic: Diagnostic, ranks: Sequence[int], size: int) -> Diagnostic:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return (
        diagnostic
        if len(ranks) == size
        else replace(diagnostic, problem=f"{diagnostic.problem} (found by {who})")
    )
