"""Runs a model in stages, one after another in one process, and compares it with the same model run whole, in
float64.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache
from meshwright.model.blocks.block_forward_backward import ForwardDriver, backward
from meshwright.model.pipeline.forward_graph import ForwardGraph
from meshwright.model.pipeline.stage_forward import StageResult, run_stage
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.stage_transfers import StageBoundaries, StageSpec
from tests.model.block_backward import Chain, Forward, Gradients, analyze_model, weigh

X = {"x": torch.linspace(-2, 2, 24).view(4, 6).sin()}
Example = Mapping[str, torch.Tensor]
Total = Callable[[Any], torch.Tensor]


@dataclass
class Ranks:
    """As many copies of a model as there are parts at most, and the truth: the loss and gradients of one
    backward.
    """

    analyzed: AnalyzedModel
    graph: ForwardGraph
    inputs: dict[str, torch.Tensor]
    total: Total
    loss: torch.Tensor
    truth: Gradients
    pool: list[Any] = field(default_factory=list)

    @property
    def boundaries(self) -> StageBoundaries:
        """Returns where the model may be divided."""
        return self.graph.boundaries

    def error(self, boundaries: Sequence[str], *, lean: bool = False) -> float:
        """The largest difference of loss and gradients when the model is run in parts that begin at
        `boundaries`.
        """
        parts = self.graph.boundaries.stages(boundaries)
        while len(self.pool) < len(parts):
            self.pool.append(self.analyzed.make_module("cpu", torch.float64))
        for _, _, parameters in self.pool:
            for parameter in parameters.values():
                parameter.grad = None
        gradients, loss = steps(self, parts, self.pool[: len(parts)], lean=lean)
        scale = max(value.abs().max().item() for value in self.truth.values() if value is not None)
        error = abs(loss.item() - self.loss.item()) / max(1.0, abs(self.loss.item()))
        for name, truth in self.truth.items():
            shares = [each[name] for each in gradients if each[name] is not None]
            if truth is None:
                assert all(share.abs().max() == 0 for share in shares), name
            else:
                error = max(error, (sum(shares, torch.zeros(())) - truth).abs().max().item() / scale)
        return error

    def evaluated(self, boundaries: Sequence[str], graph_cache: ForwardGraphCache) -> Any:
        """The outputs of the model when it is run in parts without gradients, in eval mode."""
        graph = graph_cache.get(self.inputs, training=False)
        store: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for part in graph.boundaries.stages(boundaries):
                module, blocks, _ = self.analyzed.make_module("cpu", torch.float64)
                module.eval()
                drive = ForwardDriver(blocks, in_place=self.analyzed.model_spec.writes_in_place)
                ran = run_one_stage(self, part, module, drive, store, graph=graph)
                drive.detach()
                store |= ran.sent_values
        return ran.outputs


def ranks(
    build: Callable[[], nn.Module],
    example: Example,
    blocks: Sequence[str] | None = None,
    total: Total = weigh,
    samples: Example | None = None,
) -> Ranks:
    """The model that `build` makes, read on `example`, to be run on `samples` (None: the example)."""
    analyzed = analyze_model(build, example, blocks)
    inputs = {key: v.double() if v.is_floating_point() else v for key, v in (samples or example).items()}
    graph = ForwardGraphCache(analyzed, torch.float64).get({key: value[:1] for key, value in inputs.items()})
    module, _, parameters = analyzed.make_module("cpu", torch.float64)
    loss = total(module(**inputs))
    loss.backward()
    return Ranks(
        analyzed, graph, inputs, total, loss, {name: parameter.grad for name, parameter in parameters.items()}
    )


def steps(
    one: Ranks, parts: Sequence[StageSpec], made: Sequence[Any], *, lean: bool
) -> tuple[list[Gradients], torch.Tensor]:
    """The gradients of every part's copy, and the loss: all forwards in order,
    then all backwards in reverse.
    """
    store: dict[str, torch.Tensor] = {}
    ran, drives, loss = [], [], torch.zeros(())
    corrupted = [fill_absent_with_nan(one, part, each[2]) for part, each in zip(parts, made, strict=True)]
    for part, (module, blocks, _) in zip(parts, made, strict=True):
        before = {key: value.clone() for key, value in module.state_dict().items()}
        drives.append(ForwardDriver(blocks, in_place=one.analyzed.model_spec.writes_in_place))
        ran.append(run_one_stage(one, part, module, drives[-1], store, lean=lean))
        store |= {name: tensor.detach().clone() for name, tensor in ran[-1].sent_values.items()}
        untouched = {
            name
            for name in before
            if not any(name.startswith(block_call.split("#")[0]) for block_call in part.block_calls)
        }
        now = module.state_dict()
        assert all(torch.equal(now[name].nan_to_num(), before[name].nan_to_num()) for name in untouched)
    owed: dict[str, torch.Tensor] = {}
    for place in reversed(range(len(parts))):
        if parts[place].is_last:
            loss = one.total(ran[place].outputs)
            loss.backward()
        for name, leaf in ran[place].sent_values.items():
            if name in owed:
                leaf.grad = owed[name] if leaf.grad is None else leaf.grad + owed[name]
        backward_of_stage(ran[place], drives[place])
        for name, leaf in ran[place].received_values.items():
            if leaf.grad is not None:
                owed[name] = owed[name] + leaf.grad if name in owed else leaf.grad
        drives[place].detach()
        for parameter, values in corrupted[place]:
            parameter.data.copy_(values)
    return [{name: parameter.grad for name, parameter in each[2].items()} for each in made], loss


def fill_absent_with_nan(
    one: Ranks, part: StageSpec, parameters: Mapping[str, nn.Parameter]
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Make all parameters NaN that a rank with this part alone would not hold; what they were."""
    used = {weight.name: set(weight.block_calls) for weight in one.analyzed.model_spec.params}
    for name, block_calls in one.boundaries.root_params:
        used[name] |= set(block_calls)
    foreign = [parameter for name, parameter in parameters.items() if used[name].isdisjoint(part.block_calls)]
    before = [(parameter, parameter.detach().clone()) for parameter in foreign]
    for parameter in foreign:
        parameter.data.fill_(torch.nan)
    return before


