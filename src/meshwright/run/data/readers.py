"""Readers of documents: the files of a source, and rows of text files, JSONL files and Hugging Face datasets.

A *row* is a mapping from column to value with its location (`talk.jsonl:7`, `imdb[12]`), so that later
errors can name it. A row that cannot be read is a Diagnostic instead; reading continues, and the caller
decides how many diagnostics to report.

    talk.jsonl    one JSON object per line, UTF-8; empty lines are skipped; .gz is decompressed while reading
    datasets      a folder of `save_to_disk`, local json / parquet / csv / arrow files, or a name on the hub
                  ("name:config")

The package `datasets` is optional and imported only here.
"""

import gzip
import json
import logging
import os
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, Literal

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name
from meshwright.run.data.tokenizer import is_path

SourceFormat = Literal["text", "jsonl", "datasets"]
LocatedRow = tuple[str, Mapping[str, Any] | Diagnostic]
JSONL_PATTERNS = ("*.jsonl", "*.jsonl.gz")
FORMAT_OF_SUFFIX = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
}  # the builders' names
SAVED_DATASET_FILES = (
    "state.json",
    "dataset_info.json",
    "dataset_dict.json",
)  # what save_to_disk leaves in a folder
READ_NBYTES = 1 << 20
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


@dataclass(frozen=True)
class RowReader:
    """Rows that can be read repeatedly: `read()` starts again. `digest` identifies their content as far as
    is cheap.
    """

    format: SourceFormat
    read: Callable[[], Iterator[LocatedRow]]
    digest: str


def source_format(source: DataConfig) -> SourceFormat:
    """Returns the format of `source`: data.format, or what its name and its files suggest."""
    if source.format != "auto":
        return source.format
    path = Path(source.source)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return "jsonl"
    saved = path.is_dir() and any((path / name).is_file() for name in SAVED_DATASET_FILES)
    return "datasets" if saved or path.suffix in FORMAT_OF_SUFFIX else "text"


def open_reader(source: DataConfig) -> RowReader:
    """Returns the reader of `source`. Raises PlanError for missing or unreadable files, and for fields
    without effect.
    """
    kind = source_format(source)
    raise_diagnostics(unused_field_diagnostics(source))
    if kind == "datasets":
        return _dataset_rows(source)
    files = list_files(source, JSONL_PATTERNS if kind == "jsonl" else DEFAULT_PATTERNS)
    raise_diagnostics(diagnostic for path in files if (diagnostic := missing_file_diagnostic(path)))
    read = (lambda: _jsonl_rows(files)) if kind == "jsonl" else (lambda: _text_rows(files))
    return RowReader(kind, read, _content(files))


def missing_column_diagnostic(row: Mapping[str, Any], name: str, where: str, key: str) -> Diagnostic | None:
    """Returns the diagnostic that `row` has no column `name`, which the field `key` names; None if it has."""
    if name in row:
        return None
    there = ", ".join(row) or "none"
    return Diagnostic(
        f"there is no column '{name}'; the columns are: {there}",
        f"set {key}: {suggest_name(name, row)}",
        where,
    )


def unused_field_diagnostics(source: DataConfig) -> Iterator[Diagnostic]:
    """Yields the fields of `source` that are set and have no effect for its format."""
    kind = source_format(source)
    words = {"text": "plain text files have", "jsonl": "JSONL files have", "datasets": "datasets have"}
    fields = {"column": "text", "chat": "", "split": "train", "streaming": False}
    idle = {"text": ("column", "chat", "split", "streaming"), "jsonl": ("split", "streaming"), "datasets": ()}
    for name in idle[kind]:
        value = vars(source)[name]
        if value != fields[name]:
            fix = (
                'remove it, or set data.format = "datasets"'
                if kind == "jsonl"
                else 'set data.format = "jsonl" or "datasets"'
            )
            yield Diagnostic(f"{name} = {value!r}, which {words[kind]} not", fix, f"data.{name}")
    if kind == "datasets" and (source.include or source.exclude):
        fix = "remove data.include and data.exclude, or name the files themselves as data.source"
        yield Diagnostic(
            "include and exclude choose files of a folder, and a dataset has none", fix, "data.include"
        )


def _content(files: Iterable[Path]) -> str:
    digest = sha256()
    for path in files:
        one = sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(READ_NBYTES):
                    one.update(piece)
        except OSError as error:
            fix = "allow reading it, or exclude it with data.exclude"
            raise PlanError(
                f"it cannot be read: {error.strerror}", fix=fix, location=printable_path(path)
            ) from error
        digest.update(one.digest())
    return digest.hexdigest()


