"""One call of attention, without a model round it: on one device by its formula, and on ranks that have some
of its tokens each.

    q [B, H, N, d]     k [B, G, N, d]     v [B, G, N, e]     grad, of what comes out [B, H, N, e]

H is a multiple of G. Masks, [B or 1, H or 1, N or 1, N] of bools (true: is looked at), but for `bias`, which
is added and learns:

    none        every query looks at every key
    causal      at keys up to its own position: the flag, no mask
    window      at the last few of these
    prefix      as causal, and everybody at the first third
    document    causal as a mask: a row is one document
    documents   several of unlike length, in each row others
    padding     causal; the first half of the second row is looked at by nobody, and looks at nothing
    bias        scores fall with the distance, in each head by another slope: a bias with a gradient
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.group import World
from meshwright.engine.forward.block_collectives import BlockCollectives
from meshwright.model.context_parallel.attention_call import ShardedAttentionCall, describe_mask
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import AttentionSpec, BlockSequenceInfo, SequenceInfo
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Program, Transfer
from meshwright.plan.step.single_device import FIRST_ROLE
from meshwright.plan.strategy import Strategy

MASKS = ("none", "causal", "window", "prefix", "document", "documents", "padding", "bias")
VISIT = "attention"
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """One call on all tokens of its rows, and the gradient of what comes out; `learns`:
    the mask has one too.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    mask: torch.Tensor | None = None
    causal: bool = False
    learns: bool = False

    @property
    def length(self) -> int:
        """The tokens of a row."""
        return self.query.shape[2]

    @property
    def inputs(self) -> Tensors:
        """What has gradients."""
        return (
            self.query,
            self.key,
            self.value,
            *((self.mask,) if self.learns and self.mask is not None else ()),
        )

    def space(self, mesh: Mesh) -> ShardingPlan:
        """A model of one block that does nothing but attend."""
        _, heads, length, width = self.query.shape
        sizes = heads, self.key.shape[1], width, self.value.shape[3], length, length
        mask = None if self.mask is None else describe_mask(self.mask.detach().requires_grad_(self.learns))
        attend = AttentionSpec(VISIT, *sizes, self.causal, mask is not None, mask=mask)
        tokens = SequenceInfo(
            length, ("input_ids",), ("labels",), (BlockSequenceInfo(VISIT, ((1,),), ((1,),)),), (attend,)
        )
        return ShardingPlan.one_device(
            mesh, ModelSpec("attention", (VISIT,), (), (length,), (1,), sequence_info=tokens)
        )


@dataclass(frozen=True)
class Sizes:
    """Rows, heads of queries, and of keys and values, tokens, and the widths of a head of queries and of one
    of values.
    """

    rows: int = 2
    heads: int = 12
    groups: int = 4
    tokens: int = 37
    width: int = 4
    values: int = 3

    def call(self, mask: str = "none", dtype: torch.dtype = torch.float64) -> Call:
        """A call of noise with the mask of that name."""
        noise = torch.Generator().manual_seed(100 * self.heads + self.tokens)
        shapes = [
            (self.heads, self.width),
            (self.groups, self.width),
            (self.groups, self.values),
            (self.heads, self.values),
        ]
        query, key, value, grad = (
            torch.randn(self.rows, heads, self.tokens, width, generator=noise, dtype=torch.float64).to(dtype)
            for heads, width in shapes
        )
        made = mask_named(mask, self.rows, self.heads, self.tokens)
        made = made.to(dtype) if made is not None and made.is_floating_point() else made
        return Call(query, key, value, grad, made, causal=mask == "causal", learns=mask == "bias")


