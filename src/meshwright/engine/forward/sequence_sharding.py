"""What a rank does that has some of the tokens of each sample: blocks run on those, and glue believes that all are here.

    batch     [ids of all tokens] --> this rank's --> embed --> Apart --> glue --> layer --> Apart --> ... --> loss of its labels
    layer     [ Apart, table of all positions, mask ] --> [ hidden, rows of the table, rows of the mask ] --> hidden' --> Apart

Every rank reads the same rows. A loss that is a sum over tokens is taken on this rank's; of any other, the first rank along the
axis takes the one of all tokens, which are brought together for it; and so of logits that glue has made of all. Attention asks
the technique that has dealt the tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.comm.collectives.redistribute import move
from meshwright.engine.runtime.loss import Batch
from meshwright.engine.runtime.state import State
from meshwright.model.sequence_parallel.attention_call import Answer, Asked, Attending
from meshwright.model.sequence_parallel.conv_call import Beside, Convolving
from meshwright.model.sequence_parallel.hf_attention import plug
from meshwright.model.sequence_parallel.sharded_activation import Told, given
from meshwright.model.sequence_parallel.sharded_forward import Dealt, Lengths
from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.model.tensors.pytree import swap, tensors
from meshwright.model.tensors.token_slices import positions
from meshwright.plan.model_spec.model_spec import visit_of
from meshwright.plan.model_spec.sequence_info import LEAST, Deal, Tokens
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.placement import P, R, S


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

    def convolve(self, answer: Beside) -> None:
        """Have convolutions over tokens within blocks be what `answer` says."""
        raise RuntimeError("a strategy answers for convolutions, and none has dealt the tokens")

    def during(self, batch: Batch) -> AbstractContextManager[object]:
        """Round a forward on `batch`."""
        return nullcontext()

    def again(self, batch: Batch, visit: str) -> AbstractContextManager[object]:
        """Round a `visit` of a forward on `batch` that is run again, as it was given then; another forward may be under way."""
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
        Dealt.__init__(self, tokens, Lengths(self._share, {}))
        AllTokens.__init__(self, state)
        self._deal, self._tokens = deal, tokens
        self._group = state.world.group(plan.space.token_axes)
        self.first = self._group.index == 0
        precision = plan.job.precision  # under autocast, what glue brings together travels as products take it
        self._wire = None if precision.compute == precision.parameters else getattr(torch, precision.compute)
        self._shares: dict[int, Share] = {}  # by length
        self._forms: dict[tuple[Any, ...], Lengths] = {}  # by shapes
        self._answer: Answer | None = None
        self._beside: Beside | None = None
        self._active, self._depth, self._again, self._answering = False, 0, "", False
        self._calls: dict[str, int] = {}
        self._plugged = plug(state.subject.module, lambda queries, keys: self.coming(self._visit) if self._asks() else None)
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

    def convolve(self, answer: Beside) -> None:
        self._beside = answer

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._plugged.out()

    @contextmanager
    def during(self, batch: Batch) -> Iterator[None]:
        self.lengths, self._calls, self._depth, self._active = self._lengths_of(batch), {}, 0, True
        self.under_way.clear()
        try:
            with self._attending():
                yield
        finally:
            self._active = False

    @contextmanager
    def again(self, batch: Batch, visit: str) -> Iterator[None]:
        before = self.lengths, self._again, self._asked, self._convolved
        self.lengths, self._again, self._asked, self._convolved = self._lengths_of(batch), visit, 0, 0
        try:
            with self._attending():
                yield
        finally:
            self.lengths, self._again, self._asked, self._convolved = before

    def parts(self) -> Dealt | None:
        return self

    def call(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        return self.here(module(**inputs))

    def total(self, outputs: Any, batch: Batch) -> torch.Tensor:
        loss, told = self._state.loss, self._lengths_of(batch).told
        share = self._read(outputs, told) if loss.by_token else None
        targets = [key for key in self._tokens.targets if key in batch]
        if share is not None and all(batch[key].shape[1] == share.length for key in targets):
            mine = {key: share.own(value, 1) if key in targets else value for key, value in batch.items()}
            return loss.total(_own(outputs, told), mine)
        return loss.total(given(outputs, told), batch) * float(self.first)

    def _read(self, outputs: Any, told: Told) -> Share | None:
        """Which tokens the loss reads; None where it reads more than those of one row that are here.

        Logits of a row as a whole, or of all tokens, are alike on all ranks.
        """
        split, known = self._state.loss.split, dict(zip(map(id, tensors(outputs)), told, strict=True))
        read = [known.get(id(each)) for each in tensors(split.logits(outputs) if split is not None else outputs)]
        shares = {None if each is None else each[1].length: each for each in read}
        (found,) = shares.values() if len(shares) == 1 else (None,)
        return None if found is None else found[1]

    @contextmanager
    def _attending(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._answer is not None:
                stack.enter_context(Attending(self._answered, lambda: self.asked(self._visit), self._asks))
            if self._beside is not None and self._convolves:
                stack.enter_context(
                    Convolving(self._beside, lambda: self.convolving(self._visit) if self._asks() else None, self._aside)
                )
            yield

    @property
    def _visit(self) -> str:
        """The visit that runs; empty: glue."""
        return self._again or (self.under_way[-1].visit if self.under_way else "")

    def _asks(self) -> bool:
        return self._runs.get(self._visit, 0) > 0 and not self._answering

    def _answered(self, asked: Asked) -> torch.Tensor:
        """What the technique says; attention that it calls for itself is torch's, though another forward may be under way."""
        if self._answer is None:
            raise RuntimeError("attention is asked of a technique, and none answers")
        with self._aside():
            return self._answer(asked)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._answering = True
        try:
            yield
        finally:
            self._answering = False

    def _lengths_of(self, batch: Batch) -> Lengths:
        form = tuple((key, value.shape) for key, value in batch.items())
        if form not in self._forms:
            lengths = Lengths.read(self._share, self._tokens, batch)
            if self._state.subject.alike is not None:
                self._state.subject.alike.check(self._tokens, self._deal, lengths.found)
            self._forms[form] = lengths
        return self._forms[form]

    def _share(self, length: int) -> Share:
        if length not in self._shares:
            spans = self._deal.spans(length, self._group.index)
            together = self._deal.together(length, self._group.index) if self._deal.inner > 1 else ()
            keeps = not self._tokens.unseen
            self._shares[length] = Share(length, spans, partial(self._bring, length), self._add, together, keeps)
        return self._shares[length]

    def _bring(self, length: int, local: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens along `dim`, in order of their positions; backward gives each rank the sum of what all make of its own."""
        counts = self._deal.counts(length)
        most = max(counts)
        local = local.narrow(dim, 0, counts[self._group.index])
        pad = [0, 0] * (local.ndim - 1 - dim) + [0, most - local.shape[dim]]
        padded = F.pad(local, pad) if pad[-1] else local
        wire = local.dtype if self._wire is None or not local.is_floating_point() else self._wire
        met = move(padded.to(wire), self._group, S(dim), R, lambda: self._state.acting).to(local.dtype)
        places = torch.empty(length, dtype=torch.int64)
        for index in range(self._group.size):
            at = torch.tensor(positions(self._deal.spans(length, index)))
            places[at] = torch.arange(len(at)) + index * most
        return met.index_select(dim, places.to(met.device))

    def _add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks give; backward gives each that of its gradients. It travels in float32 at least."""
        wide = torch.promote_types(part.dtype, torch.float32)
        return move(part.to(wide), self._group, P, R, lambda: self._state.acting).to(part.dtype)

    def _enter(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active:
            return None
        self._depth += 1
        if self._depth > 1:  # within another block
            return None
        count = self._calls[name] = self._calls.get(name, 0) + 1
        visit = visit_of(name, count)
        return self.enter(visit, (args, kwargs))

    def _leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not self._active:
            return None
        self._depth -= 1
        return self.leave(outputs) if not self._depth else None


def _own(outputs: Any, told: Told) -> Any:
    """`outputs` without what stands in for tokens."""
    pairs = zip(tensors(outputs), told, strict=True)
    few = {id(each): each.narrow(known[0], 0, known[1].count) for each, known in pairs if known and known[1].count < LEAST}
    return swap(outputs, few) if few else outputs
