"""A forward as it runs on ranks that have some of the tokens, on the only one of them, which has all."""

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.core.errors import PlanError
from meshwright.core.tokens import Passing, Tokens
from meshwright.model.alias import Alias
from meshwright.model.apart import Share, apart, given, locals_of, own_of, taken


class OnlyRank:
    """Rows of `length` tokens: glue sees tensors that look whole, and a block what is here, which is all of it."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self._tokens, self._share = tokens, Share(length, ((0, length),), _bring)
        self._passings = {passing.visit: passing for passing in tokens.visits}
        self._under_way: list[Passing] = []

    @classmethod
    def of(cls, tokens: Tokens | None, inputs: Mapping[str, torch.Tensor]) -> "OnlyRank | None":
        """That on rows like those of `inputs`; None where nothing is known of tokens, or a visit needs all of them."""
        if tokens is None or any(passing.mixes for passing in tokens.visits):
            return None
        lengths = [inputs[key].shape[1] for key in tokens.inputs if key in inputs]
        return cls(tokens, lengths[0]) if lengths else None

    def inputs(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """`inputs` as the model's forward sees them."""
        return inputs

    def apart(self, tensor: torch.Tensor, along: int) -> Any:
        """`tensor` as glue sees it."""
        return apart(tensor, along, self._share)

    def enter(self, visit: str, given: Any) -> Any:
        """What the visit, given this, runs on. Raises PlanError for one of which nothing is known."""
        if visit not in self._passings:
            text = f"the forward reaches '{visit}', of which nothing is known: which of its tensors have tokens"
            raise PlanError(text, fix="let the forward call the same blocks on every batch", where="model")
        self._under_way.append(self._passings[visit])
        return taken(given, self._under_way[-1], self._share)

    def leave(self, outputs: Any) -> Any:
        """What the visit that was entered last has given out, as glue sees it."""
        passing = self._under_way.pop()
        return given(own_of(outputs, passing, self._share), passing.gives, self._share)

    def here(self, outputs: Any) -> Any:
        """What the model gives out, as it is."""
        return locals_of(outputs)


def _bring(local: torch.Tensor, dim: int) -> torch.Tensor:
    """The same tensor, by another identity."""
    with torch._C.DisableTorchFunction():
        return Alias.apply(local, local) if local.requires_grad else local.detach()
