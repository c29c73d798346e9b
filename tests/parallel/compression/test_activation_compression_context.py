"""What context parallelism exchanges travels as codes: results, bytes and refusals."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.coded_redistribution import CodedRedistribution
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.block_redistributions import _CodedMove
from meshwright.parallel.compression.activation_compression import ActivationCompression, FlatCodec
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import VOCABULARY, case_of, executor_of, first_of, tiny_job, verdict_of

WIDTH, HEADS, HEAD, LENGTH, BATCH = 9, 6, 5, 7, 4
INT8 = ActivationCompression(axis="cp", codec="int8")
REPLICAS = mw.DDP("cp")


class AttentionLayer(nn.Module):
    """A residual block of causal attention, in which several query heads share one of `groups` key heads."""

    def __init__(self, groups: int, p: float) -> None:
        super().__init__()
        self.norm, self.groups, self.p = nn.LayerNorm(WIDTH), groups, p
        self.q, self.o = nn.Linear(WIDTH, HEADS * HEAD), nn.Linear(HEADS * HEAD, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, groups * HEAD) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.norm(x)
        q, k, v = (each(taken).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        p = self.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True)
        return x + self.o(out.transpose(1, 2).flatten(2))


class Attentive(nn.Module):
    """Embedding, two attention layers, head."""

    def __init__(self, groups: int, p: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(AttentionLayer(groups, p) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(count: int = BATCH) -> dict[str, torch.Tensor]:
    """Random samples."""
    generator = torch.Generator().manual_seed(2)
    found = [torch.randint(VOCABULARY, (count, LENGTH), generator=generator) for _ in range(2)]
    return {"input_ids": found[0], "labels": found[1]}


@cache
def analyzed(groups: int = 3, p: float = 0.0) -> mw.AnalyzedModel:
    """The analyzed model, cached."""
    return mw.analyze(lambda: Attentive(groups, p), tokens(2))


def planned(
    mesh: mw.Mesh, *strategies: Strategy, groups: int = 3, p: float = 0.0, micro_batch: int = 2, **job: object
) -> Plan:
    """The plan of those strategies."""
    job.setdefault("train", TrainConfig(batch=BATCH, clip=0.5))
    return mw.make_plan(analyzed(groups, p), tiny_job(**job), mesh, strategies, micro_batch)


def found_by_verify(plan: Plan, groups: int = 3, p: float = 0.0, steps: int = 2) -> Any:
    """The verdict on `plan`, against one device that loses what the codes lose."""
    return verdict_of(case_of(analyzed(groups, p), plan, data=tokens(2 * BATCH)), steps=steps)


def check(plan: Plan, groups: int = 3, p: float = 0.0) -> None:
    """Fails unless the plan passes static checks, and equals one device that loses what its codes lose."""
    assert static_checks(plan) == []
    found = found_by_verify(plan, groups, p)
    assert found.passed, found


@pytest.mark.parametrize(
    ("mesh", "strategies", "codec", "options"),
    [
        (mw.Mesh(cp=2), (mw.Ulysses(), REPLICAS), "int8", {}),
        (mw.Mesh(cp=3), (mw.Ulysses(), REPLICAS), "bfloat16", {}),
        (mw.Mesh(cp=3), (mw.Ulysses(), REPLICAS), "int8", {"groups": 2}),
        (mw.Mesh(cp=3), (mw.Ulysses(), REPLICAS, mw.ActivationCheckpointing()), "float8", {"p": 0.2}),
        (mw.Mesh(pp=2, cp=2), (mw.Ulysses(), REPLICAS, mw.Pipeline()), "int8", {"groups": 2}),
    ],
    ids=["2 ranks", "3 ranks", "shared key heads", "recomputed, dropout", "stages"],
)
def test_exchanged_heads_equal_one_device_that_loses_what_codes_lose(
    mesh: mw.Mesh, strategies: tuple[Strategy, ...], codec: str, options: dict[str, Any]
):
    check(planned(mesh, *strategies, ActivationCompression(axis="cp", codec=codec), **options), **options)


def sent_by_attention(plan: Plan, groups: int) -> dict[str, float]:
    """The bytes that rank 0 sends in each action of a block, in one step."""

    def run(world: World) -> dict[str, float]:
        executor = executor_of(analyzed(groups), plan, world)
        executor.step(tokens())
        executor.close()
        return dict(world.ledger.sent_nbytes)

    sent = run_on_threads(run, plan.mesh)[0].items()
    return {name: nbytes for name, nbytes in sent if name.startswith(("F(layers", "B(layers"))}


@pytest.mark.parametrize(("ranks", "groups", "num_sent"), [(2, 6, 6), (3, 3, 3), (3, 2, 6)])
def test_an_exchange_sends_the_bytes_of_the_law(ranks: int, groups: int, num_sent: int):
    numel = 2 * -(-LENGTH // ranks) * HEAD  # of one head, of the rank with most tokens
    head = numel + 4 * -(-numel // 256)
    sent = sent_by_attention(planned(mw.Mesh(cp=ranks), mw.Ulysses(), REPLICAS, INT8, groups=groups), groups)
    assert len(sent) == 2 * 2 * 2  # forward and backward, layers, microbatches
    assert set(sent.values()) == {(2 * HEADS + 2 * num_sent) * head * (ranks - 1) // ranks}


decode, encode, move = FlatCodec.decode, FlatCodec.encode, _CodedMove.__call__
exchange = CodedRedistribution._exchange


def halved(codec: FlatCodec, codes: torch.Tensor, values: torch.Tensor) -> None:
    decode(codec, codes, values)
    values.mul_(0.5)


def exact_gradients(coded: _CodedMove, *args: Any, is_backward: bool) -> torch.Tensor | None:
    return None if is_backward else move(coded, *args, is_backward=is_backward)


def other_rank(coded: CodedRedistribution, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return exchange(coded, tensor, dim).roll(1, 0)


FAULTS = {
    "heads are decoded at half their size": (FlatCodec, "decode", halved, "sum of codes"),
    "heads of another rank": (CodedRedistribution, "_exchange", other_rank, "loss"),
    "gradients travel as they are": (_CodedMove, "__call__", exact_gradients, "ledger"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    where, name, wrong, quantity = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    plan = planned(mw.Mesh(cp=3), mw.Ulysses(), REPLICAS, INT8)
    assert first_of(found_by_verify(plan, steps=1))[1] in (quantity, "gradient")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: planned(mw.Mesh(), INT8), "mesh.cp is 1(?s:.*)set mesh.cp to 2 or more"),
        (
            lambda: planned(
                mw.Mesh(cp=2), mw.Ulysses(), REPLICAS, ActivationCompression("cp", min_numel=999)
            ),
            "no value along cp has 999 elements; the largest has 840(?s:.*)set min_numel to 840",
        ),
    ],
)
def test_what_cannot_be_coded_is_refused_with_a_repair(make: Callable[[], object], told: str):
    with pytest.raises(PlanError, match=told) as refused:
        make()
    assert all(each.fix for each in refused.value.diagnostics)
