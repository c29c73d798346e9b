"""Embeddings that couple samples are refused where each rank would see a part of the batch, and accepted
elsewhere.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

import meshwright as mw
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.precision import PrecisionConfig
from tests.tiny_model import tiny_job

WORDS, WIDTH, NUM_SAMPLES = 31, 8, 12


class Own(nn.Module):
    """A table, a layer, a head that may be tied to the table."""

    def __init__(self, words: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.words, self.layer, self.head = words, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = words.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(input_ids)).tanh())


class Called(nn.Module):
    """A table that is looked up by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight, scale_grad_by_freq=True)


class Bag(nn.Module):
    """A sum of words for each row."""

    def __init__(self, **said: float | str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, **said)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bag(ids).unsqueeze(1).expand(-1, ids.shape[1], -1)


def samples() -> dict[str, torch.Tensor]:
    thrown = torch.Generator().manual_seed(4)
    return {key: torch.randint(WORDS, (NUM_SAMPLES, 5), generator=thrown) for key in ("input_ids", "labels")}


def analyze_model(words: Callable[[], nn.Module], *, tied: bool = False) -> mw.AnalyzedModel:
    return mw.analyze(lambda: Own(words(), tied=tied), samples())


def normed() -> nn.Module:
    return nn.Embedding(WORDS, WIDTH, max_norm=1.0)


def counted() -> nn.Module:
    return nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            normed,
            "the table 'words.weight' with max_norm is written by the forward, for the lookups of a part of",
        ),
        (counted, "the table 'words.weight' with scale_grad_by_freq would divide gradients by how often"),
        (Called, "the table 'words.weight' with scale_grad_by_freq would divide gradients by how often"),
        (lambda: Bag(max_norm=1.0), "with max_norm is written by the forward"),
        (lambda: Bag(mode="sum", scale_grad_by_freq=True), "with scale_grad_by_freq would divide gradients"),
    ],
    ids=["norm", "count", "by its function", "norm of a bag", "count of a bag"],
)
def test_a_table_that_would_see_a_part_of_the_batch_is_refused_with_what_to_do(
    words: Callable[[], nn.Module], message: str
):
    analyzed = analyze_model(words)
    for mesh in (mw.Mesh(dp_replicate=2), mw.Mesh(dp_shard=3)):
        with pytest.raises(PlanError) as caught:
            mw.make_plan(analyzed, tiny_job(), mesh)
        assert message in str(caught.value)
        assert "repair: remove it" in str(caught.value)
        assert "or train on one device with micro_batch = 0" in str(caught.value)


@pytest.mark.parametrize("words", [normed, counted])
def test_a_table_that_would_see_some_of_the_tokens_is_refused(words: Callable[[], nn.Module]):
    with pytest.raises(PlanError, match="a part of the global batch"):
        mw.make_plan(analyze_model(words), tiny_job(), mw.Mesh(cp=3), (RingAttention(), DDP(axis="cp")))


def test_micro_batches_divide_counts_and_leave_norms_alone():
    with pytest.raises(PlanError, match="1 ranks x 3 microbatches"):
        mw.make_plan(analyze_model(counted), tiny_job(), micro_batch=4)
    with pytest.raises(
        PlanError, match="with max_norm is written"
    ):  # the head has used what is written later
        mw.make_plan(analyze_model(normed, tied=True), tiny_job(), micro_batch=4)
    analyzed = analyze_model(normed)
    verdict = mw.verify(analyzed, mw.make_plan(analyzed, tiny_job(), micro_batch=4), [samples(), samples()])
    assert verdict.passed, verdict


def test_writes_that_master_weights_would_overwrite_are_refused():
    halves = PrecisionConfig("bfloat16", "bfloat16", master="float32")
    with pytest.raises(PlanError, match=r"its master \(float32\) would overwrite it"):
        mw.make_plan(analyze_model(normed), tiny_job(precision=halves))


@pytest.mark.parametrize("words", [normed, counted, lambda: nn.Embedding(WORDS, WIDTH, padding_idx=3)])
def test_on_one_device_all_of_them_train(words: Callable[[], nn.Module]):
    analyzed = analyze_model(words)
    assert mw.verify(analyzed, mw.make_plan(analyzed, tiny_job()), [samples()]).passed


def test_a_table_without_coupled_samples_is_split():
    analyzed = analyze_model(lambda: nn.Embedding(WORDS, WIDTH, padding_idx=3))
    assert analyzed.table_uses == ()
    assert mw.verify(
        analyzed, mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=2)), [samples()]
    ).passed


class Written(nn.Module):
    """A layer whose forward writes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.copy_(F.normalize(self.layer.weight, dim=1))
        return self.layer(self.words(ids))


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (mw.Mesh(dp_shard=2), {}, "it is gathered for a use, and freed"),
        (
            mw.Mesh(),
            {"precision": PrecisionConfig("bfloat16", "bfloat16", master="float32")},
            r"its master \(float32\) would overwrite it",
        ),
    ],
    ids=["shards", "master"],
)
def test_a_write_that_would_be_lost_is_refused(mesh: mw.Mesh, changes: dict[str, object], message: str):
    with pytest.raises(
        PlanError, match=f"the forward writes into the parameter 'words.layer.weight', and {message}"
    ):
        mw.make_plan(analyze_model(Written), tiny_job(**changes), mesh)


def test_a_write_that_all_ranks_make_equally_equals_one_device():
    analyzed = analyze_model(Written)
    assert mw.verify(
        analyzed, mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=2)), [samples(), samples()]
    ).passed


class Scaled(nn.Module):
    """Words, scaled by `norm` over rows and tokens."""

    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), norm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2)


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, training=True)


def test_statistics_by_the_functional_batch_norm_are_those_of_all_samples():
    analyzed = analyze_model(lambda: Scaled(batch_norm))
    for mesh, micro_batch, text in (
        (mw.Mesh(dp_replicate=2), 0, "no running statistics, and an evaluation takes those of its batch"),
        (mw.Mesh(), 4, "micro_batch = 0"),
    ):
        part = r"F.batch_norm in \(model\)(?s:.*)would take statistics of a part of the global batch(?s:.*)"
        with pytest.raises(PlanError, match=part + text):
            mw.make_plan(analyzed, tiny_job(), mesh, micro_batch=micro_batch)
    assert mw.make_plan(analyzed, tiny_job()).num_microbatches == 1
    model_spec = analyze_model(lambda: Scaled(F.instance_norm)).model_spec
    assert model_spec.batch_norm_calls == ()  # it sees one row at a time


@pytest.mark.parametrize(
    "words", [lambda: nn.Embedding(WORDS, WIDTH, sparse=True), lambda: Bag(sparse=True)], ids=["table", "bag"]
)
def test_sparse_gradients_are_refused(words: Callable[[], nn.Module]):
    with pytest.raises(
        PlanError, match=r"is sparse, and sparse gradients cannot be reduced\n.*remove sparse = True"
    ):
        mw.make_plan(analyze_model(words), tiny_job())
