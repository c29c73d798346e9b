"""What two forwards bring together is what every forward does, or it is said why not."""

import pytest
import torch

from meshwright.model.sequence_analysis.gathers import GatherRecord, compare_gathers
from meshwright.plan.model_spec.sequence_info import GlueGather


def moved(block_call: str, numel: int, dtype: torch.dtype, *back: str, tokens: int = 0) -> GatherRecord:
    return GatherRecord(block_call, numel, tokens, dtype, backward_calls=[*back])


def test_elements_are_counted_by_row_where_they_come_with_rows():
    few = [
        moved("a", 3 * 8, torch.float32, "b"),
        moved("a", 7, torch.int64),
        moved("b", 3 * 70, torch.float32, tokens=10),
    ]
    more = [
        moved("a", 4 * 8, torch.float64, "b"),
        moved("a", 7, torch.int64),
        moved("b", 4 * 70, torch.float32, tokens=10),
    ]
    assert compare_gathers(few, more, (3, 4)) == (
        (
            GlueGather("a", 8, backward_calls=("b",)),
            GlueGather("a", 7, per_sample=False, dtype="int64"),
            GlueGather("b", 70, 10, dtype="float32"),  # float32 in a model of float64 too
        ),
        "",
    )


def test_of_one_forward_alone_what_divides_by_rows_comes_with_rows():
    assert compare_gathers([moved("a", 3 * 8, torch.float32)], None, (3, 4)) == ((GlueGather("a", 8),), "")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            [],
            "the glue after 'a' gathers tokens of several ranks 1 times on 3 samples, and 0 times on 4",
        ),
        (
            [moved("a", 9 * 4 * 4, torch.float64)],
            "depends on the number of samples, or of tokens: 36 elements of 3 samples, 144 of 4",
        ),
        ([moved("a", 4 * 12, torch.float64, "b")], "depends on the number of samples, or of tokens"),
    ],
)
def test_what_varies_is_told(more: list[GatherRecord], why: str):
    found, said = compare_gathers([moved("a", 36, torch.float32)], more, (3, 4))
    assert found == ()
    assert why in said
