"""Results of the chunked loss and the tiled MLP: the largest tensor, evaluations, bitwise differences, half
precision.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.api import make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.memory.tiled_job import CPU, JOB, NUM_SAMPLES, SHARDS, TOKENS, planned
from tests.parallel.tensor.odd_llama import SIZES, analyzed_llama, batches
from tests.tiny_model import analyzed_model, executor_of, tiny_job, token_samples


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor with a dim of `width` that is made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.most = width, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = (each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and each.ndim > 1)
        # more rows than there are tokens: a weight, or a gradient of one
        made = (
            each for each in found if each.shape[-1] == self.width and each.numel() <= 2 * TOKENS * self.width
        )
        self.most = max([self.most, *(each.numel() for each in made)])
        return out


@pytest.mark.parametrize(("count", "rows_of_tile"), [(4, 3), (9, 1)])
@pytest.mark.parametrize("width", [SIZES["vocab_size"], SIZES["intermediate_size"]])
def test_no_tensor_is_larger_than_a_chunk_in_a_step_or_an_evaluation(
    count: int, rows_of_tile: int, width: int
):
    data = batches(1, NUM_SAMPLES)[0]
    found = {}
    for name, strategies in {"usual": (), "tiled": (ChunkedLoss(count), TiledMLP(count))}.items():
        with parallelize(
            analyzed_llama(),
            planned(analyzed_llama(), Mesh(), *strategies, micro_batch=2),
            world=single_rank_world(CPU),
        ) as engine:
            with Largest(width) as step:
                engine.step(data)
            with Largest(width) as evaluation:
                engine.evaluate([data])
        found[name] = step.most, evaluation.most
    assert found["usual"] == (2 * TOKENS * width,) * 2
    assert found["tiled"] == (2 * rows_of_tile * width,) * 2


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(), ()),
        (Mesh(cp=3), (RingAttention(), DDP(axis="cp"))),
        (Mesh(dp_shard=2), (SHARDS, ZeRO())),
        (Mesh(tp=2), (TensorParallel(), VocabParallel())),
        (Mesh(pp=2), (Pipeline(),)),
    ],
    ids=str,
)
def test_an_evaluation_equals_one_device(mesh: Mesh, strategies: tuple[Strategy, ...]):
    data, job = (
        batches(2, NUM_SAMPLES),
        replace(JOB, precision=PrecisionConfig("float64", "float64", "float64")),
    )

    def found(mesh: Mesh, *strategies: Strategy) -> list[float]:
        plan = planned(analyzed_llama(), mesh, *strategies, job=job)

        def rank(world: World) -> float:
            with parallelize(analyzed_llama(), plan, world=world) as engine:
                return engine.evaluate([engine.local_batch(each) for each in data]).loss

        return run_on_threads(rank, mesh)

    (expected,) = found(Mesh())
    assert found(mesh, *strategies, ChunkedLoss(4)) == pytest.approx([expected] * mesh.world_size, rel=1e-12)


def stepped(
    tiles: tuple[Strategy, ...], precision: PrecisionConfig, analyzed: AnalyzedModel | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one step."""
    analyzed = analyzed or analyzed_model()
    job = tiny_job(precision=precision)
    executor = executor_of(analyzed, make_plan(analyzed, job, Mesh(), tiles), single_rank_world(CPU))
    gradients: dict[str, torch.Tensor] = {}
    clip = executor._actions.handlers["CLIP"]

    def kept(action: Action) -> None:
        gradients.update(executor.gather_gradients())
        clip(action)

    executor._entries = [
        (a, kept if a.kind == "CLIP" else handler, waits) for a, handler, waits in executor._entries
    ]
    loss = executor.step({key: value[:12] for key, value in token_samples().items()}).loss
    executor.close()
    return loss, gradients


def test_gradients_equal_those_without_chunks_up_to_rounding():
    (_, usual), (_, tiled_) = (
        stepped(tiles, PrecisionConfig("float64", "float64", "float64")) for tiles in ((), (ChunkedLoss(2),))
    )
    torch.testing.assert_close(tiled_, usual, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        (PrecisionConfig(compute="bfloat16"), 2e-2),  # 8 bits
        (
            PrecisionConfig("bfloat16", "bfloat16", master="float32"),
            4e-2,
        ),  # of which sums over tiles lose some
        (PrecisionConfig("float16", "float16", master="float32", loss_scale=2.0**12), 5e-3),
    ],
    ids=str,
)
def test_half_precision_equals_that_without_chunks_up_to_rounding(precision: PrecisionConfig, bound: float):
    (loss, usual), (tiled_loss, tiled_) = (stepped(tiles, precision) for tiles in ((), (ChunkedLoss(2),)))
    assert tiled_loss == pytest.approx(loss, rel=bound)
    for name, gradient in usual.items():
        scale = gradient.double().norm()
        assert (tiled_[name].double() - gradient.double()).norm() <= bound * scale, name
