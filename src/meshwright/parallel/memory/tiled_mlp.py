"""Tiled MLPs: an MLP runs on one tile of tokens at a time, and saves no intermediate activations.

Why it works: an MLP treats tokens one by one. It can therefore run on one tile of tokens after the other,
without a graph; its backward runs each tile once more, with a graph, and frees it. The intermediate
activations of one tile exist at any time.

    forward     x0 --> [module] --> y0        x1 --> [module] --> y1        no graph: intermediates are freed
    backward    x1 --> [module] --> y1'  with a graph, from dy1 to dx1 and the weights; then the same for x0

    intermediate activations of an MLP, w elements per token:
    bytes = 4 b s w / n, of one block at a time    instead of 4 b s w per block

The second run uses the function modes and the autocast state of the first.
Cost: one more forward of the MLPs; no bytes sent. The products have fewer rows: below some hundred tokens per
tile they slow down.
Limits: an MLP is a module of its own between a colwise and a rowwise layer whose units are single features.
It is not sharded, and the model has no dropout. In a split backward (zero bubble) the gradients of its
weights come with the input gradients.
Paper: Bekman et al. 2025, "Arctic Long Sequence Training" (tiled MLP), arXiv 2506.13996.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec, block_of
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.block_call_memory import activation_memory
from meshwright.plan.step.memory.memory_names import SCRATCH, saved_activations_name
from meshwright.plan.step.program import Action, Program
from meshwright.plan.step.single_device_program import FORWARD_KINDS, INPUT_GRAD_KINDS, samples_per_microbatch
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

TOKEN_DIM = 1  # of a tensor [samples, tokens, width]
LOCATION = "strategies.tiled_mlp"
UNTILED_FIX = "remove the strategy tiled_mlp"
RunModule = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class TiledMLP(Strategy):
    """Runs each MLP in `num_tiles` tiles of a rank's tokens; at most one tile per token."""

    name: ClassVar[str] = "tiled_mlp"
    phase: ClassVar[StrategyPhase] = "memory"
    needs_sequence_info: ClassVar[bool] = True
    num_tiles: int = field(default=4, metadata=at_least(2, "write 4, say; or remove the strategy"))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from _check_mlps(sharding.model_spec)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        sliced = [name for each in sharding.param_shardings if each.sliced_dims for name in each.param.names]
        mlps = [f"{mlp.name}." for mlp in _find_mlps(sharding.model_spec)]
        inside = [name for mlp in mlps for name in sliced if name.startswith(mlp)]
        if inside:
            text = f"{inside[0]} is sharded, so each tile would need the collective that all tokens share"
            fix = f"{UNTILED_FIX}, or do not shard MLPs: activation_checkpointing saves as much memory"
            yield Diagnostic(text, fix, LOCATION)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._tile_memory(actions, view, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        for name in dict.fromkeys(mlp.name for mlp in _find_mlps(runtime.state.plan.view.model_spec)):
            runtime.state.patches.wrap_forward(name, partial(run_tiled, name, self.num_tiles))
        return {}

    def _tile_memory(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        num_samples, width = (
            samples_per_microbatch(actions, view.plan, job),
            FLOAT_NBYTES[job.precision.compute],
        )
        mlps: dict[str, list[_MLPCall]] = {}
        for mlp in _find_mlps(view.model_spec):
            mlps.setdefault(mlp.block_call, []).append(mlp)
        num_tokens = _local_tokens(view)
        tile_fraction = Fraction(-(-num_tokens // self.num_tiles), num_tokens)
        memory = activation_memory(view, job, num_samples)

        def tiled(action: Action) -> Action:
            calls = mlps.get(action.subject, [])
            name = saved_activations_name(action.subject, action.microbatch)
            fractions = [view.work_share.token_fraction(call.block_call) for call in calls]
            inside = [
                int(call.inner_numel * fraction) * num_samples * width
                for call, fraction in zip(calls, fractions, strict=True)
            ]
            if calls and action.kind in (*FORWARD_KINDS, "RECOMPUTE"):
                allocations = tuple(
                    replace(each, nbytes=max(0, each.nbytes - sum(inside))) if each.name == name else each
                    for each in action.allocations
                )
                return replace(action, allocations=allocations)
            if calls and action.kind in INPUT_GRAD_KINDS:
                tile_nbytes = max(int(each * tile_fraction) for each in inside)
                # measured on whole MLPs; tiles add to the weight gradients of earlier tiles
                measured = memory[action.subject].backward_nbytes
                tile_nbytes += round(measured * tile_fraction) if measured else _scratch(action)
                allocations = tuple(
                    replace(each, nbytes=tile_nbytes) if each.name == SCRATCH else each
                    for each in action.allocations
                )
                again = sum(
                    int(call.flops * fraction) for call, fraction in zip(calls, fractions, strict=True)
                )
                return replace(action, allocations=allocations, flops=action.flops + again * num_samples)
            return action

        return [tiled(action) for action in actions]


def _scratch(action: Action) -> int:
    return sum(each.nbytes for each in action.allocations if each.name == SCRATCH)


@dataclass(frozen=True)
class _MLPCall:
    """One call of an MLP; elements between its colwise and rowwise layers and floating-point operations, per
    sample.
    """

    name: str
    block_call: str
    inner_numel: int
    flops: int


def _find_mlps(model_spec: ModelSpec) -> Iterator[_MLPCall]:
    """The MLPs of a model, in order: modules that hold a pair of layers and nothing else that
    can be sharded.
    """
    weights = {
        layer: weight for weight in model_spec.params if len(weight.shape) > 1 for layer in weight.layers
    }
    waiting: list[LayerCall] = []
    for call in model_spec.layer_calls:
        if call.role == "colwise":
            waiting = [each for each in waiting if each.block_call == call.block_call] + [call]
        elif call.role == "rowwise":
            pair, waiting = [*waiting, call], []
            cut = weights[call.name].split_of_side("in") if call.name in weights else None
            if len(pair) == 1 or cut is None or cut.num_heads or cut.num_units != sum(cut.sections):
                continue
            name = _common_module([each.name for each in pair])
            within = [
                each
                for each in model_spec.layer_calls
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
    parts = [name.split(".")[:-1] for name in names]
    return ".".join(
        alike[0] for alike in takewhile(lambda alike: len(set(alike)) == 1, zip(*parts, strict=False))
    )


def _local_tokens(view: RankView) -> int:
    known = view.plan.model_spec.sequence_info
    return 1 if known is None else int(known.length * view.work_share.sample_fraction)


def _check_mlps(model_spec: ModelSpec) -> Iterator[Diagnostic]:
    mlps, known = list(_find_mlps(model_spec)), model_spec.sequence_info
    if known is None or not mlps:
        text = (
            f"{model_spec.name} has no module between colwise and rowwise layers of single "
            f"features that takes tokens"
        )
        yield Diagnostic(
            text, f"declare the roles of its layers: Model(layer_roles=...); or {UNTILED_FIX}", LOCATION
        )
        return
    if model_spec.has_dropout:
        text = "the model draws dropout by the position of an element among all tokens"
        yield Diagnostic(text, f"set dropout to 0, or {UNTILED_FIX}", LOCATION)
    mixing = {
        each.block_call: each.not_sequence_parallel
        for each in known.block_calls
        if each.not_sequence_parallel
    }
    attending = {each.block_call for each in known.attention_calls}
    for mlp in mlps:
        if mlp.block_call in mixing:
            text = f"{mlp.name} does not treat tokens one by one: {mixing[mlp.block_call]}"
            yield Diagnostic(text, UNTILED_FIX, LOCATION)
        elif mlp.name == block_of(mlp.block_call) and mlp.block_call in attending:
            yield Diagnostic(f"{mlp.name} attends to other tokens", UNTILED_FIX, LOCATION)
        elif any(each.halo and f"{each.module}.".startswith(f"{mlp.name}.") for each in known.conv_calls):
            yield Diagnostic(f"{mlp.name} convolves over tokens", UNTILED_FIX, LOCATION)
        elif any(f"{each.module}.".startswith(f"{mlp.name}.") for each in known.sample_gathers):
            text = f"{mlp.name} compares tokens of a sample with each other"
            yield Diagnostic(text, UNTILED_FIX, LOCATION)


def run_tiled(name: str, num_tiles: int, run: RunModule, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the output of `run(x)` for the module `name`, computed in `num_tiles` tiles of tokens;
    differentiable.

    Args:
        args: one tensor [samples, tokens, width].

    Raises:
        PlanError: the module takes more than one such tensor, attends, or returns other tokens than it takes.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3:
        text = (
            f"the module '{name}' is called with more than one tensor [samples, tokens, width]; tiles "
            f"split just one"
        )
        raise PlanError(text, fix=UNTILED_FIX, location="model")
    if not torch.is_grad_enabled():
        tiles = args[0].tensor_split(_clamp_num_tiles(args[0], num_tiles), TOKEN_DIM)
        return torch.cat([_run_tile(name, run, x) for x in tiles], TOKEN_DIM)
    # makes autograd call the backward also where the weights alone need a gradient
    anchor = torch.zeros((), requires_grad=True)
    return _Tiled.apply(args[0], anchor, name, num_tiles, run)


class _RefuseAttention(TorchFunctionMode):
    """Refuses attention, which reads several tokens at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            text = f"the module '{self._name}' attends, so it cannot run on a tile of tokens"
            raise PlanError(text, fix=UNTILED_FIX, location="model")
        return func(*args, **(kwargs or {}))


def _run_tile(name: str, run: RunModule, x: torch.Tensor) -> torch.Tensor:
    with _RefuseAttention(name):
        y = run(x.contiguous())  # the whole input was contiguous, and the module may view it
    if not isinstance(y, torch.Tensor) or y.shape[: TOKEN_DIM + 1] != x.shape[: TOKEN_DIM + 1]:
        text = f"the module '{name}' does not return a tensor with the tokens of its input"
        raise PlanError(text, fix=UNTILED_FIX, location="model")
    return y


def _clamp_num_tiles(x: torch.Tensor, num_tiles: int) -> int:
    return max(1, min(num_tiles, x.shape[TOKEN_DIM]))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, name: str, num_tiles: int, run: RunModule
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        device_type = x.device.type
        ctx.call, ctx.function_modes = (name, num_tiles, run), _get_current_function_mode_stack()
        ctx.autocast = (
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )
        return torch.cat(
            [
                _run_tile(name, run, each)
                for each in x.tensor_split(_clamp_num_tiles(x, num_tiles), TOKEN_DIM)
            ],
            TOKEN_DIM,
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (name, num_tiles, run) = ctx.saved_tensors, ctx.call
        device_type, enabled, dtype = ctx.autocast
        gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        num_tiles = _clamp_num_tiles(x, num_tiles)
        with ExitStack() as stack:
            # no cache: a cached cast would join the graphs of two tiles
            stack.enter_context(
                torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
            )
            active = {id(mode) for mode in _get_current_function_mode_stack()}
            for mode in (mode for mode in ctx.function_modes if id(mode) not in active):
                stack.enter_context(mode)
            parts = (
                each.tensor_split(num_tiles, TOKEN_DIM)
                for each in (x, grads[0], x if gradient is None else gradient)
            )
            for x_tile, grad, into in zip(*parts, strict=True):
                with torch.enable_grad():
                    leaf = x_tile.detach().contiguous().requires_grad_(gradient is not None)
                    y = _run_tile(name, run, leaf)
                if y.requires_grad:
                    torch.autograd.backward([y], [grad])
                if leaf.grad is not None:
                    into.copy_(leaf.grad)
        return gradient, None, None, None, None
