"""The outputs that the loss takes: per sample or not, used or not, and losses that a trial cannot run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.loss_inputs import batch_columns, loss_inputs
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor

BATCH = {"x": torch.zeros(3, 4), "labels": torch.zeros(3, 2, dtype=torch.int64)}
PER_SAMPLE, SHARED, SPARE = torch.ones(3, 5), torch.ones(()), torch.ones(3, dtype=torch.bool)


def sum_of(total: Any, *, whole_batch: bool = False) -> Loss:
    return Loss(total, lambda batch: torch.tensor(1), ("labels",), whole_batch=whole_batch)


def test_the_tensors_of_a_batch_are_batch_tensors_per_sample():
    assert batch_columns(BATCH) == (BatchTensor("x", (4,), "float32"), BatchTensor("labels", (2,), "int64"))


def test_outputs_differ_by_being_per_sample_and_by_being_used():
    found = loss_inputs(
        sum_of(lambda outputs, batch: outputs["a"].sum() * outputs["s"]),
        BATCH,
        {"a": PER_SAMPLE, "s": SHARED, "m": SPARE},
    )
    assert found == (
        BatchTensor("output0", (5,), "float32"),
        BatchTensor("output1", (), "float32", per_sample=False),
        BatchTensor("output2", (), "bool", used_by_loss=False),
    )


def test_a_tensor_used_twice_is_one_input():
    assert (
        len(loss_inputs(sum_of(lambda outputs, batch: outputs[0].sum()), BATCH, (PER_SAMPLE, [PER_SAMPLE])))
        == 1
    )


def test_a_second_size_tells_a_dim_of_the_batch_from_another_of_the_same_length():
    three = torch.ones(3, 3)
    found = loss_inputs(
        sum_of(lambda outputs, batch: outputs[0].sum()),
        BATCH,
        (three, three + 1),
        (torch.ones(5, 3), three),
    )
    assert [(column.shape, column.per_sample) for column in found] == [((3,), True), ((3, 3), False)]


@pytest.mark.parametrize(
    ("smaller", "larger", "rows"), [((12, 2), (20, 2), 4), ((6, 3, 2), (6, 5, 2), 0), ((9, 2), (25, 2), 0)]
)
def test_rows_along_the_first_dim_are_counted_per_sample(
    smaller: tuple[int, ...], larger: tuple[int, ...], rows: int
):
    (found,) = loss_inputs(
        sum_of(lambda outputs, batch: outputs[0].sum()), BATCH, (torch.ones(smaller),), (torch.ones(larger),)
    )
    assert (found.rows_per_sample, found.shape) == (rows, smaller[1:])
    says = "does not have samples along dim 0" if not rows else "has 4 rows of shape [2] along dim 0"
    assert says in next(found.diagnostics("loss")).problem
    whole = sum_of(lambda outputs, batch: outputs[0].sum(), whole_batch=True)
    if not rows:
        with pytest.raises(PlanError, match="compares the samples of one rank with each other"):
            loss_inputs(whole, BATCH, (torch.ones(smaller),), (torch.ones(larger),))


def test_cross_entropy_of_a_model_without_logits_is_refused():
    with pytest.raises(
        PlanError, match=r"the loss reads logits, and the model returns a dict with text_embeds, scale"
    ):
        loss_inputs(token_cross_entropy(), BATCH, {"text_embeds": PER_SAMPLE, "scale": SHARED})


def test_a_loss_that_cannot_be_run_is_assumed_to_use_all_outputs():
    assert all(
        column.used_by_loss
        for column in loss_inputs(sum_of(lambda outputs, batch: outputs.nothing), BATCH, (PER_SAMPLE, SHARED))
    )


@pytest.mark.parametrize("whole_batch", [False, True])
def test_a_loss_that_fails_on_the_shapes_of_outputs_and_labels_is_refused(whole_batch: bool):
    """Labels of another length than the outputs: the first step would end in a traceback."""
    loss = sum_of(
        lambda outputs, batch: F.cross_entropy(outputs["logits"].view(-1, 5), batch["labels"].view(-1)),
        whole_batch=whole_batch,
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        outputs = {"logits": mode.from_tensor(torch.ones(3, 4, 5))}
        with pytest.raises(PlanError) as refused:
            loss_inputs(loss, BATCH, outputs)
    said = str(refused.value)
    assert "returns (logits [3, 4, 5]) and the batch (" in said
    assert "labels [3, 2]): ValueError: Expected input batch_size (12) to match target batch_size (6)" in said
    assert "repair: give a batch whose labels fit the outputs of the model" in said


def test_a_loss_that_reads_values_is_not_refused():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        outputs = (mode.from_tensor(PER_SAMPLE),)
        (found,) = loss_inputs(sum_of(lambda outputs, batch: outputs[0].max().item()), BATCH, outputs)
    assert found.used_by_loss


@pytest.mark.parametrize("whole_batch", [False, True])
def test_only_a_loss_of_the_whole_batch_is_kept_from_the_inputs(whole_batch: bool):
    def greedy(outputs: Any, batch: Any) -> torch.Tensor:
        return outputs[0].sum() + batch["x"].sum()

    if not whole_batch:
        assert [
            column.used_by_loss for column in loss_inputs(sum_of(greedy), BATCH, (PER_SAMPLE, SHARED))
        ] == [
            True,
            False,
        ]
        return
    with pytest.raises(PlanError, match="reads 'x', which is not among its targets"):
        loss_inputs(sum_of(greedy, whole_batch=True), BATCH, (PER_SAMPLE, SHARED))


def test_bytes_sent_follow_the_dtypes_of_parameters_and_tensors():
    half, mask, odd = (
        BatchTensor("a", (2, 3), "bfloat16"),
        BatchTensor("b", (7,), "bool"),
        BatchTensor("c", (), "complex64"),
    )
    assert (half.nbytes("float32"), half.nbytes("bfloat16"), half.nbytes("float64")) == (24, 24, 48)
    assert (mask.nbytes("float64"), mask.comm_dtype("float64")) == (7, "bool")
    assert (
        "c has dtype complex64, which cannot be sent between ranks" in next(odd.diagnostics("here")).problem
    )
    assert not [*half.diagnostics(""), *mask.diagnostics("")]
