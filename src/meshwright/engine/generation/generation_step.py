"""One forward of the sequences that run on a rank, and their next tokens, with the ranks that compute them.

    batch.run_forward()     logits behind each row         tp, pp: one forward of all ranks together
    choose                  the next token of each row     the same on all ranks of the rows
    extend_sequences        tokens appended; an end token ends an answer

Along pp the sequences of a rank are as many batches as there are stages, where there are enough: while the
last stage computes the tokens of one batch, the others compute the next.

    stage 0    a0 b0    a1 b1    a2 b2          a, b: batches; a1: the forward behind the first token of a
    stage 1       a0 b0    a1 b1    a2 b2

What ranks agree on meanwhile (whether any has work, where a stop string ends an answer) is known a round
later: stage 0 would wait for stage 1 otherwise. Tokens behind such an end are dropped.

Which ranks have the same rows, and which meet in a forward though their rows differ (experts along ep; shards
that are gathered block by block), follows from the plan.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from meshwright.comm.collectives.group import Group, Work
from meshwright.engine.generation.cached_forward import CachedForward
from meshwright.engine.generation.continuous_batch import (
    AT_LENGTH,
    NOT_FINITE,
    RUNNING,
    ContinuousBatch,
    GeneratedSequence,
    SequenceRows,
)
from meshwright.engine.generation.decode_context_parallel import (
    LOCATION,
    OPTION,
    WITHOUT,
    make_cache_division,
)
from meshwright.engine.generation.routed_experts import RouteRecorder
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.engine.generation.stage_forwards import make_stage_forwards
from meshwright.engine.generation.token_sampler import (
    NO_TOKEN,
    ChosenTokens,
    TokenSampler,
    full_vocabulary,
)
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.plan.generation_program import Gather, meeting_axes, row_axes
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import AXES, in_mesh_order

GENERATE_ACTION = "GENERATE"  # name in the ledger


class GenerationStep:
    """Runs forwards and chooses tokens on one rank; sharded weights are gathered as `gather` says.

    `group` are the ranks with other rows, `same_rows_group` those with the same; along `meeting_axes` ranks
    with other rows meet in a forward. With `decode_context_parallel` ranks with other tokens of a sample in a
    step have the same rows, and divide their keys and values. With `sends_logprobs` log-probabilities arrive
    with each token on the ranks of a pipeline.
    """

    group: Group
    same_rows_group: Group

    def __init__(
        self,
        executor: StepExecutor,
        gather: Gather,
        *,
        decode_context_parallel: bool,
        sends_logprobs: bool = False,
    ) -> None:
        state = executor.state
        self._executor, self._state, self._gather = executor, state, gather
        self._sends_logprobs = sends_logprobs
        sharding, world = state.plan.sharding, state.world
        self._division = make_cache_division(state) if decode_context_parallel else None
        of_rows = row_axes(state.plan) if self._division is None else in_mesh_order(sharding.data_axes)
        self.group = world.group(of_rows)
        self.same_rows_group = world.group([axis for axis in AXES if axis not in of_rows])
        meeting = meeting_axes(state.plan, gather)
        self.meeting_axes = tuple(axis for axis in of_rows if axis in meeting)
        self._stages = make_stage_forwards(state, GENERATE_ACTION)
        self.num_batches = 1 if self._stages is None else self._stages.num_batches
        # a stage that takes slices of features cannot do to a cache what another one does (lockstep)
        slices = state.takes_residual_slices(has_whole_tokens=True)
        self._keeps_cache = not (sharding.block_calls_by_pp_rank and slices)
        if self._division is not None and sharding.block_calls_by_pp_rank and self._stages is None:
            text = f"{OPTION} = True, and stages of the pipeline send each other more than outputs of blocks"
            raise PlanError(text, fix=WITHOUT, location=LOCATION)
        self._vocab_shard: VocabShard | None = None

    @property
    def forwards_meet(self) -> bool:
        """Whether ranks with other rows, or with none, run each forward together."""
        return bool(self.meeting_axes)

    @contextmanager
    def forwards(self) -> Iterator[CachedForward]:
        """Yields the forward of the rows of this rank. Parameters, buffers, modes and random streams are
        unchanged afterwards; sharded weights are gathered until then.
        """
        self._executor.check_sites_agree("generate")
        run_stages = None if self._stages is None else self._stages.run()
        with self._executor.full_param_forwards.generation_forwards(
            GENERATE_ACTION, gather_once=self._gather == "once", run_stages=run_stages
        ) as self._vocab_shard:
            module = self._state.trained_module.module
            with nullcontext() if self._division is None else self._division.patched_attention():
                yield CachedForward(module, self._stages, self._division, keeps_cache=self._keeps_cache)

    def batches(
        self,
        forward: CachedForward,
        groups: Sequence[Sequence[GeneratedSequence]],
        max_num_seqs: int,
        recorder: RouteRecorder | None = None,
    ) -> list[ContinuousBatch]:
        """Returns the batches whose forwards follow each other; of all, `max_num_seqs` sequences run at once.

        Those of each of `groups` have the same prompt, and stay together.
        """
        waiting = [list(group) for group in groups]
        largest, num_sequences = max(map(len, waiting), default=1), sum(map(len, waiting))
        num_running = min(max_num_seqs, num_sequences)
        room = max(largest, -(-num_running // self.num_batches))
        count = max(1, min(self.num_batches, max_num_seqs // room, -(-num_sequences // room)))
        room, device = room if count > 1 else max_num_seqs, self._state.world.device
        return [ContinuousBatch(forward, waiting, room, device, recorder) for _ in range(count)]

    def begin(self, batch: ContinuousBatch) -> "ForwardUnderWay":
        """Runs the next forward of `batch`; tokens that another stage chooses may be under way behind it."""
        rows, logits_BV = batch.run_forward()
        stages, sequences = self._stages, rows.sequences
        if stages is not None and not stages.is_last:
            nothing = torch.zeros(len(sequences), dtype=torch.float64, device=rows.context.device)
            return self._under_way(rows, ChosenTokens(nothing.long(), nothing, nothing.clone()))
        by_params = dict[SamplingParams, list[int]]()
        for place, sequence in enumerate(sequences):
            by_params.setdefault(sequence.params.of_a_token, []).append(place)
        chosen = list[ChosenTokens]()
        for params, places in by_params.items():
            sampler = TokenSampler(params, self._vocab_shard or full_vocabulary(logits_BV.shape[1]))
            seeds = [sequences[place].random_number for place in places]
            positions = [sequences[place].num_tokens for place in places]
            index = places if len(by_params) > 1 else slice(None)
            chosen.append(sampler.choose(logits_BV[index], rows.context[index], seeds, positions))
        together = chosen[0]
        if len(chosen) > 1:
            order = torch.tensor([place for places in by_params.values() for place in places]).argsort()
            together = ChosenTokens(
                *(torch.cat(each)[order.to(each[0].device)] for each in zip(*chosen, strict=True))
            )
        if self._division is not None:  # prompts are computed on each rank, and may round otherwise
            self._division.group.broadcast(together.ids, action=GENERATE_ACTION).wait()
        return self._under_way(rows, together)

    def _under_way(self, rows: SequenceRows, chosen: ChosenTokens) -> "ForwardUnderWay":
        """Begins to replace what is `chosen` on the ranks of a pipeline that have no logits."""
        stages, arrivals = self._stages, list[Work]()
        if stages is not None:
            arrivals.append(stages.share_tokens(chosen.ids))
        if stages is not None and self._sends_logprobs:
            arrivals += map(stages.share_logprobs, (chosen.logprobs, chosen.sampling_logprobs))
        return ForwardUnderWay(rows, chosen, arrivals)

    def share_logprobs(self, logprobs: torch.Tensor) -> None:
        """Replaces `logprobs` on the ranks of a pipeline by those of the rank that has the logits."""
        if self._stages is not None:
            self._stages.share_logprobs(logprobs).wait()


class ForwardUnderWay(NamedTuple):
    """The rows of a forward, and the token that follows each; where a rank of a pipeline has no logits, they
    come with `arrivals`: tokens, and log-probabilities if they are sent.
    """

    rows: SequenceRows
    chosen: ChosenTokens
    arrivals: Sequence[Work]

    @property
    def has_work(self) -> bool:
        """Whether any of the rows is a sequence that runs: a rank without one runs forwards with others."""
        return any(each.state == RUNNING for each in self.rows.sequences)

    def finish(self) -> tuple[SequenceRows, ChosenTokens]:
        """Returns the rows and their tokens, once these have arrived."""
        for arrival in self.arrivals:
            arrival.wait()
        return self.rows, self.chosen


class DelayedSums:
    """Sums of a few numbers over `group`, each known `delay` exchanges later: a rank that is so far ahead of
    the others, as the first stage of a pipeline is, does not wait for them.
    """

    def __init__(self, group: Group, device: torch.device, delay: int) -> None:
        self._group, self._device, self._delay = group, device, delay
        self._under_way = deque[tuple[torch.Tensor, Work]]()

    def exchange(self, numbers: Sequence[int]) -> list[int] | None:
        """Begins to sum `numbers`, and returns the sums of `delay` calls ago; None in the first calls."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._under_way.append((tensor, self._group.all_reduce(tensor, action=GENERATE_ACTION)))
        if len(self._under_way) <= self._delay:
            return None
        summed, work = self._under_way.popleft()
        work.wait()
        return summed.tolist()

    def finish(self) -> list[list[int]]:
        """Returns the sums that are not known yet."""
        for _, work in self._under_way:
            work.wait()
        return [summed.tolist() for summed, _ in self._under_way]


