"""Continues prompts on all ranks of a plan, with the weights as they lie: each prompt on one rank of the data
axes.

    prompts    p0 p1 p2 | p3 p4 | p5 p6         ranks along dp, ep and cp have different prompts
    rank 0     p0 p1 p2                         tp and pp ranks continue the same ones together
    rank 1     p3 p4                            batch_size rows at once: one prefill, then a token per forward
    rank 2     p5 p6
               answers of p0 .. p6 on every rank, in order

Along cp ranks have the tokens of the same samples in a step; here each has whole sequences, and prompts of
its own. Shards of weights are gathered before the first forward into memory of their own, once for all
tokens, and freed at the end; or, with gather="block", block by block in every forward, as a step does. Ranks
whose forwards meet (experts along ep; shards gathered block by block) run equally many: one that has nothing
left runs a prompt of one token, and after each token they agree whether any rank goes on.

An answer depends on its prompt, its number among the requests and the sampling parameters, and on nothing
else.

    bytes sent by a rank, per forward, with D wide activations of r rows
        tp       two sums per layer (all_reduce of r D), one of the embedding, token_sampler.py per row
        pp       r D at each border and 8 per row for the token (stage_forwards.py); once per call 16
                 max_new_tokens per row
        ep       what ExpertParallel sends for r tokens, and 8 bytes to agree
        shards   nothing; once per call (n - 1) S of each shard of S bytes
        at the end of a call  (n - 1) (24 max_new_tokens + 16) bytes per row of a rank

Memory: with gather="once" all weights of this rank's stages and slices; in both cases keys and values of
batch_size rows, of the heads and layers of this rank: 2 layers x rows x tokens x heads x head dim elements.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, Protocol

import torch

from meshwright.comm.collectives.group import Group
from meshwright.engine.generation.cached_forward import CachedForward
from meshwright.engine.generation.sampling_params import (
    LOCATION,
    GeneratedAnswer,
    SamplingParams,
    end_tokens,
    request_diagnostics,
)
from meshwright.engine.generation.stage_forwards import make_stage_forwards
from meshwright.engine.generation.token_sampler import (
    ABSENT,
    NO_TOKEN,
    ChosenTokens,
    TokenSampler,
    full_vocabulary,
)
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.sharding.mesh import AXES, in_mesh_order
from meshwright.plan.step.single_device_program import FORWARD_KINDS

GENERATE_ACTION = "GENERATE"  # name in the ledger
Decode = Callable[[list[int]], str]  # makes text of token ids
Gather = Literal["once", "block"]
TOKEN_DIM = 1  # of a residual stream [samples, tokens, features]
RUNNING, STOPPED, AT_LENGTH, NOT_FINITE = range(4)  # how a row ended, as it travels between ranks


class Decoder(Protocol):
    """A tokenizer, as far as generation needs one."""

    def decode(self, token_ids: list[int], /) -> str:
        """Returns the text of `token_ids`."""


@dataclass(frozen=True)
class GenerationRequest:
    """The `prompts`, token ids, and how all of them are continued: `batch_size` at once on each rank.

    `gather`: sharded weights are gathered "once" for all tokens, or each "block" in every forward. `decode`
    makes text of token ids, in which stop strings are looked for.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    batch_size: int = 8
    gather: Gather = "once"
    decode: Decode | None = None

    def check(self, state: RankState) -> None:
        """Raises PlanError with all that is wrong with the request, on all ranks alike."""
        _check_same_on_all_ranks(state, self)
        module = state.trained_module.module
        diagnostics = list(
            request_diagnostics(module, self.prompts, self.params, decodes=self.decode is not None)
        )
        diagnostics += _plan_diagnostics(state)
        if not (isinstance(self.batch_size, int) and self.batch_size > 0):
            text = f"batch_size = {self.batch_size!r}; needed is a whole number of at least 1"
            diagnostics.append(Diagnostic(text, "pass batch_size=8, the default", LOCATION))
        if self.gather not in ("once", "block"):
            text = f"gather = {self.gather!r}; needed is 'once' or 'block'"
            diagnostics.append(Diagnostic(text, "pass gather='once', the default", LOCATION))
        raise_diagnostics(diagnostics)


@dataclass
class _Row:
    """A prompt of this rank and what follows it."""

    number: int
    prompt: Sequence[int]
    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    state: int = RUNNING

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)


def generate(executor: StepExecutor, request: GenerationRequest) -> list[GeneratedAnswer]:
    """Returns the answer to each prompt of `request`, on all ranks; all ranks call it with the same.

    Parameters, buffers, modes and random streams are unchanged. Raises PlanError for a request that cannot
    work, for ranks that pass different ones, and for logits that are not finite.
    """
    request.check(executor.state)
    return _Generation(executor, request).answers()


