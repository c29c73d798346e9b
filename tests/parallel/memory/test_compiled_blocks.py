"""Compiled blocks: equal blocks share a graph, plans with them equal one device, and what cannot be compiled
is refused by name.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from time import sleep

import pytest
import torch
from torch import fx, nn
from tqdm import tqdm

from meshwright.api import analyze, default_strategies, make_plan, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.loss_free_balancing import LossFreeBalancing
from meshwright.parallel.memory import compiled_blocks
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.block_compiler import BlockCompiler
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks, compile_once_per_cache
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.plan.compiled_graphs import CompiledGraphs
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.context.test_conv_halo_models import Mixed
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
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
CP_JOB = Job(
    ModelConfig("mixed"),
    DataConfig("random", sequence=9),
    TrainConfig(batch=4, clip=0.5),
    OptimizerConfig("sgd", lr=0.1, weight_decay=0.1),
)


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


@cache
def mixed_layers() -> AnalyzedModel:
    return analyze(partial(Mixed, 0.3), batches(1)[0])


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
            "inductor_mode is an option of Inductor, and the backend is 'eager'",
        ),
        (
            (CompiledBlocks(backend="eager", emulate_precision_casts=True),),
            "emulate_precision_casts is an option of Inductor, and the backend is 'eager'",
        ),
        (
            (COMPILED, ActivationCheckpointing(blocks=("layers.*",), save=("matmul",))),
            "of single operations in 'layers.0' the results are kept, and a compiled block has others",
        ),
        ((COMPILED, Gist(backward_dtype="bfloat16")), "compile does not work with gist: it changes the oper"),
        (
            (COMPILED, LossFreeBalancing()),
            "compile does not work with loss_free_balancing: it counts choices",
        ),
    ],
    ids=["backend", "pattern", "mode", "casts", "kept outputs", "gist", "biases of routers"],
)
def test_what_cannot_be_compiled_is_refused(strategies: tuple[Strategy, ...], text: str):
    with pytest.raises(PlanError) as refused:
        planned(Mesh(), *strategies)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(dp_replicate=2), (ActivationOffload(blocks=("layers.*",)),)),
        (Mesh(dp_shard=3), (ActivationOffload(prefetch=0), ALL_AGAIN)),
        (Mesh(dp_replicate=3), (MemoryBudget(),)),
    ],
    ids=["saved tensors leave", "inputs leave", "budget"],
)
def test_what_blocks_keep_may_leave_or_be_computed_again(
    mesh: Mesh, strategies: tuple[Strategy, ...], graphs: list[CompiledGraphs]
):
    verdict = verdict_of(case_of(analyzed_model(p=0.3), planned(mesh, *strategies, COMPILED)))
    assert verdict.passed, verdict
    for each in graphs:
        assert len(set(each.blocks)) == len(each.blocks) <= 3
        assert not each.breaks


@pytest.mark.parametrize(
    ("make", "strategy", "layer"),
    [
        (mixed_layers, RingAttention(), "layers.0"),
        (analyzed_llama, Ulysses(), "model.layers.0"),
    ],
    ids=["ring, convolutions", "ulysses, attention"],
)
def test_tokens_are_exchanged_between_the_graphs_of_a_block(
    make: Callable[[], AnalyzedModel], strategy: Strategy, layer: str, graphs: list[CompiledGraphs]
):
    analyzed = make()
    plan = make_plan(analyzed, CP_JOB, Mesh(cp=3), (strategy, DDP(axis="cp"), COMPILED))
    verdict = verify(analyzed, plan, batches(2))
    assert verdict.passed, verdict
    for each in graphs:
        assert layer in {block for block, _ in each.breaks}
        assert len(each.blocks) < 12  # one for each torch call, if what a mode does for it were compiled
        assert not each.num_late


AUTOCAST = PrecisionConfig(compute="bfloat16")
HALF = PrecisionConfig(parameters="bfloat16", compute="bfloat16", master="float32")


def losses(precision: PrecisionConfig, *strategies: Strategy, steps: int) -> list[float]:
    """The losses of steps on one device, with all samples in each."""
    analyzed, job = analyzed_model(p=0.3), tiny_job(precision=precision)
    executor = executor_of(analyzed, make_plan(analyzed, job, Mesh(), strategies), single_rank_world(CPU))
    batch = {key: value[:12] for key, value in token_samples().items()}
    found = [executor.step(batch).loss for _ in range(steps)]
    executor.close()
    return found


@pytest.mark.parametrize("precision", [AUTOCAST, HALF], ids=["autocast", "parameters"])
def test_torchs_own_kernels_round_as_uncompiled_in_half_precision(precision: PrecisionConfig):
    assert losses(precision, COMPILED, steps=3) == losses(precision, steps=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("precision", [AUTOCAST, HALF], ids=["autocast", "parameters"])
def test_inductor_rounds_less_often_unless_it_emulates_casts(
    precision: PrecisionConfig, monkeypatch: pytest.MonkeyPatch
):
    from torch._inductor import async_compile

    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    (uncompiled,) = losses(precision, steps=1)
    (fused,) = losses(precision, CompiledBlocks(), steps=1)
    assert losses(precision, CompiledBlocks(emulate_precision_casts=True), steps=1) == [uncompiled]
    assert fused != uncompiled
    assert fused == pytest.approx(uncompiled, rel=2**-8)  # one rounding of bfloat16


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


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(PlanError) as refused:
        planned(Mesh(), CompiledBlocks())
    assert "cache folder, and it cannot: [Errno 20] Not a directory" in str(refused.value)
    assert "TORCHINDUCTOR_CACHE_DIR" in str(refused.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_inductor_trains_the_numbers_of_one_device(
    graphs: list[CompiledGraphs], monkeypatch: pytest.MonkeyPatch
):
    from torch._inductor import async_compile

    # threads of Inductor outlive a test; its config is one of the thread that sets it, and ranks are threads
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    verdict = verdict_of(case_of(analyzed_model(p=0.3), planned(Mesh(dp_replicate=2), CompiledBlocks())))
    assert verdict.passed, verdict


HOLDER = """
import sys, time
from pathlib import Path
from torch import fx
from meshwright.parallel.memory.compiled_blocks import compile_once_per_cache

def compile_graph(graph, inputs):
    with Path(sys.argv[1]).open("a") as log:
        print("begin", file=log, flush=True)
        if sys.argv[2] == "stay":
            time.sleep(600)
        print("end", file=log)

compile_once_per_cache(compile_graph, fx.symbolic_trace(lambda x: x + 1), ())
"""


def test_of_the_processes_of_a_host_one_compiles_at_a_time_and_one_that_is_killed_lets_go(
    tmp_path: Path,
):
    log = tmp_path / "log"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def start(how: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-Wignore", "-c", HOLDER, str(log), how], env=environment)

    with start("stay") as holder:
        while not (log.exists() and log.read_text()):
            sleep(0.05)
        waiting = [start("end") for _ in range(2)]
        with pytest.raises(subprocess.TimeoutExpired):
            waiting[0].wait(4)
        holder.kill()
        assert [each.wait() for each in waiting] == [0, 0]
    assert log.read_text().split() == ["begin", *["begin", "end"] * 2]


def test_a_graph_is_compiled_while_somebody_clears_the_cache_folder(monkeypatch: pytest.MonkeyPatch):
    def make_lock(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr("torch.utils._filelock.FileLock", make_lock)
    graph = fx.symbolic_trace(lambda x: x + 1)
    assert compile_once_per_cache(lambda *given: given, graph, [1]) == (graph, [1])
