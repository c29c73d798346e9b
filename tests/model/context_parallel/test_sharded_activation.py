"""Glue that computes with a sequence-sharded tensor gets the results of one device."""

import pytest
import torch

from meshwright.model.context_parallel.sharded_activation import (
    SequenceShardedTensor,
    make_sharded_tensor,
    shard_block_inputs,
    to_local_tensors,
    wrap_block_outputs,
)
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo
from meshwright.plan.sharding.sequence_sharding import SequenceSharding

LENGTH = 7
WHOLE = torch.arange(2.0 * LENGTH * 3, dtype=torch.float64).view(2, LENGTH, 3)


def gathered(local: torch.Tensor, dim: int) -> torch.Tensor:
    """All tokens, as ranks would bring them together: here only their number and order are looked at."""
    shape = [*local.shape]
    shape[dim] = LENGTH
    return WHOLE.expand(shape) if local.ndim == 3 else torch.zeros(shape, dtype=local.dtype)


SHARE = TokenShard(LENGTH, SequenceSharding(2).token_ranges(LENGTH, 0), gathered)


def shares(planned: int, found: int) -> TokenShard:
    """Rows of the plan's length and of this one."""
    return SHARE if planned == LENGTH else TokenShard(found, SequenceSharding(2).token_ranges(found, 0))


def some(whole: torch.Tensor = WHOLE, dim: int = 1) -> SequenceShardedTensor:
    # a copy: the shard keeps its slices for later calls, and tests write into what they get
    return make_sharded_tensor(SHARE.take_padded(whole, dim).clone(), dim, SHARE)


def test_a_sharded_activation_has_the_global_shape():
    x = some()
    assert x.shape == WHOLE.shape
    assert x.size(1) == len(x[0]) == LENGTH
    assert x.numel() == WHOLE.numel()
    assert x.dtype == torch.float64
    assert x.device == WHOLE.device
    assert not x.requires_grad
    assert x.local_tensor.shape == (2, SHARE.num_tokens, 3)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2 + 1,
        lambda x: x + WHOLE,
        lambda x: WHOLE[:1] - x,
        lambda x: x * torch.arange(float(LENGTH))[:, None],
        lambda x: x + torch.ones(3),
        lambda x: x.to(torch.float32),
        lambda x: torch.nn.functional.gelu(x),
        lambda x: x[:, :, :2],
        lambda x: x[:, slice(0, None), :],
        lambda x: x[..., None],
        lambda x: x[None],
        lambda x: x[0],
        lambda x: x[:, :, 1],
    ],
)
def test_tokenwise_operations_stay_sharded(compute):
    made, expected = compute(some()), compute(WHOLE)
    assert type(made) is SequenceShardedTensor
    assert made.shape == expected.shape
    torch.testing.assert_close(made.local_tensor, SHARE.take_padded(expected, made.sequence_dim))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x[:, :2],
        lambda x: x[:, 1:],
        lambda x: x.amax(1),
        lambda x: x.flatten(),
        lambda x: x[:, [0, 2]],
    ],
)
def test_other_operations_gather_all_tokens(compute):
    made = compute(some())
    assert type(made) is torch.Tensor
    torch.testing.assert_close(made, compute(WHOLE))


def test_gradients_go_to_this_ranks_tokens():
    local = SHARE.take_padded(WHOLE, 1).clone().requires_grad_()
    x = make_sharded_tensor(local, 1, SHARE)
    assert x.requires_grad
    (x * WHOLE).local_tensor.sum().backward()
    torch.testing.assert_close(local.grad, SHARE.take_padded(WHOLE, 1))


