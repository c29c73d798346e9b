"""The loss of a step is a sum over what counts; the engine owns the division."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from transformers.modeling_outputs import CausalLMOutput

from meshwright.engine.loss import IGNORED, logits_of, token_cross_entropy

LOGITS = torch.linspace(-2, 2, 2 * 3 * 5, dtype=torch.float64).view(2, 3, 5)
LABELS = torch.tensor([[1, IGNORED, 4], [IGNORED, IGNORED, 0]])


def test_the_total_is_a_sum_over_labels_that_count():
    loss, batch = token_cross_entropy(), {"labels": LABELS}
    by_hand = -sum(LOGITS.log_softmax(-1)[at] for at in ((0, 0, 1), (0, 2, 4), (1, 2, 0)))
    assert torch.allclose(loss.total(LOGITS, batch), by_hand, rtol=1e-14)
    assert loss.count(batch) == 3
    assert loss.targets == ("labels",)


def test_nothing_that_counts_is_a_sum_of_zero():
    loss, batch = token_cross_entropy(), {"labels": torch.full((2, 3), IGNORED)}
    assert loss.total(LOGITS, batch) == 0
    assert loss.count(batch) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype):
    logits = LOGITS.to(dtype).requires_grad_()
    total = token_cross_entropy().total(logits, {"labels": LABELS})
    assert total.dtype == torch.float32
    assert total == F.cross_entropy(logits.float().view(-1, 5), LABELS.view(-1), reduction="sum")
    assert token_cross_entropy().total(LOGITS, {"labels": LABELS}).dtype == torch.float64


def test_logits_are_found_in_what_models_return():
    for outputs in (LOGITS, (LOGITS, None), [LOGITS], {"logits": LOGITS}, CausalLMOutput(logits=LOGITS)):
        assert logits_of(outputs) is LOGITS
