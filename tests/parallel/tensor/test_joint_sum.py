"""Parallel row-wise layers share one all-reduce: bytes by the law, and every number as on one device."""

from functools import cache

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, parallelize, verify
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor import joint_sum, sharded_layer
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.model_families import (
    GROUPED,
    analyze_family,
    batches,
    factory_of,
    loss_of,
    planned,
)
from tests.parallel.tensor.odd_llama import batches as tokens
from tests.parallel.tensor.odd_llama import planned as said

LENGTH, NUM_SAMPLES, WIDTH = 12, 4, 24
STREAM = NUM_SAMPLES * LENGTH * WIDTH * 4  # bytes, of float32
NORMS = {"falcon": 1, "falcon, new": 2, "gpt-neox": 2, "cohere": 1}  # tensors that columns layers take in
KEPT, ANEW = (TensorParallel(), SequenceParallel()), (TensorParallel(), SequenceParallel(regather=True))


@cache
def analyzed_model(family: str) -> AnalyzedModel:
    if family != "cohere":
        return analyze_family(family, LENGTH)
    transformers.utils.logging.set_verbosity_error()
    return analyze(factory_of("Cohere", "ForCausalLM", **GROUPED)(), batches(family, 1, length=LENGTH)[0])


def stream_transfers(plan: Plan, kind: str, layer: str) -> list[tuple[str, int]]:
    """Returns the transfers of a tensor or slice of the size of the stream in the `layer` of that number."""
    actions = [
        each
        for each in plan.program.actions(FIRST_ROLE)
        if each.kind == kind and each.subject.endswith(f".{layer}")
    ]
    sizes = (STREAM, STREAM // plan.mesh.tp)
    return [
        (move.collective, move.nbytes)
        for each in actions
        for move in each.inner_transfers
        if move.nbytes in sizes
    ]


@pytest.mark.parametrize("family", NORMS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_sends_the_bytes_of_one_sum(family: str, ranks: int):
    plan, inputs = planned(analyzed_model(family), Mesh(tp=ranks), (TensorParallel(),)), NORMS[family]
    assert stream_transfers(plan, "F", "1") == [("all_reduce", STREAM)]
    assert stream_transfers(plan, "B", "1") == [("all_reduce", STREAM)] * inputs
    k = (1 + inputs) / 2
    sent = sum(
        2 * nbytes * (ranks - 1) / ranks
        for kind in ("F", "B")
        for _, nbytes in stream_transfers(plan, kind, "1")
    )
    assert sent == 4 * k * NUM_SAMPLES * LENGTH * WIDTH * (ranks - 1) / ranks * 4


@pytest.mark.parametrize("family", NORMS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_with_sequence_parallel_it_scatters_once(family: str, ranks: int):
    inputs, gathered, scattered = NORMS[family], ("all_gather", STREAM // ranks), ("reduce_scatter", STREAM)
    for strategies, again in ((KEPT, 0), (ANEW, inputs)):
        plan = planned(analyzed_model(family), Mesh(tp=ranks), strategies)
        assert stream_transfers(plan, "F", "1") == [gathered] * inputs + [scattered]
        assert sorted(stream_transfers(plan, "B", "1")) == [gathered] * (1 + again) + [scattered] * inputs


CASES: dict[str, tuple[str, Mesh, tuple[Strategy, ...], int]] = {
    "cohere on 2 ranks": ("cohere", Mesh(tp=2), (TensorParallel(),), 2),
    "cohere on 3 ranks, in slices": ("cohere", Mesh(tp=3), KEPT, 0),
    "gpt-neox on 2 ranks, sequence_parallel, regathered and recomputed": (
        "gpt-neox",
        Mesh(tp=2),
        (*ANEW, ActivationCheckpointing()),
        2,
    ),
    "falcon in uneven chunks": ("falcon", Mesh(tp=3), (TensorParallel(num_overlap_chunks=3),), 0),
    "falcon, new, in slices and chunks": (
        "falcon, new",
        Mesh(tp=2),
        (TensorParallel(num_overlap_chunks=2), SequenceParallel()),
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_device(case: str):
    family, mesh, strategies, micro = CASES[case]
    analyzed = analyzed_model(family)
    assert_exact(
        analyzed,
        planned(analyzed, mesh, strategies, micro),
        batches(family, 2, length=LENGTH),
        loss_of(family),
    )


def test_in_3d_the_sum_along_the_depth_is_one():
    even = {"vocab_size": 72, "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 24}
    analyzed, cube = (
        analyze_family("gpt-neox", LENGTH, **even),
        (TensorParallel3D(), BatchSplit("dp_shard"), ZeRO(gather="microbatch")),
    )
    plan = planned(analyzed, Mesh(dp_shard=2, tp_depth=2, tp=2), cube)
    (forward,) = [each for each in plan.program.actions(FIRST_ROLE) if each.name == "F(gpt_neox.layers.1, 0)"]
    scattered = [move for move in forward.inner_transfers if move.collective == "reduce_scatter"]
    assert len(scattered) == 3, "q, k and v; the first of the mlp; attention and mlp together"
    assert_exact(analyzed, plan, batches("gpt-neox", 1, length=LENGTH))


class Branches(nn.Module):
    """Three pairs side by side, with biases; what the first gives out is multiplied by `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = nn.LayerNorm(8), factor
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*sizes) for _ in range(3)) for sizes in ((8, 12), (12, 8))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        first, *others = (down(torch.tanh(up(h))) for up, down in zip(self.up, self.down, strict=True))
        first = first if self.factor == 1 else first * self.factor
        return sum(others, x + first)


class Network(nn.Module):
    """Embedding, such layers, head."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(67, 8), nn.Linear(8, 67)
        self.layers = nn.ModuleList(Branches(factor) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@cache
def network(factor: float) -> AnalyzedModel:
    sockets = {"layers.*.up.*": "colwise", "layers.*.down.*": "rowwise"}
    return analyze(lambda: Model(Network(factor), layer_roles=sockets), tokens(1, length=LENGTH)[0])


def branches(
    factor: float, strategies: tuple[Strategy, ...], ranks: int = 3, **job: object
) -> tuple[AnalyzedModel, Plan]:
    return said(network(factor), Mesh(tp=ranks), strategies, length=LENGTH, **job)


@pytest.mark.parametrize(
    "strategies",
    [
        (TensorParallel(),),
        (TensorParallel(num_overlap_chunks=2), SequenceParallel(regather=True), ActivationCheckpointing()),
    ],
    ids=["whole", "slices"],
)
@pytest.mark.parametrize(("factor", "sums"), [(1.0, 1), (0.5, 2)])
def test_three_pairs_share_sums_as_far_as_the_model_allows(
    strategies: tuple[Strategy, ...], factor: float, sums: int
):
    analyzed, plan = branches(factor, strategies)
    forwards = [
        each
        for each in plan.program.actions(FIRST_ROLE)
        if each.subject == "layers.1" and each.kind in ("F", "F_CHECKPOINTED")
    ]
    moves = [
        move for move in forwards[0].inner_transfers if move.collective in ("all_reduce", "reduce_scatter")
    ]
    assert len(moves) == sums * (2 if len(strategies) > 1 else 1), "with 2 chunks, two messages a sum"
    assert_exact(analyzed, plan, tokens(2, length=LENGTH))


def test_a_scaled_summand_in_a_shared_sum_is_noticed(monkeypatch: pytest.MonkeyPatch):
    analyzed, plan = branches(0.5, (TensorParallel(),))
    monkeypatch.setattr(
        sharded_layer, "joint_sum_members", lambda sums: joint_sum.joint_sum_members(all_in_one_sum(plan))
    )
    assert not verify(analyzed, plan, tokens(1, length=LENGTH)).passed


def all_in_one_sum(plan: Plan) -> dict[str, tuple[str, ...]]:
    """All rows layers of a block, as if they ended in one sum."""
    found = {}
    for block in ("layers.0", "layers.1"):
        layers = tuple(
            call.name
            for call in plan.model_spec.layer_calls
            if call.role == "rowwise" and call.block_call == block
        )
        found |= dict.fromkeys(layers, layers)
    return found


def test_a_lost_summand_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharded_layer, "add_summand", lambda summand, more: summand)
    analyzed, plan = branches(1.0, (TensorParallel(),))
    assert not verify(analyzed, plan, tokens(1, length=LENGTH)).passed


@pytest.mark.parametrize("strategies", [(TensorParallel(),), KEPT], ids=["whole", "slices"])
def test_an_evaluation_and_half_precision_share_the_sum_too(strategies: tuple[Strategy, ...]):
    found = []
    for ranks, those in ((3, strategies), (1, ())):
        analyzed, plan = branches(1.0, those, ranks, precision=PrecisionConfig(compute="bfloat16"))
        found += run_on_threads(
            lambda world, analyzed=analyzed, plan=plan: losses_and_norm(world, analyzed, plan), plan.mesh
        )[:1]
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def losses_and_norm(world: World, analyzed: AnalyzedModel, plan: Plan) -> list[float]:
    """The loss and the norm of the gradients of a step, and the loss of an evaluation behind it."""
    with parallelize(analyzed, plan, world=world) as engine:
        batch = tokens(1, length=LENGTH)[0]
        metrics = engine.step(engine.local_batch(batch))
        return [metrics.loss, metrics.grad_norm, engine.evaluate([engine.local_batch(batch)]).loss]


def test_layers_that_run_in_another_order_than_in_the_trial_are_reported():
    turns = joint_sum.joint_sum_members(dict.fromkeys(("a", "b", "c"), ("a", "b", "c")))
    zeros = turns["a"].contribute(torch.ones(2, 3), [], sharded_layer.I, 2)
    assert zeros.eq(0).all()
    assert zeros.is_contiguous()
    with pytest.raises(RuntimeError, match=r"c ends the sum of a, b, c, and a ran before it: needed are all"):
        turns["c"].collect()
    with pytest.raises(RuntimeError, match=r"none ran before it"):
        turns["c"].collect()
