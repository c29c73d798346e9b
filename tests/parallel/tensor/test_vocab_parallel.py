"""Vocabulary parallelism: results of one device, known bytes, and what cannot be sharded stays whole."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.engine.losses import vocab_parallel_logits
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel, unsharded_vocab_notes
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import (
    NUM_SAMPLES,
    SIZES,
    TOKENS,
    analyzed_llama,
    batches,
    llama,
    planned,
)

BOTH = (TensorParallel(), VocabParallel())
CASES = {
    "2 ranks": (Mesh(tp=2), BOTH, 0),
    "3 ranks": (Mesh(tp=3), BOTH, 2),
    "alone": (Mesh(tp=2), (VocabParallel(),), 0),
    "with ddp": (
        Mesh(dp_replicate=2, tp=3),
        (BatchSplit(), DDP(), VocabParallel(), TensorParallel()),
        1,
    ),
    "stage 1": (Mesh(dp_shard=2, tp=2), (*BOTH, BatchSplit(axis="dp_shard"), ZeRO(stage=1)), 0),
    "stage 3": (Mesh(dp_shard=2, tp=3), (*BOTH, BatchSplit(axis="dp_shard"), ZeRO(stage=3)), 1),
    "activation_checkpointing": (
        Mesh(dp_shard=2, tp=2),
        (*BOTH, BatchSplit(axis="dp_shard"), ZeRO(), ActivationCheckpointing()),
        2,
    ),
}


def uneven(count: int, *, weighted: bool = False) -> list[dict[str, torch.Tensor]]:
    """Batches in which labels at the borders count, many do not, and one row has none."""
    found = batches(count)
    generator = torch.Generator().manual_seed(1)
    for batch in found:
        batch["labels"][0, :4] = torch.tensor([0, 33, 34, SIZES["vocab_size"] - 1])
        batch["labels"][1, 2:7], batch["labels"][2] = IGNORE_INDEX, IGNORE_INDEX
        if weighted:
            batch["loss_weights"] = torch.rand(NUM_SAMPLES, TOKENS, generator=generator, dtype=torch.float64)
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_device(case: str, tied: bool):
    mesh, strategies, micro = CASES[case]
    analyzed, plan = planned(analyzed_llama(tie_word_embeddings=tied), mesh, strategies, micro)
    assert_exact(analyzed, plan, uneven(2), fake=case == "activation_checkpointing" and tied)


@pytest.mark.parametrize(
    "strategies", [(VocabParallel(),), (*BOTH, ActivationCheckpointing())], ids=["vocab_parallel", "both"]
)
def test_one_rank_along_the_axis_has_the_whole_vocabulary_and_sends_nothing(strategies):
    analyzed, plan = planned(
        analyzed_llama(), Mesh(dp_replicate=2, tp=1), (BatchSplit(), DDP(), *strategies), 1
    )
    assert not any(action.inner_transfers for action in plan.for_rank(0).actions)
    assert_exact(analyzed, plan, uneven(2))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_and_smoothing_equal_one_device(smoothing: float):
    loss, data = token_cross_entropy(smoothing), uneven(2, weighted=True)
    analyzed = analyze(llama(), data[0], loss=loss)
    plan = make_plan(analyzed, planned(analyzed_llama(), Mesh())[1].job, Mesh(tp=3), micro_batch=2)
    assert_exact(analyzed, plan, data, loss)


class Glue(nn.Module):
    """A table with padding whose rows are scaled, a head with a bias, and what is between the head and the
    loss.
    """

    def __init__(self, behind: str = "capped", *, tied: bool = False, **table: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIZES["vocab_size"], 8, padding_idx=40, **table)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, SIZES["vocab_size"])
        self.bias = nn.Parameter(torch.randn(SIZES["vocab_size"]))
        self.register_buffer("scale", torch.tensor([0.7]))
        self.behind = behind
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        match self.behind:
            case "capped":
                return 5.0 * torch.tanh(logits.float() / 5.0)
            case "a scale":
                return logits * self.scale
            case "a trained scale":
                return logits * self.bias[:1]
            case "a bias per word":
                return logits + self.bias
            case "softmax":
                return logits.log_softmax(-1)
            case "words":
                return logits[..., :60]
            case _:
                return torch.nn.functional.linear(x, self.embed.weight)


@pytest.mark.parametrize("behind", ["capped", "a scale"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_elementwise_operations_on_logits_are_allowed_before_the_loss(behind: str, tied: bool):
    analyzed, plan = planned(
        Glue(behind, tied=tied),
        Mesh(dp_shard=2, tp=3),
        (VocabParallel(), BatchSplit(axis="dp_shard"), ZeRO()),
        1,
    )
    assert "embedding" in {
        weight.role for weight in analyzed.model_spec.params if weight.name == "embed.weight"
    }
    assert plan.sharding.logits_layout.placements
    data = uneven(2)
    data[0]["input_ids"][:, :4] = 40  # padding, on the second of three ranks
    verdict = verify(analyzed, plan, data)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("behind", "why"),
    [
        ("a bias per word", "add needs all logits of a token at once"),
        ("a trained scale", "mul needs all logits of a token at once"),
        ("softmax", "_log_softmax needs all logits of a token at once"),
        ("words", "slice needs all logits of a token at once"),
        ("the table again", "the loss takes other tensors than its output"),
    ],
)
def test_operations_over_the_whole_vocabulary_leave_the_head_whole(behind: str, why: str):
    batch = batches(1)[0]
    batch["labels"] = batch["labels"].clamp(max=59)  # one of the models has logits of 60 tokens
    analyzed = analyze(Glue(behind), batch)
    weights = {weight.name: weight for weight in analyzed.model_spec.params}
    assert (weights["head.weight"].role, weights["head.weight"].not_shardable_reason) == (
        "lm_head_unsharded",
        why,
    )
    assert analyzed.model_spec.logits is None
    assert (weights["embed.weight"].role == "embedding") is (behind != "the table again")
    both = {weight.name: weight for weight in analyze(Glue(behind, tied=True), batch).model_spec.params}
    assert list(unsharded_vocab_notes(analyzed.model_spec)) == [
        f"head.weight stays whole on every rank: {why}"
    ]
    assert both["embed.weight"].role != "embedding", "tied weights are divided together, or not at all"


def test_only_the_embedding_is_sharded_when_the_loss_needs_whole_logits():
    loss = Loss(token_cross_entropy().total, token_cross_entropy().count)
    analyzed = analyze(llama(), batches(1)[0], loss=loss)
    plan = make_plan(analyzed, planned(analyzed_llama(), Mesh())[1].job, Mesh(tp=2))
    assert [strategy.name for strategy in plan.strategies] == ["tensor_parallel", "vocab_parallel"]
    assert analyzed.model_spec.logits is None
    why = next(
        weight.not_shardable_reason
        for weight in analyzed.model_spec.params
        if weight.name == "lm_head.weight"
    )
    assert why == "the loss needs the logits of the whole vocabulary"
    verdict = verify(analyzed, plan, uneven(2), loss=loss)
    assert verdict.passed, str(verdict)
    with pytest.raises(
        PlanError, match=r"the loss needs full logits, and the plan shards them(?s:.*)the same loss"
    ):
        verify(*planned(analyzed_llama(), Mesh(tp=2), BOTH), uneven(1), loss=loss)


@pytest.mark.parametrize("table", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_couples_its_rows_stays_whole(table: dict[str, float]):
    analyzed = analyze(Glue(**table), batches(1)[0])
    embed = next(weight for weight in analyzed.model_spec.params if weight.name == "embed.weight")
    assert embed.role != "embedding"
    assert embed.not_shardable_reason == (f"{next(iter(table))} needs more than the rows of one rank")


def moved(plan: Plan, kind: str) -> list[tuple[str, str, int]]:
    acts = [action for action in plan.program.actions(FIRST_ROLE) if action.kind == kind]
    return [(act.subject, move.collective, move.nbytes) for act in acts for move in act.inner_transfers]


@pytest.mark.parametrize("ranks", [2, 3])
def test_its_bytes_are_two_sums_of_the_stream_and_two_numbers_per_token(ranks: int):
    _, plan = planned(analyzed_llama(), Mesh(tp=ranks), (VocabParallel(),))
    stream = NUM_SAMPLES * TOKENS * SIZES["hidden_size"] * 4
    assert moved(plan, "F") == [("model.embed_tokens", "all_reduce", stream)]
    assert moved(plan, "B") == [("lm_head", "all_reduce", stream)]
    assert moved(plan, "LOSS") == [("", "all_gather", NUM_SAMPLES * TOKENS * 2 * 4)]
    shapes = [
        {
            param_sharding.param.name: param_sharding.param.shape
            for param_sharding in plan.for_rank(rank).view.param_shardings
        }
        for rank in range(ranks)
    ]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert sum(prod(each[name]) for each in shapes) == SIZES["vocab_size"] * SIZES["hidden_size"]
        assert {each[name][0] for each in shapes} == ({34, 33} if ranks == 2 else {23, 22})


def test_logit_statistics_that_are_averaged_over_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch):
    def swapped(self: vocab_parallel_logits.VocabParallelLogits, numbers: torch.Tensor) -> torch.Tensor:
        told = right(self, numbers)
        return told.mean(0, keepdim=True).expand_as(told)

    right = vocab_parallel_logits.VocabParallelLogits._gather_stats
    monkeypatch.setattr(vocab_parallel_logits.VocabParallelLogits, "_gather_stats", swapped)
    assert not verify(*planned(analyzed_llama(), Mesh(tp=2), BOTH), uneven(1)).passed


def test_more_ranks_than_vocabulary_entries_are_refused():
    small = llama(vocab_size=3)
    data = {"input_ids": torch.zeros(4, 9, dtype=torch.long), "labels": torch.zeros(4, 9, dtype=torch.long)}
    job = Job(ModelConfig("llama"), DataConfig("random", sequence=9), TrainConfig(batch=4))
    with pytest.raises(
        PlanError, match=r"divide into 3 units, and tp has 4 ranks\n.*set mesh.tp to at most 3"
    ):
        make_plan(analyze(small, data), job, Mesh(tp=4), (VocabParallel(),))


def test_a_model_without_a_vocabulary_is_refused():
    data = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    loss = Loss(
        lambda outputs, batch: (outputs - batch["y"]).square().sum(),
        lambda batch: torch.tensor(len(batch["y"])),
        ("y",),
    )
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    job = Job(ModelConfig("m"), DataConfig("example"), TrainConfig(batch=4))
    model.forward = lambda x: nn.Sequential.forward(model, x)  # type: ignore[method-assign]
    with pytest.raises(
        PlanError,
        match=r"no embedding and no LM head that can be sharded(?s:.*)leave the strategy out",
    ):
        make_plan(analyze(model, data, loss=loss), job, Mesh(tp=2), (VocabParallel(),))


def evaluated(world: World, analyzed: AnalyzedModel, plan: Plan) -> tuple[float, torch.Tensor, float]:
    """The loss of an evaluation, logits outside of steps, and the loss of a second step."""
    with parallelize(analyzed, plan, world=world) as engine:
        data = uneven(2)
        found = engine.evaluate([engine.local_batch(batch) for batch in data]).loss
        with engine.full_params() as module:
            logits = module(input_ids=data[0]["input_ids"]).logits
        return found, logits, [engine.step(engine.local_batch(batch)).loss for batch in data][-1]


@pytest.mark.parametrize("mesh", [Mesh(tp=3), Mesh(dp_shard=2, tp=2)])
def test_evaluations_and_full_forwards_give_logits_of_the_whole_vocabulary(mesh: Mesh):
    analyzed, plan = planned(analyzed_llama(), mesh)
    _, alone = planned(analyzed_llama(), Mesh())
    (truth, logits, second), *_ = run_on_threads(lambda world: evaluated(world, analyzed, alone), Mesh())
    for mine, found, stepped in run_on_threads(lambda world: evaluated(world, analyzed, plan), mesh):
        assert mine == pytest.approx(truth, rel=1e-5)
        assert torch.allclose(found, logits, atol=1e-5)
        assert stepped == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_the_embedding_output_is_sent_in_its_own_dtype(compute: str):
    analyzed, plan = planned(
        analyzed_llama(), Mesh(tp=2), (VocabParallel(),), precision=PrecisionConfig(compute=compute)
    )
    dtypes = {
        action.kind: move.dtype
        for action in plan.program.actions(FIRST_ROLE)
        for move in action.inner_transfers
    }
    assert dtypes == {"F": "float32", "LOSS": "float32", "B": compute}
    assert trace(analyzed, plan, fake=False).passed
    assert replace(plan.sharding.logits_layout).placements
