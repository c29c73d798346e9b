"""Checks that the tokenizer in a folder of weights fits the model's vocabulary.

An id beyond the embedding is an error in the middle of a step on a CPU and a crash of the whole device on a
GPU, so it is checked first. Only ids are read, from tokenizer.json or, without one, vocab.json. A vocabulary
that is larger than the tokenizer needs is usual (sizes are padded).
"""

import json
from pathlib import Path
from typing import Any

from meshwright.plan.job.errors import PlanError


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
