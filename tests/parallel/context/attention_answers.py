"""Runs one call of sequence-parallel attention on threads without an engine, and compares it with torch's
attention on one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
from meshwright.model.context_parallel.attention_call import (
    DecodeAttentionImpl,
    ShardedAttentionCall,
    describe_mask,
)
from meshwright.model.context_parallel.conv_call import Conv1dImpl
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import AttentionSpec, BlockSequenceInfo, SequenceInfo
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE, program_of

NUM_SAMPLES = 2
BLOCK_CALL = "layers.0"


@dataclass(frozen=True)
class Case:
    """One call of attention on all tokens of `NUM_SAMPLES` samples, and the gradient of what comes out."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    mask: torch.Tensor | None = None
    causal: bool = False

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Returns what has gradients."""
        learned = (self.mask,) if self.mask is not None and self.mask.requires_grad else ()
        return (self.query, self.key, self.value, *learned)

    @property
    def attend(self) -> AttentionSpec:
        """Returns what the plan knows of it."""
        return AttentionSpec(
            *(BLOCK_CALL, self.query.shape[1], self.key.shape[1], self.query.shape[3], self.value.shape[3]),
            *(self.query.shape[2], self.key.shape[2], self.causal, self.mask is not None),
            mask=describe_mask(self.mask),
        )

    def dense(self) -> tuple[torch.Tensor, ...]:
        """Returns what one device makes of it: the output, then the gradients of the inputs."""
        leaves = [each.detach().requires_grad_() for each in self.inputs]
        shared = self.query.shape[1] // self.key.shape[1]
        key, value = (each.repeat_interleave(shared, 1) for each in leaves[1:3])
        out = F.scaled_dot_product_attention(
            leaves[0], key, value, leaves[3] if leaves[3:] else self.mask, is_causal=self.causal
        )
        return out.detach(), *torch.autograd.grad(out, leaves, self.grad)


def case(
    heads: int,
    groups: int,
    length: int,
    *,
    widths: tuple[int, int] = (4, 4),
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A case of noise."""
    noise = torch.Generator().manual_seed(heads * 100 + length)
    shapes = [(heads, widths[0]), (groups, widths[0]), (groups, widths[1]), (heads, widths[1])]
    drawn = [
        torch.randn(NUM_SAMPLES, many, length, width, generator=noise, dtype=dtype) for many, width in shapes
    ]
    return Case(*drawn, mask, causal)


class Rank:
    """The parts of one rank that a strategy for attention may use."""

    def __init__(self, world: World, space: ShardingPlan) -> None:
        view = RankView(space, world.mesh.coordinate(world.rank))
        self.answer: Callable[[ShardedAttentionCall], torch.Tensor] | None = None
        self.beside: Conv1dImpl | None = None
        plan = SimpleNamespace(sharding=space, view=view)
        self.state: Any = SimpleNamespace(
            world=world, current_action="F", plan=plan, sequence_runner=self, activation_codecs={}
        )
        self.state.collectives = BlockCollectives(self.state)

    def act(self, action: str) -> None:
        """What is moved from now on is for `action`."""
        self.state.current_action = action

    def set_attention(self, answer: Callable[[ShardedAttentionCall], torch.Tensor]) -> None:
        self.answer = answer

    def set_decode_attention(self, answer: DecodeAttentionImpl) -> None:
        """Ignores `answer`: nothing is generated."""

    def set_convolution(self, answer: Conv1dImpl) -> None:
        self.beside = answer


def sharding_of(mesh: Mesh, attends: Sequence[AttentionSpec]) -> ShardingPlan:
    """A model of one block that attends."""
    length = attends[0].query_len
    tokens = SequenceInfo(
        length,
        ("input_ids",),
        ("labels",),
        (BlockSequenceInfo(BLOCK_CALL, ((1,),), ((1,),)),),
        tuple(attends),
    )
    return ShardingPlan.one_device(
        mesh, ModelSpec("tiny", (BLOCK_CALL,), (), (length,), (1,), sequence_info=tokens)
    )


@dataclass(frozen=True)
class GatheredResult:
    """The outputs of all ranks together, as of one device, and the messages of each."""

    found: tuple[torch.Tensor, ...]
    entries: tuple[tuple[LedgerEntry, ...], ...]


