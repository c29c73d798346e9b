"""Gathers that two trial forwards agree on are those of every forward; differences are reported."""

import pytest
import torch

from meshwright.model.sequence_analysis.glue_gather_trace import GatherRecord, compare_gathers
from meshwright.plan.model_spec.sequence_info import GlueGather


def gathered_bytes(
    block_call: str, numel: int, dtype: torch.dtype, *back: str, tokens: int = 0
) -> GatherRecord:
    return GatherRecord(block_call, numel, tokens, dtype, backward_calls=[*back])


def test_elements_are_counted_per_sample_where_they_grow_with_samples():
    few = [
        gathered_bytes("a", 3 * 8, torch.float32, "b"),
        gathered_bytes("a", 7, torch.int64),
        gathered_bytes("b", 3 * 70, torch.float32, tokens=10),
    ]
    more = [
        gathered_bytes("a", 4 * 8, torch.float64, "b"),
        gathered_bytes("a", 7, torch.int64),
        gathered_bytes("b", 4 * 70, torch.float32, tokens=10),
    ]
    assert compare_gathers(few, more, (3, 4)) == (
        (
            GlueGather("a", 8, backward_calls=("b",)),
            GlueGather("a", 7, per_sample=False, dtype="int64"),
            GlueGather("b", 70, 10, dtype="float32"),  # float32 in a model of float64 too
        ),
        "",
    )


def test_with_one_forward_sizes_divisible_by_the_batch_grow_with_samples():
    assert compare_gathers([gathered_bytes("a", 3 * 8, torch.float32)], None, (3, 4)) == (
        (GlueGather("a", 8),),
        "",
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            [],
            "the glue after 'a' gathers tokens of several ranks 1 times on 3 samples, and 0 times on 4",
        ),
        (
            [gathered_bytes("a", 9 * 4 * 4, torch.float64)],
            "depends on the number of samples, or of tokens: 36 elements of 3 samples, 144 of 4",
        ),
        ([gathered_bytes("a", 4 * 12, torch.float64, "b")], "depends on the number of samples, or of tokens"),
    ],
)
def test_gathers_that_vary_are_reported(more: list[GatherRecord], why: str):
    found, said = compare_gathers([gathered_bytes("a", 36, torch.float32)], more, (3, 4))
    assert found == ()
    assert why in said
