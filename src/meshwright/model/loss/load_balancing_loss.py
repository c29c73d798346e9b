"""The load balancing loss of transformers' mixtures of experts, over the tokens of the global batch.

    aux = E sum over experts of f_e P_e      f_e = times that expert e is chosen / N      P_e = sum of p_e / N

with N the tokens of all layers together, p the softmax of the router's logits, and tokens left out that the
attention mask excludes. Each token chooses k experts, so f adds up to k. All layers are pooled before the
product, as in the models.

A product of two means over a part of a batch is not that of the batch, but f has no gradient. So f and N are
summed over the global batch first, 1 number per expert and 2 more, and then aux is a sum over tokens:

    aux = sum over tokens of (E / N^2) sum over experts of c_e p_e        c_e = N f_e, N: known

A model calls `load_balancing_loss_func` in its forward. `find_call` sees the call, and takes the function for
this loss only if both agree on random logits, with and without a mask. Counts are integers, and the sum of p
is taken in float32 at least, as in the models.

Paper: Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961 (equations 4 to 6).
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from meshwright.model.loss.loss_definition import AuxiliaryLoss, Batch
from meshwright.model.tensors.pytree import named_tensors

FUNCTION_NAME = "load_balancing_loss_func"
MASK_KEY = "attention_mask"
TRIAL_TOKENS, TRIAL_LAYERS, TRIAL_TOLERANCE = 12, 2, 1e-5


@dataclass(frozen=True)
class LoadBalancingCall:
    """A call in a forward: the router's logits of each layer, [tokens, experts], the mask, the result."""

    logits: tuple[torch.Tensor, ...]
    num_experts: int
    top_k: int
    mask: torch.Tensor | None
    result: torch.Tensor


def pooled_counts(
    logits: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how often each expert is chosen [experts], and the number of tokens, over all layers; float64.

    `logits` are [tokens, experts] per layer, `mask` [samples, tokens of each] has 1 for tokens that count.
    """
    counts = torch.zeros(logits[0].shape[-1], dtype=torch.float64, device=logits[0].device)
    num_tokens = torch.zeros((), dtype=torch.float64, device=logits[0].device)
    for layer in logits:
        weights = _token_weights(layer, mask)
        chosen = layer.detach().softmax(-1).topk(top_k, dim=-1).indices
        counts = counts.index_add(0, chosen.flatten(), weights.repeat_interleave(top_k))
        num_tokens = num_tokens + weights.sum()
    return counts, num_tokens


def pooled_loss(
    logits: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    counts: torch.Tensor,
    num_tokens: torch.Tensor,
) -> torch.Tensor:
    """Returns the part of the loss of the tokens of `logits`, given the global `counts` and `num_tokens`; in
    float32 at least.
    """
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    factors = (counts * (len(counts) / num_tokens.square().clamp(min=1))).to(dtype)
    scores = [
        (layer.softmax(-1).to(dtype) * _token_weights(layer, mask).to(dtype).unsqueeze(-1)).sum(0)
        for layer in logits
    ]
    return (torch.stack(scores).sum(0) * factors).sum()


def _token_weights(layer: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return torch.ones(len(layer), dtype=torch.float64, device=layer.device)
    return mask.reshape(-1).to(torch.float64)


@contextmanager
def find_calls(module: nn.Module) -> Iterator[list[LoadBalancingCall]]:
    """Context manager: yields a list to which each call in a forward of `module` is added.

    The function is found by its name in the files of the model's classes.
    """
    names = {each.__module__ for part in module.modules() for each in type(part).__mro__}
    files = [vars(sys.modules[name]) for name in sorted(names & sys.modules.keys())]
    functions = [(file, file[FUNCTION_NAME]) for file in files if callable(file.get(FUNCTION_NAME))]
    calls: list[LoadBalancingCall] = []
    for file, function in functions:
        file[FUNCTION_NAME] = partial(_record_call, function, calls)
    try:
        yield calls
    finally:
        for file, function in functions:
            file[FUNCTION_NAME] = function


def _record_call(
    function: Callable[..., Any], calls: list[LoadBalancingCall], *args: Any, **kwargs: Any
) -> Any:
    result = function(*args, **kwargs)
    given: Mapping[str, Any] = inspect.signature(function).bind(*args, **kwargs).arguments
    logits, num_experts, top_k = (given.get(key) for key in ("gate_logits", "num_experts", "top_k"))
    known = isinstance(logits, tuple) and isinstance(num_experts, int) and isinstance(top_k, int)
    if known and isinstance(result, torch.Tensor) and _is_known(function, num_experts, top_k):
        calls.append(LoadBalancingCall(logits, num_experts, top_k, given.get(MASK_KEY), result))
    return result


def _is_known(function: Callable[..., Any], num_experts: int, top_k: int) -> bool:
    """Returns whether `function` and `pooled_loss` agree on random logits, with and without a mask."""
    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        shape = TRIAL_TOKENS, num_experts
        logits = tuple(3 * torch.randn(shape, generator=generator) for _ in range(TRIAL_LAYERS))
        mask = (torch.arange(TRIAL_TOKENS) % 4 > 0).long().view(2, -1)
        for given in (None, mask):
            theirs = function(logits, num_experts, top_k, given)
            ours = pooled_loss(logits, given, *pooled_counts(logits, top_k, given))
            if not torch.is_tensor(theirs) or abs(float(theirs) / float(ours) - 1) > TRIAL_TOLERANCE:
                return False
    return True


def auxiliary_loss(
    call: LoadBalancingCall,
    outputs: Mapping[str, torch.Tensor],
    batch: Batch,
    factor: float,
    count: Callable[[Batch], torch.Tensor],
) -> AuxiliaryLoss | None:
    """Returns the loss that `call` computes, times `factor`, as a term of a loss with the divisor `count`.

    `outputs` are those of the forward, by name. None if the logits are not among them, or if another mask is
    taken than that of `batch`.
    """
    names = {id(tensor): name for name, tensor in outputs.items()}
    read = tuple(names.get(id(layer), "") for layer in call.logits)
    has_mask = call.mask is not None
    if not all(read) or (has_mask and call.mask is not batch.get(MASK_KEY)):
        return None
    form = _PooledForm(read, call.top_k, has_mask, factor, count)
    return AuxiliaryLoss(form.sums, form.total, call.num_experts + 2)


@dataclass(frozen=True)
class _PooledForm:
    """The loss of the outputs `names`; its sums are counts per expert, tokens, and the divisor."""

    names: tuple[str, ...]
    top_k: int
    has_mask: bool
    factor: float
    count: Callable[[Batch], torch.Tensor]

    def sums(self, outputs: Any, batch: Batch) -> torch.Tensor:
        logits, mask = self._read(outputs, batch)
        counts, num_tokens = pooled_counts(logits, self.top_k, mask)
        divisor = torch.as_tensor(self.count(batch), dtype=torch.float64).to(counts.device)
        return torch.cat([counts, torch.stack([num_tokens, divisor])])

    def total(self, outputs: Any, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        counts, (num_tokens, divisor) = sums[:-2], sums[-2:]
        logits, mask = self._read(outputs, batch)
        loss = pooled_loss(logits, mask, counts, num_tokens)
        return loss * (self.factor * divisor).to(loss.dtype)

    def _read(self, outputs: Any, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        named = dict(named_tensors(outputs))
        return [named[name] for name in self.names], batch[MASK_KEY] if self.has_mask else None
