"""One call of attention, without a model around it: on one device by its formula, and on ranks that have
shards of its tokens.

    q [B, H, N, d]     k [B, G, N, d]     v [B, G, N, e]     grad of the output [B, H, N, e]

H is a multiple of G. Masks are bools [B or 1, H or 1, N or 1, N] (true: the query attends to the key), except
`bias`, which is added to the scores and has a gradient:

    none        every query attends to every key
    causal      to keys up to its own position: the flag, no mask
    window      to the last few of these
    prefix      as causal, and every query to the first third
    document    causal as a mask: a sample is one document
    documents   several documents of unequal lengths, different ones in each sample
    padding     causal; no query attends to the first half of the second sample, whose queries attend to none
    bias        scores fall with the distance, with another slope for each head: a bias with a gradient
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
from meshwright.model.context_parallel.attention_call import ShardedAttentionCall, describe_mask
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
from meshwright.plan.step.program import Action, Program, Role, Transfer
from meshwright.plan.strategy_interface import Runtime, Strategy

MASKS = ("none", "causal", "window", "prefix", "document", "documents", "padding", "bias")
BLOCK = "attention"
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """One attention call on all tokens of its samples, and the gradient of its output; `mask_has_grad`: the
    mask has a gradient too.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    mask: torch.Tensor | None = None
    causal: bool = False
    mask_has_grad: bool = False

    @property
    def length(self) -> int:
        """The number of tokens of a sample."""
        return self.query.shape[2]

    @property
    def inputs(self) -> Tensors:
        """The tensors that have gradients."""
        return (
            self.query,
            self.key,
            self.value,
            *((self.mask,) if self.mask_has_grad and self.mask is not None else ()),
        )

    def sharding_plan(self, mesh: Mesh) -> ShardingPlan:
        """Returns the sharding plan of a model of one block that only runs attention, on one device."""
        _, heads, length, width = self.query.shape
        sizes = heads, self.key.shape[1], width, self.value.shape[3], length, length
        mask = (
            None
            if self.mask is None
            else describe_mask(self.mask.detach().requires_grad_(self.mask_has_grad))
        )
        attend = AttentionSpec(BLOCK, *sizes, self.causal, mask is not None, mask=mask)
        tokens = SequenceInfo(
            length, ("input_ids",), ("labels",), (BlockSequenceInfo(BLOCK, ((1,),), ((1,),)),), (attend,)
        )
        return ShardingPlan.one_device(
            mesh, ModelSpec("attention", (BLOCK,), (), (length,), (1,), sequence_info=tokens)
        )


@dataclass(frozen=True)
class Sizes:
    """Samples, query heads, key and value heads, tokens, and the widths of a query head and
    of a value head.
    """

    samples: int = 2
    heads: int = 12
    groups: int = 4
    tokens: int = 37
    width: int = 4
    values: int = 3

    def call(self, mask: str = "none", dtype: torch.dtype = torch.float64) -> Call:
        """Returns a call with random tensors, and the mask of that name."""
        noise = torch.Generator().manual_seed(100 * self.heads + self.tokens)
        shapes = [
            (self.heads, self.width),
            (self.groups, self.width),
            (self.groups, self.values),
            (self.heads, self.values),
        ]
        query, key, value, grad = (
            torch.randn(self.samples, heads, self.tokens, width, generator=noise, dtype=torch.float64).to(
                dtype
            )
            for heads, width in shapes
        )
        made = make_mask(mask, self.samples, self.heads, self.tokens)
        made = made.to(dtype) if made is not None and made.is_floating_point() else made
        return Call(query, key, value, grad, made, causal=mask == "causal", mask_has_grad=mask == "bias")


