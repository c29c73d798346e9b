"""Builds the second program of a plan: that of a call of `generate`, as a list of actions per role.

    CHECK_REQUEST   ranks compare what they were asked for
    UNSHARD         sharded weights are gathered: once for all tokens, or before each use of their block
    AGREE           ranks that meet in a forward agree that some of them has work
    PREFILL         forward of one block call on the tokens of the prompts
    DECODE          forward of one block call on one token of each sequence that runs
    SEND, RECV      the hidden states behind a stage of a pipeline
    SAMPLE          the next token of each row: ranks with parts of the vocabulary exchange their best
    SEND_TOKENS     the last stage tells them to the others
    SEND_LOGPROBS   and, at the end, their log-probabilities
    GATHER_ANSWERS  ranks with other sequences tell each other the answers

    pp0   PREFILL(0) SEND(0) PREFILL(1) SEND(1)   DECODE(2) ...     0, 1: two batches, one for each stage;
    pp1              RECV(0) PREFILL(0) SAMPLE(0) PREFILL(1) ...    2: the second token of batch 0

It follows from the program of a step: the forwards of one microbatch, with transfers of other sizes, in the
proportion of tokens. In a forward of generation ranks have whole sequences, and a sequence_parallel exchange
becomes the sum that it is made of. The engine runs the model's own forward; what it sends is compared with
this program, byte by byte, in tests/plan/test_generation_program.py. Where routes of experts decide sizes,
they are those expected.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import PARAM_DTYPE_NBYTES, ROOT, ModelSpec, block_of
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, in_mesh_order
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.tensor_placements import TOKEN_DIM
from meshwright.plan.step.program import Action, Program, Role, RuntimeSize, Transfer
from meshwright.plan.step.single_device_program import FORWARD_KINDS

Gather = Literal["once", "block"]
FORWARDS_OF_GENERATION = ("PREFILL", "DECODE")
DIGEST_NBYTES = 24  # of a request
SCORE_NBYTES = 48  # of a row, for the best token of a part of the vocabulary
TOKEN_NBYTES = 8
AGREED_NBYTES = 16
LOGPROBS_NBYTES, STATE_NBYTES = 16, 16  # of a token, and of an answer beside its tokens


@dataclass(frozen=True)
class Rollout:
    """Sequences that each rank with rows of its own continues, all at once: `num_new_tokens` behind each of
    `num_seqs` prompts of `num_prompt_tokens`, greedily. `gather` is that of `generate`.
    """

    num_seqs: int
    num_prompt_tokens: int
    num_new_tokens: int
    gather: Gather = "once"

    def batch_sizes(self, num_stages: int) -> tuple[int, ...]:
        """Returns the rows of each batch that goes round `num_stages` stages."""
        room = -(-self.num_seqs // num_stages)
        return tuple(min(room, self.num_seqs - first) for first in range(0, self.num_seqs, room))


def generation_program(plan: Plan, rollout: Rollout) -> Program:
    """Returns the program of `rollout` under `plan`.

    Raises PlanError where transfers are not in the proportion of tokens: blocks that take slices of features,
    sequences of unknown length, and ranks that only serve.
    """
    if problem := _problem(plan):
        raise PlanError(f"the program of generation is not known: {problem}", fix="leave it out")
    meeting = meeting_axes(plan, rollout.gather)
    roles = plan.program.roles
    return Program(
        tuple(replace(role, actions=tuple(_RoleProgram(plan, role, rollout, meeting))) for role in roles)
    )


def meeting_axes(plan: Plan, gather: Gather) -> set[str]:
    """Returns the axes along which ranks meet in a forward, of any stage of a pipeline."""
    actions = [action for role in plan.program.roles for action in role.actions]
    forwards = (action for action in actions if action.kind in FORWARD_KINDS)
    axes = {axis for action in forwards for each in action.inner_transfers for axis in each.axes}
    axes -= _axes_of_tokens_alone(plan)
    if gather == "block":
        sharded = [each for each in plan.sharding.param_shardings if each.is_stored_sharded]
        axes |= {axis for each in sharded for axis in each.storage_layout.axes_with("S")}
    return {axis for axis in axes if plan.mesh.size(axis) > 1}


def row_axes(plan: Plan) -> tuple[str, ...]:
    """Returns the axes along which ranks generate behind prompts of their own."""
    return in_mesh_order({*plan.sharding.data_axes, *plan.sharding.token_axes})


def _axes_of_tokens_alone(plan: Plan) -> set[str]:
    """Returns the axes on which attention does not meet, since each rank has whole sequences: those of
    tokens; experts may meet there.
    """
    sliced = {axis for each in plan.sharding.param_shardings for axis in each.sliced_dims}
    return {*plan.sharding.token_axes} - sliced


def _problem(plan: Plan) -> str:
    sharding, mesh = plan.sharding, plan.mesh
    if sharding.num_servers:
        return "some ranks only serve"
    if sharding.has_owners:
        return "ranks send each other the parameters that they step"
    values = _boundary_values(plan.model_spec)
    sent = {_value_name(each) for role in plan.program.roles for each in role.actions if each.kind == "SEND"}
    if any(values[name].op for name in sent if name in values) or not sent <= values.keys():
        return "stages send each other more than outputs of blocks"
    calls = [call for of_rank in sharding.block_calls_by_pp_rank for call in of_rank]
    if len(set(calls)) < len(calls):
        return "several ranks of the pipeline have a block"
    placements = sharding.residual_layout.placements
    if any(each.dim not in (None, TOKEN_DIM) and mesh.size(axis) > 1 for axis, each in placements):
        return "blocks take slices of features"
    return "" if num_sample_tokens(plan.model_spec) else "samples are no sequences of one length"


def num_sample_tokens(model_spec: ModelSpec) -> int:
    """Returns the tokens of a sample in the example; 0: unknown."""
    if model_spec.sequence_info is not None and model_spec.sequence_info.length:
        return model_spec.sequence_info.length
    flows, logits = model_spec.residual_flows, model_spec.logits
    return flows[0].num_tokens if flows else 0 if logits is None else logits.num_tokens


class _RoleProgram:
    """The actions of one role, sized for its first rank; ranks with other rows meet along `meeting`."""

    def __init__(self, plan: Plan, role: Role, rollout: Rollout, meeting: Collection[str]) -> None:
        self._plan, self._rollout = plan, rollout
        self._view: RankView = plan.rank_view(role.ranks[0])
        first = [each for each in role.actions if each.microbatch == 0]
        self._forwards = [each for each in first if each.kind in (*FORWARD_KINDS, "SEND", "RECV")]
        self._values = _boundary_values(plan.model_spec)
        self._gathered_once, self._gathered_by_block = self._gathers(role)
        self._meeting = [axis for axis in row_axes(plan) if axis in meeting]
        self._of_whole_sequences = _axes_of_tokens_alone(plan)
        placements = plan.sharding.residual_layout.placements
        self._of_token_slices = {axis for axis, each in placements if each.dim == TOKEN_DIM}
        stages = _stage_ranks(plan)
        self._is_pipeline, self._last_rank = len(set(stages)) > 1, stages[-1] if stages else 0
        self._is_last = not self._is_pipeline or self._view.coordinate["pp"] == self._last_rank
        self._batch_sizes = rollout.batch_sizes(num_stages_at_once(plan))

    def __iter__(self) -> Iterator[Action]:
        rollout, number = self._rollout, 0
        if self._plan.mesh.world_size > 1:
            yield _exchange("CHECK_REQUEST", None, _gather(AXES, DIGEST_NBYTES, "int64"))
        yield from self._gathered_once
        forwards = [("PREFILL", rollout.num_prompt_tokens)] + [("DECODE", 1)] * (rollout.num_new_tokens - 1)
        for kind, num_tokens in forwards:
            for rows in self._batch_sizes:
                if self._meeting:
                    yield _agree(self._meeting, number)
                yield from self._forward(number, kind, rows, num_tokens)
                number += 1
        for idle in range(len(self._batch_sizes) if self._meeting else 0):
            # until the last tokens have come round, a forward of one token that nobody waits for
            if idle:
                yield from self._forward(number, "PREFILL", 1, 1)
                number += 1
            yield _agree(self._meeting, number)
        yield from self._answers()

    def _forward(self, number: int, kind: str, rows: int, num_tokens: int) -> Iterator[Action]:
        """Yields the forward of `num_tokens` tokens of each row, and the choice of the next one."""
        before, once = number - len(self._batch_sizes), [each.name for each in self._gathered_once]
        told = [f"SEND_TOKENS({before})" if self._is_pipeline else f"SAMPLE({before})"]
        waited_for = told if kind == "DECODE" else once
        last_name, blocks, arriving = "", set[str](), list[str]()
        for action in self._forwards:
            if action.kind in FORWARD_KINDS:
                block = block_of(action.subject)
                gathers = [] if block in blocks else self._gathered_by_block[block]
                of_block = [_gather_for(each, f"tokens of {block}", number) for each in gathers]
                yield from of_block
                blocks.add(block)
                inner = tuple(self._inner_transfers(action, rows, num_tokens))
                waits = (*waited_for, *arriving, *(each.name for each in of_block))
                forward = Action(kind, action.subject, number, waits=waits, inner_transfers=inner)
                yield forward
                last_name, arriving = forward.name, []
            elif action.transfer is not None:
                is_send = action.kind == "SEND"
                waits = (last_name,) if is_send else tuple(_at(each, number) for each in action.waits)
                moved = self._sent_value(action, action.transfer, rows, num_tokens)
                passed = Action(
                    action.kind, action.subject, number, action.stream, waits=waits, transfer=moved
                )
                yield passed
                arriving += [] if is_send else [passed.name]
        yield from self._choice(number, rows, last_name)

    def _gathers(self, role: Role) -> tuple[list[Action], dict[str, list[Action]]]:
        """Returns what gathers parameters once in a call, and what does it before each use of a block."""
        once, by_block = list[Action](), defaultdict[str, list[Action]](list)
        gathering = [each for each in role.actions if each.kind == "UNSHARD"]
        for group in self._view.all_param_groups:
            ours = (each for each in gathering if f"{each.subject}, ".startswith(f"{group.name}, "))
            first = next(ours, None)
            if first is None or group.name not in self._view.flat_param_specs:
                continue
            stays = not group.param_shardings[0].is_stored_sharded or ROOT in group.block_calls
            if stays or self._rollout.gather == "once":
                once.append(_gather_for(replace(first, subject=group.name), "all tokens", None))
                continue
            for block in dict.fromkeys(map(block_of, group.block_calls)):
                by_block[block].append(replace(first, subject=group.name))
        return once, by_block

    def _sent_value(self, action: Action, transfer: Transfer, rows: int, num_tokens: int) -> Transfer:
        """Returns the transfer of a whole value, of which ranks send slices or codes in a step."""
        value, length = self._values[_value_name(action)], num_sample_tokens(self._plan.model_spec)
        numel = rows * value.numel(1)
        if (length, 0) in value.dim_sizes:
            numel = numel // length * num_tokens
        nbytes = numel * PARAM_DTYPE_NBYTES[transfer.dtype]
        return replace(transfer, nbytes=nbytes, carried_by=(), carried_from=0, replica_axes=())

    def _choice(self, number: int, rows: int, last_name: str) -> Iterator[Action]:
        axes = self._plan.sharding.logits_layout.axes_with("S")
        scores = [_gather(axes, SCORE_NBYTES * rows, "float64")] if axes else []
        if self._is_last:
            yield Action("SAMPLE", "", number, waits=(last_name,), inner_transfers=tuple(scores))
        if self._is_pipeline:
            waits = (f"SAMPLE({number})",) if self._is_last else ()
            nbytes = TOKEN_NBYTES * rows
            yield _exchange("SEND_TOKENS", number, self._from_last(nbytes, "int64"), waits)

    def _answers(self) -> Iterator[Action]:
        rows, num_new = self._rollout.num_seqs, self._rollout.num_new_tokens
        if self._is_pipeline:
            yield _exchange(
                "SEND_LOGPROBS", None, self._from_last(LOGPROBS_NBYTES * num_new * rows, "float64")
            )
        axes = [axis for axis in row_axes(self._plan) if self._plan.mesh.size(axis) > 1]
        if axes:
            nbytes = (LOGPROBS_NBYTES + TOKEN_NBYTES) * num_new + STATE_NBYTES
            yield _exchange("GATHER_ANSWERS", None, _gather(axes, nbytes * rows, "int64"))

    def _from_last(self, nbytes: int, dtype: str) -> Transfer:
        return Transfer("broadcast", ("pp",), nbytes, dtype=dtype, root=self._last_rank)

    def _ratio(self, block_call: str, rows: int, num_tokens: int) -> Fraction:
        """Returns the tokens of a forward, as a multiple of those of a microbatch on this rank."""
        own = self._view.work_share.token_fraction(block_call) * num_sample_tokens(self._plan.model_spec)
        return Fraction(rows * num_tokens) / (own * self._plan.micro_batch)

    def _inner_transfers(self, action: Action, rows: int, num_tokens: int) -> Iterator[Transfer]:
        ratio = self._ratio(action.subject, rows, num_tokens)
        for each in action.inner_transfers:
            is_of_slices = not self._of_token_slices.isdisjoint(each.axes)
            if not self._of_whole_sequences.isdisjoint(each.axes):
                continue
            if is_of_slices and each.collective == "all_gather":
                continue
            if is_of_slices and each.collective == "reduce_scatter":
                yield _scaled(replace(each, collective="all_reduce"), ratio)
            elif each.collective == "all_to_all" and each.dtype == "int64":
                yield each  # counts of rows: one for each expert, whatever the tokens
            else:
                yield _scaled(each, ratio)


def _boundary_values(model_spec: ModelSpec) -> dict[str, StageValue]:
    boundaries = model_spec.stage_boundaries
    return {} if boundaries is None else {each.name: each for each in boundaries.values}


def _value_name(action: Action) -> str:
    """Returns the value that a message between stages carries."""
    return action.subject.partition(" to ")[0]


def _stage_ranks(plan: Plan) -> list[int]:
    """Returns the pipeline rank of each stage, in the order of the forward."""
    by_rank = plan.sharding.block_calls_by_pp_rank
    owners = {call: rank for rank, calls in enumerate(by_rank) for call in calls}
    found = [owners[call] for call in plan.model_spec.block_calls if call in owners]
    return [*found[:1], *(other for one, other in pairwise(found) if one != other)]


def num_stages_at_once(plan: Plan) -> int:
    """Returns for how many stages batches go round: all, where each rank has one; else 1, since stages work
    one after the other.
    """
    stages = _stage_ranks(plan)
    return len(stages) if len(set(stages)) == len(stages) > 0 else 1


def _at(wait: str, number: int) -> str:
    """Returns the name of an action of the first microbatch, such as "pp0/SEND(layers.1 to 1, 0)", for
    another one.
    """
    return f"{wait.removesuffix(', 0)')}, {number})"


def _agree(axes: Sequence[str], number: int) -> Action:
    summed = Transfer("all_reduce", tuple(axes), AGREED_NBYTES, dtype="int64")
    return Action("AGREE", "", number, inner_transfers=(summed,))


def _gather(axes: Iterable[str], nbytes: int, dtype: str) -> Transfer:
    return Transfer("all_gather", tuple(axes), nbytes, dtype=dtype)


def _exchange(kind: str, number: int | None, transfer: Transfer, waits: tuple[str, ...] = ()) -> Action:
    return Action(kind, "", number, "comm", waits=waits, transfer=transfer)


def _gather_for(action: Action, whose: str, number: int | None) -> Action:
    """Returns what gathers parameters, as an action of generation: nothing frees them before it ends."""
    subject = f"{action.subject}, {whose}"
    return replace(action, subject=subject, microbatch=number, waits=(), allocations=(), frees=())


def _scaled(transfer: Transfer, ratio: Fraction) -> Transfer:
    """Returns `transfer` of `ratio` times as many tokens; codes, which training uses, are not."""
    runtime = transfer.runtime_size
    if runtime is not None:
        expected, most = (round(ratio * rows) for rows in (runtime.expected_rows, runtime.max_rows))
        runtime = RuntimeSize(runtime.count, runtime.row_nbytes, expected, max(expected, most))
    nbytes = round(ratio * transfer.nbytes) if runtime is None else runtime.expected
    return replace(transfer, nbytes=nbytes, runtime_size=runtime, carried_by=(), carried_from=0)
