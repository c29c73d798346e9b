"""Resolves a hub id to a folder on this machine, and pins it to a commit.

`ORG/NAME` is a repository of the Hugging Face hub, unless a local path of that name exists. huggingface_hub
fetches its config, safetensors and tokenizer into its own cache and obeys its own settings (HF_HOME,
HF_HUB_OFFLINE, a token); pickles and code are not fetched. Without weights only the small files are.

A branch moves, so `pin_revision` replaces it by its current commit; a plan file contains that commit, and
every rank reads it from the cache without network access.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
PATH_SUFFIXES = (".json", ".py", ".toml", ".safetensors", ".bin", ".pt")
CONFIG_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHT_PATTERNS = ("*.safetensors",)
CODE_PATTERNS = ("*.py",)


def is_hub_id(name: str) -> bool:
    """Returns whether `name` can only be a repository of the hub: ORG/NAME, and no path on this machine."""
    path = Path(name)
    return (
        bool(HUB_ID.fullmatch(name))
        and path.suffix not in PATH_SUFFIXES
        and not path.exists()
        and not path.parent.is_dir()
    )


def resolve_path(name: str, source: ModelConfig, where: str) -> Path:
    """Returns the path `name`, or the folder of its snapshot if it is a hub id.

    Raises PlanError if the hub does not have it and the cache does not either.
    """
    if not is_hub_id(name):
        return Path(name)
    patterns = [
        *CONFIG_PATTERNS,
        *(WEIGHT_PATTERNS if name == source.weights else ()),
        *(CODE_PATTERNS if source.trust_remote_code else ()),
    ]
    try:
        folder = snapshot_download(
            name,
            revision=source.revision or None,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            library_name="meshwright",
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        revision = f" at '{source.revision}'" if source.revision else ""
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        text = f"there is no path '{name}' here, and as a hub id{revision} it cannot be fetched: {reason}"
        fix = (
            "check the path or the id; private repositories need `hf auth login`; offline, set HF_HOME to a "
            "cache that holds it"
        )
        raise PlanError(text, fix=fix, location=where) from error
    return Path(folder)


def model_folders(source: ModelConfig) -> Iterator[tuple[str, Path]]:
    """Yields the folders of the weights and of the config of `source`, each with the name that it has there.

    A hub id is resolved to its snapshot. Files are in no folder of a model, but for config.json.
    """
    small = replace(source, weights="")  # of the weights, only the small files next to them
    for name in filter(None, (source.weights, source.source)):
        path = resolve_path(name, small, "model.source")
        path = path.parent if path.name == "config.json" else path
        if path.is_dir():
            yield name, path


def pin_revision(source: ModelConfig) -> ModelConfig:
    """Returns `source` with the commit as its revision, if it names a hub id; otherwise unchanged.

    Raises PlanError for a revision without a hub id, for two repositories under one revision, for
    trust_remote_code without a hub id, and if the hub cannot be reached.
    """
    ids = list(dict.fromkeys(name for name in (source.weights, source.source) if is_hub_id(name)))
    if not ids:
        if source.trust_remote_code:
            text = (
                f"trust_remote_code with '{source.source}', which is not a hub id: a folder has no commit "
                "that fixes its code"
            )
            fix = "name the hub id, or build the model in a file of your own: model.source = file.py:factory"
            raise PlanError(text, fix=fix, location="model.trust_remote_code")
        if source.revision:
            text = (
                f"the revision '{source.revision}', and neither model.source nor model.weights is a hub id "
                "(ORG/NAME)"
            )
            raise PlanError(
                text,
                fix="remove model.revision, or name a hub id that is not a local path",
                location="model.revision",
            )
        return source
    if len(ids) > 1:
        text = f"two repositories, {ids[1]} and {ids[0]}, under one revision"
        raise PlanError(
            text, fix="remove model.source: it defaults to model.weights", location="model.source"
        )
    if COMMIT_HASH.fullmatch(source.revision):
        return source
    folder = resolve_path(ids[0], source, "model.weights" if ids[0] == source.weights else "model.source")
    return replace(source, revision=folder.name) if COMMIT_HASH.fullmatch(folder.name) else source
