"""Keeps the batch of one rank full: a sequence that ends makes room for the next, between two forwards.

Answers have unlike lengths. A batch that is computed until its longest one has ended computes many rows for
nothing. Here each forward is either the prefill of those that come new, or one token of all that run; what
has been computed new joins those that run.

    waiting     d e f             e f              e f             f
    forward     prefill a b c     decode a b c     prefill d       decode a c d  ...
    running     a b c             a c              a c d           a c d
                                    b has ended

    columns of the running batch    [ a a a a a ]     the newest token of each is in the last column,
                                    [ - - c c c ]     padding on the left, which a mask hides
                                    [ - d d d d ]

Sequences that share a prompt are computed once up to its end; their cache is copied then. Where there is no
cache that sequences can join, each forward computes all tokens of those that are equally long.

Cost: rows x (columns of the longest) in the cache of keys and values (kv_cache.py); a forward per token, and
one per admission.
Paper: Yu et al. 2022, Orca, OSDI 2022 (iteration-level scheduling).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.engine.generation.cached_forward import CachedForward
from meshwright.engine.generation.kv_cache import (
    cache_nbytes,
    drop_columns,
    join,
    release_unused,
    select_sequences,
)
from meshwright.engine.generation.routed_experts import RouteRecorder
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.engine.generation.token_sampler import ABSENT

RUNNING, STOPPED, AT_LENGTH, ABORTED, NOT_FINITE = range(
    5
)  # how a sequence ended, as it travels between ranks


@dataclass(eq=False)
class GeneratedSequence:
    """A prompt and what follows it: answer number `index` of all, and number `sample` to its `prompt`."""

    index: int
    prompt_number: int
    sample: int
    prompt: Sequence[int]
    params: SamplingParams
    end_tokens: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    routes: list[torch.Tensor] = field(default_factory=list)  # of all tokens but the newest, if recorded
    state: int = RUNNING

    @property
    def num_tokens(self) -> int:
        """The tokens so far, the prompt included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def random_number(self) -> int:
        """The number of the request in the hash of random numbers; it does not depend on how many answers
        there are.
        """
        return self.prompt_number + (self.sample << 32)

    def end(self, state: int, num_tokens: int) -> None:
        """Ends the answer behind its first `num_tokens` tokens."""
        self.state = state
        for each in (self.tokens, self.logprobs, self.sampling_logprobs):
            del each[num_tokens:]

    def append(self, token: int, logprob: float, sampling_logprob: float) -> None:
        """Adds a token; an end token ends the answer."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        if token in self.end_tokens:
            self.state = STOPPED


class SequenceRows(NamedTuple):
    """The sequences of a forward, all their tokens so far, (rows, tokens) with ABSENT for padding, and the
    cache of what has been computed of them; None if nothing has, or if it cannot be kept.
    """

    sequences: list[GeneratedSequence]
    context: torch.Tensor
    cache: Any


class ContinuousBatch:
    """The sequences of one rank, of which at most `max_num_seqs` run at once.

    `waiting` are groups in order; those of a group have the same prompt, and are at most `max_num_seqs`.
    Batches of a rank may take from the same list. `recorder` records the routes of experts.
    """

    def __init__(
        self,
        forward: CachedForward,
        waiting: list[list[GeneratedSequence]],
        max_num_seqs: int,
        device: torch.device,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self._forward, self._max_num_seqs, self._device = forward, max_num_seqs, device
        self._recorder = recorder
        self._waiting = waiting
        self._running: SequenceRows | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting) or self._running is not None

    def drop_ended(self) -> None:
        """Drops sequences that somebody else has ended between two forwards, waiting or running."""
        running = ([each for each in group if each.state == RUNNING] for group in self._waiting)
        self._waiting[:] = [group for group in running if group]
        self._running = None if self._running is None else _without_ended(self._running)

    @property
    def cache_nbytes(self) -> int:
        """The bytes of keys, values and states of the sequences that run, on this rank."""
        return 0 if self._running is None else cache_nbytes(self._running.cache)

    def run_forward(self) -> tuple[SequenceRows, torch.Tensor]:
        """Runs one forward, of the prompts for which there is room, else of those that run, and returns the
        logits behind each, (rows, this rank's part of the vocabulary).

        Without work it runs one token that nobody waits for, with ranks that have work.
        """
        groups, rows = self._admitted(), self._running
        running = None if rows is None else rows.cache
        if rows is None or groups:
            groups = groups or [[GeneratedSequence(0, 0, 0, [0], SamplingParams(), state=AT_LENGTH)]]
            rows = self._prompts([group[0] for group in groups])
        ids_BL, mask_BL = rows.context.clamp(min=0), (rows.context != ABSENT).long()
        logits_BV, cache = self._forward.next_logits(ids_BL, mask_BL, rows.cache, running)
        rows = rows._replace(cache=cache)
        if self._recorder is not None:
            self._recorder.add_routes(rows.sequences)
            for first, *others in groups:  # with the same prompt
                for each in others:
                    each.routes = list(first.routes)
        if any(len(group) > 1 for group in groups):
            indices = [number for number, group in enumerate(groups) for _ in group]
            rows = _selected(rows, indices)._replace(sequences=[each for group in groups for each in group])
            logits_BV = logits_BV[indices]
        return rows, logits_BV

    def append(self, rows: SequenceRows, ids_B: torch.Tensor) -> None:
        """Adds the chosen tokens `ids_B`, (rows,), to the `rows` of the latest forward; those that have ended
        leave.
        """
        running = self._running
        is_prefill = running is None or rows.sequences is not running.sequences
        context = torch.cat([rows.context, ids_B.unsqueeze(1)], 1)
        remaining = _without_ended(rows._replace(context=context))
        if remaining is not None and remaining.cache is None:  # all of their tokens are computed again
            self._waiting[:0] = [[each] for each in remaining.sequences]
            return
        if is_prefill and remaining is not None:
            release_unused(remaining.cache)
        if is_prefill and running is not None:
            remaining = running if remaining is None else _joined(running, remaining)
        self._running = remaining

    def _admitted(self) -> list[list[GeneratedSequence]]:
        """Returns the groups that waited and for which there is room; equally long ones without padding."""
        candidates, admitted = self._waiting, list[list[GeneratedSequence]]()
        if candidates and not self._forward.takes_padding:
            length = min(group[0].num_tokens for group in candidates)
            candidates = [group for group in candidates if group[0].num_tokens == length]
        room = self._max_num_seqs - (0 if self._running is None else len(self._running.sequences))
        for group in candidates:
            if len(group) > room:
                break
            room -= len(group)
            admitted.append(group)
        self._waiting[:] = [group for group in self._waiting if group not in admitted]
        return admitted

    def _prompts(self, sequences: list[GeneratedSequence]) -> SequenceRows:
        longest = max(each.num_tokens for each in sequences)
        padded = [[ABSENT] * (longest - each.num_tokens) + [*each.prompt, *each.tokens] for each in sequences]
        return SequenceRows(sequences, torch.tensor(padded, dtype=torch.int64, device=self._device), None)


def _selected(rows: SequenceRows, indices: list[int]) -> SequenceRows:
    if rows.cache is not None:
        select_sequences(rows.cache, indices)
    return SequenceRows([rows.sequences[index] for index in indices], rows.context[indices], rows.cache)


def _without_ended(rows: SequenceRows) -> SequenceRows | None:
    """Returns those that run on, without columns that none of them needs; None if there are none."""
    indices = [index for index, each in enumerate(rows.sequences) if each.state == RUNNING]
    if not indices:
        return None
    if len(indices) < len(rows.sequences):
        rows = _selected(rows, indices)
    num_unneeded = rows.context.shape[1] - max(each.num_tokens for each in rows.sequences)
    if rows.cache is not None:
        drop_columns(rows.cache, num_unneeded)
    return rows._replace(context=rows.context[:, num_unneeded:])


def _joined(first: SequenceRows, second: SequenceRows) -> SequenceRows:
    num_columns = max(each.context.shape[1] for each in (first, second))
    contexts = [
        F.pad(each.context, (num_columns - each.context.shape[1], 0), value=ABSENT)
        for each in (first, second)
    ]
    join(first.cache, second.cache, num_columns - 1)  # the newest tokens have not been computed
    return SequenceRows([*first.sequences, *second.sequences], torch.cat(contexts), first.cache)
