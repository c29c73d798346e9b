"""Computes something of all tokens of each sample, also where a rank has only some of them.

    values of tokens [samples, tokens, ..] -> compute -> [samples, tokens, ..], or [samples, ..]

On one device this calls `compute`. Under context parallelism a sample's tokens lie on several ranks: there
the values are gathered in the order of the sample, every rank computes the same, and takes the results of
its own tokens. So a layer that compares tokens (places in an expert, a mean over tokens) has the same results
on any number of ranks.

    rank 0   a . . d --+--> a b c d -> compute -> A B C D -> A . . D
    rank 1   . b c . --+--> a b c d -> compute -> A B C D -> . B C .

Cost: under context parallelism an all-gather of the values in forward and, where they need gradients, a
reduce-scatter in backward; so give few numbers per token. The collectives are planned and counted as those of
attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class WholeSamples(nn.Module):
    """Calls a function on all tokens of each sample."""

    def forward(self, compute: Callable[..., Any], *values: torch.Tensor, per_token: bool = True) -> Any:
        """Returns `compute(*values)`. All `values` are [samples, tokens, ..].

        With `per_token`, all tensors that `compute` returns are [samples, tokens, ..] too, otherwise none
        has tokens. Other values that it returns must be the same for any part of the samples' tokens.
        """
        return compute(*values)
