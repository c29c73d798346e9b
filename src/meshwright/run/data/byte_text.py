"""Text files as training samples: all files become one sequence of bytes, and a sample is a window of it.

Bytes are the tokens (256 of them), so any language works without a vocabulary. Files are joined in sorted
order with one zero byte between them. No text contains a zero byte (a file that does is refused), so it
marks the end of a document without ambiguity, and a model learns it. Empty files add nothing.

    tokens    h e l l o 0 w o r l d        T = 4: sample i is tokens[4 i : 4 i + 5]
    sample 0  inputs h e l l   labels e l l o
    sample 1  inputs o 0 w o   labels 0 w o r
    sample 2  inputs r l d .   labels l d . .        . in labels is -100: no token follows, no weight in the
                                                     loss

Neighboring samples share the token at their boundary, so every token but the first is a label exactly once
per epoch. The tokens are kept in memory, one byte each; a window is cut when it is read.
"""

import logging
import os
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path, PurePath

import numpy as np
import torch

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.run.data.token_dataset import (
    TokenCount,
    TokenDataset,
    count_window_tokens,
    cut_windows,
    num_windows,
)
from meshwright.run.data.tokenizer import ByteTokenizer

SEPARATOR = 0
DEFAULT_PATTERNS = (
    "*.txt",
    "*.md",
    "*.py",
)  # of the files of a folder that are read when data.include names none
MAX_UNDECODABLE = (
    0.1  # share of a file's bytes; Latin-1 prose stays below 0.05, compressed data lies near 0.4
)
DECODE_NBYTES = 1 << 20

logger = logging.getLogger(__name__)


