"""Computation that overlaps communication changes no result, is stated as it is sent, and really runs
meanwhile.
"""

from collections.abc import Callable

import pytest
import torch
import transformers

from meshwright.api import analyze, parallelize, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor import comm_overlap
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import analyzed_llama, batches, llama, planned

SHARDED = (BatchSplit(axis="dp_shard"), ZeRO())
LENGTH = 12
CASES = {
    "2 chunks": (Mesh(tp=2), (TensorParallel(num_overlap_chunks=2),), 0),
    "3 uneven chunks": (Mesh(tp=3), (TensorParallel(num_overlap_chunks=3),), 4),
    "more chunks than samples": (Mesh(tp=2), (TensorParallel(num_overlap_chunks=8),), 1),
    "slices of tokens": (Mesh(tp=3), (TensorParallel(num_overlap_chunks=3), SequenceParallel()), 4),
    "zero and activation_checkpointing": (
        Mesh(dp_shard=2, tp=2),
        (
            TensorParallel(num_overlap_chunks=2),
            SequenceParallel(regather=True),
            *SHARDED,
            ActivationCheckpointing(),
        ),
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_device(case: str):
    mesh, strategies, micro = CASES[case]
    analyzed, plan = planned(
        analyzed_llama(LENGTH, attention_bias=True, mlp_bias=True), mesh, strategies, micro, length=LENGTH
    )
    assert_exact(analyzed, plan, batches(2, length=LENGTH), fake=case == "3 uneven chunks")


def test_chunks_send_the_same_bytes_in_more_messages():
    found = {}
    for chunks in (1, 3):
        _, plan = planned(analyzed_llama(), Mesh(tp=2), (TensorParallel(num_overlap_chunks=chunks),))
        (action,) = [each for each in plan.program.actions(FIRST_ROLE) if each.name == "F(model.layers.1, 0)"]
        found[chunks] = [move.nbytes for move in action.inner_transfers]
    assert len(found[3]) == 3 * len(found[1]) == 3 * 2
    assert sum(found[3]) == sum(found[1])
    assert found[3][:3] == sorted(found[3][:3], reverse=True), (
        "the first chunks have the samples that are left over"
    )


def test_chunks_are_samples_where_a_model_merges_samples_and_tokens():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 6, "ffn_dim": 53, "max_position_embeddings": 32}
    config = transformers.OPTConfig(vocab_size=67, hidden_size=48, word_embed_proj_dim=48, dropout=0, **sizes)
    analyzed = analyze(transformers.OPTForCausalLM(config), batches(1)[0], loss=token_cross_entropy())
    analyzed, plan = planned(analyzed, Mesh(tp=2), (TensorParallel(num_overlap_chunks=3),), 4)
    assert_exact(analyzed, plan, batches(1))


def test_a_lost_weight_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comm_overlap, "_accumulate_grad", lambda leaf, gradient: None)
    analyzed, plan = planned(analyzed_llama(), Mesh(tp=2))
    assert not verify(analyzed, plan, batches(1)).passed


class Orders:
    """The actions of each rank in the backward of the second layer: sums that it issues, and weights whose
    gradients come late.
    """

    def __init__(self) -> None:
        self.seen: dict[int, list[str]] = {0: [], 1: []}
        self.names: dict[int, tuple[int, str]] = {}  # of weights, by id
        self.add = comm_overlap._accumulate_grad

    def step(self, world: World, analyzed: AnalyzedModel, plan: Plan) -> None:
        group, mine = world.group(("tp",)), self.seen[world.rank]
        issue = group.all_reduce

        def issued(tensor: torch.Tensor, **how: str) -> object:
            mine.extend(["sum"] if how["action"].startswith("B(model.layers.1") else [])
            return issue(tensor, **how)

        with parallelize(analyzed, plan, world=world) as engine, pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "all_reduce", issued)
            for name, parameter in engine.executor.state.trained_module.parameters.items():
                self.names[id(parameter)] = world.rank, name
            engine.step(engine.local_batch(batches(1)[0]))

    def added(self, leaf: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> None:
        rank, name = self.names[id(leaf)]
        self.seen[rank] += (
            [name.removeprefix("model.layers.1.").removesuffix(".weight")] if "layers.1" in name else []
        )
        self.add(leaf, gradient)


def test_column_parallel_weight_gradients_wait_until_the_input_sum_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
):
    analyzed, plan = planned(analyzed_llama(), Mesh(tp=2))
    orders = Orders()
    monkeypatch.setattr(comm_overlap, "_accumulate_grad", orders.added)
    run_on_threads(lambda world: orders.step(world, analyzed, plan), plan.mesh)
    for seen in orders.seen.values():
        assert [seen[0], seen[3]] == ["sum", "sum"]
        assert set(seen[1:3]) == {"mlp.gate_proj", "mlp.up_proj"}
        assert set(seen[4:]) == {f"self_attn.{name}_proj" for name in "qkv"}


@pytest.mark.parametrize(
    "strategies",
    [(TensorParallel(num_overlap_chunks=2),), (TensorParallel(num_overlap_chunks=2), SequenceParallel())],
    ids=["whole", "slices"],
)
def test_half_precision_is_computed_and_sent_in_half(strategies: tuple[Strategy, ...]):
    torch.manual_seed(0)
    half = {"length": LENGTH, "precision": PrecisionConfig(compute="bfloat16")}
    analyzed, plan = planned(llama(), Mesh(tp=2), strategies, **half)
    assert trace(analyzed, plan, fake=False).passed
    _, alone = planned(analyzed, Mesh(), (), **half)
    found = [
        run_on_threads(lambda world, each=each: loss_and_norm(world, analyzed, each), each.mesh)[0]
        for each in (plan, alone)
    ]
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def loss_and_norm(world: World, analyzed: AnalyzedModel, plan: Plan) -> list[float]:
    """The loss and the norm of the gradients of a step: all weights count in it."""
    with parallelize(analyzed, plan, world=world) as engine:
        metrics = engine.step(engine.local_batch(batches(1, length=LENGTH)[0]))
        return [metrics.loss, metrics.grad_norm]


def test_no_chunk_at_all_is_refused():
    with pytest.raises(
        PlanError,
        match=(r"strategies.tensor_parallel.num_overlap_chunks: " r"num_overlap_chunks = 0; .*\n.*from 1 up"),
    ):
        planned(analyzed_llama(), Mesh(tp=2), (TensorParallel(num_overlap_chunks=0),))