def make_mask(name: str, samples: int, heads: int, length: int) -> torch.Tensor | None:
    """Returns the mask of that name (see the module), in float64 if it is not bool; None if no mask is
    passed.

    Raises KeyError for a name that is not one of `MASKS`.
    """
    at = torch.arange(length)
    distance = at.unsqueeze(-1) - at
    causal = distance >= 0
    starts = torch.linspace(0, 1, samples + 2)[1:-1] * length  # begin of a document, different in each sample
    document = (at >= starts.unsqueeze(-1)).long() + (at >= starts.unsqueeze(-1) / 3) + (at >= length - 2)
    visible = torch.stack([at >= (length // 2 if sample % 2 else 0) for sample in range(samples)])
    slopes = torch.linspace(0.1, 1.0, heads, dtype=torch.float64).view(1, heads, 1, 1)
    made: dict[str, Callable[[], torch.Tensor | None]] = {
        "none": lambda: None,
        "causal": lambda: None,
        "window": lambda: (causal & (distance < max(2, length // 4))).view(1, 1, length, length),
        "prefix": lambda: (causal | (at < length // 3)).view(1, 1, length, length),
        "document": lambda: causal.view(1, 1, length, length),
        "documents": lambda: ((document.unsqueeze(-1) == document.unsqueeze(-2)) & causal).unsqueeze(1),
        "padding": lambda: (visible.unsqueeze(-1) & visible.unsqueeze(-2) & causal).unsqueeze(1),
        "bias": lambda: -slopes * distance.abs(),
    }
    return made[name]()


def reference_attention(call: Call) -> Tensors:
    """Returns the output of `call` and the gradients of its inputs, by the formula, on one device.

    Queries that attend to no key give zeros.
    """
    leaves = [each.detach().requires_grad_() for each in call.inputs]
    query, key, value, *bias = leaves
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = query.shape[-1] ** -0.5 * query @ key.transpose(-1, -2)
    if call.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, float("-inf"))
    elif call.mask is not None:
        scores = scores + (bias[0] if bias else call.mask)
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    out = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value
    return out.detach(), *torch.autograd.grad(out, leaves, call.grad)


def torch_attention(call: Call) -> Tensors:
    """Returns the same as `reference_attention`, by torch's own kernel."""
    leaves = [each.detach().requires_grad_() for each in call.inputs]
    mask = leaves[3] if leaves[3:] else call.mask
    inputs = {
        "attn_mask": mask,
        "is_causal": call.causal,
        "enable_gqa": call.query.shape[1] != call.key.shape[1],
    }
    out = F.scaled_dot_product_attention(*leaves[:3], **inputs)
    return out.detach(), *torch.autograd.grad(out, leaves, call.grad)


class AttentionRank:
    """One rank with its tokens of a call; it has the part of the state that attention uses."""

    def __init__(self, world: World, strategy: Strategy, call: Call) -> None:
        sharding_plan = strategy.place(call.sharding_plan(world.mesh))
        plan = SimpleNamespace(
            sharding=sharding_plan, view=RankView(sharding_plan, world.mesh.coordinate(world.rank))
        )
        self._world, self._call = world, call
        state: Any = SimpleNamespace(
            world=world, current_action="", plan=plan, sequence_runner=self, activation_codecs={}
        )
        state.collectives = BlockCollectives(state)
        self._state = state
        self._attention_fn: Callable[[ShardedAttentionCall], torch.Tensor] | None = None
        rank = world.mesh.coordinate(world.rank)["cp"]
        self.token_shard = TokenShard(
            call.length,
            sharding_plan.sequence_sharding.token_ranges(call.length, rank)
            if sharding_plan.sequence_sharding
            else ((0, call.length),),
        )
        self.grad, self.leaves = (
            self.take_local(call.grad),
            [self.take_local(each) for each in (call.query, call.key, call.value)],
        )
        self.mask = None
        if call.mask is not None:
            self.mask = call.mask.detach() if call.mask.shape[2] == 1 else self.take_local(call.mask)
        transfers = [
            transfer for each in planned_transfers(strategy, call, world.mesh).values() for transfer in each
        ]
        for axes, among in sorted(
            {(transfer.axes, among) for transfer in transfers for among in transfer.member_groups(world.mesh)}
        ):
            world.group(axes, among)  # every rank creates all groups, in the same order
        strategy.bind(Runtime(state))

    def take_local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's tokens of queries, keys or values, or its rows of a mask;
        empty if it has none.
        """
        return self.token_shard.take_local(tensor.detach(), 2).clone()

    def forward(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the output for this rank's tokens, and the leaves that have gradients."""
        if self._attention_fn is None:
            raise RuntimeError("no strategy computes attention; bind one that shards tokens")
        self._state.collectives.begin_block("F")
        leaves = [each.detach().requires_grad_() for each in self.leaves]
        mask = self.mask
        if mask is not None and self._call.mask_has_grad:
            mask = mask.detach().requires_grad_()
            leaves.append(mask)
        scale = self._call.query.shape[-1] ** -0.5
        query, key, value = leaves[:3]
        inputs = ShardedAttentionCall(
            query, key, value, mask, 0.0, self._call.causal, scale, self.token_shard, self.token_shard
        )
        return self._attention_fn(inputs), leaves

    def run_step(self) -> Tensors:
        """Runs forward and backward; returns the output and the gradients of the inputs for this rank's
        tokens.
        """
        out, leaves = self.forward()
        self._state.current_action = "B"
        return out.detach(), *torch.autograd.grad(out, leaves, self.grad)

    def scatter_to(self, full: Tensors, found: Tensors) -> None:
        """Copies the local tensors `found` to the positions of this rank's tokens in `full`."""
        for full_tensor, local in zip(full, found, strict=True):
            at = 0
            for begin, end in self.token_shard.spans:
                full_tensor[:, :, begin:end] = local[:, :, at : at + end - begin]
                at += end - begin

    def set_attention(self, answer: Callable[[Any], Any]) -> None:
        """Sets the function that computes attention."""
        self._attention_fn = answer

    def set_decode_attention(self, answer: Callable[[Any], Any]) -> None:
        """Ignores `answer`: nothing is generated."""

    def set_convolution(self, answer: Callable[[Any], Any]) -> None:
        """Ignores `answer`: there are no convolutions."""


def planned_transfers(strategy: Strategy, call: Call, mesh: Mesh) -> dict[str, list[Transfer]]:
    """Returns the transfers of a rank in a forward, F, and in a backward, B, by the program of `strategy`."""
    view = RankView(strategy.place(call.sharding_plan(mesh)), mesh.coordinate(0))
    dtype: Any = str(call.query.dtype).removeprefix("torch.")
    train, precision = TrainConfig(batch=call.query.shape[0]), PrecisionConfig(dtype, dtype)
    job = Job(ModelConfig("attention"), DataConfig("random"), train, precision=precision)
    role = Role(BLOCK, range(1), (Action("F", BLOCK, 0), Action("B", BLOCK, 0)))
    return {
        action.kind: list(action.inner_transfers)
        for action in strategy.rewrite(Program((role,)), view, job).actions(BLOCK)
    }
