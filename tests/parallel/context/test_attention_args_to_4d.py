"""Attention inputs are reshaped to four dims; calls whose tokens are not those of the rank are refused."""

from dataclasses import replace

import pytest
import torch

from meshwright.model.context_parallel.attention_call import ShardedAttentionCall
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.parallel.context.attention_args_to_4d import attention_inputs
from meshwright.plan.job.errors import PlanError

SHARE = TokenShard(9, ((0, 2), (7, 9)))  # four of nine tokens
ASKED = ShardedAttentionCall(
    torch.randn(2, 6, 4, 5),
    torch.randn(2, 3, 4, 5),
    torch.randn(2, 3, 4, 7),
    None,
    0.0,
    False,
    1.0,
    SHARE,
    SHARE,
)


def refusal(asked: ShardedAttentionCall) -> str:
    with pytest.raises(PlanError) as caught:
        attention_inputs(asked, "ring")
    return str(caught.value)


@pytest.mark.parametrize("shape", [(2, 6), (6,), (), (3, 2, 6)], ids=str)
def test_any_number_of_dims_before_the_tokens_becomes_two_and_comes_back(shape: tuple[int, ...]) -> None:
    query, key, value = (torch.randn(*shape, 4, width) for width in (5, 5, 7))
    mask = torch.randn(*shape, 4, 9) if shape else torch.randn(4, 9)
    given = attention_inputs(replace(ASKED, query=query, key=key, value=value, mask=mask), "ring")
    assert given.query.ndim == given.key.ndim == given.value.ndim == 4
    assert given.mask is not None
    assert given.mask.expand(*given.query.shape[:3], 9).shape == (*given.query.shape[:3], 9)
    out = given.value + given.query.mean()
    assert torch.equal(given.restore_shape(out), out.view(*shape, 4, 7))


@pytest.mark.parametrize("shape", [(4, 9), (1, 9), (4, 1), (2, 1, 4, 9), (6, 4, 9)], ids=str)
def test_a_mask_may_be_shared_by_samples_heads_queries_or_keys(shape: tuple[int, ...]) -> None:
    mask = attention_inputs(replace(ASKED, mask=torch.ones(shape) > 0), "ring").mask
    assert mask is not None
    assert mask.ndim == 4
    assert mask.expand(2, 6, 4, 9).all()


def test_keys_that_are_not_the_tokens_of_the_samples_are_refused() -> None:
    said = refusal(replace(ASKED, key=torch.randn(2, 3, 8, 5)))
    assert "attention gets 8 keys, and this rank has 4 of 9 tokens" in said
    assert "repair: attend to the tokens of the sample alone, or set mesh.cp = 1" in said


@pytest.mark.parametrize("shape", [(4, 4), (9, 9), (2, 1, 4, 8)], ids=str)
def test_a_mask_without_columns_for_all_keys_or_with_rows_of_other_ranks_is_refused(
    shape: tuple[int, ...],
) -> None:
    said = refusal(replace(ASKED, mask=torch.ones(shape)))
    assert (
        f"the mask is of shape {list(shape)}; needed are rows for 4 queries of this rank, and "
        f"columns for all 9 keys"
    ) in said


def test_a_mask_under_a_causal_mask_is_refused() -> None:
    assert "and is_causal = False" in refusal(replace(ASKED, mask=torch.ones(4, 9), is_causal=True))


def test_under_autocast_inputs_have_the_autocast_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = attention_inputs(replace(ASKED, mask=torch.ones(4, 9) > 0), "ring")
    assert {each.dtype for each in (given.query, given.key, given.value)} == {torch.bfloat16}
    assert given.mask is not None
    assert given.mask.dtype == torch.bool
