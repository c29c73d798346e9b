"""Windows of a long text, and documents that are padded or cut."""

import numpy as np
import torch

from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.run.data.token_dataset import EncodedDocument, cut_windows, pad_documents


def test_windows_share_the_token_at_their_boundary():
    batch = cut_windows(np.arange(10, 18), [0, 1, 2, -1], 3, pad_id=0)
    assert batch["input_ids"].tolist() == [[10, 11, 12], [13, 14, 15], [16, 17, 0], [0, 0, 0]]
    assert batch["labels"].tolist() == [[11, 12, 13], [14, 15, 16], [17, -100, -100], [-100] * 3]
    assert batch["labels"].dtype == torch.int64


def test_sequences_are_padded_or_cut_and_masked_tokens_have_no_label():
    long = EncodedDocument(np.arange(1, 8), np.array([0, 0, 1, 1, 0, 1, 1]))
    short = EncodedDocument(np.array([5, 6]))
    batch = pad_documents([long, short, None], 4, pad_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 9, 9], [9] * 4]
    assert batch["labels"].tolist() == [
        [IGNORE_INDEX, 3, 4, IGNORE_INDEX],
        [6, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX],
        [IGNORE_INDEX] * 4,
    ]
    exact = pad_documents([EncodedDocument(np.arange(1, 6))], 4, pad_id=9)
    assert (exact["input_ids"].tolist(), exact["labels"].tolist()) == ([[1, 2, 3, 4]], [[2, 3, 4, 5]])
