"""Tiles: the loss, and MLPs if asked for, take some tokens after others; what they make is never there for all of them.

Why it works: logits are the widest tensor of a language model, and a sum over tokens needs those of one token at a time. So the
head hands what went into it to the loss, which multiplies a tile of tokens, takes their loss and its gradient at once, adds both
up, and forgets the tile.

    before   F(norm) F(head)  LOSS  B(head) B(norm)       held: logits of all tokens, what the loss keeps of them, their gradient
    after    F(norm) F(head)  LOSS  B(head) B(norm)       held: hidden of all tokens, its gradient, and a tile of the three
                     nothing  3 products per tile

    logits in float32, b rows of s tokens, V words, n tiles:    bytes = 3 x 4 b s V / n    instead of 3 x 4 b s V

Sums over tokens are taken tile by tile, so they may have other last bits. It goes with tokens dealt to ranks (a rank tiles its
own), with words divided (ranks then tell each other a tile's numbers), and with evaluations, which have no more than a tile of
logits either.

MLPs treat tokens one by one, too: in tiles, nothing of what they compute within is kept, and backward runs each tile once more.

    within an MLP, of w elements per token:    bytes = 4 b s w / n, of one block at a time    instead of 4 b s w per block

Cost: of the loss no operation more, of MLPs a forward more; nothing on the wire. Products have fewer rows: below some hundred
tokens per tile they slow down.
Limits: the head is an nn.Linear called once, in the last block, and gives out what the loss takes: logits that the model
scales, caps or cuts are refused. The loss is a sum over tokens, and every rank takes its own. Tiles are of each row's tokens,
so a sample of one token has one. An MLP is a module of its own between columns and rows of single features, whole on its rank,
in a model without dropout. Of a backward in halves (zero bubble), its weights have their gradients in the first.
Paper: Bekman et al. 2025, "Arctic Long Sequence Training" (tiled logits, loss and MLP), arXiv 2506.13996; Hsu et al. 2024, "Liger
Kernel" (fused linear cross-entropy), arXiv 2410.10989.

A module that treats tokens one by one, run on some of them after others; backward runs each piece once more.

    forward     x0 --> [module] --> y0        x1 --> [module] --> y1        no graph: what is computed within is forgotten
    backward    x1 --> [module] --> y1'  with a graph, from dy1 to dx1 and the weights; then the same for x0

So of what the module computes within there is one piece at any time. A second run finds the modes and the autocast of the first.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.layer_calls import LayerCall
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec, block_of
from meshwright.plan.sharding.rank_share import chunked_head_call, local_fraction, local_token_fraction
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Allocation, Program
from meshwright.plan.step.activation_memory import activation_memory
from meshwright.plan.step.single_device import (
    FORWARD_KINDS,
    INPUT_GRAD_KINDS,
    SCRATCH,
    samples_per_microbatch,
    saved_activations_name,
)
from meshwright.plan.strategy import Handler, Runtime, Strategy, StrategyPhase

TOKEN_DIM = 1  # the dim of them
RunModule = Callable[..., torch.Tensor]


def run_tiled(name: str, num_tiles: int, run: RunModule, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What `run(x)` gives of the module `name`, in so many `tiles` of tokens. Its weights have their gradients afterwards.

    Raises PlanError where it takes in more than [rows, tokens, width], or gives out other tokens.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3:
        text = f"the module '{name}' is called with more than one tensor [rows, tokens, width], so nobody knows how to cut that"
        raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", location="model")
    if not torch.is_grad_enabled():
        return torch.cat(
            [
                _run_tile(name, run, x)
                for x in args[0].tensor_split(_clamp_num_tiles(args[0], num_tiles), TOKEN_DIM)
            ],
            TOKEN_DIM,
        )
    weighted = torch.zeros(
        (), requires_grad=True
    )  # there is a backward, whether `x` needs a gradient or weights alone do
    return _Tiled.apply(args[0], weighted, name, num_tiles, run)


class _RefuseAttention(TorchFunctionMode):
    """Refuses what looks at several tokens at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            text = f"the module '{self._name}' attends, and cannot run on some of the tokens"
            raise PlanError(
                text, fix="leave `mlp` out of the strategy that runs it in tiles", location="model"
            )
        return func(*args, **(kwargs or {}))