class _Generation:
    """One call of `generate` on one rank."""

    def __init__(self, executor: StepExecutor, request: GenerationRequest) -> None:
        state = executor.state
        self._executor, self._state, self._request = executor, state, request
        sharding = state.plan.sharding
        self._row_axes = in_mesh_order({*sharding.data_axes, *sharding.token_axes})
        self._group: Group = state.world.group(self._row_axes)
        self._ends = frozenset(end_tokens(state.trained_module.module, request.params) or ())
        meeting = [axis for axis in self._row_axes if axis in self._meeting_axes()]
        self._stages = make_stage_forwards(state, GENERATE_ACTION)
        self._meeting_group = state.world.group(tuple(meeting)) if meeting else None

    def answers(self) -> list[GeneratedAnswer]:
        """Returns the answers of all ranks."""
        batches, module = self._batches(), self._state.trained_module.module
        takes_mask = CachedForward(module).takes_mask
        own = [list(_batches_of(rows, self._request.batch_size, takes_mask)) for rows in batches]
        rows = own[self._group.index]
        if self._meeting_group is not None:
            rows = rows + [[_dummy_row()]] * (max(map(len, own)) - len(rows))
        gather_once = self._request.gather == "once"
        self._executor.check_sites_agree("generate")
        forwards = self._executor.full_param_forwards
        run_stages = None if self._stages is None else self._stages.run()
        with forwards.generation_forwards(
            GENERATE_ACTION, gather_once=gather_once, run_stages=run_stages
        ) as vocab_shard:
            for batch in rows:
                self._continue(batch, CachedForward(module, self._stages), vocab_shard)
        return self._gathered(batches)

    def _batches(self) -> list[list[_Row]]:
        """Returns the rows of each rank of the group, as even as possible, in order."""
        prompts, size = self._request.prompts, self._group.size
        ends = [len(prompts) * (index + 1) // size for index in range(size)]
        return [
            [_Row(number, prompts[number], [], [], []) for number in range(first, end)]
            for first, end in zip([0, *ends], ends, strict=False)
        ]

    def _meeting_axes(self) -> set[str]:
        """Returns the axes along which ranks meet in a forward, of any stage of a pipeline."""
        plan = self._state.plan
        actions = [action for role in plan.program.roles for action in role.actions]
        forwards = (action for action in actions if action.kind in FORWARD_KINDS)
        axes = {axis for action in forwards for each in action.inner_transfers for axis in each.axes}
        if self._request.gather == "block":
            sharded = [each for each in plan.sharding.param_shardings if each.is_stored_sharded]
            axes |= {axis for each in sharded for axis in each.storage_layout.axes_with("S")}
        return {axis for axis in axes if plan.mesh.size(axis) > 1}

    def _continue(self, rows: list[_Row], forward: CachedForward, vocab_shard: VocabShard | None) -> None:
        """Continues the prompts of one batch until all rows have ended, here and where ranks meet."""
        device, longest = self._state.world.device, max(len(row.prompt) for row in rows)
        padded = [[ABSENT] * (longest - len(row.prompt)) + list(row.prompt) for row in rows]
        context_BL = torch.tensor(padded, dtype=torch.int64, device=device)
        while self._any_running(rows):
            ids_BL, mask_BL = context_BL.clamp(min=0), (context_BL != ABSENT).long()
            logits_BV = forward.next_logits(ids_BL, mask_BL)
            chosen = self._choose(logits_BV, context_BL, rows, vocab_shard)
            self._append(rows, *(each.tolist() for each in chosen))
            context_BL = torch.cat([context_BL, chosen.ids.unsqueeze(1)], 1)

    def _choose(
        self,
        logits_BV: torch.Tensor,
        context_BL: torch.Tensor,
        rows: list[_Row],
        vocab_shard: VocabShard | None,
    ) -> ChosenTokens:
        """Returns the next token of each row; where a rank of a pipeline has no logits, without
        log-probabilities.
        """
        stages = self._stages
        if stages is not None and not stages.is_last:
            nothing = torch.zeros(len(rows), dtype=torch.float64, device=context_BL.device)
            return ChosenTokens(stages.share_tokens(nothing.long()), nothing, nothing)
        sampler = TokenSampler(self._request.params, vocab_shard or full_vocabulary(logits_BV.shape[1]))
        numbers, positions = [row.number for row in rows], [row.num_tokens for row in rows]
        chosen = sampler.choose(logits_BV, context_BL, numbers, positions)
        if stages is not None:
            stages.share_tokens(chosen.ids)
        return chosen

    def _any_running(self, rows: list[_Row]) -> bool:
        num_running = sum(row.state == RUNNING for row in rows)
        if self._meeting_group is None:
            return num_running > 0
        counted = torch.tensor([num_running], device=self._state.world.device)
        self._meeting_group.all_reduce(counted, action=GENERATE_ACTION).wait()
        return counted.item() > 0

    def _append(
        self, rows: list[_Row], ids: list[int], logprobs: list[float], sampling_logprobs: list[float]
    ) -> None:
        for row, token, logprob, sampling_logprob in zip(rows, ids, logprobs, sampling_logprobs, strict=True):
            if row.state != RUNNING:
                continue
            if token == NO_TOKEN:
                row.state = NOT_FINITE
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.sampling_logprobs.append(sampling_logprob)
            if token in self._ends or self._completes_stop_string(row):
                row.state = STOPPED
            elif len(row.tokens) == self._request.params.max_new_tokens:
                row.state = AT_LENGTH

    def _completes_stop_string(self, row: _Row) -> bool:
        strings, decode = self._request.params.stop_strings, self._request.decode
        if not strings or decode is None:
            return False
        text = decode(row.tokens)
        return any(each in text for each in strings)

    def _gathered(self, rows_by_rank: list[list[_Row]]) -> list[GeneratedAnswer]:
        """Returns the answers of all ranks of the group, in the order of the prompts."""
        num_tokens, device = self._request.params.max_new_tokens, self._state.world.device
        most_rows, own = max(map(len, rows_by_rank)), rows_by_rank[self._group.index]
        ids = torch.zeros(most_rows, 2 + num_tokens, dtype=torch.int64)
        logprobs = torch.zeros(most_rows, 2, num_tokens, dtype=torch.float64)
        for place, row in enumerate(own):
            count = len(row.tokens)
            ids[place, :2] = torch.tensor([row.state, count])
            ids[place, 2 : 2 + count] = torch.tensor(row.tokens, dtype=torch.int64)
            both = [row.logprobs, row.sampling_logprobs]
            logprobs[place, :, :count] = torch.tensor(both, dtype=torch.float64)
        ids, logprobs = ids.to(device), logprobs.to(device)
        if self._stages is not None:
            self._stages.share_logprobs(logprobs)
        ids, logprobs = (_all_gather(self._group, each) for each in (ids, logprobs))
        answers = []
        for rank, rows in enumerate(rows_by_rank):
            for row, (how, count, *tokens), (full, drawn) in zip(
                rows, ids[rank].tolist(), logprobs[rank].tolist(), strict=False
            ):
                if how == NOT_FINITE:
                    raise _not_finite(row.number, len(row.prompt) + count)
                reason: Literal["stop", "length"] = "stop" if how == STOPPED else "length"
                shortened = tuple(tokens[:count]), reason, tuple(full[:count]), tuple(drawn[:count])
                answers.append(GeneratedAnswer(*shortened))
        return answers


def _plan_diagnostics(state: RankState) -> Iterator[Diagnostic]:
    layout, mesh = state.plan.sharding.residual_layout, state.plan.mesh
    for axis, placement in layout.placements:
        if placement.dim == TOKEN_DIM and mesh.size(axis) > 1:
            text = (
                f"the tokens of the residual stream are sharded over the {mesh.size(axis)} ranks of {axis} "
            )
            text += "(sequence_parallel), and a forward that generates has one token"
            fix = "save, and load the checkpoint under a plan without sequence_parallel"
            yield Diagnostic(text, fix, LOCATION)


def _dummy_row() -> _Row:
    """Returns a row that has ended, for a rank that takes part in the forwards of others."""
    return _Row(0, [0], [], [], [], AT_LENGTH)


def _batches_of(rows: list[_Row], size: int, takes_mask: bool) -> Iterator[list[_Row]]:
    """Yields `rows` in batches of at most `size`; of equal length where the model takes no mask."""
    batch: list[_Row] = []
    for row in rows if takes_mask else sorted(rows, key=lambda row: len(row.prompt)):
        if batch and (len(batch) == size or not (takes_mask or len(batch[0].prompt) == len(row.prompt))):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _all_gather(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the equally shaped `tensor`s of all ranks of `group`, (ranks, *shape), on the CPU."""
    gathered = tensor.new_empty(group.size, *tensor.shape)
    group.all_gather(gathered, tensor.contiguous(), action=GENERATE_ACTION).wait()
    return gathered.cpu()


def _check_same_on_all_ranks(state: RankState, request: GenerationRequest) -> None:
    said = repr((list(map(list, request.prompts)), request.params, request.batch_size, request.gather))
    digest = sha256(said.encode()).digest()[:8]
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(state.world.device)
    if len(set(_all_gather(state.world.group(AXES), own).flatten().tolist())) > 1:
        text = "the ranks passed different prompts or parameters, and generate divides the prompts itself"
        fix = "pass the same prompts, in the same order, and the same parameters and seed on every rank"
        raise PlanError(text, fix=fix, location=LOCATION)


def _not_finite(number: int, position: int) -> PlanError:
    text = f"the logits of prompt {number} at position {position} are not finite"
    fix = "load a checkpoint with finite parameters; in half precision, compute in a wider dtype"
    return PlanError(text, fix=fix, location=LOCATION)