def extend_sequences(sequences: Sequence[GeneratedSequence], chosen: ChosenTokens) -> list[GeneratedSequence]:
    """Appends the `chosen` tokens to those of `sequences` that run, and returns these; one whose logits are
    not finite ends without a token.
    """
    extended = list[GeneratedSequence]()
    for sequence, token, *both in zip(sequences, *(each.tolist() for each in chosen), strict=True):
        if sequence.state == RUNNING and token == NO_TOKEN:
            sequence.state = NOT_FINITE
        elif sequence.state == RUNNING:
            sequence.append(token, *both)
            extended.append(sequence)
    return extended


def end_at_length(sequences: Sequence[GeneratedSequence]) -> None:
    """Ends those of `sequences` that run and have as many tokens as was asked for."""
    for sequence in sequences:
        if sequence.state == RUNNING and len(sequence.tokens) == sequence.params.max_new_tokens:
            sequence.state = AT_LENGTH


def gather_from_ranks(group: Group, tensor: torch.Tensor, action: str = GENERATE_ACTION) -> torch.Tensor:
    """Returns the equally shaped `tensor`s of all ranks of `group`, (ranks, *shape), on the CPU."""
    gathered = tensor.new_empty(group.size, *tensor.shape)
    group.all_gather(gathered, tensor.contiguous(), action=action).wait()
    return gathered.cpu()
