"""Blocks that branch on the number of tokens are refused on the sequence lengths of the run, before results
are wrong.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.sequence_analysis.same_ops_on_shards import SequenceShardCheck
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads

NUM_SAMPLES, TOKENS = 2, 13
Rule = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """Attends to what `rule` makes of its input."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule, self.qkv, self.out = rule, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(self.rule(x)).chunk(3, -1))
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Own(nn.Module):
    """Words, two layers, a head."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(67, 8), nn.Linear(8, 67)
        self.layers = nn.ModuleList(Layer(rule) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def far(x: torch.Tensor) -> torch.Tensor:
    return 2 * x if x.shape[1] > 16 else x


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * (1.5 if x.shape[1] > 16 else 1.0)


def near(x: torch.Tensor) -> torch.Tensor:
    return 2 * x if x.shape[1] < 5 else x


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


def samples(length: int = TOKENS) -> dict[str, torch.Tensor]:
    thrown = torch.Generator().manual_seed(2)
    return {
        key: torch.randint(67, (NUM_SAMPLES, length), generator=thrown) for key in ("input_ids", "labels")
    }


def analyzed_model(rule: Rule) -> AnalyzedModel:
    return analyze(lambda: Own(rule), samples())


JOB = Job(ModelConfig("own"), DataConfig("random", sequence=TOKENS), TrainConfig(batch=NUM_SAMPLES))


def planned(analyzed: AnalyzedModel, mesh: Mesh | None = None, *strategies: Strategy) -> Plan:
    return make_plan(
        analyzed, JOB, mesh or Mesh(cp=3), (*(strategies or (RingAttention(),)), DDP(axis="cp")), 1
    )


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(cp=3), (RingAttention(),)),
        (Mesh(cp=4), (HybridContextParallel(),)),
        (Mesh(pp=2, cp=2), (Pipeline(), RingAttention())),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("rule", "message"),
    [(far, "layers.0 computes 'mul' on sequences of 40"), (scaled, "the number of tokens (mul)")],
)
def test_a_branch_taken_by_longer_sequences_is_refused_when_they_come(
    rule: Rule, message: str, mesh: Mesh, strategies: tuple
) -> None:
    analyzed = analyzed_model(rule)
    plan = planned(analyzed, mesh, *strategies)
    assert verify(analyzed, plan, [samples()]).passed
    with pytest.raises(PlanError) as caught:
        verify(analyzed, plan, [samples(40)])
    assert message in str(caught.value)
    assert "let it compute the same on 40 tokens as on fewer; or set mesh.cp = 1" in str(caught.value)


def test_a_branch_that_a_rank_takes_alone_is_refused_before_anything_starts() -> None:
    analyzed = analyzed_model(
        near
    )  # on 13 and on 5 tokens it is not taken, and of 13 on three ranks one has 4
    with pytest.raises(PlanError, match="a block cannot run on some of the tokens: layers"):
        planned(analyzed)
    assert planned(analyzed, Mesh(cp=2)).mesh.cp == 2


def test_sequences_of_any_length_run_where_blocks_do_not_branch_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    analyzed, tried = analyzed_model(plain), list[dict[int, int]]()
    run = SequenceShardCheck._trace
    monkeypatch.setattr(
        SequenceShardCheck,
        "_trace",
        lambda self, tokens, lengths, share: tried.append(lengths) or run(self, tokens, lengths, share),
    )
    plan = planned(analyzed)

    def train(world):
        with parallelize(analyzed, plan, world=world) as engine:
            return [engine.step(engine.local_batch(samples(length))).loss for length in (13, 9, 21, 20, 13)]

    def alone() -> list[float]:
        with parallelize(analyzed, make_plan(analyzed, JOB)) as engine:
            return [engine.step(samples(length)).loss for length in (13, 9, 21, 20, 13)]

    assert run_on_threads(train, Mesh(cp=3))[0] == pytest.approx(alone(), rel=1e-4)
    assert tried == [
        {13: 13},
        {13: 13},
        {13: 9},
        {13: 21},
    ]  # some of 13, all of 13; fewer; more; the last two lie between


def test_evaluations_are_checked_too() -> None:
    analyzed = analyzed_model(far)
    plan = planned(analyzed)

    def evaluate(world):
        with parallelize(analyzed, plan, world=world) as engine:
            engine.evaluate([engine.local_batch(samples(40))])

    with pytest.raises(PlanError, match="on sequences of 40 tokens"):
        run_on_threads(evaluate, Mesh(cp=3))


def test_a_block_that_fails_on_a_length_is_reported() -> None:
    def short(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 16:
            raise ValueError("too long")
        return x

    analyzed = analyzed_model(short)
    tokens = analyzed.sequence_info
    assert tokens is not None
    with pytest.raises(PlanError, match="it does not run on sequences of 40 tokens: ValueError: too long"):
        analyzed.shard_check.check(tokens, SequenceSharding(3), {TOKENS: 40})
