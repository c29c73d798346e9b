"""What Dynamo makes of blocks is noted: graphs, breaks with their lines, calls without a graph, and why."""

import inspect
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from tqdm import tqdm

from meshwright.api import analyze, make_plan
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.step.executor import StepExecutor
from meshwright.parallel.memory import block_compiler
from meshwright.parallel.memory.block_compiler import BRANCH
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.plan.compiled_graphs import CompiledGraphs
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.tiny_model import VOCABULARY, WIDTH, executor_of, tiny_job, token_samples

# torch hides it by a filter, which other threads undo
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
GRAPHS_ONLY = CompiledBlocks(blocks=("layers.*",), backend="eager")


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(WIDTH, WIDTH), 0


class Printing(OneLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        logging.getLogger("a model").info(id(x))
        return x + 1


class Branching(OneLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if x.sum() > 1e9:
            x = x + 1
        return x * 2


class Looping(OneLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.linear(x)
            if x.sum() > 1e9:
                x = x + 1
        return x


class Counting(OneLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.linear(x) * (1 + 1e-9 * self.num_calls)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def no_threads_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps Dynamo's progress bar from starting a thread that outlives a test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def make_executor(layer: Callable[[], nn.Module]) -> StepExecutor:
    analyzed = analyze(lambda: Model(layer), token_samples(2))
    plan = make_plan(analyzed, tiny_job(), Mesh(), (GRAPHS_ONLY,))
    return executor_of(analyzed, plan, single_rank_world(torch.device("cpu")))


def graphs_of_steps(layer: Callable[[], nn.Module], num_steps: int = 2) -> Iterator[CompiledGraphs]:
    executor = make_executor(layer)
    for _ in range(num_steps):
        executor.step({key: value[:12] for key, value in token_samples().items()})
        yield executor.state.compiled_graphs
    executor.close()


def line_of(layer: type, text: str) -> str:
    """The place of the line of the class `layer` that begins with `text`."""
    lines, begin = inspect.getsourcelines(layer)
    return f"{__file__}:{next(begin + at for at, line in enumerate(lines) if line.strip().startswith(text))}"


def test_a_branch_on_a_value_ends_a_graph_at_its_line():
    *_, found = graphs_of_steps(Branching)
    assert found.breaks == [("layers.0", f"{BRANCH} at {line_of(Branching, 'if')}")]
    assert found.blocks == ["layers.0", "layers.0"]
    assert (found.num_late, found.num_uncompiled_calls, found.uncompiled) == (0, 0, {})
    assert found.classes == {"layers.0": "Branching", "layers.1": "Branching"}


def test_calls_that_run_without_a_graph_are_counted_and_reported_once(caplog: pytest.LogCaptureFixture):
    for number, found in enumerate(graphs_of_steps(Looping), start=1):
        assert found.num_uncompiled_calls == 2 * number, "two blocks, one microbatch"
        assert not found.graphs
    cause = f"Data-dependent branching, in a loop of the function forward at {line_of(Looping, 'def')}"
    assert found.uncompiled == {"layers.0": cause, "layers.1": cause}
    (record,) = [each for each in caplog.records if "runs uncompiled" in each.message]
    assert f"'layers.0' runs uncompiled: {cause}" in record.message


def test_a_class_that_is_compiled_in_every_step_runs_uncompiled_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(block_compiler, "MAX_LATE_CALLS", 3)
    late = [(found.num_late, found.num_uncompiled_calls) for found in graphs_of_steps(Counting, 6)]
    # layers share the graph for a number of calls; in steps 3 to 5 the first one needs another
    assert late == [(0, 0), (0, 0), (1, 0), (2, 0), (3, 1), (3, 3)]
    (record,) = [each for each in caplog.records if "is compiled again" in each.message]
    assert "in step 2: self.num_calls == " in record.message
    assert "runs uncompiled: it was compiled again in" in caplog.text


def test_a_class_with_as_many_graphs_as_it_may_have_runs_uncompiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_compiler, "GRAPHS_PER_BLOCK", 1)  # four blocks: four graphs for a class
    *_, found = graphs_of_steps(Counting, 6)
    assert len(found.graphs) == 4
    assert found.num_uncompiled_calls == 4, "two blocks in two steps"
    assert "its code has 4 graphs, which is the limit: self.num_calls == " in found.uncompiled["layers.0"]


def test_a_part_that_is_given_up_is_named():
    class Half(Looping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loop(self.linear(x) * 2, self.linear)

    def loop(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
        torch._dynamo.graph_break()
        for _ in range(2):
            x = linear(x)
            if x.sum() > 1e9:
                x = x + 1
        return x

    *_, found = graphs_of_steps(Half)
    assert found.num_uncompiled_calls == 0
    assert found.uncompiled["layers.0"].startswith(
        "a part of it: Data-dependent branching, in a loop of the function loop at "
    )


def test_graphs_become_plain_values():
    *_, found = graphs_of_steps(Printing)
    said = found.as_dict()
    assert (said["blocks"], said["graphs"], said["breaks"], said["late"]) == (2, 2, 1, 0)
    assert line_of(Printing, "logging") in found.breaks[0][1]


def test_a_full_disk_is_refused_by_name_and_another_failure_blames_the_block(monkeypatch: pytest.MonkeyPatch):
    def fail_with(error: Exception) -> str:
        def compile_graph(*_: object) -> None:
            raise error

        monkeypatch.setattr(CompiledBlocks, "make_backend", lambda _: compile_graph)
        with pytest.raises(PlanError) as refused:
            list(graphs_of_steps(Printing))
        return str(refused.value)

    text = fail_with(OSError(28, "No space left on device"))
    assert "the block 'layers.0' cannot be compiled by eager" in text
    assert "No space left on device" in text
    assert "make room in torch's cache folder" in text
    assert "TORCHINDUCTOR_CACHE_DIR" in text
    text = fail_with(RuntimeError("C++ compile error\nld: final link failed: No space left on device"))
    assert "make room in torch's cache folder" in text
    text = fail_with(NotImplementedError("an operation"))
    assert "cannot be compiled by eager: NotImplementedError: an operation" in text
    assert "leave it out of the strategy's `blocks`" in text


@torch.library.custom_op("test_block_compiler::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


class CustomOperator(OneLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + without_fake(x.detach())


def test_a_custom_operator_without_a_fake_kernel_is_named_with_torchs_advice():
    with pytest.raises(PlanError) as refused:
        list(graphs_of_steps(CustomOperator))
    assert "'layers.0' cannot be compiled by eager: " in str(refused.value)
    assert "no fake impl registered for <CustomOpDef(test_block_compiler::without_fake)>" in str(
        refused.value
    )
