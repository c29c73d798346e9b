"""Tokenizers: texts to token ids and back.

There are two: `ByteTokenizer`, whose tokens are bytes, and `PretrainedTokenizer`, a tokenizer of transformers
from a folder or from the hub. No code from a repository is executed.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from meshwright.plan.job.errors import Diagnostic, PlanError

WHERE = "data.tokenizer"


class Tokenizer(ABC):
    """Turns texts into token ids and back.

    `vocab_size` is one more than the largest id, `eos_token_id` the id that ends a document (None: there is
    none). Two tokenizers with the same `digest` give the same ids.
    """

    name: str
    vocab_size: int
    eos_token_id: int | None
    digest: str

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text (1-D integer arrays), without added special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; invalid text is shown as replacement characters."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as tokens; a zero byte, which no text contains, ends a document."""

    name, vocab_size, eos_token_id, digest = "bytes", 256, 0, "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token % 256 for token in ids).decode(errors="replace")


class PretrainedTokenizer(Tokenizer):
    """The tokenizer that transformers loads from `name`, a folder or a name on the hub.

    Raises PlanError when there is none, when it needs code of its own, or when it has no tokens.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        if is_path(name) and not Path(name).is_dir():  # not to be asked of the hub, which is slow to say no
            text = f"no tokenizer: there is no folder '{name}'"
            raise PlanError(
                text,
                fix="name a folder with tokenizer.json, or a model on the hub: owner/name",
                location=WHERE,
            )
        try:
            loaded: Any = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # transformers, its hub client and tokenizers raise a dozen kinds for what they cannot load
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            problem = (
                "contains none that can be read"
                if Path(name).is_dir()
                else "is not a folder, and none was loaded from the hub"
            )
            fix = (
                "name a folder with tokenizer.json, or a model on the hub (which needs a "
                "network, or a filled cache)"
            )
            raise PlanError(f"no tokenizer: '{name}' {problem}: {reason}", fix=fix, location=WHERE) from error
        known: dict[str, int] = loaded.get_vocab()
        self.hf_tokenizer, self.vocab_size, self.eos_token_id = (
            loaded,
            max(known.values(), default=-1) + 1,
            loaded.eos_token_id,
        )
        if self.vocab_size < 1:
            text = f"the tokenizer '{name}' has no tokens"
            raise PlanError(
                text, fix="name a folder with tokenizer.json, or another model on the hub", location=WHERE
            )
        digest = sha256(json.dumps([sorted(known.items()), self.eos_token_id, loaded.chat_template]).encode())
        digest.update(loaded.backend_tokenizer.to_str().encode() if loaded.is_fast else b"slow")
        self.digest = digest.hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = (
            self.hf_tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            if texts
            else []
        )
        return [np.asarray(ids, dtype=np.int64) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        return self.hf_tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def is_path(name: str) -> bool:
    """Returns whether `name` can only be a path: a name on the hub has one slash at most."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def make_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names; "" is bytes."""
    return PretrainedTokenizer(name) if name else ByteTokenizer()


def tokenizer_diagnostics(tokenizer: Tokenizer, *, is_packed: bool) -> Iterator[Diagnostic]:
    """Yields what keeps `tokenizer` from separating packed documents."""
    if is_packed and tokenizer.eos_token_id is None:
        fix = 'set "eos_token" in its tokenizer_config.json, or choose another tokenizer'
        yield Diagnostic(
            f"the tokenizer '{tokenizer.name}' has no end-of-text token; needed is one between documents",
            fix,
            WHERE,
        )