def test_a_block_gets_its_rows_of_masks_and_tables_and_returns_a_sharded_activation():
    mask, table = torch.ones(1, 1, LENGTH, LENGTH), torch.arange(float(LENGTH))[None]
    slots = ("0.0", "1.mask", "1.tables.0", "1.tables.1")
    passing = BlockSequenceInfo(
        "b", input_token_dims=((1,), (2, 3), (1,), (1,)), arg_paths=slots
    ).with_lengths(LENGTH)
    args, kwargs = shard_block_inputs(
        ((some(),), {"mask": mask, "tables": (table, table), "flag": None}), passing, shares
    )
    assert args[0].shape == (2, SHARE.num_tokens, 3)
    assert type(args[0]) is torch.Tensor
    assert kwargs["mask"].shape == (1, 1, SHARE.num_tokens, LENGTH)
    assert [each.tolist() for each in kwargs["tables"]] == [SHARE.take_padded(table, 1).tolist()] * 2
    out = wrap_block_outputs((args[0], table), ((1, SHARE), None))
    assert type(out[0]) is SequenceShardedTensor
    assert out[1] is table
    assert to_local_tensors(out)[0] is args[0]


def test_inputs_shared_by_layers_are_sliced_once():
    mask, learned = torch.ones(1, 1, LENGTH, LENGTH), torch.ones(1, LENGTH, 3, requires_grad=True)
    first = SHARE.take_padded(mask, 2)
    assert SHARE.take_padded(mask, 2) is first
    assert SHARE.take_padded(mask, 3) is not first
    assert SHARE.take_padded(learned, 1) is not SHARE.take_padded(learned, 1)
    mask[..., 0] = 5.0
    assert SHARE.take_padded(mask, 2) is not first
    assert (SHARE.take_padded(mask, 2)[..., 0] == 5.0).all()
    with torch.inference_mode():
        read = torch.ones(1, LENGTH, 3)
        assert SHARE.take_padded(read, 1).shape == (1, SHARE.num_tokens, 3)


@pytest.mark.parametrize("dim", [0, 1])
def test_many_token_ranges_are_sliced_as_few_are(dim: int):
    spans = SequenceSharding(2, striped=True).token_ranges(40, 1)
    whole = torch.randn(40, 40, dtype=torch.float64, requires_grad=True)
    mine = TokenShard(40, spans).take_padded(whole, dim)
    assert torch.equal(mine, whole[1::2] if dim == 0 else whole[:, 1::2])
    mine.sum().backward()
    assert whole.grad is not None
    assert float(whole.grad.sum()) == 800


def test_a_block_takes_tokens_of_sequences_of_two_lengths():
    mask, theirs = torch.ones(2, 1, LENGTH, 4), make_sharded_tensor(torch.zeros(2, 2, 3), 1, shares(9, 4))
    passing = BlockSequenceInfo(
        "b", ((1,), (1,), (2, 3)), arg_paths=("0.0", "0.1", "1.mask"), input_num_tokens=(LENGTH, 9, LENGTH)
    )
    (mine, other), kwargs = shard_block_inputs(((some(), theirs), {"mask": mask}), passing, shares)
    assert (mine.shape, other.shape) == ((2, SHARE.num_tokens, 3), (2, 2, 3))
    assert kwargs["mask"].shape == (2, 1, SHARE.num_tokens, 4)


def test_sequences_of_another_length_are_refused():
    with pytest.raises(PlanError, match="dim 1 of that was tokens"):
        shard_block_inputs(
            ((torch.ones(1, 5),), {}),
            BlockSequenceInfo("layer", input_token_dims=((1,),), arg_paths=("0.0",)).with_lengths(LENGTH),
            shares,
        )


def test_of_inputs_unknown_to_the_trial_only_masks_are_sliced():
    passing = BlockSequenceInfo("layer", input_token_dims=((1,),), arg_paths=("0.0",)).with_lengths(LENGTH)
    given_now = ((some(),), {"mask": torch.ones(2, 1, LENGTH, LENGTH), "width": torch.ones(3)})
    _, kwargs = shard_block_inputs(given_now, passing, shares)
    assert kwargs["mask"].shape == (2, 1, SHARE.num_tokens, LENGTH)
    assert kwargs["width"].shape == (3,)
    with pytest.raises(PlanError, match="was absent in the trial"):
        shard_block_inputs(((some(),), {"table": torch.ones(LENGTH, 3)}), passing, shares)
