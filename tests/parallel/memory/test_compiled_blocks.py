"""Compiled blocks: equal blocks share a graph, plans with them equal one device, and what cannot be compiled
is refused by name.
"""

from functools import cache

import pytest
import torch
from torch import nn
from tqdm import tqdm

from meshwright.api import analyze, default_strategies, make_plan
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.loss_free_balancing import LossFreeBalancing
from meshwright.parallel.memory import compiled_blocks
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.compiled_blocks import BlockCompiler, CompiledBlocks, CompiledGraphs
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.tiny_model import (
    VOCABULARY,
    WIDTH,
    analyzed_model,
    case_of,
    executor_of,
    tiny_job,
    token_samples,
    verdict_of,
)

# torch hides it by a filter, which other threads undo
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
COMPILED = CompiledBlocks(backend="aot_eager")
ALL_AGAIN = ActivationCheckpointing(blocks=("*",))
CPU = torch.device("cpu")


class Branch(nn.Module):
    """A block of two layers that a tensor-parallel plan splits, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.drop(torch.tanh(self.up(x)))))


class Branches(nn.Module):
    """Embedding, two branches, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Branch(), Branch()])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_roles() -> Model:
    roles = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    return Model(Branches(), layer_roles=roles)


@cache
def branches() -> AnalyzedModel:
    return analyze(with_roles, token_samples(2))


def planned(mesh: Mesh, *more: Strategy, analyzed: AnalyzedModel | None = None, micro_batch: int = 2) -> Plan:
    analyzed = analyzed or analyzed_model(p=0.3)
    strategies = (*default_strategies(mesh, analyzed.model_spec), *more)
    return make_plan(analyzed, tiny_job(), mesh, strategies, micro_batch)


@pytest.fixture(autouse=True)
def no_threads_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps Dynamo's progress bar from starting a thread that outlives a test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[CompiledGraphs]:
    """What the ranks of this test compile, one value for each of them."""
    found: list[CompiledGraphs] = []

    def noted(*given: object) -> BlockCompiler:
        compiler = BlockCompiler(*given)
        found.append(compiler.graphs)
        return compiler

    monkeypatch.setattr(compiled_blocks, "BlockCompiler", noted)
    return found


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(dp_replicate=2), (BatchSplit(), DDP())),
        (Mesh(dp_shard=3), (BatchSplit("dp_shard"), ZeRO(), ALL_AGAIN)),
        (Mesh(dp_shard=2), (BatchSplit("dp_shard"), ZeRO(stage=2), Offload(step_on="host"), ChunkedLoss(2))),
        (Mesh(dp_replicate=3), (BatchSplit(), ParameterServer(servers=1))),
        (Mesh(outer=2), (LocalSGD(sync_every=2),)),
        (Mesh(pp=2), (Pipeline(),)),
        (Mesh(pp=2), (PipeDream(),)),
    ],
    ids=["ddp", "zero 3, recomputed", "zero 2", "server", "rounds", "pipeline", "pipedream"],
)
def test_plans_equal_one_device_with_a_graph_for_each_class_of_blocks(
    mesh: Mesh, strategies: tuple[Strategy, ...], graphs: list[CompiledGraphs]
):
    job, analyzed = tiny_job(train=TrainConfig(batch=12, clip=0.0)), analyzed_model(p=0.3)
    plan = make_plan(analyzed, job, mesh, (*strategies, COMPILED), 2)
    verdict = verdict_of(case_of(analyzed, plan), steps=5)
    assert verdict.passed, verdict
    for each in graphs:  # three layers, several steps and microbatches, weights gathered anew
        assert len(set(each.blocks)) == len(each.blocks) <= 3
        assert not each.breaks
    assert {block for each in graphs for block in each.blocks} >= {"embed", "layers.0", "head"}


def test_sharded_layers_run_between_the_graphs_of_a_block(graphs: list[CompiledGraphs]):
    plan = planned(Mesh(tp=2), COMPILED, analyzed=branches())
    verdict = verdict_of(case_of(branches(), plan))
    assert verdict.passed, verdict
    for each in graphs:  # the second layer runs the graphs of the first
        assert "layers.0" in each.blocks
        assert "layers.1" not in each.blocks
        assert all("test_compiled_blocks.py:" in cause for _, cause in each.breaks), each.breaks


def test_a_late_compilation_is_reported_once_with_its_cause(
    graphs: list[CompiledGraphs], caplog: pytest.LogCaptureFixture
):
    plan = planned(Mesh(), COMPILED)
    executor = executor_of(analyzed_model(p=0.3), plan, single_rank_world(CPU))
    batch = {key: value[:12] for key, value in token_samples().items()}
    executor.step(batch)
    executor.step(batch)
    assert "is compiled again" not in caplog.text
    executor.state.trained_module.module.layers[1].norm.eps = 1e-3
    executor.step(batch)
    executor.step(batch)
    executor.close()
    (record,) = [each for each in caplog.records if "is compiled again" in each.message]
    assert "'layers.1' is compiled again in step 2" in record.message
    assert "eps" in record.message
    assert graphs[0].num_late > 0


@pytest.mark.parametrize(
    ("strategies", "text"),
    [
        ((CompiledBlocks(backend="inductr"),), "torch.compile has no backend 'inductr'"),
        ((CompiledBlocks(blocks=("layer.*",), backend="eager"),), "'layer.*' matches no block"),
        (
            (CompiledBlocks(backend="eager", inductor_mode="max-autotune-no-cudagraphs"),),
            "is one of Inductor, and the backend is 'eager'",
        ),
        ((COMPILED, Gist(backward_dtype="bfloat16")), "compile does not work with gist: it changes the oper"),
        (
            (COMPILED, LossFreeBalancing()),
            "compile does not work with loss_free_balancing: it counts choices",
        ),
    ],
    ids=["backend", "pattern", "mode", "gist", "biases of routers"],
)
def test_what_cannot_be_compiled_is_refused(strategies: tuple[Strategy, ...], text: str):
    with pytest.raises(PlanError) as refused:
        planned(Mesh(), *strategies)
    assert text in str(refused.value)


def test_half_precision_is_refused():
    job = tiny_job(precision=PrecisionConfig(compute="bfloat16"))
    with pytest.raises(PlanError, match=r"blocks compute in bfloat16.*\n.*precision\.compute to \"float32\""):
        make_plan(analyzed_model(p=0.3), job, Mesh(), (COMPILED,))


def test_a_split_backward_is_refused():
    with pytest.raises(PlanError, match="that of a compiled block is one unit"):
        make_plan(analyzed_model(p=0.3), tiny_job(), Mesh(pp=2), (Pipeline(schedule="zb_h1"), COMPILED), 2)


def test_a_missing_compiler_is_refused():
    import torch._inductor.config

    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(PlanError, match=r"Inductor needs a C\+\+ compiler"),
    ):
        planned(Mesh(), CompiledBlocks())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_inductor_trains_the_numbers_of_one_device(
    graphs: list[CompiledGraphs], monkeypatch: pytest.MonkeyPatch
):
    from torch._inductor import async_compile

    # threads of Inductor outlive a test; its config is one of the thread that sets it, and ranks are threads
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    verdict = verdict_of(case_of(analyzed_model(p=0.3), planned(Mesh(dp_replicate=2), CompiledBlocks())))
    assert verdict.passed, verdict
