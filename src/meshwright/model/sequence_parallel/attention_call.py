"""Attention where each rank has some of the tokens: whoever calls torch's is answered by a technique.

`F.scaled_dot_product_attention` is where models come to that attend in a fused kernel, transformers' among them. Within a block
it is asked for with the tokens of this rank alone, and what it looks at lies on all ranks:

    query, key, value    [.., heads, tokens, width]     this rank's tokens
    mask                 [.., queries, keys]            rows of this rank's queries, columns of all keys, in their order
    causal               by positions in the sample, not by places on this rank

What torch's attention is called with; a mask that is a bias less what another mask forbids remembers both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.plan.model_spec.sequence_info import LEAST, Mask


@dataclass(frozen=True)
class Attention:
    """The arguments of F.scaled_dot_product_attention, by its names: `Attention(*args, **kwargs)`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among them."""
        given = (self.query, self.key, self.value, self.attn_mask)
        return tuple(each for each in given if each is not None)


PARTS = "superposed_of"  # the attribute of a mask that was made of two


def superposed(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A bias, less what a mask forbids; `parts` tells both."""
    if mask is None:
        return bias
    made = torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
    vars(made)[PARTS] = bias, mask
    return made


def parts(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The bias, and the mask, of which `superposed` has made this one; None of any other."""
    return vars(mask).get(PARTS)


@dataclass(frozen=True)
class Asked:
    """One call of attention. `queries` and `keys` say which tokens this rank has of both; `scale` is that of the scores.

    Where glue has made the mask, for all heads alike, `together` are its rows of the queries of all ranks that exchange heads
    (model/share.py). Where a block has laid that mask over a `bias` of its own, rows of own queries, both are told.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float
    queries: Share
    keys: Share
    together: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def mask_of(mask: torch.Tensor | None) -> Mask | None:
    """What the plan needs to know of a mask, [.., queries, keys]."""
    if mask is None:
        return None
    rows, heads, queries = (size > 1 for size in (*[1] * (4 - mask.ndim), *mask.shape)[-4:-1])
    return Mask(rows, heads, queries, adds=mask.dtype != torch.bool, needed=mask.requires_grad)


Answer = Callable[[Asked], torch.Tensor]  # [.., heads, own queries, width of values]


class Attending(TorchFunctionMode):
    """While active, attention within blocks, as `inside()` tells, is `answer`; `shares()` are queries and keys of the call."""

    def __init__(self, answer: Answer, shares: Callable[[], tuple[Share, Share]], inside: Callable[[], bool]) -> None:
        super().__init__()
        self._answer, self._shares, self._inside = answer, shares, inside

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or not self._inside():
            return func(*args, **(kwargs or {}))
        return self._asked(Attention(*args, **(kwargs or {})))

    def _asked(self, given: Attention) -> torch.Tensor:
        queries, keys = self._shares()
        query, key, value, mask = given.query, given.key, given.value, given.attn_mask
        bias, together = _made_of(mask, queries)
        idle = max(0, LEAST - queries.count)
        if idle:  # what stands in attends to nothing
            query = query[..., : queries.count, :]
            mask, bias = (_first(each, queries.count) for each in (mask, bias))
        if keys.count < LEAST:  # and nobody to it
            key, value = key[..., : keys.count, :], value[..., : keys.count, :]
        said = given.dropout_p, given.is_causal, given.factor, queries, keys, together, bias
        made = self._answer(Asked(query, key, value, mask, *said))
        return F.pad(made, (0, 0, 0, idle)) if idle else made


def _made_of(mask: torch.Tensor | None, queries: Share) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The `bias` of a mask, and `together`, as `Asked` has them."""
    if mask is None:
        return None, None
    bias, known = parts(mask) or (None, mask)
    by_head = known.ndim > 2 and known.shape[-3] > 1  # ranks may have some of them
    together = None if by_head else queries.rows_together(known)
    return (None if together is None else bias), together


def _first(mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return mask[..., :count, :] if mask is not None and mask.shape[-2] > 1 else mask
