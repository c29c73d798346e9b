"""Graphs are compiled before a run into a folder from which the run loads them."""

import os

import pytest
import torch
from rich.console import Console
from torch import nn
from tqdm import tqdm

from meshwright.api import analyze, default_strategies, make_plan
from meshwright.comm.backends.threads import single_rank_world
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import EvalConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.terminal.explain_model import graphs_ahead_view
from meshwright.run.measure.compile_ahead import compile_ahead
from tests.parallel.memory.test_block_compiler import Model
from tests.tiny_model import WIDTH, executor_of, tiny_job, token_samples

CPU = torch.device("cpu")


class Dropped(nn.Module):
    """A block of which no earlier run has left graphs in the folder."""

    scale = 1 + int.from_bytes(os.urandom(4), "big") / 2**33

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(x)) * self.scale)


class Tagged(Dropped):
    """A block that Dynamo traces anew for each module, to the same graph."""

    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        Tagged.num_made += 1
        self.tag = f"layer {Tagged.num_made}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.tag == "none" else super().forward(x)


ANALYZED = analyze(lambda: Model(Dropped), token_samples(2))


@pytest.fixture(autouse=True)
def no_threads_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile

    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)  # threads outlive a test
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def planned(*strategies: CompiledBlocks) -> Plan:
    return make_plan(ANALYZED, tiny_job(), Mesh(), strategies, 2)


def shown(found: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(found)
    return captured.get()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_run_compiles_nothing_of_what_was_compiled_ahead():
    plan = planned(CompiledBlocks(blocks=("layers.*",)))
    first = compile_ahead(ANALYZED, plan, ANALYZED.loss, CPU)
    assert not any(each.is_loaded for each in first)
    again = compile_ahead(ANALYZED, plan, ANALYZED.loss, CPU)
    assert [each.is_loaded for each in again] == [True] * len(first)
    assert f"seconds 0 0 {len(first)}" in " ".join(shown(graphs_ahead_view(again)).split())
    before = dict(torch._dynamo.utils.counters["inductor"])
    executor = executor_of(ANALYZED, plan, single_rank_world(CPU))
    executor.step(token_samples(plan.job.train.batch))
    executor.close()
    after = dict(torch._dynamo.utils.counters["inductor"])
    assert after["fxgraph_cache_hit"] == before["fxgraph_cache_hit"] + 2 * len(first)  # with backwards
    assert after["fxgraph_cache_miss"] == before["fxgraph_cache_miss"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [(Mesh(), [0, 0]), (Mesh(dp_shard=2), [0, 0]), (Mesh(pp=3), [0, 0, 1, 1])],
    ids=["alone", "shards", "stages"],
)
def test_graphs_of_evaluations_are_compiled_for_each_role(
    mesh: Mesh, ranks: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(CompiledBlocks, "has_cache", True)
    job, compiled = tiny_job(evaluate=EvalConfig(hold_out=2)), CompiledBlocks(("layers.*",), backend="eager")
    strategies = (*default_strategies(mesh, ANALYZED.model_spec), compiled)
    found = compile_ahead(ANALYZED, make_plan(ANALYZED, job, mesh, strategies, 2), ANALYZED.loss, CPU)
    assert [each.rank for each in found] == ranks


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_graph_that_comes_again_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CompiledBlocks, "has_cache", True)
    analyzed = analyze(lambda: Model(Tagged), token_samples(2))
    compiled = CompiledBlocks(("layers.*",), backend="eager")
    plan = make_plan(analyzed, tiny_job(), Mesh(), (compiled,), 2)
    assert [each.rank for each in compile_ahead(analyzed, plan, analyzed.loss, CPU)] == [0]


def test_a_plan_without_graphs_that_are_kept_is_refused():
    for strategies, text in (
        ((), "it compiles no block"),
        ((CompiledBlocks(backend="aot_eager"),), "the backend 'aot_eager' keeps nothing"),
    ):
        with pytest.raises(PlanError, match=text):
            compile_ahead(ANALYZED, planned(*strategies), ANALYZED.loss, CPU)
