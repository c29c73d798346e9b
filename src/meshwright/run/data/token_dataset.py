"""Datasets of token samples: windows of one long sequence of tokens, and padded documents.

A sample has T inputs and T labels; label t is the token that follows input t, or -100 where there is none.
Training reads a `TokenDataset`, whatever it was made from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.run.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenCount:
    """The tokens of all samples of a dataset: of `num_positions` places, `num_tokens` are no padding and
    `num_labels` have a label.
    """

    num_positions: int
    num_tokens: int
    num_labels: int


class TokenDataset(ABC):
    """Samples of `sequence` tokens of `tokenizer`; `digest` identifies their content, `notes` are shown to
    the user.
    """

    sequence: int
    tokenizer: Tokenizer
    digest: str
    notes: tuple[str, ...] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def count_tokens(self) -> TokenCount | None:
        """Returns the number of tokens of all samples; None for a stream, which has not been read."""

    @abstractmethod
    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns the samples `ids` as {"input_ids": (n, T), "labels": (n, T)}, both int64; the id -1 has no
        labels.
        """


@dataclass(frozen=True)
class EncodedDocument:
    """The tokens of a document or conversation, and which of them have labels (None: all); both 1-D of one
    length.
    """

    ids: np.ndarray
    label_mask: np.ndarray | None = None


def cut_windows(
    tokens: np.ndarray, ids: Sequence[int], sequence: int, pad_id: int
) -> dict[str, torch.Tensor]:
    """Returns the windows `ids` of a sequence of `tokens`, window i being tokens[i T : i T + T + 1], as
    inputs and labels of (n, T).

    After the end of the tokens, inputs are `pad_id` and labels -100. Raises IndexError for a window that
    does not exist.
    """
    rows = check_ids(ids, num_windows(tokens, sequence))
    at = rows[:, None] * sequence + np.arange(sequence + 1)
    problem = (rows[:, None] >= 0) & (at < tokens.size)
    window = tokens[np.where(problem, at, 0)].astype(np.int64)
    inputs = np.where(problem[:, :-1], window[:, :-1], pad_id)
    labels = np.where(problem[:, 1:], window[:, 1:], IGNORE_INDEX)
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


def pad_documents(
    documents: Sequence[EncodedDocument | None], sequence: int, pad_id: int
) -> dict[str, torch.Tensor]:
    """Returns one sample per document, truncated or padded to T inputs and labels: (n, T) each; None is an
    absent sample.
    """
    inputs = np.full((len(documents), sequence), pad_id, dtype=np.int64)
    labels = np.full((len(documents), sequence), IGNORE_INDEX, dtype=np.int64)
    for r, row in enumerate(documents):
        if row is not None:
            ids = row.ids[: sequence + 1].astype(np.int64)
            wanted = (
                np.ones(ids.size, bool)
                if row.label_mask is None
                else row.label_mask[: sequence + 1].astype(bool)
            )
            inputs[r, : min(ids.size, sequence)] = ids[:sequence]
            labels[r, : max(ids.size - 1, 0)] = np.where(wanted[1:], ids[1:], IGNORE_INDEX)
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


def num_windows(tokens: np.ndarray, sequence: int) -> int:
    """Returns the number of windows of `tokens`; the last one may be short."""
    return -(-(tokens.size - 1) // sequence)


def count_window_tokens(tokens: np.ndarray, sequence: int) -> TokenCount:
    """Returns the number of tokens in all windows of `tokens`; only the last one has padding."""
    num_positions = num_windows(tokens, sequence) * sequence
    return TokenCount(num_positions, min(tokens.size, num_positions), tokens.size - 1)


def check_ids(ids: Sequence[int], num: int) -> np.ndarray:
    """Returns `ids` as an int64 array. Raises IndexError for an id that is neither a
    sample nor -1 (absent).
    """
    rows = np.asarray(ids, dtype=np.int64)
    wrong = rows[(rows < -1) | (rows >= num)]
    if wrong.size:
        raise IndexError(
            f"there is no sample {wrong[0]}: ids run from 0 to {num - 1}, and -1 is an absent sample; "
            "take ids from a SampleOrder over len(data) samples"
        )
    return rows