def run_on_ranks(strategy: Strategy, given: Case, mesh: Mesh) -> GatheredResult:
    """`given`, run_on_ranks by `strategy`: each rank is handed its own tokens."""
    space = strategy.place(sharding_of(mesh, [given.attend]))

    def play(world: World) -> tuple[list[torch.Tensor], list[LedgerEntry]]:
        return _run_rank(world, strategy, space, given)

    ranks = run_on_threads(play, mesh)
    whole = [torch.zeros_like(each) for each in (given.grad, *given.inputs)]
    for rank, (locals_, _) in enumerate(ranks):
        for at, (all_of, local) in enumerate(zip(whole, locals_, strict=True)):
            if at == 4 and all_of.shape[2] == 1:  # of a mask that all queries share each rank has a summand
                all_of += local
            else:
                _put(all_of, local, _share(space, rank, given.query.shape[2]))
    return GatheredResult(tuple(whole), tuple(tuple(entries) for _, entries in ranks))


def _put(whole: torch.Tensor, local: torch.Tensor, share: TokenShard) -> None:
    at = 0
    for begin, end in share.spans:
        whole[:, :, begin:end] = local[:, :, at : at + end - begin]
        at += end - begin


def _share(space: ShardingPlan, rank: int, length: int) -> TokenShard:
    return TokenShard(
        length,
        space.sequence_sharding.token_ranges(length, rank) if space.sequence_sharding else ((0, length),),
    )


def _run_rank(
    world: World, strategy: Strategy, space: ShardingPlan, given: Case
) -> tuple[list[torch.Tensor], list[LedgerEntry]]:
    rank, share = Rank(world, space), _share(space, world.rank, given.query.shape[2])
    strategy.bind(rank)
    world.ledger.is_recording = True
    leaves = [
        share.take_local(each.detach(), 2).clone().requires_grad_()
        for each in (given.query, given.key, given.value)
    ]
    mask = given.mask
    if mask is not None:
        mask = mask.detach() if mask.shape[-2] == 1 else share.take_local(mask.detach(), 2).clone()
        if given.mask is not None and given.mask.requires_grad:
            leaves.append(mask.requires_grad_())
    assert rank.answer is not None
    scale = given.query.shape[-1] ** -0.5
    out = rank.answer(ShardedAttentionCall(*leaves[:3], mask, 0.0, given.causal, scale, share, share))
    rank.act("B")
    found = torch.autograd.grad(out, leaves, share.take_local(given.grad, 2))
    return [out.detach(), *found], world.ledger.entries


def largest_error(given: Case, strategy: Strategy, mesh: Mesh) -> float:
    """The largest gap to one device, of the output and of gradients."""
    found = run_on_ranks(strategy, given, mesh).found
    return max(float((one - other).abs().max()) for one, other in zip(given.dense(), found, strict=True))


Sent = dict[str, list[tuple[str, int, int, str]]]  # by action: collectives, ranks that meet, bytes, dtypes


def issued_transfers(entries: Sequence[LedgerEntry]) -> Sent:
    """Returns what a rank has issued in a forward, F, and in a backward, B."""
    said = [
        (entry.action, (entry.collective, entry.group_size, entry.nbytes, entry.dtype)) for entry in entries
    ]
    return {action: [each for name, each in said if name == action] for action in "FB"}


def planned_transfers(strategy: Strategy, given: Case, mesh: Mesh) -> Sent:
    """Returns what the program of `strategy` says of it."""
    view = RankView(strategy.place(sharding_of(mesh, [given.attend])), mesh.coordinate(0))
    dtype = str(given.query.dtype).removeprefix("torch.")
    job = Job(
        ModelConfig("tiny"),
        DataConfig("random"),
        TrainConfig(batch=NUM_SAMPLES),
        precision=PrecisionConfig(dtype, dtype),
    )
    program = program_of({FIRST_ROLE: [Action("F", BLOCK_CALL, 0), Action("B", BLOCK_CALL, 0)]})
    actions = strategy.rewrite(program, view, job).actions(FIRST_ROLE)
    return {
        action.kind: [
            (move.collective, move.num_ranks(mesh), move.nbytes, move.dtype)
            for move in action.inner_transfers
        ]
        for action in actions
    }