def _run_tile(name: str, run: RunModule, x: torch.Tensor) -> torch.Tensor:
    with _RefuseAttention(name):
        y = run(x.contiguous())  # what it was given whole was that, and it may view it so
    if not isinstance(y, torch.Tensor) or y.shape[: TOKEN_DIM + 1] != x.shape[: TOKEN_DIM + 1]:
        text = f"the module '{name}' does not give out a tensor with the tokens that it takes in"
        raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", location="model")
    return y


def _clamp_num_tiles(x: torch.Tensor, tiles: int) -> int:
    return max(1, min(tiles, x.shape[TOKEN_DIM]))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weighted: torch.Tensor, name: str, tiles: int, run: RunModule
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        kind = x.device.type
        ctx.how, ctx.function_modes = (name, tiles, run), _get_current_function_mode_stack()
        ctx.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return torch.cat(
            [_run_tile(name, run, each) for each in x.tensor_split(_clamp_num_tiles(x, tiles), TOKEN_DIM)],
            TOKEN_DIM,
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (name, tiles, run) = ctx.saved_tensors, ctx.how
        kind, enabled, dtype = ctx.autocast
        gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        pieces = _clamp_num_tiles(x, tiles)
        with ExitStack() as stack:
            # no cache: a cached cast would join the graphs of two tiles
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            active = {id(mode) for mode in _get_current_function_mode_stack()}
            for mode in (mode for mode in ctx.function_modes if id(mode) not in active):
                stack.enter_context(mode)
            parts = (
                each.tensor_split(pieces, TOKEN_DIM)
                for each in (x, grads[0], x if gradient is None else gradient)
            )
            for taken, came, place in zip(*parts, strict=True):
                with torch.enable_grad():
                    leaf = taken.detach().contiguous().requires_grad_(gradient is not None)
                    y = _run_tile(name, run, leaf)
                if y.requires_grad:
                    torch.autograd.backward([y], [came])
                if leaf.grad is not None:
                    place.copy_(leaf.grad)
        return gradient, None, None, None, None


UNCHUNKED_FIX = "set loss = 1: logits are then made all at once"


@dataclass(frozen=True)
class ChunkedLoss(Strategy):
    """The loss in `loss` tiles of a rank's tokens, and each MLP in `mlp`; 1: at once. More than there are tokens: one each."""

    name: ClassVar[str] = "tiles"
    phase: ClassVar[StrategyPhase] = "memory"
    num_chunks: int = 8
    num_tiles: int = 1

    @property
    def needs_sequence_info(self) -> bool:  # type: ignore[override]  # it depends on a field
        """Whether MLPs run on some tokens at a time."""
        return self.num_tiles > 1

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        where, anatomy = "strategies.tiles", sharding.model_spec
        if self.num_chunks < 1 or self.num_tiles < 1 or self.num_chunks == self.num_tiles == 1:
            text = f"loss = {self.num_chunks} tiles and mlp = {self.num_tiles}"
            yield Diagnostic(
                text,
                "write numbers from 1, all at once, up, and one of them above 1; or leave the strategy out",
                where,
            )
        if sharding.num_loss_chunks > 1:
            yield Diagnostic(
                "the loss is taken in tiles already", "keep one of the strategies that do it", where
            )
        if self.num_chunks > 1 and anatomy.needs_global_batch:
            yield Diagnostic(
                "the loss compares all rows of a batch, so it needs them all at once",
                UNCHUNKED_FIX,
                f"{where}.loss",
            )
        yield from _check_head(sharding, f"{where}.loss") if self.num_chunks > 1 else ()
        yield from _check_mlps(anatomy, f"{where}.mlp") if self.num_tiles > 1 else ()

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        cut = {
            name: home for home in sharding.param_shardings if home.sliced_dims for name in home.param.names
        }
        call = chunked_head_call(sharding)
        home = None if call is None else cut.get(f"{call.name}.weight")
        if home is not None and set(home.sliced_dims) != set(sharding.logits_layout.axes_with("S")):
            text = f"the head {home.param.name} is cut along {' and '.join(home.sliced_dims)}, and its products move something each"
            yield Diagnostic(
                text,
                "divide it by words alone (line and vocabulary), or set loss = 1",
                "strategies.tiles.loss",
            )
        if self.num_chunks > 1 and sharding.primary_rank_axes:
            text = f"one rank along {' and '.join(sharding.primary_rank_axes)} takes the loss of all, of logits that the others send whole"
            yield Diagnostic(
                text,
                "set loss = 1, or have every rank take its own loss (replicate, zero)",
                "strategies.tiles.loss",
            )
        inside = (
            [
                name
                for mlp in _find_mlps(sharding.model_spec)
                for name in cut
                if name.startswith(f"{mlp.name}.")
            ]
            if self.num_tiles > 1
            else []
        )
        if inside:
            text = (
                f"{inside[0]} is divided among ranks, which meet once for all tokens, and would for each tile"
            )
            yield Diagnostic(
                text, "set mlp = 1, or do not divide MLPs: recompute spares as much", "strategies.tiles.mlp"
            )

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return replace(sharding, num_loss_chunks=max(1, self.num_chunks))

    def rewrite(self, program: Program, sharding: ShardingPlan, job: Job) -> Program:
        if self.num_tiles == 1:
            return program
        return program.edit(lambda actions: self._tile_memory(actions, sharding, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        for mlp in (
            dict.fromkeys(mlp.name for mlp in _find_mlps(runtime.plan.sharding.model_spec))
            if self.num_tiles > 1
            else ()
        ):
            runtime.wrap_forward(mlp, partial(run_tiled, mlp, self.num_tiles))
        return {}

    def _tile_memory(self, actions: list[Action], space: ShardingPlan, job: Job) -> list[Action]:
        """`actions` with a tile of what MLPs compute within, in the backward of their visit, for all that a forward keeps."""
        rows, width = samples_per_microbatch(actions, space, job), FLOAT_NBYTES[job.precision.compute]
        mlps: dict[str, list[_MLPCall]] = {}
        for mlp in _find_mlps(space.model_spec):
            mlps.setdefault(mlp.visit, []).append(mlp)
        tokens = Fraction(-(-_local_tokens(space) // self.num_tiles), _local_tokens(space))
        whole = activation_memory(space, job, rows)

        def lean(action: Action) -> Action:
            mine, name = (
                mlps.get(action.subject, []),
                saved_activations_name(action.subject, action.microbatch),
            )
            spared = [int(mlp.inner_numel * local_fraction(space, mlp.visit)) * rows * width for mlp in mine]
            if mine and action.kind in (*FORWARD_KINDS, "RECOMPUTE"):
                left = {
                    held.name: held.nbytes - (held.name == name) * sum(spared) for held in action.allocations
                }
                return replace(
                    action,
                    allocations=tuple(Allocation(each, max(0, nbytes)) for each, nbytes in left.items()),
                )
            if mine and action.kind in INPUT_GRAD_KINDS:
                more = max(int(each * tokens) for each in spared)
                weighed = whole[
                    action.subject
                ].backward_nbytes  # of whole MLPs; tiles add to the gradients of weights that are there
                more += round(weighed * tokens) if weighed else _scratch(action)
                takes = (
                    replace(held, nbytes=more) if held.name == SCRATCH else held
                    for held in action.allocations
                )
                again = sum(int(mlp.flops * local_fraction(space, mlp.visit)) for mlp in mine) * rows
                return replace(action, allocations=tuple(takes), flops=action.flops + again)
            return action

        return [lean(action) for action in actions]


def _scratch(action: Action) -> int:
    return sum(held.nbytes for held in action.allocations if held.name == SCRATCH)


@dataclass(frozen=True)
class _MLPCall:
    """One call of a module that holds columns and rows layers; per sample, what lies between them, and operations."""

    name: str
    visit: str
    inner_numel: int
    flops: int


def _find_mlps(anatomy: ModelSpec) -> Iterator[_MLPCall]:
    """The MLPs of a model, in order: modules that hold a pair of layers and nothing else that can be divided."""
    weights = {layer: weight for weight in anatomy.params if len(weight.shape) > 1 for layer in weight.layers}
    waiting: list[LayerCall] = []
    for call in anatomy.layer_calls:
        if call.role == "columns":
            waiting = [each for each in waiting if each.block_call == call.block_call] + [call]
        elif call.role == "rows":
            pair, waiting = [*waiting, call], []
            cut = weights[call.name].split_of_side("in") if call.name in weights else None
            if len(pair) == 1 or cut is None or cut.num_heads or cut.num_units != sum(cut.sections):
                continue
            name = _common_module([each.name for each in pair])
            within = [
                each
                for each in anatomy.layer_calls
                if each.block_call == call.block_call and each.name.startswith(f"{name}.")
            ]
            if name and within == pair:
                yield _MLPCall(
                    name,
                    call.block_call,
                    sum(each.saved_numel for each in pair),
                    sum(each.flops for each in pair),
                )


def _common_module(names: list[str]) -> str:
    """The module that holds all of `names`."""
    parts = [name.split(".")[:-1] for name in names]
    return ".".join(
        alike[0] for alike in takewhile(lambda alike: len(set(alike)) == 1, zip(*parts, strict=False))
    )


def _local_tokens(space: ShardingPlan) -> int:
    known = (space.all_ranks or space).model_spec.sequence_info
    return 1 if known is None else int(known.length * local_token_fraction(space))


def _check_mlps(anatomy: ModelSpec, where: str) -> Iterator[Diagnostic]:
    """What keeps MLPs from running on some tokens at a time."""
    found, known = list(_find_mlps(anatomy)), anatomy.sequence_info
    if known is None or not found:
        text = f"{anatomy.name} has no module of its own between columns and rows of single features that takes in tokens"
        yield Diagnostic(text, "declare the roles of its layers: Model(sockets=...); or set mlp = 1", where)
        return
    if anatomy.has_dropout:
        yield Diagnostic(
            "the model draws dropout, by the place of an element among all tokens",
            "set dropout to 0, or mlp = 1",
            where,
        )
    mixes = {
        passing.block_call: passing.not_sequence_parallel
        for passing in known.block_calls
        if passing.not_sequence_parallel
    }
    attends = {attend.block_call for attend in known.attention_calls}
    for mlp in found:
        if mlp.visit in mixes:
            yield Diagnostic(
                f"{mlp.name} does not treat tokens one by one: {mixes[mlp.visit]}", "set mlp = 1", where
            )
        elif mlp.name == block_of(mlp.visit) and mlp.visit in attends:
            yield Diagnostic(f"{mlp.name} attends to other tokens", "set mlp = 1", where)
        elif any(each.halo and f"{each.module}.".startswith(f"{mlp.name}.") for each in known.conv_calls):
            yield Diagnostic(f"{mlp.name} convolves tokens", "set mlp = 1", where)


def _check_head(space: ShardingPlan, where: str) -> Iterator[Diagnostic]:
    """Why there is no head whose product the loss could make."""
    anatomy, logits = space.model_spec, space.model_spec.logits
    if logits is None:
        kept = next(
            (
                f" ({each.name}: {each.not_shardable_reason})"
                for each in anatomy.params
                if each.role == "logits" and each.not_shardable_reason
            ),
            "",
        )
        yield Diagnostic(
            f"{anatomy.name} has no head whose logits go to the loss as they are{kept}", UNCHUNKED_FIX, where
        )
        return
    call = chunked_head_call(replace(space, num_loss_chunks=2))
    if call is None or call.block_call != anatomy.block_calls[-1]:
        yield Diagnostic(
            f"the head {logits.layer} is not in the last block that runs, {anatomy.block_calls[-1]}",
            UNCHUNKED_FIX,
            where,
        )
    elif logits.modified_by:
        text = f"between the head {logits.layer} and the loss the model changes logits ({logits.modified_by}), and a tile would not be"
        yield Diagnostic(
            text,
            f"return the head's output as it is and change it in a loss of your own, or {UNCHUNKED_FIX}",
            where,
        )
    elif not any(
        each.per_sample and each.shape == (logits.num_tokens, logits.vocab_size) for each in anatomy.outputs
    ):
        text = (
            f"the logits do not come out as [rows, tokens, words]: there are {logits.num_tokens} of a sample"
        )
        yield Diagnostic(text, UNCHUNKED_FIX, where)
    elif logits.num_tokens < 2:
        yield Diagnostic(
            "a sample has the logits of one token, so there is nothing to tile", UNCHUNKED_FIX, where
        )
