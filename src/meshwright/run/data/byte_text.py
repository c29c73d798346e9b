"""Text files as training samples: all files become one sequence of bytes, and a sample is a window of it.

Bytes are the tokens (256 of them), so any language works without a vocabulary. Files are joined in sorted
order with one zero byte between them. No text contains a zero byte (a file that does is refused), so it
marks the end of a document without ambiguity, and a model learns it. Empty files add nothing.

    tokens    h e l l o 0 w o r l d        T = 4: sample i is tokens[4 i : 4 i + 5]
    sample 0  inputs h e l l   labels e l l o
    sample 1  inputs o 0 w o   labels 0 w o r
    sample 2  inputs r l d .   labels l d . .        . in labels is -100: no token follows, no weight in the
                                                     loss

Neighboring samples share the token at their boundary, so every token but the first is a label exactly once
per epoch. The tokens are kept in memory, one byte each; a window is cut when it is read.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.run.data.readers import DEFAULT_PATTERNS, list_files, printable_path, read_text
from meshwright.run.data.token_dataset import (
    TokenCount,
    TokenDataset,
    count_window_tokens,
    cut_windows,
    num_windows,
)
from meshwright.run.data.tokenizer import ByteTokenizer

SEPARATOR = 0


class TextDataset(TokenDataset):
    """The samples of one data source. `files` are the files that were read, in order.

    `digest` is the sha256 of the sequence length and the tokens: a resumed run detects changed data with it.

    Raises PlanError with every diagnostic: no file, no match, unreadable or binary files.
    """

    def __init__(self, source: DataConfig) -> None:
        root = Path(source.source)
        self.sequence, self.tokenizer = source.sequence, ByteTokenizer()
        self.files = list_files(source, DEFAULT_PATTERNS)
        content = _join_files(self.files)
        if len(content) < 2:
            what = (
                f"'{printable_path(root)}' holds {len(content)} bytes in all; needed are at "
                f"least 2, a token and the one after it"
            )
            raise_diagnostics(
                [Diagnostic(what, "point data.source at a text that is not empty", "data.source")]
            )
        self.tokens = np.frombuffer(content, dtype=np.uint8)
        self.tokens.flags.writeable = False
        self.digest = sha256(b"bytes, sequence %d\n" % self.sequence + sha256(content).digest()).hexdigest()

    def __len__(self) -> int:
        """Returns the number of samples; the last one may be short."""
        return num_windows(self.tokens, self.sequence)

    def count_tokens(self) -> TokenCount:
        return count_window_tokens(self.tokens, self.sequence)

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns the samples `ids` as {"input_ids": (n, T), "labels": (n, T)}, both int64; labels are
        already shifted.

        labels[:, t] is the token after input_ids[:, t], or -100 where none follows. The id -1 is an absent
        sample: inputs of 0 and labels of -100, so that it weighs nothing. Raises IndexError for an id that is
        neither.
        """
        return cut_windows(self.tokens, ids, self.sequence, SEPARATOR)


def _join_files(files: Sequence[Path]) -> bytearray:
    content, diagnostics = bytearray(), []
    for path in files:
        text, diagnostic = read_text(path)
        if diagnostic:
            diagnostics.append(diagnostic)
        elif text:
            content += b"\0" if content else b""
            content += text
    raise_diagnostics(diagnostics)
    return content
