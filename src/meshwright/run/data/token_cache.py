"""Tokens on disk: documents are tokenized once, and every later run and every rank maps the same files into
memory.

    cache/
      3f9a...c1/               one per (content, tokenizer, columns); its name is their hash
        tokens.bin             the ids of all documents, one after the other: uint16, or uint32 for large
                               vocabularies
        document_starts.bin    where each document begins, and the end: int64
        label_mask.bin         conversations only: which tokens have labels, one byte each
        meta.json              the format, the lengths, the dtype of the ids, and the sha256 of the contents
      3f9a...c1.partial-77/    being written, or left behind by a killed process

A folder appears by one rename, so a reader sees all of it or nothing. If several ranks start at once, one
tokenizes and the others wait for its lock, which the system releases when a process dies. On a file system
without locks each rank tokenizes, and the first rename wins. No file is a pickle.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import TOKEN_CACHE
from meshwright.run.data.token_dataset import EncodedDocument

ARRAY_DTYPES = {
    "tokens": "",
    "document_starts": "<i8",
    "label_mask": "|u1",
}  # the type of tokens stands in meta.json
META_FILE = "meta.json"
UINT16_VOCAB = 1 << 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenCache:
    """Documents as arrays mapped from disk: `tokens` (N,), `document_starts` (documents + 1,), `label_mask`
    (N,) or None.

    `digest` is the sha256 of the ids, the document boundaries and the label mask.
    """

    tokens: np.ndarray
    document_starts: np.ndarray
    label_mask: np.ndarray | None
    digest: str

    def document(self, i: int) -> EncodedDocument:
        """Returns document `i`, from 0."""
        here = slice(int(self.document_starts[i]), int(self.document_starts[i + 1]))
        return EncodedDocument(self.tokens[here], None if self.label_mask is None else self.label_mask[here])


def open_token_cache(
    cache: Path, key: str, vocab_size: int, documents: Callable[[], Iterable[EncodedDocument]]
) -> TokenCache:
    """Returns the documents of `key` from `cache`; if they are missing, tokenizes `documents()` and keeps
    them.

    `vocab_size` decides the dtype of the ids. Exceptions of `documents()` propagate, and nothing is kept.
    """
    place = cache / sha256(f"{TOKEN_CACHE.version} {vocab_size} {key}".encode()).hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(place.with_suffix(".lock")):
            if not _is_complete(place):
                _build(place, vocab_size, documents())
    except OSError as error:
        text = f"the tokens cannot be kept in '{cache}': {error.strerror or error}"
        raise PlanError(
            text, fix="free space there, or name another folder: run.cache", location="run.cache"
        ) from error
    return _open(place)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        with suppress(ImportError, OSError):
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(place: Path, size: int, documents: Iterable[EncodedDocument]) -> None:
    for left in place.parent.glob(
        f"{place.name}.partial-*"
    ):  # of processes that were killed: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    partial = place.with_name(f"{place.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        meta = _write(partial, np.dtype("<u2" if size <= UINT16_VOCAB else "<u4"), documents)
        (partial / META_FILE).write_text(json.dumps(TOKEN_CACHE.header | meta), encoding="ascii")
        if place.exists():  # of another version of the files, or damaged
            shutil.rmtree(place)
        with suppress(
            OSError
        ):  # another process, on a file system without locks, was first: its files are as good
            os.rename(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    folder: Path, width: np.dtype, documents: Iterable[EncodedDocument]
) -> dict[str, str | int | bool]:
    digest, total, starts, chosen = sha256(), 0, [0], False
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}

        def append(name: str, values: np.ndarray) -> None:
            if name not in files:
                files[name] = stack.enter_context((folder / f"{name}.bin").open("wb"))
            content = values.tobytes()
            digest.update(content)
            files[name].write(content)

        for document in documents:
            append("tokens", document.ids.astype(width))
            if document.label_mask is not None:
                chosen = True
                append("label_mask", document.label_mask.astype(np.uint8))
            total += document.ids.size
            starts.append(total)
        append("document_starts", np.asarray(starts, dtype=ARRAY_DTYPES["document_starts"]))
    return {
        "tokens": total,
        "document_starts": len(starts),
        "label_mask": total * chosen,
        "width": width.str,
        "digest": digest.hexdigest(),
    }


def _read_meta(place: Path) -> dict[str, Any]:
    path = place / META_FILE
    return TOKEN_CACHE.contents(json.loads(path.read_text(encoding="ascii")), str(path))


def _is_complete(place: Path) -> bool:
    try:
        meta = _read_meta(place)
        sizes = {
            name: meta[name] * np.dtype(kind or meta["width"]).itemsize for name, kind in ARRAY_DTYPES.items()
        }
        return all((place / f"{name}.bin").stat().st_size == size for name, size in sizes.items() if size)
    except (OSError, ValueError, KeyError, TypeError, PlanError):
        return False


def _open(place: Path) -> TokenCache:
    meta = _read_meta(place)

    def map_array(name: str) -> np.ndarray:
        kind = np.dtype(ARRAY_DTYPES[name] or meta["width"])
        return (
            np.memmap(place / f"{name}.bin", kind, mode="r", shape=(meta[name],))
            if meta[name]
            else np.empty(0, kind)
        )

    return TokenCache(
        map_array("tokens"),
        map_array("document_starts"),
        map_array("label_mask") if meta["label_mask"] else None,
        meta["digest"],
    )
