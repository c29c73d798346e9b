"""Stateless draws of a compiled graph: the masks are inputs of the graph, drawn before it runs.

A compiler must not see the arithmetic of a draw (its keys are 64 bits, and new in every step). So while torch
compiles, `StatelessDropout` lets random functions pass into the graph; there each is replaced by the same
function with its masks given, and the graph gets one more input for each mask:

    graph(x, w)                   linear -> dropout(p) -> relu
    graph(x, w, mask)             linear -> masked_fill(~mask) / (1 - p) -> relu
    call    mask = rng.keep_mask(shape, p);  graph(x, w, mask)

The masks are those of an uncompiled run, because the same generator draws them at the same sites in the same
order. There is no graph break, and nothing that a compiler may cache, reorder or replay draws.

Cost: all masks of a graph are there from its beginning; most of them are kept for the backward anyway.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.model.rng.sharded_draws import DrawRegion
from meshwright.model.rng.stateless_dropout import StatelessDropout, drawing_functions
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.plan.job.errors import PlanError

Size = int | torch.SymInt
# what Dynamo keeps at a node: its fake tensor, and where an input comes from; and at a graph
EXAMPLE, SOURCE, PARAM_SOURCES = "example_value", "_dynamo_source", "_param_name_to_source"


@dataclass(frozen=True)
class Draw:
    """One draw of a graph: a mask (with `p`), or numbers in [0, 1) of `dtype`. Sizes may be symbols."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    p: float | None

    def make(self, rng: StatelessRNG, shape: Sequence[int]) -> torch.Tensor:
        """Returns what `rng` draws at its next site, of `shape`."""
        if self.p is None:
            return rng.uniform(shape, self.dtype, self.device)
        return rng.keep_mask(shape, self.p, self.device)


