"""Tensor parallelism, mode 2.5d: results of one device, and the papers' bytes and memory."""

from math import prod

import pytest

from meshwright.api import trace
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.tensor.even_llama import analyzed_even_llama, elements_received, inputs, shards
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import batches, planned

DATA = (BatchSplit(), BatchSplit(axis="dp_shard"), ZeRO(replicate_axis="dp_replicate"))
SQUARES = (TensorParallel25D(), *DATA)


@pytest.mark.parametrize(
    ("mesh", "strategies", "micro"),
    [
        (Mesh(dp_replicate=2, dp_shard=2, tp=2), SQUARES, 0),
        (
            Mesh(dp_replicate=3, dp_shard=2, tp=2),
            (*DATA, TensorParallel25D(regather=False), VocabParallel()),
            1,
        ),
    ],
)
def test_it_equals_one_device(mesh: Mesh, strategies: tuple[Strategy, ...], micro: int):
    samples = 2 * mesh.dp_replicate * mesh.dp_shard
    analyzed, plan = planned(
        analyzed_even_llama(tie_word_embeddings=micro == 1), mesh, strategies, micro, samples
    )
    assert_exact(analyzed, plan, batches(2, samples), fake=micro == 0)


@pytest.mark.parametrize(("d", "q"), [(2, 2), (3, 2), (2, 3)])
def test_a_layer_receives_the_papers_elements(d: int, q: int):
    analyzed, plan = planned(
        analyzed_even_llama(), Mesh(dp_replicate=d, dp_shard=q, tp=q), SQUARES, samples=d * q
    )
    taken, tokens = 2 * sum(inputs(d * q)), 2 * d * q * 9
    along = elements_received(plan, ("F", "B"), "tp")
    assert along == pytest.approx(
        3 * (q - 1) / q**2 * taken / d + 2 * 2 * (q - 1) / (d * q) * tokens
    )  # and two norms
    shard = shards(analyzed, q**2, "layers")  # |W| / q^2
    assert elements_received(plan, ("UNSHARD", "REDUCE"), "dp_shard") == 3 * (q - 1) * shard
    assert elements_received(plan, ("REDUCE",), "dp_replicate") == pytest.approx(2 * (d - 1) / d * shard)
    for param_sharding in plan.rank_view(0).param_shardings:
        assert prod(param_sharding.param.shape) * q == next(
            w.numel for w in analyzed.model_spec.params if w.name == param_sharding.param.name
        )


def test_squares_that_read_samples_of_another_square_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
):
    analyzed, plan = planned(
        analyzed_even_llama(), Mesh(dp_replicate=2, dp_shard=2, tp=2), SQUARES, samples=4
    )
    monkeypatch.setattr(
        TensorParallel2D, "rewrite", lambda square, program, space, job: program
    )  # nothing is said of what travels
    assert not trace(analyzed, planned(analyzed, plan.mesh, SQUARES, samples=4)[1], fake=False).passed


def test_one_square_and_squares_that_share_samples_are_refused():
    with pytest.raises(
        PlanError,
        match=(r'there is one square.*\n.*name = "tensor_parallel", ' r"mode " r'= "2d" for a single square'),
    ):
        planned(
            analyzed_even_llama(),
            Mesh(dp_shard=2, tp=2),
            (TensorParallel25D(), BatchSplit(axis="dp_shard"), ZeRO()),
        )
    with pytest.raises(
        PlanError,
        match=r'no strategy splits samples and replicates shards along dp_replicate.*\n.*"dp_replicate"',
    ):
        planned(
            analyzed_even_llama(),
            Mesh(dp_replicate=2, dp_shard=2, tp=2),
            (TensorParallel25D(), BatchSplit(axis="dp_shard"), ZeRO()),
        )