def _text_rows(files: Iterable[Path]) -> Iterator[LocatedRow]:
    for path in files:
        text, diagnostic = read_text(path)
        yield printable_path(path), diagnostic or {"text": text.decode(errors="replace")}


def _jsonl_rows(files: Iterable[Path]) -> Iterator[LocatedRow]:
    for path in files:
        try:
            for number, line in _lines(path):
                yield f"{printable_path(path)}:{number}", _object(line, f"{printable_path(path)}:{number}")
        except (
            OSError,
            EOFError,
            zlib.error,
        ) as error:  # also what gzip says of a file that is cut short or no gzip
            yield (
                printable_path(path),
                Diagnostic(
                    f"it cannot be read to its end: {error}",
                    "write or download it again",
                    printable_path(path),
                ),
            )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from ((number, line.strip()) for number, line in enumerate(file, 1) if line.strip())


def _object(line: bytes, where: str) -> Mapping[str, Any] | Diagnostic:
    fix = "write one JSON object per line, in UTF-8, or repair this line"
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Diagnostic(f"the byte at position {error.start} of the line is not UTF-8", fix, where)
    except json.JSONDecodeError as error:
        return Diagnostic(f"not JSON: {error.msg} (column {error.colno})", fix, where)
    except RecursionError:
        return Diagnostic("not JSON that can be read: it nests too deep", fix, where)
    return (
        found
        if isinstance(found, dict)
        else Diagnostic(f"the line holds {_kind(found)}; needed is an object", fix, where)
    )


def _kind(value: object) -> str:
    words: dict[type, str] = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


def _dataset_rows(source: DataConfig) -> RowReader:
    try:
        import datasets  # optional
    except ImportError as error:
        fix = "pip install 'meshwright[datasets]'"
        raise PlanError(
            f"'{source.source}' is a dataset, and the package 'datasets' is not installed",
            fix=fix,
            location="data.format",
        ) from error
    found = _load_dataset(datasets, source)
    if isinstance(
        found, datasets.DatasetDict | datasets.IterableDatasetDict
    ):  # a folder of save_to_disk with several splits
        if source.split not in found:
            text = f"there is no split '{source.split}'; the splits are: {', '.join(map(str, found))}"
            raise PlanError(
                text,
                fix=f"set data.split: {suggest_name(source.split, map(str, found))}",
                location="data.split",
            )
        found = found[source.split]
    if found.column_names is not None:
        name, key = (source.chat, "data.chat") if source.chat else (source.column, "data.column")
        raise_diagnostics(
            diagnostic
            for diagnostic in [
                missing_column_diagnostic(dict.fromkeys(found.column_names), name, source.source, key)
            ]
            if diagnostic
        )
    said = [source.source, source.split, str(found.info.version), sorted(map(str, found.column_names or ()))]
    digest = found._fingerprint if isinstance(found, datasets.Dataset) else json.dumps(said)

    def read() -> Iterator[LocatedRow]:
        for number, row in enumerate(found):
            yield f"{source.source}[{number}]", row

    return RowReader("datasets", read, digest)


def _load_dataset(datasets: Any, source: DataConfig) -> Any:
    path, fix = (
        Path(source.source),
        "check data.source and data.split; a name on the hub needs a network, or a filled cache",
    )
    if is_path(source.source):
        raise_diagnostics(
            diagnostic
            for diagnostic in [None if path.is_dir() else missing_file_diagnostic(path)]
            if diagnostic
        )
    builder = FORMAT_OF_SUFFIX.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix)
    try:
        if path.is_dir() and any((path / name).is_file() for name in SAVED_DATASET_FILES):
            found = datasets.load_from_disk(str(path))
            return (
                found.to_iterable_dataset()
                if source.streaming and isinstance(found, datasets.Dataset)
                else found
            )
        if path.is_file() and builder:
            where: dict[str, Any] = {"path": builder, "data_files": {source.split.split("[")[0]: str(path)}}
        else:
            name, _, config = source.source.partition(":")
            where = {"path": name, "name": config or None}
        return datasets.load_dataset(**where, split=source.split, streaming=source.streaming)
    except Exception as error:  # the package and its hub client raise a dozen kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise PlanError(
            f"the dataset '{source.source}' cannot be loaded: {reason}", fix=fix, location="data.source"
        ) from error


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


def _count_undecodable(text: bytes) -> int:
    """The number of bytes that are no part of a UTF-8 character, found in pieces: a large file is not held
    twice.
    """
    decoder = getincrementaldecoder("utf-8")(errors="ignore")
    pieces = (text[i : i + DECODE_NBYTES] for i in range(0, len(text), DECODE_NBYTES))
    return len(text) - sum(len(decoder.decode(piece).encode()) for piece in pieces)
