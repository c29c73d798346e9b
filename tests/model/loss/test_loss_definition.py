"""The loss of a step is a sum over tokens or samples that count; the engine divides by their global
number.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import meshwright as mw
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Loss
from meshwright.model.loss.token_cross_entropy import get_logits, token_cross_entropy
from meshwright.plan.job.errors import PlanError
from tests.engine.one_device import pair, sample_range
from tests.tiny_model import (
    VOCABULARY,
    Tiny,
    analyzed_model,
    case_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

LOGITS = torch.linspace(-2, 2, 2 * 3 * 5, dtype=torch.float64).view(2, 3, 5)
LABELS = torch.tensor([[1, IGNORE_INDEX, 4], [IGNORE_INDEX, IGNORE_INDEX, 0]])


def test_the_total_is_a_sum_over_labels_that_count():
    loss, batch = token_cross_entropy(), {"labels": LABELS}
    by_hand = -sum(LOGITS.log_softmax(-1)[at] for at in ((0, 0, 1), (0, 2, 4), (1, 2, 0)))
    assert torch.allclose(loss.total(LOGITS, batch), by_hand, rtol=1e-14)
    assert loss.count(batch) == 3
    assert loss.targets == ("labels", "loss_weights")


def test_nothing_that_counts_is_a_sum_of_zero():
    loss, batch = token_cross_entropy(), {"labels": torch.full((2, 3), IGNORE_INDEX)}
    assert loss.total(LOGITS, batch) == 0
    assert loss.count(batch) == 0


def test_smoothing_is_torchs():
    flat, labels = LOGITS.view(-1, 5), LABELS.view(-1)
    by_torch = F.cross_entropy(flat, labels, label_smoothing=0.2, reduction="sum")
    assert torch.equal(token_cross_entropy(0.2).total(LOGITS, {"labels": LABELS}), by_torch)
    assert not token_cross_entropy(0.2).is_token_nll
    assert token_cross_entropy().is_token_nll


@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_an_invalid_label_smoothing_is_refused(smoothing: float):
    with pytest.raises(PlanError, match=rf"label_smoothing = {smoothing}\n.*from 0 .the label alone. to 1"):
        token_cross_entropy(smoothing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype):
    logits = LOGITS.to(dtype).requires_grad_()
    total = token_cross_entropy().total(logits, {"labels": LABELS})
    assert total.dtype == torch.float32
    assert total == F.cross_entropy(logits.float().view(-1, 5), LABELS.view(-1), reduction="sum")
    assert token_cross_entropy().total(LOGITS, {"labels": LABELS}).dtype == torch.float64


def test_logits_are_found_in_what_models_return():
    for outputs in (LOGITS, (LOGITS, None), [LOGITS], {"logits": LOGITS}, CausalLMOutput(logits=LOGITS)):
        assert get_logits(outputs) is LOGITS


def test_logits_are_an_attribute_of_any_object_and_outputs_without_them_are_refused():
    assert get_logits(SimpleNamespace(logits=LOGITS)) is LOGITS
    with pytest.raises(PlanError, match=r"the model returns a SimpleNamespace\n.*return the"):
        get_logits(SimpleNamespace(scores=LOGITS))
    with pytest.raises(PlanError, match="returns a dict with scores, loss"):
        get_logits({"scores": LOGITS, "loss": 0})


class NamespaceOutputs(Tiny):
    """Returns its loss and its logits in a plain object."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = super().forward(input_ids)
        if labels is None:
            return SimpleNamespace(logits=logits)
        flat = logits[:, :-1].reshape(-1, VOCABULARY)
        return SimpleNamespace(loss=F.cross_entropy(flat, labels[:, 1:].reshape(-1)), logits=logits)


def test_the_loss_of_a_model_that_returns_a_plain_object_is_its_own():
    """Not found, its labels, a copy of the inputs, would count as aligned: it would train the identity."""
    tokens = token_samples(4, uneven=False)["input_ids"]
    analyzed = mw.analyze(NamespaceOutputs(), {"input_ids": tokens, "labels": tokens})
    assert analyzed.loss.shifts_labels
    verdict = mw.verify(analyzed, plan_of(analyzed, 2), [{"input_ids": tokens, "labels": tokens}])
    assert verdict.passed, verdict