def run_one_stage(
    one: Ranks,
    part: StageSpec,
    module: nn.Module,
    drive: ForwardDriver,
    store: Mapping[str, torch.Tensor],
    *,
    lean: bool = False,
    graph: ForwardGraph | None = None,
) -> StageResult:
    """`part` run on copies of what it takes of the store, and on nothing else."""
    received = {value.name: store[value.name].clone() for value in part.inputs if value.name in store}
    block_calls: list[str] = []

    def reach(block_call: str) -> bool:
        block_calls.append(block_call)
        return lean

    samples = len(next(iter(one.inputs.values())))
    ran = run_stage(
        lambda: module(**one.inputs), drive, graph or one.graph, part, samples, received, before_block=reach
    )
    assert torch.is_grad_enabled() is False or block_calls == list(part.block_calls)
    for value in part.outputs:
        assert tuple(ran.sent_values[value.name].shape) == value.shape(samples)
    return ran


def backward_of_stage(ran: StageResult, drive: ForwardDriver) -> None:
    """The backward of a part, visit by visit."""
    backward(ran.closing_call)
    for block_call in reversed(ran.forward_pass.block_calls.values()):
        drive.recompute(block_call)
        backward(block_call)


def stage_divisions(boundaries: Sequence[str], most: int = 8) -> Iterable[tuple[str, ...]]:
    """Every border alone, and some divisions into 3 and 4 parts, at most so many of each."""
    yield from ((boundary,) for boundary in boundaries)
    for parts in (2, 3):
        found = list(combinations(boundaries, parts))
        yield from found[:: max(1, len(found) // most)]


def num_values_and_nbytes_crossing(boundaries: StageBoundaries, samples: int) -> tuple[int, int]:
    """The largest number of values that cross a stage boundary, and the largest number of bytes."""
    live = [boundaries.live_values(boundary) for boundary in boundaries.open_boundaries()]
    return max(map(len, live)), max(sum(v.nbytes(samples) for v in each) for each in live)


def same(one: Any, other: Any) -> bool:
    """Whether two outputs hold the same tensors to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(tree_tensors(one), tree_tensors(other), strict=True))


def chained(glue: Forward, block: Forward | None = None) -> Ranks:
    """A chain of three blocks and a head, read."""
    return ranks(lambda: Chain(glue, block), X)


def exact(glue: Forward, block: Forward | None = None) -> StageBoundaries:
    """The borders of a chain of which all are open, after all divisions gave the gradients of
    one backward.
    """
    one = chained(glue, block)
    assert one.boundaries.closed_boundaries == ()
    for boundaries in stage_divisions(one.boundaries.open_boundaries()):
        assert one.error(boundaries) < 1e-12, boundaries
        assert one.error(boundaries, lean=True) < 1e-12, boundaries
    return one.boundaries


def live(boundaries: StageBoundaries) -> dict[str, list[str]]:
    """The names of the values that are live before each visit but the first."""
    return {
        boundary: [value.name for value in boundaries.live_values(boundary)]
        for boundary in boundaries.block_calls[1:]
    }


def refused(glue: Forward, block: Forward | None = None) -> Ranks:
    """A chain that has closed borders; all others still give the gradients of one backward."""
    one = chained(glue, block)
    for boundaries in stage_divisions(one.boundaries.open_boundaries()):
        assert one.error(boundaries) < 1e-12
    return one


class Normed(nn.Module):
    """Batch norms between linears, in layers whose residual is added by glue."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x
