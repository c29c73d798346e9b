"""What a rank does that has some of the tokens of each sample: blocks run on those, and glue believes that all are here.

    batch     [ids of all tokens] --> this rank's --> embed --> Apart --> glue --> layer --> Apart --> ... --> loss of its labels
    layer     [ Apart, table of all positions, mask ] --> [ hidden, rows of the table, rows of the mask ] --> hidden' --> Apart

Every rank reads the same rows. A loss that is a sum over tokens is taken on this rank's; of any other, the first rank along the
axis takes the one of all tokens, which are brought together for it; and so of logits that glue has made of all. Attention asks
the technique that has dealt the tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.comm.moves import move
from meshwright.core.errors import PlanError
from meshwright.core.layout import R, S
from meshwright.core.plan import Plan
from meshwright.core.tokens import LEAST, Deal, Tokens
from meshwright.engine.loss import Batch
from meshwright.engine.state import State
from meshwright.model.apart import Apart, Share, given
from meshwright.model.attend import Answer, Asked, Attending
from meshwright.model.only import Dealt
from meshwright.model.plugs import plug
from meshwright.model.values import swap, tensors


def dealing(plan: Plan, state: State) -> "AllTokens":
    """How this rank runs the model on the tokens that it has."""
    deal, tokens = plan.space.deal, plan.anatomy.tokens
    return AllTokens(state) if deal is None or tokens is None else SomeTokens(plan, state, deal, tokens)


class AllTokens:
    """A rank that has all tokens of its samples: the model runs as it is."""

    first = True  # of the ranks that have the tokens of the same samples

    def __init__(self, state: State) -> None:
        self._state = state

    def attend(self, answer: Answer) -> None:
        """Have attention within blocks be what `answer` says."""
        raise RuntimeError("a strategy answers for attention, and none has dealt the tokens")

    def during(self, batch: Batch) -> AbstractContextManager[object]:
        """Round a forward on `batch`."""
        return nullcontext()

    def again(self, batch: Batch) -> AbstractContextManager[object]:
        """Round one visit of a forward on `batch` that is run again, as it was given then; another forward may be under way."""
        return nullcontext()

    def parts(self) -> Dealt | None:
        """What is done round the blocks of a part of the model (model/parts.py); None: nothing."""
        return None

    def call(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        """What `module` gives out on this rank's tokens of `inputs`."""
        return module(**inputs)

    def total(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """The part of the loss of `batch` that this rank takes, of what `call` has given: those of all ranks add up to it."""
        return self._state.loss.total(outputs, batch)

    def detach(self) -> None:
        """Leave the model as it was."""


class SomeTokens(Dealt, AllTokens):
    """One rank's part of the tokens of what it runs."""

    def __init__(self, plan: Plan, state: State, deal: Deal, tokens: Tokens) -> None:
        Dealt.__init__(self, tokens, Share(0, ()))
        AllTokens.__init__(self, state)
        self._deal, self._tokens = deal, tokens
        self._group = state.world.group(plan.space.token_axes)
        self.first = self._group.index == 0
        self._shares: dict[int, Share] = {}  # by length
        self._answer: Answer | None = None
        self._active, self._depth, self._again, self._answering = False, 0, False, False
        self._calls: dict[str, int] = {}
        self._along: Sequence[tuple[int, ...]] = ()  # of what the model gives out
        self._plugged = plug(state.subject.module, lambda: self.share if self._asks() else None)
        self._handles = [
            handle
            for name, block in (
                state.subject.blocks.items() if not plan.space.stages else ()
            )  # parts say themselves what they run
            for handle in (
                block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                block.register_forward_hook(self._leave, with_kwargs=True, prepend=True),
            )
        ]

    def attend(self, answer: Answer) -> None:
        self._answer = answer

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._plugged.out()

    @contextmanager
    def during(self, batch: Batch) -> Iterator[None]:
        self.share, self._calls, self._depth, self._active = self._share_of(batch), {}, 0, True
        self.under_way.clear()
        try:
            with self._attending():
                yield
        finally:
            self._active = False

    @contextmanager
    def again(self, batch: Batch) -> Iterator[None]:
        before = self.share, self._again
        self.share, self._again = self._share_of(batch), True
        try:
            with self._attending():
                yield
        finally:
            self.share, self._again = before

    def parts(self) -> Dealt | None:
        return self

    def call(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        return self.here(module(**inputs))

    def here(self, outputs: Any) -> Any:
        self._along = [(each.along,) if type(each) is Apart else () for each in tensors(outputs)]
        return super().here(outputs)

    def total(self, outputs: Any, batch: Batch) -> torch.Tensor:
        loss, share = self._state.loss, self._share_of(batch)
        if loss.by_token and self._dealt(outputs):
            mine = {key: share.own(value, 1) if key in self._tokens.targets else value for key, value in batch.items()}
            return loss.total(self._own(outputs, share), mine)
        return loss.total(given(outputs, self._along, share), batch) * float(self.first)

    def _dealt(self, outputs: Any) -> bool:
        """Whether the loss reads nothing but this rank's tokens: logits of a row, or of all tokens, are alike on all ranks."""
        split, along = self._state.loss.split, dict(zip(map(id, tensors(outputs)), self._along, strict=True))
        read = tensors(split.logits(outputs)) if split is not None else tensors(outputs)
        return all(along.get(id(each)) for each in read)

    def _own(self, outputs: Any, share: Share) -> Any:
        """`outputs` without what stands in for tokens."""
        if share.count >= LEAST:
            return outputs
        told = zip(tensors(outputs), self._along, strict=True)
        return swap(outputs, {id(each): each.narrow(along[0], 0, share.count) for each, along in told if along})

    def _attending(self) -> AbstractContextManager[object]:
        if self._answer is None:
            return nullcontext()
        return Attending(self._answered, lambda: self.share, self._asks)

    def _asks(self) -> bool:
        inside = bool(self.under_way) and not self.under_way[-1].whole
        return (inside or self._again) and not self._answering

    def _answered(self, asked: Asked) -> torch.Tensor:
        """What the technique says; attention that it calls for itself is torch's, though another forward may be under way."""
        if self._answer is None:
            raise RuntimeError("attention is asked of a technique, and none answers")
        self._answering = True
        try:
            return self._answer(asked)
        finally:
            self._answering = False

    def _share_of(self, batch: Batch) -> Share:
        lengths = {key: batch[key].shape[1] for key in self._tokens.inputs if key in batch}
        if len(set(lengths.values())) != 1:
            said = ", ".join(f"{key} {length}" for key, length in lengths.items()) or "none of " + ", ".join(self._tokens.inputs)
            text = f"the rows hold {said} tokens; needed is one length for all that is dealt to ranks"
            raise PlanError(text, fix="pad the rows to one length", where="batch")
        length = next(iter(lengths.values()))
        if length not in self._shares:
            self._shares[length] = Share(length, self._deal.spans(length, self._group.index), partial(self._bring, length))
        return self._shares[length]

    def _bring(self, length: int, local: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens along `dim`, in order of their positions; backward gives each rank the sum of what all make of its own."""
        counts = self._deal.counts(length)
        most = max(counts)
        local = local.narrow(dim, 0, counts[self._group.index])
        pad = [0, 0] * (local.ndim - 1 - dim) + [0, most - local.shape[dim]]
        padded = F.pad(local, pad) if pad[-1] else local
        met = move(padded, self._group, S(dim), R, lambda: self._state.acting)
        places = torch.empty(length, dtype=torch.int64)
        for index in range(self._group.size):
            at = torch.cat([torch.arange(*span) for span in self._deal.spans(length, index)] or [places[:0]])
            places[at] = torch.arange(len(at)) + index * most
        return met.index_select(dim, places.to(met.device))

    def _enter(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active:
            return None
        self._depth += 1
        if self._depth > 1:  # within another block
            return None
        count = self._calls[name] = self._calls.get(name, 0) + 1
        visit = name if count == 1 else f"{name}#{count}"
        return self.enter(visit, (args, kwargs))

    def _leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not self._active:
            return None
        self._depth -= 1
        return self.leave(outputs) if not self._depth else None