WEIGHTED = {"labels": LABELS, "loss_weights": torch.tensor([[0.5, float("nan"), 0.0], [7.0, 7.0, 0.25]])}


def test_weights_multiply_the_losses_of_tokens_and_divide_by_their_sum():
    loss = token_cross_entropy()
    by_hand = -0.5 * LOGITS.log_softmax(-1)[0, 0, 1] - 0.25 * LOGITS.log_softmax(-1)[1, 2, 0]
    assert torch.allclose(loss.total(LOGITS, WEIGHTED), by_hand, rtol=1e-7)
    assert loss.count_weight_and_tokens(WEIGHTED) == (0.75, 3.0), (
        "a token of weight 0 is a token, one without a label is none"
    )
    assert loss.count_weight_and_tokens({"labels": LABELS}) == (3.0, 3.0)


def test_weights_of_one_change_nothing():
    loss, batch = token_cross_entropy(), {"labels": LABELS, "loss_weights": torch.ones(2, 3)}
    assert torch.allclose(loss.total(LOGITS, batch), loss.total(LOGITS, {"labels": LABELS}), rtol=1e-14)
    assert loss.count(batch) == 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            torch.ones(2),
            r"(?s)loss_weights of shape \[2\] with labels of shape \[2, 3\].*one weight per label",
        ),
        (torch.full((2, 3), -0.5), r"(?s)loss_weights from -0.5 up.*from 0 up"),
        (torch.full((2, 3), float("inf")), r"(?s)weigh inf; needed is a number from 0 up.*loss_weights"),
    ],
    ids=["shape", "negative", "infinite"],
)
def test_invalid_weights_are_refused(weights: torch.Tensor, message: str):
    with pytest.raises(PlanError, match=message):
        token_cross_entropy().count_weight_and_tokens({"labels": LABELS, "loss_weights": weights})


def test_a_key_that_the_batch_lacks_is_named():
    with pytest.raises(
        PlanError,
        match=r"(?s)Loss.count reads 'labels' of the batch, which holds x\n  repair: give the batch",
    ):
        token_cross_entropy().count_weight_and_tokens({"x": LABELS})


def weighted_samples(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        **token_samples(count),
        "loss_weights": 0.1 * torch.rand(count, 5, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_weighted_tokens_equal_one_device_on_any_ranks(micro_batch: int):
    """The weights of a step add up to less than 1: a count that is no whole number is divided by as it is."""
    analyzed, data = analyzed_model(), weighted_samples(24)
    data["loss_weights"][:12] *= 0.01
    verdict = verdict_of(case_of(analyzed, plan_of(analyzed, 3, micro_batch=micro_batch), data), steps=2)
    assert verdict.passed, str(verdict)
    done = pair()
    optimizer = torch.optim.SGD(done.model.parameters(), lr=0.1, foreach=False)
    for first in (0, 12):
        some = sample_range(data, first, first + 12)
        metrics = done.executor.step(some)
        total = done.loss.total(done.model(some["input_ids"]), some) / done.loss.count(some)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        assert metrics.loss == pytest.approx(total.item(), rel=1e-12)
        assert metrics.tokens == (some["labels"] != IGNORE_INDEX).sum()
    assert done.error < 1e-14


class Regression(nn.Module):
    """Two numbers from four."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def squared_error() -> Loss:
    """The mean over rows of the squared distance; rows are what is counted."""
    return Loss(
        total=lambda outputs, batch: ((outputs - batch["y"]) ** 2).sum(),
        count=lambda batch: torch.tensor(len(batch["y"])),
        targets=("y",),
    )


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_a_custom_loss_that_counts_samples_equals_one_device(micro_batch: int):
    generator = torch.Generator().manual_seed(2)
    data = {"x": torch.randn(17, 4, generator=generator), "y": torch.randn(17, 2, generator=generator)}
    analyzed = mw.analyze(Regression(), data, loss=squared_error())
    plan = mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=3), micro_batch=micro_batch)
    batches = [sample_range(data, 0, 12), sample_range(data, 12, 17)]
    verdict = mw.verify(analyzed, plan, batches, loss=squared_error())
    assert verdict.passed, str(verdict)
    with mw.parallelize(
        Regression(), mw.make_plan(analyzed, tiny_job()), loss=squared_error(), example=data
    ) as engine:
        metrics = engine.step({key: value.double() for key, value in batches[1].items()})
        assert metrics.tokens == 5