class TextDataset(TokenDataset):
    """The samples of one data source. `files` are the files that were read, in order.

    `digest` is the sha256 of the sequence length and the tokens: a resumed run detects changed data with it.

    Raises PlanError with every diagnostic: no file, no match, unreadable or binary files.
    """

    def __init__(self, source: DataConfig) -> None:
        raise_diagnostics(source.diagnostics())
        root = Path(source.source)
        self.sequence, self.tokenizer = source.sequence, ByteTokenizer()
        self.files = list_files(source, DEFAULT_PATTERNS)
        content = _join_files(self.files)
        if len(content) < 2:
            what = (
                f"'{printable_path(root)}' holds {len(content)} bytes in all; needed are at "
                f"least 2, a token and the one after it"
            )
            raise_diagnostics(
                [Diagnostic(what, "point data.source at a text that is not empty", "data.source")]
            )
        self.tokens = np.frombuffer(content, dtype=np.uint8)
        self.tokens.flags.writeable = False
        self.digest = sha256(b"bytes, sequence %d\n" % self.sequence + sha256(content).digest()).hexdigest()

    def __len__(self) -> int:
        """Returns the number of samples; the last one may be short."""
        return num_windows(self.tokens, self.sequence)

    def count_tokens(self) -> TokenCount:
        return count_window_tokens(self.tokens, self.sequence)

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns the samples `ids` as {"input_ids": (n, T), "labels": (n, T)}, both int64; labels are
        already shifted.

        labels[:, t] is the token after input_ids[:, t], or -100 where none follows. The id -1 is an absent
        sample: inputs of 0 and labels of -100, so that it weighs nothing. Raises IndexError for an id that is
        neither.
        """
        return cut_windows(self.tokens, ids, self.sequence, SEPARATOR)


def list_files(source: DataConfig, patterns: Sequence[str]) -> tuple[Path, ...]:
    """Returns the files that `source` names, in order: itself, or those of the folder that match
    data.include, else `patterns`.

    Raises PlanError when none matches, and for what cannot be read.
    """
    root, include = Path(source.source), source.include or tuple(patterns)
    files = tuple(_files(root, include, source.exclude)) if root.is_dir() else (root,)
    if not files:
        what = (
            f"no file in '{printable_path(root)}' matches include = {list(include)}, exclude = "
            f"{list(source.exclude)}"
        )
        names = sorted({path.suffix for path in root.iterdir() if path.suffix and path.is_file()})[:6]
        there = f"; it holds {', '.join(f'*{name}' for name in names)}" if names else ""
        raise_diagnostics(
            [
                Diagnostic(
                    what + there, "change data.include or data.exclude, or set data.format", "data.include"
                )
            ]
        )
    return files


def read_text(path: Path) -> tuple[bytes, Diagnostic | None]:
    """Returns the bytes of the text file at `path`, or a diagnostic: missing, unreadable, or not UTF-8."""
    where = printable_path(path)
    text, diagnostic = read_file(path)
    if diagnostic:
        return b"", diagnostic
    fix = "save it as UTF-8 text, or exclude it with data.exclude"
    if zeros := text.count(0):
        return b"", Diagnostic(
            f"{zeros} of its {len(text)} bytes are zero: binary data or UTF-16; needed is text", fix, where
        )
    odd = _count_undecodable(text)
    if odd > MAX_UNDECODABLE * len(text):
        return b"", Diagnostic(
            f"{odd} of its {len(text)} bytes are not UTF-8: binary data or another encoding", fix, where
        )
    return text, None


def missing_file_diagnostic(path: Path) -> Diagnostic | None:
    """Returns the diagnostic that `path` is not a readable file; None if it is."""
    if not path.exists():
        fix = 'correct data.source; for a dataset of the Hugging Face hub set data.format = "datasets"'
        return Diagnostic("there is no such file or folder", fix, printable_path(path))
    if not path.is_file():  # a pipe or a device would be read for ever
        return Diagnostic("it is not a regular file", "exclude it with data.exclude", printable_path(path))
    return None


def read_file(path: Path) -> tuple[bytes, Diagnostic | None]:
    """Returns the bytes of the file at `path`, or why it cannot be read."""
    diagnostic = missing_file_diagnostic(path)
    if diagnostic:
        return b"", diagnostic
    try:
        return path.read_bytes(), None
    except OSError as error:
        fix = "allow reading it, or exclude it with data.exclude"
        return b"", Diagnostic(f"it cannot be read: {error.strerror}", fix, printable_path(path))


def printable_path(path: Path) -> str:
    """Returns the path as text that any terminal can print; undecodable bytes of a file name are escaped."""
    return str(path).encode(errors="backslashreplace").decode()


def _files(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    inside = folder.resolve()
    found: dict[str, Path] = {}
    denied: list[OSError] = []
    for here, folders, names in os.walk(
        folder, onerror=denied.append
    ):  # does not enter linked folders, so loops cannot trap it
        for name in (*names, *(name for name in folders if Path(here, name).is_symlink())):
            path = Path(here, name)
            relative = path.relative_to(folder)
            if not _matches(relative, include) or _matches(relative, exclude):
                continue
            if not path.resolve().is_relative_to(inside):
                logger.warning(
                    "not read: '%s' is a link out of the folder; name its target as data.source",
                    printable_path(path),
                )
            elif name in names:
                found[relative.as_posix()] = path
    fix = "allow reading it, or point data.source elsewhere"
    raise_diagnostics(
        Diagnostic(f"the folder cannot be read: {error.strerror}", fix, printable_path(Path(error.filename)))
        for error in denied
    )
    return (found[key] for key in sorted(found))


def _matches(relative: PurePath, patterns: Sequence[str]) -> bool:
    candidates = (relative.as_posix(), *relative.parts)
    return any(fnmatchcase(candidate, pattern) for pattern in patterns for candidate in candidates)


def _join_files(files: Sequence[Path]) -> bytearray:
    content, diagnostics = bytearray(), []
    for path in files:
        text, diagnostic = read_text(path)
        if diagnostic:
            diagnostics.append(diagnostic)
        elif text:
            content += b"\0" if content else b""
            content += text
    raise_diagnostics(diagnostics)
    return content


def _count_undecodable(text: bytes) -> int:
    """The number of bytes that are no part of a UTF-8 character, found in pieces: a large file is not held
    twice.
    """
    decoder = getincrementaldecoder("utf-8")(errors="ignore")
    pieces = (text[i : i + DECODE_NBYTES] for i in range(0, len(text), DECODE_NBYTES))
    return len(text) - sum(len(decoder.decode(piece).encode()) for piece in pieces)
