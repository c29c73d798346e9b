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

from meshwright.plan.job.errors import Fault, PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.layer_calls import Call
from meshwright.plan.model_spec.model_spec import NBYTES, Anatomy, block_of
from meshwright.plan.sharding.rank_share import head_in_pieces, own_share, own_tokens
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Program
from meshwright.plan.step.activation_memory import taken
from meshwright.plan.step.single_device import BACKWARDS, FORWARDS, SCRATCH, inside, micro_rows
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy

TOKENS = 1  # the dim of them
Run = Callable[..., torch.Tensor]


def in_tiles(name: str, tiles: int, run: Run, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What `run(x)` gives of the module `name`, in so many `tiles` of tokens. Its weights have their gradients afterwards.

    Raises PlanError where it takes in more than [rows, tokens, width], or gives out other tokens.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3:
        text = f"the module '{name}' is called with more than one tensor [rows, tokens, width], so nobody knows how to cut that"
        raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", where="model")
    if not torch.is_grad_enabled():
        return torch.cat([_alone(name, run, x) for x in args[0].tensor_split(_count(args[0], tiles), TOKENS)], TOKENS)
    weighted = torch.zeros((), requires_grad=True)  # there is a backward, whether `x` needs a gradient or weights alone do
    return _Tiled.apply(args[0], weighted, name, tiles, run)


class _Alone(TorchFunctionMode):
    """Refuses what looks at several tokens at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            text = f"the module '{self._name}' attends, and cannot run on some of the tokens"
            raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", where="model")
        return func(*args, **(kwargs or {}))


def _alone(name: str, run: Run, x: torch.Tensor) -> torch.Tensor:
    with _Alone(name):
        y = run(x.contiguous())  # what it was given whole was that, and it may view it so
    if not isinstance(y, torch.Tensor) or y.shape[: TOKENS + 1] != x.shape[: TOKENS + 1]:
        text = f"the module '{name}' does not give out a tensor with the tokens that it takes in"
        raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", where="model")
    return y


def _count(x: torch.Tensor, tiles: int) -> int:
    return max(1, min(tiles, x.shape[TOKENS]))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weighted: torch.Tensor, name: str, tiles: int, run: Run) -> torch.Tensor:
        ctx.save_for_backward(x)
        kind = x.device.type
        ctx.how, ctx.modes = (name, tiles, run), _get_current_function_mode_stack()
        ctx.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return torch.cat([_alone(name, run, each) for each in x.tensor_split(_count(x, tiles), TOKENS)], TOKENS)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (name, tiles, run) = ctx.saved_tensors, ctx.how
        kind, enabled, dtype = ctx.autocast
        gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        pieces = _count(x, tiles)
        with ExitStack() as stack:
            # no cache: a cached cast would join the graphs of two tiles
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            active = {id(mode) for mode in _get_current_function_mode_stack()}
            for mode in (mode for mode in ctx.modes if id(mode) not in active):
                stack.enter_context(mode)
            parts = (each.tensor_split(pieces, TOKENS) for each in (x, grads[0], x if gradient is None else gradient))
            for taken, came, place in zip(*parts, strict=True):
                with torch.enable_grad():
                    leaf = taken.detach().contiguous().requires_grad_(gradient is not None)
                    y = _alone(name, run, leaf)
                if y.requires_grad:
                    torch.autograd.backward([y], [came])
                if leaf.grad is not None:
                    place.copy_(leaf.grad)
        return gradient, None, None, None, None


AT_ONCE = "set loss = 1: logits are then made all at once"


@dataclass(frozen=True)
class Tiles(Strategy):
    """The loss in `loss` tiles of a rank's tokens, and each MLP in `mlp`; 1: at once. More than there are tokens: one each."""

    name: ClassVar[str] = "tiles"
    phase: ClassVar[Phase] = "memory"
    loss: int = 8
    mlp: int = 1

    @property
    def by_token(self) -> bool:  # type: ignore[override]  # it depends on a field
        """Whether MLPs run on some tokens at a time."""
        return self.mlp > 1

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where, anatomy = "strategies.tiles", space.anatomy
        if self.loss < 1 or self.mlp < 1 or self.loss == self.mlp == 1:
            text = f"loss = {self.loss} tiles and mlp = {self.mlp}"
            yield Fault(text, "write numbers from 1, all at once, up, and one of them above 1; or leave the strategy out", where)
        if space.pieces > 1:
            yield Fault("the loss is taken in tiles already", "keep one of the strategies that do it", where)
        if self.loss > 1 and anatomy.whole_batch:
            yield Fault("the loss compares all rows of a batch, so it needs them all at once", AT_ONCE, f"{where}.loss")
        yield from _head_faults(space, f"{where}.loss") if self.loss > 1 else ()
        yield from _mlp_faults(anatomy, f"{where}.mlp") if self.mlp > 1 else ()

    def partners(self, space: Space) -> Iterator[Fault]:
        cut = {name: home for home in space.homes if home.cut for name in home.weight.names}
        call = head_in_pieces(space)
        home = None if call is None else cut.get(f"{call.name}.weight")
        if home is not None and set(home.cut) != set(space.logits.axes("S")):
            text = f"the head {home.weight.name} is cut along {' and '.join(home.cut)}, and its products move something each"
            yield Fault(text, "divide it by words alone (line and vocabulary), or set loss = 1", "strategies.tiles.loss")
        if self.loss > 1 and space.led:
            text = f"one rank along {' and '.join(space.led)} takes the loss of all, of logits that the others send whole"
            yield Fault(text, "set loss = 1, or have every rank take its own loss (replicate, zero)", "strategies.tiles.loss")
        inside = [name for mlp in _mlps(space.anatomy) for name in cut if name.startswith(f"{mlp.name}.")] if self.mlp > 1 else []
        if inside:
            text = f"{inside[0]} is divided among ranks, which meet once for all tokens, and would for each tile"
            yield Fault(text, "set mlp = 1, or do not divide MLPs: recompute spares as much", "strategies.tiles.mlp")

    def place(self, space: Space) -> Space:
        return replace(space, pieces=max(1, self.loss))

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        if self.mlp == 1:
            return program
        return program.edit(lambda actions: self._lean(actions, space, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        for mlp in dict.fromkeys(mlp.name for mlp in _mlps(runtime.plan.space.anatomy)) if self.mlp > 1 else ():
            runtime.wrap(mlp, partial(in_tiles, mlp, self.mlp))
        return {}

    def _lean(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        """`actions` with a tile of what MLPs compute within, in the backward of their visit, for all that a forward keeps."""
        rows, width = micro_rows(actions, space, job), NBYTES[job.precision.compute]
        mlps: dict[str, list[_Mlp]] = {}
        for mlp in _mlps(space.anatomy):
            mlps.setdefault(mlp.visit, []).append(mlp)
        tokens = Fraction(-(-_tokens(space) // self.mlp), _tokens(space))
        whole = taken(space, job, rows)

        def lean(action: Action) -> Action:
            mine, name = mlps.get(action.subject, []), inside(action.subject, action.micro)
            spared = [int(mlp.inside * own_share(space, mlp.visit)) * rows * width for mlp in mine]
            if mine and action.kind in (*FORWARDS, "RERUN"):
                left = {held.name: held.nbytes - (held.name == name) * sum(spared) for held in action.takes}
                return replace(action, takes=tuple(Hold(each, max(0, nbytes)) for each, nbytes in left.items()))
            if mine and action.kind in BACKWARDS:
                more = max(int(each * tokens) for each in spared)
                weighed = whole[action.subject].backward  # of whole MLPs; tiles add to the gradients of weights that are there
                more += round(weighed * tokens) if weighed else _scratch(action)
                takes = (replace(held, nbytes=more) if held.name == SCRATCH else held for held in action.takes)
                again = sum(int(mlp.flops * own_share(space, mlp.visit)) for mlp in mine) * rows
                return replace(action, takes=tuple(takes), flops=action.flops + again)
            return action

        return [lean(action) for action in actions]


def _scratch(action: Action) -> int:
    return sum(held.nbytes for held in action.takes if held.name == SCRATCH)


@dataclass(frozen=True)
class _Mlp:
    """One call of a module that holds columns and rows layers; per sample, what lies between them, and operations."""

    name: str
    visit: str
    inside: int
    flops: int


def _mlps(anatomy: Anatomy) -> Iterator[_Mlp]:
    """The MLPs of a model, in order: modules that hold a pair of layers and nothing else that can be divided."""
    weights = {layer: weight for weight in anatomy.weights if len(weight.shape) > 1 for layer in weight.layers}
    waiting: list[Call] = []
    for call in anatomy.calls:
        if call.role == "columns":
            waiting = [each for each in waiting if each.visit == call.visit] + [call]
        elif call.role == "rows":
            pair, waiting = [*waiting, call], []
            cut = weights[call.name].side("in") if call.name in weights else None
            if len(pair) == 1 or cut is None or cut.heads or cut.units != sum(cut.sections):
                continue
            name = _around([each.name for each in pair])
            within = [each for each in anatomy.calls if each.visit == call.visit and each.name.startswith(f"{name}.")]
            if name and within == pair:
                yield _Mlp(name, call.visit, sum(each.inside for each in pair), sum(each.flops for each in pair))


def _around(names: list[str]) -> str:
    """The module that holds all of `names`."""
    parts = [name.split(".")[:-1] for name in names]
    return ".".join(alike[0] for alike in takewhile(lambda alike: len(set(alike)) == 1, zip(*parts, strict=False)))


def _tokens(space: Space) -> int:
    known = (space.whole or space).anatomy.tokens
    return 1 if known is None else int(known.length * own_tokens(space))


def _mlp_faults(anatomy: Anatomy, where: str) -> Iterator[Fault]:
    """What keeps MLPs from running on some tokens at a time."""
    found, known = list(_mlps(anatomy)), anatomy.tokens
    if known is None or not found:
        text = f"{anatomy.name} has no module of its own between columns and rows of single features that takes in tokens"
        yield Fault(text, "declare the roles of its layers: Model(sockets=...); or set mlp = 1", where)
        return
    if anatomy.random:
        yield Fault("the model draws dropout, by the place of an element among all tokens", "set dropout to 0, or mlp = 1", where)
    mixes = {passing.visit: passing.mixes for passing in known.visits if passing.mixes}
    attends = {attend.visit for attend in known.attends}
    for mlp in found:
        if mlp.visit in mixes:
            yield Fault(f"{mlp.name} does not treat tokens one by one: {mixes[mlp.visit]}", "set mlp = 1", where)
        elif mlp.name == block_of(mlp.visit) and mlp.visit in attends:
            yield Fault(f"{mlp.name} attends to other tokens", "set mlp = 1", where)
        elif any(each.reach and f"{each.module}.".startswith(f"{mlp.name}.") for each in known.convolves):
            yield Fault(f"{mlp.name} convolves tokens", "set mlp = 1", where)


def _head_faults(space: Space, where: str) -> Iterator[Fault]:
    """Why there is no head whose product the loss could make."""
    anatomy, logits = space.anatomy, space.anatomy.logits
    if logits is None:
        kept = next((f" ({each.name}: {each.why})" for each in anatomy.weights if each.role == "logits" and each.why), "")
        yield Fault(f"{anatomy.name} has no head whose logits go to the loss as they are{kept}", AT_ONCE, where)
        return
    call = head_in_pieces(replace(space, pieces=2))
    if call is None or call.visit != anatomy.visits[-1]:
        yield Fault(f"the head {logits.layer} is not in the last block that runs, {anatomy.visits[-1]}", AT_ONCE, where)
    elif logits.changed:
        text = (
            f"between the head {logits.layer} and the loss the model changes logits ({logits.changed}), and a tile would not be"
        )
        yield Fault(text, f"return the head's output as it is and change it in a loss of your own, or {AT_ONCE}", where)
    elif not any(each.rows and each.shape == (logits.tokens, logits.words) for each in anatomy.outputs):
        text = f"the logits do not come out as [rows, tokens, words]: there are {logits.tokens} of a sample"
        yield Fault(text, AT_ONCE, where)
    elif logits.tokens < 2:
        yield Fault("a sample has the logits of one token, so there is nothing to tile", AT_ONCE, where)
