"""What is done round the blocks of a forward in which a rank has some of the tokens; and such a forward on the only rank."""

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.core.errors import PlanError
from meshwright.core.tokens import Passing, Tokens
from meshwright.model.alias import another
from meshwright.model.apart import Share, apart, given, locals_of, own_of, taken


class Dealt:
    """A forward of a model of which `tokens` are known: `share` are those of its rows that are here, `under_way` the visits."""

    def __init__(self, tokens: Tokens, share: Share) -> None:
        self.share = share
        self.under_way: list[Passing] = []
        self._passings = {passing.visit: passing for passing in tokens.visits}

    def apart(self, tensor: torch.Tensor, along: int) -> Any:
        """This rank's tokens, `tensor`, as glue shall see them."""
        return apart(tensor, along, self.share)

    def enter(self, visit: str, given: Any) -> Any:
        """What the visit, given this, runs on; its end must be told by `leave`. Raises PlanError for an unknown one."""
        if visit not in self._passings:
            text = f"the forward reaches '{visit}', of which nothing is known: which of its tensors have tokens"
            raise PlanError(text, fix="let the forward call the same blocks on every batch", where="model")
        self.under_way.append(self._passings[visit])
        return taken(given, self.under_way[-1], self.share)

    def leave(self, outputs: Any) -> Any:
        """What the visit that was entered last has given out, as glue shall see it."""
        passing = self.under_way.pop()
        return given(own_of(outputs, passing, self.share), passing.gives, self.share)

    def here(self, outputs: Any) -> Any:
        """This rank's tokens of what the model gives out."""
        return locals_of(outputs)


class OnlyRank(Dealt):
    """Rows of `length` tokens: glue sees tensors that look whole, and a block what is here, which is all of it."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        super().__init__(tokens, Share(length, ((0, length),), lambda local, dim: another(local)))

    @classmethod
    def of(cls, tokens: Tokens | None, inputs: Mapping[str, torch.Tensor]) -> "OnlyRank | None":
        """That on rows like those of `inputs`; None where nothing is known of tokens, or a visit needs all of them."""
        if tokens is None or any(passing.mixes for passing in tokens.visits):
            return None
        lengths = [inputs[key].shape[1] for key in tokens.inputs if key in inputs]
        return cls(tokens, lengths[0]) if lengths else None