@dataclass
class _RecordedDraws:
    """Takes the place of a generator while the draws of a function are recorded, on fake tensors."""

    fake_mode: FakeTensorMode
    in_trial: bool = False
    location: str = "a compiled graph"
    draws: list[Draw] = field(default_factory=list)

    def keep_mask(self, shape: Sequence[Size], p: float, device: torch.device) -> torch.Tensor:
        return self._draw(Draw(tuple(shape), torch.bool, device, p))

    def uniform(self, shape: Sequence[Size], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._draw(Draw(tuple(shape), dtype, device, None))

    def keep_mask_region(self, region: DrawRegion, p: float, device: torch.device) -> torch.Tensor:
        return _refuse_region(self.location)

    def _draw(self, draw: Draw) -> torch.Tensor:
        self.draws.append(draw)
        return empty_draw(draw, self.fake_mode)


@dataclass
class _GivenDraws:
    """Takes the place of a generator in a function whose masks are given, in order."""

    given: list[torch.Tensor]
    in_trial: bool = False
    location: str = "a compiled graph"

    def keep_mask(self, shape: Sequence[Size], p: float, device: torch.device) -> torch.Tensor:
        return self.given.pop(0)

    def uniform(self, shape: Sequence[Size], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.given.pop(0)

    def keep_mask_region(self, region: DrawRegion, p: float, device: torch.device) -> torch.Tensor:
        return _refuse_region(self.location)


def _refuse_region(location: str) -> torch.Tensor:
    text = "attention on a part of a sequence draws its mask by regions, which no compiled graph does"
    raise PlanError(text, fix="leave this block out of the strategy compile: its `blocks`", location=location)


def empty_draw(draw: Draw, fake_mode: FakeTensorMode) -> torch.Tensor:
    """Returns a fake tensor with the shape of `draw`."""
    with fake_mode:
        return torch.empty(draw.shape, dtype=draw.dtype, device=draw.device)


def run_with_draws(
    name: str, draws: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Returns the result of the random function `name` with the masks `draws`; the function of a graph's
    node.
    """
    with StatelessDropout(_GivenDraws(list(draws))):
        return drawing_functions()[name](*args, **kwargs)


def draws_as_inputs(dynamo_graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Draw]]:
    """Returns a graph of Dynamo whose masks are inputs, behind its own, and their draws.

    Raises PlanError for random functions that have no stateless form.
    """
    drawing = [
        (node, name, draws) for node, name in _drawing_nodes(dynamo_graph) if (draws := _draws_of(node, name))
    ]
    if not drawing:
        return dynamo_graph, []
    graph_module, copies = _copy_graph(dynamo_graph)
    graph, found = graph_module.graph, list[Draw]()
    places = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes)) if not places else places[-1].next
    for original, name, draws in drawing:
        node = copies[original]
        with graph.inserting_before(first):
            inputs = tuple(graph.placeholder(f"drawn_{len(found) + i}") for i in range(len(draws)))
        for each in inputs:
            vars(each)[SOURCE] = None  # no value of the user's code
        found += draws
        with graph.inserting_before(node):
            replaced = graph.call_function(run_with_draws, (name, inputs, node.args, dict(node.kwargs)))
        replaced.meta = dict(node.meta)
        node.replace_all_uses_with(replaced)
        graph.erase_node(node)
    graph_module.recompile()
    return graph_module, found


def _copy_graph(dynamo_graph: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Returns a copy of a graph, which Dynamo reads after it was compiled, and the copy of each node."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(dynamo_graph.graph, copies))
    for node in dynamo_graph.graph.nodes:
        if node.op == "placeholder":
            vars(copies[node])[SOURCE] = vars(node)[SOURCE]
    copied = fx.GraphModule(dynamo_graph, graph)
    copied.meta = dict(dynamo_graph.meta)
    vars(copied)[PARAM_SOURCES] = vars(dynamo_graph)[PARAM_SOURCES]
    return copied, copies


def _drawing_nodes(graph_module: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    names = {function: name for name, function in drawing_functions().items()}
    for node in graph_module.graph.nodes:
        name = f"Tensor.{node.target}" if node.op == "call_method" else names.get(node.target, "")
        if name in drawing_functions():
            yield node, name


def _draws_of(node: fx.Node, name: str) -> list[Draw]:
    """Returns the draws that the function `name` makes on the fake tensors of `node`."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta[EXAMPLE])
    fake_mode = next(
        value.fake_mode
        for value in (each.meta.get(EXAMPLE) for each in (*node.all_input_nodes, node))
        if isinstance(value, FakeTensor)
    )
    recorded = _RecordedDraws(fake_mode)
    with fake_mode, StatelessDropout(recorded):
        drawing_functions()[name](*args, **kwargs)
    return recorded.draws


def make_drawing_call(
    graph_module: fx.GraphModule,
    draws: Sequence[Draw],
    compile_graph: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    example_inputs: Sequence[Any],
    rng: Callable[[], StatelessRNG],
) -> Callable[..., Any]:
    """Returns a function of the graph's own inputs that draws and calls what `compile_graph(graph, inputs)`
    returns.

    Args:
        graph_module, draws: those of `draws_as_inputs`.
    """
    fake_mode = TracingContext.get().fake_mode
    if fake_mode is None:
        raise RuntimeError("a graph is compiled outside of Dynamo; compile blocks by the strategy compile")
    compiled = compile_graph(
        graph_module, [*example_inputs, *(empty_draw(each, fake_mode) for each in draws)]
    )
    places = _symbol_places(graph_module)
    has_symbols = [any(isinstance(size, torch.SymInt) for size in draw.shape) for draw in draws]
    shapes = [
        () if each else _local_shape(draw.shape, {}, ())
        for each, draw in zip(has_symbols, draws, strict=True)
    ]

    def draw_and_call(*inputs: Any) -> Any:
        masks = [
            draw.make(rng(), _local_shape(draw.shape, places, inputs) if is_symbolic else shape)
            for draw, shape, is_symbolic in zip(draws, shapes, has_symbols, strict=True)
        ]
        return compiled(*inputs, *masks)

    return draw_and_call


def _symbol_places(graph_module: fx.GraphModule) -> dict[Any, int]:
    """Returns which input of the graph is the value of each symbol."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    examples = [node.meta.get(EXAMPLE) for node in placeholders]
    return {
        example.node.expr: place
        for place, example in enumerate(examples)
        if isinstance(example, torch.SymInt) and example.node.expr.is_Symbol
    }


def _local_shape(shape: Sequence[Size], places: dict[Any, int], inputs: Sequence[Any]) -> tuple[int, ...]:
    values = {symbol: inputs[place] for symbol, place in places.items()}
    return tuple(
        int(size.node.expr.subs(values)) if isinstance(size, torch.SymInt) else size for size in shape
    )
