"""Capacity and losses of the router under context parallelism: the tokens and values of one device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

import meshwright as mw
from meshwright.model.context_parallel.block_input_sharding import ShardedForward
from meshwright.nn.router import Router
from meshwright.nn.routing.routes import Routes
from meshwright.plan.job.precision import PrecisionConfig
from tests.nn.test_mixture_of_experts import PLANS as OTHER_PLANS
from tests.nn.test_mixture_of_experts import (
    ROUTINGS,
    TOKENS,
    VOCABULARY,
    Decoder,
    balanced_loss,
    batch,
    plan_of,
)

RECOMPUTE = mw.ActivationCheckpointing()
PLANS = {
    "cp 2": ({"cp": 2}, (mw.RingAttention(), mw.DDP("cp")), 0),
    "cp 3, striped": ({"cp": 3}, (mw.RingAttention(load_balance="striped"), mw.DDP("cp")), 4),
    "cp 2, ulysses, recompute": ({"cp": 2}, (mw.Ulysses(), mw.DDP("cp"), RECOMPUTE), 4),
    "cp 2, ep 2": ({"cp": 2, "ep": 2}, None, 0),
    "cp 2, pp 2": ({"cp": 2, "pp": 2}, None, 4),
    "cp 3, tp 2": ({"cp": 3, "tp": 2}, None, 0),
}


@pytest.fixture(autouse=True)
def _plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, plan in PLANS.items():
        monkeypatch.setitem(OTHER_PLANS, name, plan)


@cache
def analyzed_with_losses(routing: str) -> mw.AnalyzedModel:
    return mw.analyze(lambda: Decoder(ROUTINGS[routing], has_losses=True), batch(0, 2), loss=balanced_loss())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_and_losses_of_the_router_are_those_of_one_device(routing, plan):
    analyzed = analyzed_with_losses(routing)
    verdict = mw.verify(analyzed, plan_of(analyzed, plan), [batch(0)], loss=balanced_loss())
    verdict.raise_if_failed()
    assert max(verdict.max_errors.values()) < 1e-13


@pytest.mark.parametrize("num_tokens", [2, 4])
def test_ranks_with_one_token_or_none_choose_as_one_device(num_tokens):
    tokens = torch.randint(VOCABULARY, (12, num_tokens + 1), generator=torch.Generator().manual_seed(1))
    short = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].clone()}
    first = {name: value[:2] for name, value in short.items()}
    for routing in (mw.nn.ExpertChoice(1.0), mw.nn.Switch(1.0, noise_size=0)):
        analyzed = mw.analyze(lambda routing=routing: Decoder(routing), first)
        mw.verify(analyzed, plan_of(analyzed, "cp 3"), [short]).raise_if_failed()


def test_draws_for_two_tokens_are_refused_because_padding_looks_like_them():
    short = {name: value[:, :2] for name, value in batch(0).items()}
    analyzed = mw.analyze(
        lambda: Decoder(mw.nn.GShard(1.0)), {name: value[:2] for name, value in short.items()}
    )
    with pytest.raises(mw.PlanError, match="of sequences of 2 tokens: the slice is ambiguous"):
        mw.verify(analyzed, plan_of(analyzed, "cp 3"), [short])


@pytest.mark.parametrize("routing", ["gshard", "expert choice"])
def test_scores_are_sent_in_a_dtype_that_rounds_nothing(routing):
    analyzed = analyzed_with_losses(routing)
    plan = plan_of(analyzed, "cp 2, ep 2")
    job = replace(plan.job, precision=PrecisionConfig(compute="bfloat16"))
    plan = mw.make_plan(analyzed, job, mw.Mesh(cp=2, ep=2), micro_batch=3)
    (forward,) = (action for action in plan.for_rank(0).actions if action.name == "F(layers.0, 0)")
    rows = 3 * TOKENS // 2
    gathers = [
        (each.dtype, each.nbytes) for each in forward.inner_transfers if each.collective == "all_gather"
    ]
    # choices (and priorities), shares of the choices; then two losses. Or scores of four experts; two losses
    expected = {
        "gshard": [
            ("int64", rows * 2 * 8),
            ("float32", rows * 4),
            ("int64", rows * 8),
            ("float32", rows * 8),
        ],
        "expert choice": [("float32", rows * 4 * 4), ("float32", rows * 8)],
    }
    assert gathers == expected[routing]
    found = mw.trace(analyzed, plan, loss=balanced_loss())
    assert found.passed, found


def test_places_among_the_tokens_of_a_rank_drop_others_and_are_noticed(monkeypatch):
    def of_own_tokens(
        forward: ShardedForward, block_call: str, compute: Callable[..., Any], values: Any, *, per_token: bool
    ) -> Any:
        return compute(*values)

    monkeypatch.setattr(ShardedForward, "compute_of_whole_samples", of_own_tokens)
    analyzed = mw.analyze(lambda: Decoder(mw.nn.GShard(1.0)), batch(0, 2))
    verdict = mw.verify(analyzed, plan_of(analyzed, "cp 3"), [batch(0)])
    assert not verdict.passed
    assert "choice of experts" in str(verdict)


@dataclass(frozen=True)
class FewestFirst(mw.nn.Routing):
    """A routing that looks at other tokens by itself, or gathers what are no tokens."""

    by_itself: bool = True

    def diagnostics(self, num_experts: int) -> Iterator[mw.Diagnostic]:
        yield from ()

    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        logits = router(hidden)
        if self.by_itself:
            means = logits.detach().mean(1, keepdim=True)
        else:
            means = router.whole_samples(lambda rows: rows, logits.detach().flatten(0, 1))
            means = means.unflatten(0, hidden.shape[:2])
        scores = (logits - means).softmax(-1)
        return Routes(scores.argmax(-1, keepdim=True), scores.amax(-1, keepdim=True), logits, scores, None)


@pytest.mark.parametrize(
    ("by_itself", "message"),
    [
        (True, r"layers.\*.moe takes mean over tokens"),
        (False, r"layers.\*.moe.router.whole_samples computes of whole samples what is not \[samples, tok"),
    ],
)
def test_a_routing_that_compares_tokens_otherwise_is_refused(by_itself, message):
    analyzed = mw.analyze(lambda: Decoder(FewestFirst(by_itself)), batch(0, 2))
    with pytest.raises(mw.PlanError, match=message):
        plan_of(analyzed, "cp 3")


def test_on_one_device_it_calls_the_function():
    values = torch.arange(6.0).view(1, 3, 2)
    whole = mw.nn.MixtureOfExperts(2, 3, 4).router.whole_samples
    assert torch.equal(whole(F.relu, values), values)
    assert whole(lambda each: each.sum(1), values, per_token=False).tolist() == [[6.0, 9.0]]
