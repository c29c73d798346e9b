"""Finds the tokenizer in a model's folder, and checks that its ids fit the model's vocabulary.

A model that is published with a tokenizer is trained with it, unless another one is named (`own_tokenizer`).
A tokenizer of the hub is pinned in its name, `ORG/NAME@COMMIT`, which is what a plan file contains.

An id beyond the embedding is an error in the middle of a step on a CPU and a crash of the whole device on a
GPU, so it is checked first. Only ids are read, from tokenizer.json or, without one, vocab.json. A vocabulary
that is larger than the tokenizer needs is usual (sizes are padded).
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from meshwright.model.hf.hub import COMMIT_HASH, CONFIG_PATTERNS, HUB_ID, is_hub_id, model_folders
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig

# A folder with one of these has a tokenizer; the others belong to it.
VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json"),
    "*.model",
)
EXTRA_FILES = ("special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja")
TOKENIZER_ID = re.compile(rf"({HUB_ID.pattern}|[A-Za-z0-9][\w.-]{{0,95}})(?:@([\w./-]+))?")
HUB_TIMEOUT_S = 10.0  # of the one request that finds out whether the hub answers and has the tokenizer


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of the tokenizer in `folder`; none if there is no tokenizer."""
    vocabulary = [path for pattern in VOCABULARY_FILES for path in sorted(folder.glob(pattern))]
    extra = [folder / name for name in EXTRA_FILES if (folder / name).is_file()]
    return [*vocabulary, *extra] if vocabulary else []


def own_tokenizer(source: ModelConfig) -> str:
    """Returns the tokenizer that the model of `source` comes with, as `data.tokenizer` names it; "" for none.

    It is that of the weights or, if their folder has none, of the config: the path of the folder, or
    `HUB_ID@REVISION`.
    """
    for name, folder in model_folders(source):
        if tokenizer_files(folder):
            pinned = f"{name}@{source.revision}" if source.revision else name
            return pinned if is_hub_id(name) else str(folder.absolute())
    return ""


def fetch_tokenizer(name: str, where: str) -> Path:
    """Returns the folder with the tokenizer `name` of the hub: NAME or ORG/NAME, perhaps with @REVISION.

    The cache is asked first, then the hub, by one request of at most `HUB_TIMEOUT_S` seconds. Raises
    PlanError if neither has it.
    """
    matched = TOKENIZER_ID.fullmatch(name)
    if matched is None:
        fix = "name a folder with tokenizer.json, or a model on the hub: owner/name"
        raise PlanError(f"no tokenizer: '{name}' is neither a folder nor a hub id", fix=fix, location=where)
    repository, revision = matched[1], matched[2]
    with suppress(OSError, ValueError):
        cached = _download_tokenizer(repository, revision, from_cache=True)
        if tokenizer_files(cached):
            return cached
    try:
        commit = HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S).sha
        return _download_tokenizer(repository, commit or revision, from_cache=False)
    except Exception as error:  # the client raises the errors of its HTTP library, which differ by version
        raise _tokenizer_refusal(name, error, where) from error


def _download_tokenizer(repository: str, revision: str | None, *, from_cache: bool) -> Path:
    folder = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=list(CONFIG_PATTERNS),
        ignore_patterns=["*/*"],
        library_name="meshwright",
        local_files_only=from_cache,
    )
    return Path(folder)


def _tokenizer_refusal(name: str, error: Exception, where: str) -> PlanError:
    if isinstance(error, RepositoryNotFoundError):
        reason = "the hub has no such model, or it is private"
        fix = "check the name (owner/name); private repositories need `hf auth login`"
    else:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        reason = f"the hub cannot be asked: {first}"
        download = f"hf download {name.partition('@')[0]}"
        fix = f"fill the cache where there is a network (`{download}`), and set HF_HOME"
    text = f"no tokenizer: there is no folder '{name}', the cache of the hub does not have it, and {reason}"
    fix += '; or name a folder with tokenizer.json, or data.tokenizer = "bytes"'
    return PlanError(text, fix=fix, location=where)


def pin_tokenizer(name: str, where: str) -> str:
    """Returns `name` with the commit as its revision if it is a tokenizer of the hub; a folder unchanged.

    Raises PlanError as `fetch_tokenizer` does.
    """
    if Path(name).is_dir() or COMMIT_HASH.fullmatch(name.partition("@")[2]):
        return name
    commit = fetch_tokenizer(name, where).name
    return f"{name.partition('@')[0]}@{commit}" if COMMIT_HASH.fullmatch(commit) else name


def check_tokenizer(path: Path, vocab_size: int | None) -> None:
    """Raises PlanError if the tokenizer in the folder `path` has ids of `vocab_size` or more."""
    largest = largest_token_id(path)
    if vocab_size is not None and largest is not None and largest >= vocab_size:
        text = (
            f"the tokenizer in {path} has ids up to {largest}, and the model has {vocab_size} tokens, "
            "numbered from 0"
        )
        fix = (
            "give weights and tokenizer of one model, or start a larger embedding: "
            "model.overrides.vocab_size and model.skip"
        )
        raise PlanError(text, fix=fix, location="model.weights")


def largest_token_id(path: Path) -> int | None:
    """Returns the largest id of the tokenizer in the folder `path`; None if no file lists its ids.

    Raises PlanError for a file that is not JSON.
    """
    for name, ids in (("tokenizer.json", _ids), ("vocab.json", _id_values)):
        if (path / name).is_file():
            try:
                return max(ids(json.loads((path / name).read_text(encoding="utf-8"))), default=None)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                text = f"{path / name} cannot be read: {error}"
                raise PlanError(
                    text, fix="download it again, or remove it", location="model.weights"
                ) from error
    return None


def _ids(tokenizer: dict[str, Any]) -> list[int]:
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    vocab_ids = (
        range(len(vocabulary)) if isinstance(vocabulary, list) else _id_values(vocabulary)
    )  # in a list, the position is the id
    return [*vocab_ids, *(token["id"] for token in tokenizer.get("added_tokens") or ())]


def _id_values(vocabulary: dict[str, int]) -> list[int]:
    return [token for token in vocabulary.values() if isinstance(token, int)]
