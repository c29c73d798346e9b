"""Documents as they come: the rows of text files, of JSONL files, and of data sets of Hugging Face.

A *row* is a mapping from column to value together with where it stands (`talk.jsonl:7`, `imdb[12]`), so that whatever is
wrong with it later can be said with its place. A row that cannot be read at all is a Fault in its stead: the reader goes
on, and whoever reads decides how many faults make a message.

    talk.jsonl    one JSON object per line, UTF-8; empty lines are skipped; .gz is unpacked as it is read
    datasets      a folder of `save_to_disk`, local json / parquet / csv / arrow files, or a name on the hub ("name:config")

The package `datasets` is optional and imported only here.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from meshwright.plan.job.data_source import DataSource
from meshwright.plan.job.errors import Fault, PlanError, nearest, raise_faults
from meshwright.run.data.text import PATTERNS, files_of, missing, read_text, shown
from meshwright.run.data.tokenizer import is_path

Kind = Literal["text", "jsonl", "datasets"]
Row = tuple[str, Mapping[str, Any] | Fault]
JSONL = ("*.jsonl", "*.jsonl.gz")
TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}  # the builders' names
SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # what save_to_disk leaves in a folder
PIECE = 1 << 20


@dataclass(frozen=True)
class Rows:
    """Rows that can be read again and again: `read()` begins anew. `digest` names their content as far as is cheap."""

    kind: Kind
    read: Callable[[], Iterator[Row]]
    digest: str


def kind_of(source: DataSource) -> Kind:
    """How `source` is read: as data.format says, or as its name and what lies there suggest."""
    if source.format != "auto":
        return source.format
    path = Path(source.source)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return "jsonl"
    saved = path.is_dir() and any((path / name).is_file() for name in SAVED)
    return "datasets" if saved or path.suffix in TABLES else "text"


def open_rows(source: DataSource) -> Rows:
    """The rows of `source`. Raises PlanError for what is missing or unreadable, and for fields that its kind has no use for."""
    kind = kind_of(source)
    raise_faults(idle_faults(source))
    if kind == "datasets":
        return _dataset_rows(source)
    files = files_of(source, JSONL if kind == "jsonl" else PATTERNS)
    raise_faults(fault for path in files if (fault := missing(path)))
    read = (lambda: _jsonl_rows(files)) if kind == "jsonl" else (lambda: _text_rows(files))
    return Rows(kind, read, _content(files))


def missing_column(row: Mapping[str, Any], name: str, where: str, key: str) -> Fault | None:
    """The fault that `row` has no column `name`, which the field `key` asks for; None when it has."""
    if name in row:
        return None
    there = ", ".join(row) or "none"
    return Fault(f"there is no column '{name}'; the columns are: {there}", f"set {key}: {nearest(name, row)}", where)


def idle_faults(source: DataSource) -> Iterator[Fault]:
    """The fields of `source` that were set and that its kind has no use for."""
    kind = kind_of(source)
    words = {"text": "plain text files have", "jsonl": "JSONL files have", "datasets": "data sets have"}
    fields = {"column": "text", "chat": "", "split": "train", "streaming": False}
    idle = {"text": ("column", "chat", "split", "streaming"), "jsonl": ("split", "streaming"), "datasets": ()}
    for name in idle[kind]:
        value = vars(source)[name]
        if value != fields[name]:
            fix = 'remove it, or set data.format = "datasets"' if kind == "jsonl" else 'set data.format = "jsonl" or "datasets"'
            yield Fault(f"{name} = {value!r}, which {words[kind]} not", fix, f"data.{name}")
    if kind == "datasets" and (source.include or source.exclude):
        fix = "remove data.include and data.exclude, or name the files themselves as data.source"
        yield Fault("include and exclude choose files of a folder, and a data set has none", fix, "data.include")


def _content(files: Iterable[Path]) -> str:
    digest = sha256()
    for path in files:
        one = sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    one.update(piece)
        except OSError as error:
            fix = "allow reading it, or exclude it with data.exclude"
            raise PlanError(f"it cannot be read: {error.strerror}", fix=fix, where=shown(path)) from error
        digest.update(one.digest())
    return digest.hexdigest()


def _text_rows(files: Iterable[Path]) -> Iterator[Row]:
    for path in files:
        text, fault = read_text(path)
        yield shown(path), fault or {"text": text.decode(errors="replace")}


def _jsonl_rows(files: Iterable[Path]) -> Iterator[Row]:
    for path in files:
        try:
            for number, line in _lines(path):
                yield f"{shown(path)}:{number}", _object(line, f"{shown(path)}:{number}")
        except (OSError, EOFError, zlib.error) as error:  # also what gzip says of a file that is cut short or no gzip
            yield shown(path), Fault(f"it cannot be read to its end: {error}", "write or download it again", shown(path))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from ((number, line.strip()) for number, line in enumerate(file, 1) if line.strip())


def _object(line: bytes, where: str) -> Mapping[str, Any] | Fault:
    fix = "write one JSON object per line, in UTF-8, or repair this line"
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Fault(f"the byte at position {error.start} of the line is not UTF-8", fix, where)
    except json.JSONDecodeError as error:
        return Fault(f"not JSON: {error.msg} (column {error.colno})", fix, where)
    except RecursionError:
        return Fault("not JSON that can be read: it nests too deep", fix, where)
    return found if isinstance(found, dict) else Fault(f"the line holds {_kind(found)}; needed is an object", fix, where)


def _kind(value: object) -> str:
    words: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


def _dataset_rows(source: DataSource) -> Rows:
    try:
        import datasets  # optional
    except ImportError as error:
        fix = "pip install 'meshwright[datasets]'"
        raise PlanError(
            f"'{source.source}' is a data set, and the package 'datasets' is not installed", fix=fix, where="data.format"
        ) from error
    found = _loaded(datasets, source)
    if isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):  # a folder of save_to_disk with several splits
        if source.split not in found:
            text = f"there is no split '{source.split}'; the splits are: {', '.join(map(str, found))}"
            raise PlanError(text, fix=f"set data.split: {nearest(source.split, map(str, found))}", where="data.split")
        found = found[source.split]
    if found.column_names is not None:
        name, key = (source.chat, "data.chat") if source.chat else (source.column, "data.column")
        raise_faults(fault for fault in [missing_column(dict.fromkeys(found.column_names), name, source.source, key)] if fault)
    said = [source.source, source.split, str(found.info.version), sorted(map(str, found.column_names or ()))]
    digest = found._fingerprint if isinstance(found, datasets.Dataset) else json.dumps(said)

    def read() -> Iterator[Row]:
        for number, row in enumerate(found):
            yield f"{source.source}[{number}]", row

    return Rows("datasets", read, digest)


def _loaded(datasets: Any, source: DataSource) -> Any:
    """What the package makes of `source`; every error of its own becomes a PlanError that repeats its words."""
    path, fix = Path(source.source), "check data.source and data.split; a name on the hub needs a network, or a filled cache"
    if is_path(source.source):
        raise_faults(fault for fault in [None if path.is_dir() else missing(path)] if fault)
    builder = TABLES.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix)
    try:
        if path.is_dir() and any((path / name).is_file() for name in SAVED):
            found = datasets.load_from_disk(str(path))
            return found.to_iterable_dataset() if source.streaming and isinstance(found, datasets.Dataset) else found
        if path.is_file() and builder:
            where: dict[str, Any] = {"path": builder, "data_files": {source.split.split("[")[0]: str(path)}}
        else:
            name, _, config = source.source.partition(":")
            where = {"path": name, "name": config or None}
        return datasets.load_dataset(**where, split=source.split, streaming=source.streaming)
    except Exception as error:  # the package and its hub client raise a dozen kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise PlanError(f"the data set '{source.source}' cannot be loaded: {reason}", fix=fix, where="data.source") from error
