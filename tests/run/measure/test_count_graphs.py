"""Graphs are counted before a run, under its plan: by class of blocks, with lines, lengths, equal steps."""

from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import nn
from tqdm import tqdm

from meshwright.api import analyze, default_strategies, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.block_compiler import BRANCH, EXCLUDED, BlockCompiler
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.memory.gist import Gist
from meshwright.plan.compiled_graphs import PlannedGraphs
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.terminal.explain_model import compiled_graphs_view
from meshwright.run.measure import count_graphs as counting
from meshwright.run.measure.count_graphs import count_graphs
from tests.parallel.memory.test_block_compiler import Branching, Counting, Looping, Model, Printing
from tests.parallel.memory.test_compiled_blocks import with_roles
from tests.tiny_model import VOCABULARY, WIDTH, analyzed_model, tiny_job, token_samples

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def no_threads_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps Dynamo's progress bar from starting a thread that outlives a test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def counted(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy) -> PlannedGraphs:
    chosen = strategies or default_strategies(mesh, analyzed.model_spec)
    return count_graphs(analyzed, make_plan(analyzed, tiny_job(), mesh, chosen), analyzed.loss)


def counted_layers(layer: Callable[[], nn.Module]) -> PlannedGraphs:
    analyzed = analyze(lambda: Model(layer), token_samples(2))
    return counted(analyzed, Mesh(), CompiledBlocks(blocks=("layers.*",)))


def shown(found: PlannedGraphs) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(compiled_graphs_view(found))
    return captured.get()


def test_blocks_of_one_class_have_one_graph_and_another_for_other_lengths():
    found = counted(analyzed_model(p=0.3), Mesh(dp_replicate=2), BatchSplit(), DDP())
    kinds = {kind.class_name: kind for kind in found.kinds}
    assert list(kinds) == ["Embedding", "Layer", "Linear"]
    layers = kinds["Layer"]
    assert layers.blocks == ["layers.0", "layers.1", "layers.2"]
    assert (layers.num_graphs, layers.late, layers.breaks, layers.by_length) == (1, {}, [], [1, 0])
    assert (found.lengths, found.is_planned, found.unknown) == ((5, 2, 4), False, ())
    text = shown(found)
    assert "this plan compiles none" in text
    assert "sequences of 2 and 4 tokens, after 5" in text


class Residual(nn.Module):
    """A block of three operations, that no other test compiles: torch makes numbers that it has seen with
    other values inputs of graphs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def test_seconds_of_compilation_follow_from_the_operations_of_the_graphs_of_a_first_step():
    found = counted_layers(Residual)
    assert found.compile_s == pytest.approx(2.5 + 3 * 0.35)  # one graph for both layers
    assert "compilation: about 4 s of one core" in shown(found)


def test_under_a_plan_graphs_end_at_the_layers_of_its_strategies():
    analyzed = analyze(with_roles, token_samples(2))
    found = counted(analyzed, Mesh(tp=2))
    branch = next(kind for kind in found.kinds if kind.class_name == "Branch")
    assert branch.num_graphs > 1
    assert branch.breaks
    assert all(each.startswith(EXCLUDED) for each in branch.breaks)
    assert "breaks at test_compiled_blocks.py:" in shown(found)


def test_every_stage_is_counted():
    found = counted(analyzed_model(), Mesh(pp=2))
    assert [block for kind in found.kinds for block in kind.blocks].count("layers.2") == 1
    assert {kind.class_name: (kind.num_graphs, kind.late) for kind in found.kinds} == {
        "Embedding": (1, {}),
        "Layer": (1, {}),
        "Linear": (1, {}),
    }


def test_what_a_forward_keeps_in_python_and_what_it_reads_are_named():
    (kind,) = counted_layers(Counting).kinds
    assert sorted(kind.late) == [1, 2]
    assert "self.num_calls == " in kind.late[1]
    (kind,) = counted_layers(Branching).kinds
    assert kind.num_graphs == 2
    assert [each.partition(" at ")[0] for each in kind.breaks] == [BRANCH]
    (kind,) = counted_layers(Looping).kinds
    assert kind.num_graphs == 0
    assert "in a loop of the function forward" in kind.uncompiled[0]
    found = counted_layers(Printing)
    assert found.is_planned
    assert "breaks at test_block_compiler.py:" in shown(found)


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(counting, "MAX_REAL_NUMEL", 0)
    found = counted_layers(Branching)
    assert not found.kinds
    assert "graphs are not known: the model reads tensor values" in shown(found)
    found = counted(analyzed_model(), Mesh(), Gist(backward_dtype="bfloat16"))
    assert "blocks do not compile under this plan: compile does not work with gist" in shown(found)


def test_inputs_that_are_no_sequences_of_one_length_are_tried_as_they_are():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = {"input": torch.randn(2, 4), "labels": torch.tensor([0, 3])}
    found = counted(analyze(layers, batch, loss=nn.CrossEntropyLoss()), Mesh(), CompiledBlocks())
    assert found.lengths == ()
    assert sum(kind.num_graphs for kind in found.kinds) == 1
    assert "other lengths were not tried" in shown(found)


class Deep(nn.Module):
    """Six blocks, which compute the same, and read a number of their own if they are `numbered`."""

    def __init__(self, *, numbered: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Numbered(at, reads_it=numbered) for at in range(6))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Numbered(nn.Module):
    def __init__(self, number: int, *, reads_it: bool) -> None:
        super().__init__()
        self.reads_it = reads_it
        self.linear, self.layer_idx = nn.Linear(WIDTH, WIDTH), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if not self.reads_it or self.layer_idx >= 0 else x


@pytest.mark.parametrize(("numbered", "num_run", "num_graphs"), [(False, 3, 1), (True, 3 + 6, 6)])
def test_three_of_equal_blocks_run_unless_the_last_has_a_graph_of_its_own(
    monkeypatch: pytest.MonkeyPatch, *, numbered: bool, num_run: int, num_graphs: int
):
    ran: list[str] = []
    run = BlockCompiler._run

    def noted(self: BlockCompiler, name: str, *args: object, **kwargs: object) -> object:
        ran.append(name)
        return run(self, name, *args, **kwargs)

    monkeypatch.setattr(BlockCompiler, "_run", noted)
    analyzed = analyze(lambda: Deep(numbered=numbered), token_samples(2))
    found = counted(analyzed, Mesh(), CompiledBlocks(blocks=("layers.*",)))
    (kind,) = found.kinds
    assert (len(kind.blocks), kind.num_graphs) == (6, num_graphs)
    assert len(ran) == 5 * num_run  # in three equal steps, and two of other lengths


def test_a_stage_of_the_same_blocks_as_another_is_not_run(monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []
    of_rank = counting._graphs_of_rank
    monkeypatch.setattr(
        counting,
        "_graphs_of_rank",
        lambda analyzed, plan, rank, *others: ran.append(rank) or of_rank(analyzed, plan, rank, *others),
    )
    analyzed = analyze(lambda: Deep(numbered=False), token_samples(2))
    found = counted(analyzed, Mesh(pp=4))
    assert ran == [0, 1, 3]
    assert [block for kind in found.kinds for block in kind.blocks].count("head") == 1
