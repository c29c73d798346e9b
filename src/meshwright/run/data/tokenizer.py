"""Tokenizers: texts to token ids and back.

There are two: `ByteTokenizer`, whose tokens are bytes, and `PretrainedTokenizer`, a tokenizer of transformers
from a folder or from the hub. No code from a repository is executed.

Which one a run trains with is decided once, for the plan (`resolve_tokenizer`): the one that `data.tokenizer`
names; else the one that the model comes with; else bytes, if the model's vocabulary is no larger. A larger
vocabulary without a tokenizer is refused, because a model of 32,000 tokens would learn from 256 of them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from meshwright.model.hf.tokenizer_files import fetch_tokenizer, own_tokenizer, pin_tokenizer
from meshwright.plan.job.data_config import BYTES
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.job.job import Job, chat_diagnostics

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

    name, vocab_size, eos_token_id, digest = BYTES, 256, 0, "bytes"

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
        folder = Path(name) if Path(name).is_dir() else fetch_tokenizer(name, WHERE)
        try:
            loaded: Any = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        # transformers, its hub client and tokenizers raise a dozen kinds for what they cannot load
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            fix = 'name a folder with tokenizer.json, or a model on the hub; or data.tokenizer = "bytes"'
            text = f"no tokenizer: '{name}' contains none that can be read: {reason}"
            raise PlanError(text, fix=fix, location=WHERE) from error
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
    """Returns the tokenizer that `data.tokenizer` names; bytes for "bytes" and ""."""
    return ByteTokenizer() if name in ("", BYTES) else PretrainedTokenizer(name)


def resolve_tokenizer(job: Job, vocab_size: int | None) -> str:
    """Returns the name of the tokenizer that `job` trains with; `vocab_size` is that of its model (None: not
    known).

    Raises PlanError if the job names none, the model has none, and its vocabulary is larger than bytes or the
    data are conversations.
    """
    named = job.data.tokenizer
    if named:
        return named if named == BYTES or is_path(named) else pin_tokenizer(named, WHERE)
    if found := own_tokenizer(job.model):
        return found
    if vocab_size is not None and vocab_size > ByteTokenizer.vocab_size:
        text = f"a model of {vocab_size:,} tokens, and '{job.model.source}' comes without a tokenizer"
        fix = 'name its tokenizer, a folder or a model on the hub: data.tokenizer = "owner/name"'
        fix += f'; to train on the {ByteTokenizer.vocab_size} bytes: data.tokenizer = "bytes"'
        raise PlanError(text, fix=fix, location=WHERE)
    raise_diagnostics(chat_diagnostics(replace(job.data, tokenizer=BYTES)))
    return BYTES


def tokenizer_notes(job: Job) -> Iterator[str]:
    """Yields a note if `job` asks for bytes and its model comes with a tokenizer."""
    own = own_tokenizer(job.model) if job.data.tokenizer == BYTES else ""
    if own:
        yield f"texts are read as bytes, and the model has a tokenizer: leave data.tokenizer out to use {own}"


def tokenizer_diagnostics(tokenizer: Tokenizer, *, is_packed: bool) -> Iterator[Diagnostic]:
    """Yields what keeps `tokenizer` from separating packed documents."""
    if is_packed and tokenizer.eos_token_id is None:
        fix = 'set "eos_token" in its tokenizer_config.json, or choose another tokenizer'
        yield Diagnostic(
            f"the tokenizer '{tokenizer.name}' has no end-of-text token; needed is one between documents",
            fix,
            WHERE,
        )
