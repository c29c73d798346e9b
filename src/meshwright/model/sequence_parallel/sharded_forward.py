"""What is done round the blocks of a forward in which a rank has some of the tokens; and such a forward on the only rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.model.sequence_parallel.sharded_activation import Apart, Told, apart, given, locals_of, own_of, taken
from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.model.tensors.grad_alias import another
from meshwright.model.tensors.pytree import tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import Convolve, Passing, Tokens


class Lengths:
    """How many tokens rows have in one forward, by how many they have in the plan; `of(length)` are those that are here.

    Those of inputs are `known` beforehand, and others when a block first takes them in. `told` are those of what the model has
    given out.
    """

    def __init__(self, of: Callable[[int], Share], known: Mapping[int, int]) -> None:
        self.of, self._known = of, dict(known)
        self.told: Told = ()

    @classmethod
    def read(cls, of: Callable[[int], Share], tokens: Tokens, inputs: Mapping[str, torch.Tensor]) -> "Lengths":
        """Those of `inputs`. Raises PlanError for rows of unlike lengths that have the same one in the plan."""
        known: dict[int, dict[str, int]] = {}
        for key in tokens.inputs:
            if key in inputs:
                known.setdefault(tokens.count_in(key), {})[key] = inputs[key].shape[1]
        for found in known.values():
            if len(set(found.values())) > 1:
                said = ", ".join(f"{key} {length}" for key, length in found.items())
                text = f"the rows hold {said} tokens, and in the example of the plan they were as long as each other"
                fix = "pad the rows to one length, or make the plan from an example whose rows have unlike lengths too"
                raise PlanError(text, fix=fix, where="batch")
        return cls(of, {planned: next(iter(found.values())) for planned, found in known.items()})

    @property
    def found(self) -> Mapping[int, int]:
        """How many tokens rows have, by how many they have in the plan, as far as that is known."""
        return dict(self._known)

    def __call__(self, planned: int, found: int) -> Share:
        """Which tokens are here of rows that have `planned` in the plan, and are `found` to have so many where nobody knew."""
        return self.of(self._known.setdefault(planned, found))

    def known(self, planned: int) -> Share:
        """The same of rows that were taken in before."""
        return self.of(self._known[planned])


class Dealt:
    """A forward of a model of which `tokens` are known: `lengths` tells which of its rows' tokens are here."""

    def __init__(self, tokens: Tokens, lengths: Lengths) -> None:
        self.lengths = lengths
        self.under_way: list[Passing] = []
        self._passings = {passing.visit: passing.of(tokens.length) for passing in tokens.visits}
        self._runs = {visit: tokens.run_by(visit) for visit in self._passings}
        self._attends: dict[str, list[tuple[int, int]]] = {}
        for each in tokens.attends:
            self._attends.setdefault(each.visit, []).append((each.queries, each.keys))
        self._convolves: dict[str, list[Convolve]] = {}
        for each in tokens.convolves:
            self._convolves.setdefault(each.visit, []).append(each)
        self._asked = self._convolved = 0  # calls of attention in the visit under way, and of convolutions

    def apart(self, tensor: torch.Tensor, along: int, length: int) -> Any:
        """This rank's tokens of `length`, `tensor`, as glue shall see them."""
        return apart(tensor, along, self.lengths.of(length))

    def enter(self, visit: str, given: Any) -> Any:
        """What the visit, given this, runs on; its end must be told by `leave`. Raises PlanError for an unknown one."""
        if visit not in self._passings:
            text = f"the forward reaches '{visit}', of which nothing is known: which of its tensors have tokens"
            raise PlanError(text, fix="let the forward call the same blocks on every batch", where="model")
        self.under_way.append(self._passings[visit])
        self._asked = self._convolved = 0
        return taken(given, self.under_way[-1], self.lengths)

    def leave(self, outputs: Any) -> Any:
        """What the visit that was entered last has given out, as glue shall see it."""
        passing = self.under_way.pop()
        outputs, gives = own_of(outputs, passing, self.lengths), zip(passing.gives, passing.gives_of, strict=True)
        return given(outputs, [(dims[0], self.lengths.known(planned)) if dims else None for dims, planned in gives])

    def here(self, outputs: Any) -> Any:
        """This rank's tokens of what the model gives out."""
        self.lengths.told = [(each.along, each.share) if type(each) is Apart else None for each in tensors(outputs)]
        return locals_of(outputs)

    def coming(self, visit: str) -> tuple[Share, Share]:
        """Which queries and keys are here of the call of attention that comes next in a visit."""
        calls = self._attends.get(visit, [])
        if len(set(calls)) > 1 and self._asked >= len(calls):
            text = f"it calls attention {self._asked + 1} times, and in the trial run {len(calls)} times"
            raise PlanError(text, fix="let a block attend as often on every batch", where=visit)
        pair = calls[min(self._asked, len(calls) - 1)] if calls else (self._runs[visit],) * 2
        queries, keys = map(self.lengths.known, pair)
        return queries, keys

    def asked(self, visit: str) -> tuple[Share, Share]:
        """The same of the one that comes now."""
        found = self.coming(visit)
        self._asked += 1
        return found

    def convolving(self, visit: str) -> tuple[str, Sequence[Convolve], int, Lengths]:
        """The visit, its convolutions, the number of the one that comes now, and which tokens are here."""
        self._convolved += 1
        return visit, self._convolves.get(visit, ()), self._convolved - 1, self.lengths


class OnlyRank(Dealt):
    """Rows all of whose tokens are here: glue sees tensors that look whole, and a block what is here."""

    @classmethod
    def of(cls, tokens: Tokens | None, inputs: Mapping[str, torch.Tensor]) -> "OnlyRank | None":
        """That on rows like those of `inputs`; None where nothing is known of tokens, or a visit needs all of them."""
        if tokens is None or any(passing.mixes for passing in tokens.visits):
            return None
        return cls(tokens, Lengths.read(_all_of, tokens, inputs))


def _all_of(length: int) -> Share:
    return Share(length, ((0, length),), lambda local, dim: another(local))