def mask_named(name: str, rows: int, heads: int, length: int) -> torch.Tensor | None:
    """The mask of that name (see the module), in float64 where it is no bool; None where there is none to be
    handed over.

    Raises KeyError for a name that is not one of `MASKS`.
    """
    at = torch.arange(length)
    behind = at.unsqueeze(-1) - at
    before = behind >= 0
    starts = torch.linspace(0, 1, rows + 2)[1:-1] * length  # where a document begins, in each row elsewhere
    document = (at >= starts.unsqueeze(-1)).long() + (at >= starts.unsqueeze(-1) / 3) + (at >= length - 2)
    seen = torch.stack([at >= (length // 2 if row % 2 else 0) for row in range(rows)])
    slopes = torch.linspace(0.1, 1.0, heads, dtype=torch.float64).view(1, heads, 1, 1)
    made: dict[str, Callable[[], torch.Tensor | None]] = {
        "none": lambda: None,
        "causal": lambda: None,
        "window": lambda: (before & (behind < max(2, length // 4))).view(1, 1, length, length),
        "prefix": lambda: (before | (at < length // 3)).view(1, 1, length, length),
        "document": lambda: before.view(1, 1, length, length),
        "documents": lambda: ((document.unsqueeze(-1) == document.unsqueeze(-2)) & before).unsqueeze(1),
        "padding": lambda: (seen.unsqueeze(-1) & seen.unsqueeze(-2) & before).unsqueeze(1),
        "bias": lambda: -slopes * behind.abs(),
    }
    return made[name]()


def dense(call: Call) -> Tensors:
    """What one device makes of `call`, by the formula: the output, then the gradients of its inputs.

    Blind rows give zeros.
    """
    leaves = [each.detach().requires_grad_() for each in call.inputs]
    query, key, value, *learnt = leaves
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = query.shape[-1] ** -0.5 * query @ key.transpose(-1, -2)
    if call.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, float("-inf"))
    elif call.mask is not None:
        scores = scores + (learnt[0] if learnt else call.mask)
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    out = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value
    return out.detach(), *torch.autograd.grad(out, leaves, call.grad)


def fused(call: Call) -> Tensors:
    """What torch's own kernel makes of it on one device: as `dense`."""
    leaves = [each.detach().requires_grad_() for each in call.inputs]
    mask = leaves[3] if leaves[3:] else call.mask
    given = {
        "attn_mask": mask,
        "is_causal": call.causal,
        "enable_gqa": call.query.shape[1] != call.key.shape[1],
    }
    out = F.scaled_dot_product_attention(*leaves[:3], **given)
    return out.detach(), *torch.autograd.grad(out, leaves, call.grad)


class Seat:
    """One rank with its tokens of a call, and what a strategy may touch of it, as far as attention goes."""

    def __init__(self, world: World, strategy: Strategy, call: Call) -> None:
        space = strategy.place(call.space(world.mesh))
        self.plan: Any = SimpleNamespace(sharding=space.at_coordinate(world.mesh.coordinate(world.rank)))
        self._world, self._call = world, call
        state: Any = SimpleNamespace(world=world, current_action="")
        self._state, self.collectives, self.sequence_runner = state, BlockCollectives(state), self
        self._answer: Callable[[ShardedAttentionCall], torch.Tensor] | None = None
        rank = world.mesh.coordinate(world.rank)["cp"]
        self.share = TokenShard(
            call.length,
            space.sequence_sharding.token_ranges(call.length, rank)
            if space.sequence_sharding
            else ((0, call.length),),
        )
        self.grad, self.leaves = (
            self.mine(call.grad),
            [self.mine(each) for each in (call.query, call.key, call.value)],
        )
        self.mask = None
        if call.mask is not None:
            self.mask = call.mask.detach() if call.mask.shape[2] == 1 else self.mine(call.mask)
        moves = [move for each in stated(strategy, call, world.mesh).values() for move in each]
        for axes, among in sorted(
            {(move.axes, among) for move in moves for among in move.member_groups(world.mesh)}
        ):
            world.group(axes, among)  # every rank asks for all of them, in one order
        strategy.bind(self)  # type: ignore[arg-type]  # of what a rank is, attention touches these few words

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of queries, keys or values, or its rows of a mask; none where it has none."""
        return self.share.take_local(tensor.detach(), 2).clone()

    def forward(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What comes out for this rank's tokens, and the leaves whose gradients are to be had."""
        if self._answer is None:
            raise RuntimeError("nobody answers for attention; bind a strategy that deals tokens")
        self.collectives.begin_block("F")
        leaves = [each.detach().requires_grad_() for each in self.leaves]
        mask = self.mask
        if mask is not None and self._call.learns:
            mask = mask.detach().requires_grad_()
            leaves.append(mask)
        scale = self._call.query.shape[-1] ** -0.5
        query, key, value = leaves[:3]
        given = ShardedAttentionCall(
            query, key, value, mask, 0.0, self._call.causal, scale, self.share, self.share
        )
        return self._answer(given), leaves

    def play(self) -> Tensors:
        """One forward and backward: the output and the gradients of the inputs, for this rank's tokens."""
        out, leaves = self.forward()
        self._state.current_action = "B"
        return out.detach(), *torch.autograd.grad(out, leaves, self.grad)

    def into(self, whole: Tensors, found: Tensors) -> None:
        """Put what this rank has found to where its tokens are in `whole`."""
        for all_of, local in zip(whole, found, strict=True):
            at = 0
            for begin, end in self.share.spans:
                all_of[:, :, begin:end] = local[:, :, at : at + end - begin]
                at += end - begin

    def set_attention(self, answer: Callable[[Any], Any]) -> None:
        """Takes what computes attention."""
        self._answer = answer

    def set_convolution(self, answer: Callable[[Any], Any]) -> None:
        """Nothing here convolves."""


def stated(strategy: Strategy, call: Call, mesh: Mesh) -> dict[str, list[Transfer]]:
    """What the program of `strategy` says that a rank moves in a forward, F, and in a backward, B."""
    space = strategy.place(call.space(mesh)).at_coordinate(mesh.coordinate(0))
    dtype: Any = str(call.query.dtype).removeprefix("torch.")
    train, precision = TrainConfig(batch=call.query.shape[0]), PrecisionConfig(dtype, dtype)
    job = Job(ModelConfig("attention"), DataConfig("random"), train, precision=precision)
    program = Program.from_dict({FIRST_ROLE: [Action("F", VISIT, 0), Action("B", VISIT, 0)]})
    return {
        action.kind: list(action.inner_transfers)
        for action in strategy.rewrite(program, space, job).actions(FIRST_ROLE)
    }
