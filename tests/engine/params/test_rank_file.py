"""The file of a rank: what was written is read, errors name their cause, and nothing stays behind."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshwright.engine.params import rank_file
from meshwright.engine.params.rank_file import RankFile, load_pages
from meshwright.engine.runtime.host_memory import page_aligned
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES as BLOCK
from meshwright.plan.job.errors import PlanError

NBYTES = 64 * BLOCK


@contextmanager
def opened(folder: Path, nbytes: int = NBYTES) -> Iterator[RankFile]:
    file = RankFile(str(folder), nbytes)
    try:
        yield file
    finally:
        file.close()


def without_direct(descriptor: int, command: int, value: int = 0) -> int:
    """Fcntl on a file system that has no O_DIRECT."""
    if command == fcntl.F_SETFL and value & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return 0


def num_cached_pages(file: RankFile) -> int:
    """The pages of `file` in the memory of the system."""
    pages = (ctypes.c_ubyte * (NBYTES // 4096))()
    address = ctypes.c_void_p(file.tensor.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(NBYTES), pages) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("is_direct", [True, False])
def test_what_was_written_is_read_and_leaves_no_page_in_memory(
    is_direct: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    change = nullcontext() if is_direct else patch.object(rank_file.fcntl, "fcntl", without_direct)
    with change, opened(tmp_path) as file:
        assert file.is_direct == is_direct
        assert ("O_DIRECT" in caplog.text) != is_direct
        assert not file.tensor.any()
        file.tensor[3 * BLOCK] = 7  # an initial value
        file.drop_cache()
        found, written = page_aligned(2 * BLOCK), page_aligned(2 * BLOCK)
        file.start_read(3 * BLOCK, found, "READ_STATES(a)").wait()
        assert (found[0], found.count_nonzero()) == (7, 1)
        written.copy_(torch.arange(2 * BLOCK) % 251)
        works = [file.start_write(BLOCK, written, "WRITE_STATES(a)"), file.start_read(BLOCK, found, "")]
        works[1].wait()  # they run in order
        assert works[0].is_done
        assert torch.equal(found, written)
        assert num_cached_pages(file) == 0
        assert torch.equal(file.tensor[BLOCK : 3 * BLOCK], written)
        assert os.listdir(tmp_path) == []  # it has no name, so a process that is killed leaves nothing


def test_two_ranks_and_two_runs_have_files_of_their_own(tmp_path: Path):
    with opened(tmp_path) as a, opened(tmp_path) as b:
        a.tensor[0], b.tensor[0] = 1, 2
        assert (a.tensor[0], b.tensor[0]) == (1, 2)


def test_transfers_that_the_system_cuts_are_continued(tmp_path: Path):
    preadv = os.preadv

    def few(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:BLOCK]], offset)

    with opened(tmp_path) as file:
        file.tensor.copy_(torch.arange(NBYTES) % 251)
        found = page_aligned(NBYTES)
        with patch.object(rank_file.os, "preadv", few):
            file.start_read(0, found, "READ_STATES(a)").wait()
        assert torch.equal(found, file.tensor)


@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_an_error_of_the_disk_reaches_whoever_waits(code: str, tmp_path: Path):
    error = OSError(getattr(errno, code), "what the system says")
    with opened(tmp_path) as file, patch.object(rank_file.os, "pwritev", side_effect=error):
        work, seen = file.start_write(BLOCK, page_aligned(BLOCK), "WRITE_STATES(head)"), list[bool]()
        with pytest.raises(PlanError) as refused:
            work.wait()
        work.add_done_callback(lambda: seen.append(True))
    text = str(refused.value)
    assert "WRITE_STATES(head) failed at byte 4096 of the file" in text
    assert f"in '{tmp_path}': what the system says ({code})" in text
    assert rank_file.FIXES[getattr(errno, code)] in text
    assert seen == [True]


@pytest.mark.parametrize(
    ("folder", "code"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR), ("/sys", errno.EACCES)]
)
def test_a_folder_that_cannot_be_used_is_refused(folder: str, code: int, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="a file of 256 KiB cannot be made") as refused:
        RankFile(str(tmp_path / folder), NBYTES)
    (diagnostic,) = refused.value.diagnostics
    assert (diagnostic.fix, diagnostic.location) == (rank_file.FIXES[code], "strategies.disk_offload.folder")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EPERM, errno.EDQUOT])
def test_a_disk_that_takes_no_file_is_refused_with_its_repair(code: int, tmp_path: Path):
    refusal = patch.object(rank_file, "TemporaryFile", side_effect=OSError(code, os.strerror(code)))
    with refusal, pytest.raises(PlanError, match=errno.errorcode[code]) as refused:
        RankFile(str(tmp_path), NBYTES)
    assert refused.value.diagnostics[0].fix == rank_file.FIXES[code]


def test_a_full_disk_is_found_when_the_file_is_made(tmp_path: Path):
    with pytest.raises(PlanError, match=r"cannot be made in .*\((ENOSPC|EFBIG)\)"):
        RankFile(str(tmp_path), 1 << 60)
    assert os.listdir(tmp_path) == []


def test_other_systems_are_refused(tmp_path: Path):
    with patch.object(rank_file.sys, "platform", "darwin"), pytest.raises(PlanError, match="on darwin"):
        RankFile(str(tmp_path), NBYTES)


@pytest.mark.parametrize("writes", [False, True])
def test_pages_that_the_disk_has_lost_are_an_error_and_no_signal(writes: bool, tmp_path: Path):
    with opened(tmp_path) as file:
        load_pages(file.tensor, writes=writes)
        os.ftruncate(file._descriptor, 8 * BLOCK)  # touching what lies behind raises SIGBUS
        load_pages(file.tensor[: 8 * BLOCK], writes=writes)
        load_pages(file.tensor[8 * BLOCK : 8 * BLOCK], writes=writes)
        for lost in (file.tensor[8 * BLOCK :], file.tensor[8 * BLOCK - 1 :: BLOCK]):
            with pytest.raises(PlanError, match=r"that rest on disk cannot be (read|written)") as refused:
                load_pages(lost, writes=writes)
            (diagnostic,) = refused.value.diagnostics
            assert "(EIO)" in diagnostic.problem
            assert diagnostic.fix == rank_file.FIXES[errno.EIO]


def test_memory_of_other_tensors_and_older_systems_pass():
    load_pages(torch.arange(9).view(3, 3).t())
    load_pages(torch.empty(0))
    with patch.object(rank_file, "MADV_POPULATE_READ", 1 << 20):  # EINVAL, as before Linux 5.14
        load_pages(torch.ones(3))
