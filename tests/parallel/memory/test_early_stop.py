"""Reruns that leave out the product that no backward reads: kernels counted, bits of any run."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.api import analyze, make_plan
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory import early_stop
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.model_spec.op_sizes_and_memory import UnreadProduct
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.terminal.action_table import plan_details
from tests.engine.one_device import bits
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import case_of, executor_of, tiny_job, verdict_of

CPU = torch.device("cpu")
ALL = ActivationCheckpointing(blocks=("*layers.*",))
DOWN = "model.layers.{}.mlp.down_proj"
KEEPS_PRODUCTS = ActivationCheckpointing(blocks=("*layers.*",), save=("matmul", "attention"))
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


class Doubled(torch.autograd.Function):
    """Keeps a tensor where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mine = x
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad + 0 * ctx.mine.sum() + (ctx.mine == 0).all()


class Layer(nn.Module):
    """An MLP with a residual connection, and `last` behind its last product."""

    def __init__(self, last: Any) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(6, 9), nn.Linear(9, 6), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.down(torch.tanh(self.up(x))))


class Layers(nn.Module):
    """Embeds tokens, runs two layers, and reads off the next token."""

    def __init__(self, last: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(67, 6), nn.Linear(6, 67)
        self.layers = nn.ModuleList(Layer(last) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def positive_if_read(x: torch.Tensor) -> torch.Tensor:
    return x if x.isfinite().all() else x.nan_to_num()


HIDDEN = "a function that keeps it in secret"
BEHIND = {
    "nothing": lambda x: x,
    "a factor": lambda x: 0.5 * x,
    "tanh": torch.tanh,
    "a norm": nn.LayerNorm(6),
    HIDDEN: Doubled.apply,
    "a value that is read": positive_if_read,
}


@cache
def analyzed(behind: str) -> AnalyzedModel:
    torch.manual_seed(0)
    model = Model(Layers(BEHIND[behind]), blocks=["embed", "layers.0", "layers.1", "head"])
    return analyze(model, batches(1)[0], loss=token_cross_entropy())


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._overloadpacket in PRODUCTS] += 1
        return func(*args, **(kwargs or {}))


def trained(analyzed: AnalyzedModel, plan: Plan, steps: int = 3) -> tuple[dict[str, bytes], list[int]]:
    """The bits of the weights after some steps, and the matrix products of each step."""
    executor, products = executor_of(analyzed, plan, single_rank_world(CPU)), list[int]()
    for batch in batches(steps):
        with Counted() as counted:
            executor.step(batch)
        products.append(counted.counts[True])
    found = bits(executor.gather_parameters())
    executor.close()
    return found, products


def planned(analyzed: AnalyzedModel, *mine: Strategy, **more: Any) -> Plan:
    return make_plan(analyzed, replace(tiny_job(4), **more), Mesh(), mine, 4)


def skipped(plan: Plan) -> list[str]:
    return [layer for each in plan.for_rank(0).actions for layer in each.skipped_layers]


FLOAT64, AUTOCAST = PrecisionConfig("float64", "float64", "float64"), PrecisionConfig(compute="bfloat16")


@pytest.mark.parametrize("precision", [FLOAT64, AUTOCAST], ids=["float64", "autocast"])
def test_reruns_leave_one_product_per_layer_out_and_change_no_bit(precision: PrecisionConfig):
    usual, plain = trained(analyzed_llama(), planned(analyzed_llama(), precision=precision))
    plan = planned(analyzed_llama(), ALL, precision=precision)
    found, products = trained(analyzed_llama(), plan)
    assert found == usual
    assert skipped(plan) == [DOWN.format(1), DOWN.format(0)]
    per_forward = 2 * 7
    assert products == [plain[0] + per_forward, *2 * [plain[0] + per_forward - 2]]  # the first is whole


def test_the_last_product_is_not_kept_where_others_are():
    usual, plain = trained(analyzed_llama(), planned(analyzed_llama()))
    plan = planned(analyzed_llama(), KEEPS_PRODUCTS)
    found, products = trained(analyzed_llama(), plan)
    assert found == usual
    assert products == [plain[0] + 2, *2 * [plain[0]]]
    assert {each.flops for each in plan.for_rank(0).actions if each.kind == "RECOMPUTE"} == {0}


def test_operations_of_a_rerun_are_those_that_run():
    plan, spec = planned(analyzed_llama(), ALL), analyzed_llama().model_spec
    flops = {each.subject: each.flops for each in plan.for_rank(0).actions if each.kind == "F_CHECKPOINTED"}
    reruns = {each.subject: each.flops for each in plan.for_rank(0).actions if each.kind == "RECOMPUTE"}
    product = 2 * 9 * 48 * 53  # of down_proj: tokens, outputs, inputs
    assert {each.layer: each.flops for each in spec.unread_products}[DOWN.format(0)] == product
    assert flops["model.layers.0"] - reruns["model.layers.0"] == 4 * product
    console = Console(width=200)
    with console.capture() as text:
        console.print(plan_details(plan))
    assert "without the last product, which no backward reads" in text.get()


@pytest.mark.parametrize("behind", BEHIND)
def test_a_product_that_something_reads_is_computed(behind: str):
    model = analyzed(behind)
    plan, is_unread = planned(model, ALL), behind in ("nothing", "a factor", HIDDEN)
    assert skipped(plan) == (["layers.1.down", "layers.0.down"] if is_unread else [])
    assert trained(model, plan)[0] == trained(model, planned(model))[0]


@pytest.mark.parametrize("behind", ["tanh", "a norm", HIDDEN])
def test_the_graph_of_the_first_rerun_has_the_last_word(behind: str):
    """What the plan takes for unread, and something keeps in this run, is computed."""
    model = analyzed(behind)
    wrong = tuple(UnreadProduct(f"layers.{n}", f"layers.{n}.down", 1) for n in range(2))
    told = replace(model, model_spec=replace(model.model_spec, unread_products=wrong))
    plan = planned(told, ALL)
    assert skipped(plan) == ["layers.1.down", "layers.0.down"]
    assert trained(told, plan)[0] == trained(model, planned(model))[0]


def test_a_fault_in_that_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(early_stop, "_keeps_tensors", lambda node: False)
    with pytest.raises(AssertionError):
        test_the_graph_of_the_first_rerun_has_the_last_word("tanh")


def test_dropout_behind_it_keeps_it():
    config = transformers.GPT2Config(
        vocab_size=67, n_embd=12, n_layer=2, n_head=3, n_positions=9, use_cache=False
    )
    for dropout, layers in ((0.1, 0), (0.0, 2)):
        config.resid_pdrop = dropout
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = analyze(transformers.GPT2LMHeadModel(config), batches(1)[0], loss=token_cross_entropy())
        plan = planned(model, ActivationCheckpointing(blocks=("transformer.h.*",)))
        assert len(skipped(plan)) == layers
        assert trained(model, plan)[0] == trained(model, planned(model))[0]


SPLIT = BatchSplit("dp_shard")
CASES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "tp 3, chunks": (Mesh(tp=3), (TensorParallel(num_overlap_chunks=2), ALL)),
    "sp 3": (Mesh(tp=3), (TensorParallel(), SequenceParallel(), ALL)),
    "pp 2, zero 3": (Mesh(pp=2, dp_shard=2), (SPLIT, Pipeline(schedule="1f1b"), ZeRO(stage=3), ALL)),
    "attention is kept": (Mesh(), (ActivationCheckpointing(blocks=("*",), save=("attention",)),)),
    "products are kept": (Mesh(), (KEEPS_PRODUCTS,)),
    "products are kept, tp 2": (Mesh(tp=2), (TensorParallel(), KEEPS_PRODUCTS)),
    "budget": (Mesh(dp_shard=2), (SPLIT, DDP("dp_shard"), MemoryBudget(0.0))),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_device(case: str):
    mesh, strategies = CASES[case]
    plan = make_plan(analyzed_llama(), tiny_job(4), mesh, strategies, 2)
    assert skipped(plan)
    verdict = verdict_of(case_of(analyzed_llama(), plan, batches(1, 12)[0]), steps=3)
    assert verdict.passed, str(verdict)


def test_a_compiled_block_runs_again_whole():
    compiled = planned(analyzed_llama(), ALL, CompiledBlocks(blocks=("model.layers.0",), backend="eager"))
    assert skipped(compiled) == [DOWN.format(1)]
    whole = {(each.subject, each.kind): each.flops for each in compiled.for_rank(0).actions}
    assert whole["model.layers.0", "RECOMPUTE"] == whole["model.layers.0", "F_CHECKPOINTED"]


def test_a_rerun_whose_output_the_next_block_takes_is_whole():
    model = analyzed_llama(num_hidden_layers=6)
    plan = planned(model, MemoryBudget(0.7, choices=("recompute", "segment")))
    reruns = [each for each in plan.for_rank(0).actions if each.kind == "RECOMPUTE"]
    handing_on = [each for each in reruns if any("output" in hold.name for hold in each.allocations)]
    assert len(handing_on) == 1
    assert not handing_on[0].skipped_layers
    assert trained(model, plan)[0] == trained(model, planned(model))[0]
