"""The layer in a decoder: equal to one device under every plan, with the same tokens dropped; bad input."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import meshwright as mw
from meshwright.nn import (
    ExpertChoice,
    ExpertMLP,
    GShard,
    MixtureOfExperts,
    Routing,
    SigmoidGroups,
    Switch,
    TopK,
)
from meshwright.nn.router import Router
from meshwright.nn.routing.routes import Routes
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.job.model_config import ModelConfig

VOCABULARY, WIDTH, TOKENS, BATCH = 17, 8, 6, 12
ROUTINGS = {
    "top-k": TopK(2),
    "gshard": GShard(1.0, 3, "random"),
    "switch": Switch(1.0, noise_size=0.3),
    "expert choice": ExpertChoice(),
    "sigmoid": SigmoidGroups(2, 2, 1),
}
BATCH_PLANS = mw.BatchSplit(), mw.DDP()
EXPERTS = mw.ExpertParallel(), mw.BatchSplit("ep"), mw.BatchSplit("dp_shard"), mw.DDP("dp_shard")
ZERO = mw.BatchSplit("dp_shard"), mw.ZeRO()
PLANS = {  # mesh, strategies, samples of a microbatch
    "ddp 2, 3 microbatches": ({"dp_replicate": 2}, BATCH_PLANS, 2),
    "ddp 3, recompute": ({"dp_replicate": 3}, (*BATCH_PLANS, mw.ActivationCheckpointing()), 0),
    "zero 3": ({"dp_shard": 3}, ZERO, 0),
    "pp 2": ({"pp": 2}, (mw.Pipeline(),), 3),
    "pp 2, zb_v, zero 3": ({"pp": 2, "dp_shard": 2}, (*ZERO, mw.Pipeline(schedule="zb_v")), 1),
    "tp 2": ({"tp": 2}, (mw.TensorParallel(),), 0),
    "ep 3": ({"ep": 3}, EXPERTS, 2),
    "ep 2, tp 2, recompute": ({"ep": 2, "tp": 2}, None, 0),
    "ep 2, sliced along tp 2": ({"ep": 2, "tp": 2}, (*EXPERTS, mw.ExpertTensorParallel()), 0),
    "cp 3": ({"cp": 3}, (mw.RingAttention(), mw.DDP("cp")), 0),
}


class DecoderLayer(nn.Module):
    """Attention and a mixture of experts; `aux` are the losses of the layers before, per sample."""

    def __init__(self, routing: Routing, has_losses: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.moe = MixtureOfExperts(WIDTH, 12, 4, routing, ExpertMLP(bias=True), shared_intermediate=5)
        self.has_losses = has_losses

    def forward(self, x: torch.Tensor, aux: torch.Tensor | None = None) -> object:
        hidden = self.norm1(x)
        q, k, v = (each(hidden).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        if not self.has_losses:
            return x + self.moe(self.norm2(x))
        output, losses = self.moe(self.norm2(x), return_losses=True)
        return x + output, aux + losses.load_balancing + 0.1 * losses.z


class Decoder(nn.Module):
    def __init__(self, routing: Routing, has_losses: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(DecoderLayer(routing, has_losses) for _ in range(2))
        self.head, self.has_losses = nn.Linear(WIDTH, VOCABULARY, bias=False), has_losses

    def forward(self, input_ids: torch.Tensor) -> object:
        x = self.embed(input_ids)
        if not self.has_losses:
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))
        aux = x[:, 0, 0] * 0
        for layer in self.layers:
            x, aux = layer(x, aux)
        return self.head(self.norm(x)), aux


def batch(step: int, num_samples: int = BATCH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (num_samples, TOKENS + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].clone()}


def balanced_loss() -> mw.Loss:
    def total(outputs: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        (logits, aux), labels = outputs, batch["labels"]
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return cross_entropy + 0.1 * (aux * (labels != -100).sum(1)).sum()

    return mw.Loss(total, lambda batch: (batch["labels"] != -100).sum())


def plan_of(analyzed: mw.AnalyzedModel, name: str) -> mw.Plan:
    axes, strategies, micro_batch = PLANS[name]
    train = mw.TrainConfig(batch=BATCH, clip=0.5)
    job = mw.Job(ModelConfig("mine"), DataConfig("mine"), train, OptimizerConfig("sgd", lr=0.1))
    return mw.make_plan(analyzed, job, mw.Mesh(**axes), strategies, micro_batch)


@cache
def analyzed_decoder(routing: str) -> mw.AnalyzedModel:
    return mw.analyze(lambda: Decoder(ROUTINGS[routing]), batch(0, 2))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_decoder_of_experts_equals_one_device(routing, plan):
    analyzed = analyzed_decoder(routing)
    verdict = mw.verify(analyzed, plan_of(analyzed, plan), [batch(0), batch(1)])
    verdict.raise_if_failed()
    assert max(verdict.max_errors.values()) < 1e-13


@pytest.mark.parametrize("plan", ["ddp 2, 3 microbatches", "pp 2"])
@pytest.mark.parametrize("routing", ["top-k", "gshard"])
def test_losses_of_the_router_are_those_of_one_device(routing, plan):
    loss = balanced_loss()
    analyzed = mw.analyze(lambda: Decoder(ROUTINGS[routing], has_losses=True), batch(0, 2), loss=loss)
    verdict = mw.verify(analyzed, plan_of(analyzed, plan), [batch(0)], loss=loss)
    verdict.raise_if_failed()
    assert max(verdict.max_errors.values()) < 1e-13


@dataclass(frozen=True)
class Recorded(Routing):
    """A routing that notes the index of each sample by the sum of its input."""

    routing: Routing
    seen: dict[float, set[tuple[int, ...]]] = field(default_factory=dict)

    def diagnostics(self, num_experts: int) -> Iterator[mw.Diagnostic]:
        yield from self.routing.diagnostics(num_experts)

    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        routes = self.routing.route(hidden, router)
        if not isinstance(hidden, FakeTensor):
            for sample, index in zip(hidden.detach(), routes.index, strict=True):
                weighted = sample * torch.arange(1, sample.numel() + 1).view(sample.shape)
                indices = tuple(index.flatten().tolist())
                self.seen.setdefault(round(weighted.sum().item(), 6), set()).add(indices)
        return routes

    def __deepcopy__(self, memo: object) -> "Recorded":
        return self


@pytest.mark.parametrize(
    "routing", [GShard(1.0, priority="random"), Switch(0.75, 3, 0.3)], ids=lambda each: type(each).__name__
)
def test_the_same_tokens_are_dropped_under_every_plan(routing):
    recorded = Recorded(routing)
    analyzed = mw.analyze(lambda: Decoder(recorded), batch(0, 2))
    recorded.seen.clear()
    for plan in ("ddp 2, 3 microbatches", "ddp 3, recompute", "pp 2", "pp 2, zb_v, zero 3"):
        # one device and the ranks meet each sample in 2 layers: a second choice of experts would show
        mw.verify(analyzed, plan_of(analyzed, plan), [batch(0)]).raise_if_failed()
    assert len(recorded.seen) == 2 * BATCH
    assert {len(indices) for indices in recorded.seen.values()} == {1}
    assert any(4 in index for indices in recorded.seen.values() for index in indices)


def test_draws_of_a_rank_of_its_own_drop_other_tokens_and_are_noticed(monkeypatch):
    recorded = Recorded(GShard(1.0))
    analyzed = mw.analyze(lambda: Decoder(recorded), batch(0, 2))
    plan = plan_of(analyzed, "ddp 2, 3 microbatches")
    drawn = torch.rand(1000, dtype=torch.float64)

    def first_numbers(like: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return drawn[: like.numel()].view(like.shape)

    monkeypatch.setattr(torch, "rand_like", first_numbers)
    assert not mw.verify(analyzed, plan, [batch(0)]).passed


@pytest.mark.parametrize("routing", ROUTINGS)
def test_scores_that_are_not_finite_are_seen_in_the_output(routing):
    torch.manual_seed(1)
    layer = MixtureOfExperts(WIDTH, 12, 4, ROUTINGS[routing])
    layer.router.register_forward_hook(lambda module, args, logits: spoil(logits))
    assert layer(torch.randn(2, TOKENS, WIDTH))[1].isnan().any()


def spoil(logits: torch.Tensor) -> torch.Tensor:
    """Logits in which those of the last token, whose experts are full, are NaN."""
    logits[1, :, 0] += 50
    logits[1, -1] = torch.nan
    return logits


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(mw.PlanError) as refused:
        MixtureOfExperts(WIDTH, 0, 0, Switch(0.0, "rank", 2.0, "gaussian", "newest"), ExpertMLP("sillu"))
    text = str(refused.value)
    assert len(refused.value.diagnostics) == 8
    assert "num_experts is 0; needed is a whole number from 1 up" in text
    assert "the capacity factor is 0.0; needed is a number above 0" in text
    assert "capacity is for each rank, so the number of devices would decide what is dropped" in text
    assert "the noise of the router's input is 'gaussian'" in text
    assert "did you mean 'silu'?" in text


@pytest.mark.parametrize(
    ("num_experts", "routing", "message"),
    [
        (4, TopK(5), "chooses k = 5 of 4 experts; needed is 1 <= k <= num_experts"),
        (4, TopK(0), "chooses k = 0 of 4 experts"),
        (4, TopK(1), "one expert with a normalized weight always has weight 1"),
        (1, GShard(), "each token chooses 2 of 1 experts"),
        (4, GShard(-1.0), "the capacity factor is -1.0"),
        (4, GShard(float("nan")), "the capacity factor is nan"),
        (4, ExpertChoice(1.0, "microbatch"), "capacity is for each microbatch"),
        (4, ExpertChoice(1.0, 0), "group_tokens is 0; needed is 'sample', or a whole number from 1 up"),
        (4, Switch(1.0, noise_size=1.0), "noise_size is 1.0; needed is a number from 0 up to below 1"),
        (6, SigmoidGroups(2, 4, 1), "6 experts do not divide into 4 groups"),
        (6, SigmoidGroups(2, 3, 4), "a token reaches 4 of 3 groups of experts"),
        (6, SigmoidGroups(3, 3, 1), "chooses k = 3 of the 2 experts in 1 groups"),
        (6, SigmoidGroups(2, scale=0.0), "the scale of the weights is 0.0"),
    ],
)
def test_a_routing_that_cannot_work_is_refused_with_a_repair(num_experts, routing, message):
    with pytest.raises(mw.PlanError) as refused:
        MixtureOfExperts(WIDTH, 12, num_experts, routing)
    assert message in str(refused.value)
    assert "repair: set" in str(refused.value)


def test_groups_that_do_not_divide_a_sample_and_merged_samples_are_refused():
    layer = MixtureOfExperts(WIDTH, 12, 4, GShard(group_tokens=4))
    with pytest.raises(mw.PlanError, match=r"groups of 4 tokens do not divide .*\n.*1, 2, 3, 6"):
        layer(torch.zeros(2, TOKENS, WIDTH))
    with pytest.raises(mw.PlanError, match=r"shape \(12, 8\); needed is \[samples, tokens, width\]"):
        layer(torch.zeros(2 * TOKENS, WIDTH))
