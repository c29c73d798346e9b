"""Tensor parallelism, mode 2d: bytes of the paper, stream and weights at 1/q^2, and refusals of what cannot
be sharded.
"""

from math import prod

import pytest
import torch
from torch import nn

from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.even_llama import WIDTH, analyzed_even_llama, elements_received, inputs, shards
from tests.parallel.tensor.odd_llama import TOKENS, batches, planned

BATCH_SPLIT = BatchSplit(axis="dp_shard")
SQUARE = (TensorParallel2D(), BATCH_SPLIT, ZeRO())
LAYERS = 2


@pytest.mark.parametrize("q", [2, 3, 4])
def test_a_layer_receives_the_papers_elements(q: int):
    analyzed, plan = planned(analyzed_even_llama(), Mesh(dp_shard=q, tp=q), SQUARE, samples=q)
    statistics = 2 * LAYERS * q * TOKENS  # two norms per layer, a number per token
    taken = LAYERS * sum(inputs(q))
    forward, backward = (elements_received(plan, kinds, "tp") for kinds in (("F",), ("B",)))
    assert forward == (q - 1) / q**2 * taken + (q - 1) / q * statistics
    assert backward == 2 * (q - 1) / q**2 * taken + (q - 1) / q * statistics
    assert elements_received(plan, ("UNSHARD", "REDUCE"), "dp_shard") == 3 * (q - 1) * shards(
        analyzed, q**2, "layers"
    )


def test_cached_gathers_are_not_repeated():
    strategies = (TensorParallel2D(regather=False), BATCH_SPLIT, ZeRO())
    _, plan = planned(analyzed_even_llama(), Mesh(dp_shard=3, tp=3), strategies, samples=3)
    kept, (_, again) = (
        elements_received(plan, ("B",), "tp"),
        planned(analyzed_even_llama(), Mesh(dp_shard=3, tp=3), SQUARE, samples=3),
    )
    assert elements_received(again, ("B",), "tp") - kept == 2 / 9 * LAYERS * sum(inputs(3))


def stream_shapes_and_weight_bytes(world: World, q: int) -> tuple[list[tuple[int, ...]], int]:
    """The shapes in which the stream goes from block to block, and the bytes of the weights that this rank
    keeps.
    """
    analyzed, plan = planned(analyzed_even_llama(), Mesh(dp_shard=q, tp=q), SQUARE, samples=2 * q)
    with parallelize(analyzed, plan, world=world) as engine:
        shapes: list[tuple[int, ...]] = []
        for layer in engine.executor.state.trained_module.module.get_submodule("model.layers").children():
            layer.register_forward_hook(lambda layer, args, output: shapes.append(tuple(output.shape)))
        engine.step(engine.local_batch(batches(1, 2 * q)[0]))
        return shapes, engine.executor.memory_by_category()["parameters"]


@pytest.mark.parametrize("q", [2, 3])
def test_stream_and_weights_are_1_over_q_squared_of_one_device(q: int):
    analyzed, plan = planned(analyzed_even_llama(), Mesh(dp_shard=q, tp=q), SQUARE, samples=2 * q)
    for param_sharding in plan.rank_view(0).param_shardings:
        assert prod(param_sharding.param.shape) * q == next(
            w.numel for w in analyzed.model_spec.params if w.name == param_sharding.param.name
        )
    for shapes, nbytes in run_on_threads(lambda world: stream_shapes_and_weight_bytes(world, q), plan.mesh):
        assert shapes == [(2, TOKENS, WIDTH // q)] * LAYERS
        assert nbytes == 4 * shards(analyzed, q**2)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            Mesh(dp_shard=2, tp=3),
            r"parallel mesh is dp_shard 2 x tp 3;.*\n.*set mesh.dp_shard = 2, mesh.tp = 2 \(4 ranks\)",
        ),
        (Mesh(tp=4), r"parallel mesh is dp_shard 1 x tp 4;(?s:.*)mesh.dp_shard = 2, mesh.tp = 2"),
        (
            Mesh(dp_shard=5, tp=5),
            (
                r"12 units.* on 5 ranks\n.*set the sides of the mesh to 2 or 3 or 4 or 6 or 12; or "
                r"make it 10 or 15 units"
            ),
        ),
    ],
)
def test_a_mesh_that_is_not_square_or_sizes_that_do_not_divide_are_refused(mesh: Mesh, message: str):
    with pytest.raises(PlanError, match=message):
        planned(analyzed_even_llama(), mesh, SQUARE, samples=20)


def test_a_vocabulary_that_does_not_divide_is_referred_to_vocab_parallel():
    with pytest.raises(
        PlanError, match=(r"67 units.*\n.*a vocabulary may be sharded unevenly: name = " r'"vocab_parallel"')
    ):
        planned(analyzed_even_llama(vocab_size=67), Mesh(dp_shard=2, tp=2), SQUARE)


@pytest.mark.parametrize("others", [(BATCH_SPLIT, ZeRO(stage=2)), (BATCH_SPLIT, DDP(axis="dp_shard")), ()])
def test_batch_split_without_sharded_weights_is_refused(others: tuple[Strategy, ...]):
    with pytest.raises(
        PlanError,
        match=r'no strategy shards weights along dp_shard.*\n.*name = "zero", axis = "dp_shard"',
    ):
        planned(analyzed_even_llama(), Mesh(dp_shard=2, tp=2), (TensorParallel2D(), *others))


class Plain(nn.Module):
    """Nothing is declared of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(67, 8)
        self.mix = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 67)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(input_ids).mT).mT)


def test_layers_that_need_whole_features_are_refused():
    with pytest.raises(
        PlanError, match=r"the hidden dim is sharded, and \d parameters need all of it \(mix.weight"
    ):
        planned(Plain(), Mesh(dp_shard=2, tp=2), SQUARE)
