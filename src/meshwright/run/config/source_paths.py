"""Finds the files that a config names, beside it or in the current folder, and makes their paths absolute."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import BYTES
from meshwright.plan.job.job import Job


def with_absolute_sources(job: Job, folder: Path, overridden: frozenset[tuple[str, ...]]) -> Job:
    """Returns `job`, of a config in `folder`, with absolute paths of model, data and tokenizer; those that an
    override has set are looked for in the current folder first.
    """

    def resolve(table: str, source: str) -> str:
        typed = (table, "source") in overridden or (table,) in overridden
        return resolve_source(source, search_folders(folder, is_override=typed))

    weights = resolve("model", job.model.weights)
    model = replace(job.model, source=resolve("model", job.model.source) or weights, weights=weights)
    data, (typed, tokenizer) = job.data, (("data", "tokenizer") in overridden, job.data.tokenizer)
    if tokenizer != BYTES:
        tokenizer = resolve_source(tokenizer, search_folders(folder, is_override=typed))
    mixture = tuple(replace(part, source=resolve("data", part.source)) for part in data.mixture)
    where = data.source if data.source == "example" else resolve("data", data.source)
    data = replace(data, source=where, tokenizer=tokenizer, mixture=mixture)
    evaluate = job.evaluate
    if evaluate.source not in ("", "example"):
        evaluate = replace(evaluate, source=resolve("evaluate", evaluate.source))
    if evaluate.include_path:
        typed = ("evaluate", "include_path") in overridden
        tasks = resolve_source(evaluate.include_path, search_folders(folder, is_override=typed))
        evaluate = replace(evaluate, include_path=tasks)
    return replace(job, model=model, data=data, evaluate=evaluate)


def with_absolute_files(run: RunConfig, folder: Path, overridden: frozenset[tuple[str, ...]]) -> RunConfig:
    """Returns `run` with absolute paths of the files of measurements, likewise."""
    places = {
        key: search_folders(folder, is_override=("run", key) in overridden) for key in ("hardware", "cluster")
    }
    hardware, cluster = (resolve_source(vars(run)[key], where) for key, where in places.items())
    return replace(run, hardware=hardware, cluster=cluster)


def search_folders(folder: Path, *, is_override: bool) -> tuple[Path, Path]:
    """Returns the folders in which to look for a file that a config in `folder`, or an override, names."""
    return (Path.cwd(), folder) if is_override else (folder, Path.cwd())


def absolute_source(source: str) -> str:
    """Returns `source` (a path, or path:factory) as an absolute path if it exists here; else unchanged."""
    return resolve_source(source, (Path.cwd(),))


def resolve_source(source: str, folders: Sequence[Path]) -> str:
    """Returns `source` (a path, or path:factory) as seen from the first of `folders` in which it exists;
    unchanged when in none.
    """
    head, colon, factory = source.rpartition(":")
    for folder in folders:
        for name, tail in ((source, ""), (head, colon + factory)):
            # Path.exists raises for strings that cannot be paths.
            if name and os.path.exists(folder / name):
                return os.path.abspath(folder / name) + tail
    return source
