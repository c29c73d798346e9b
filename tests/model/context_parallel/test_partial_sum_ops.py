"""Selected tokens, or sums over tokens, as partial sums: the ranks' values add up to those of one device, and
gradients return to their ranks.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from meshwright.model.context_parallel.sharded_activation import make_sharded_tensor
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.sharding.sequence_sharding import SequenceSharding

LENGTH = 7
WHOLE = torch.arange(2.0 * LENGTH * 3, dtype=torch.float64).view(2, LENGTH, 3).sin()
LAST = torch.tensor([6, -3])
Compute = Callable[[torch.Tensor], torch.Tensor]


def run_on_ranks(compute: Compute, sharding: SequenceSharding) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of what ranks give, and the gradient of the sum of its squares, put together."""
    parts, locals_ = list[torch.Tensor](), list[torch.Tensor]()

    def add(part: torch.Tensor) -> torch.Tensor:
        parts.append(part)
        return part

    def bring(local: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError("all tokens are brought together")

    for index in range(sharding.num_ranks):
        share = TokenShard(LENGTH, sharding.token_ranges(LENGTH, index), bring, add)
        locals_.append(share.take_padded(WHOLE, 1).clone().requires_grad_())
        compute(make_sharded_tensor(locals_[-1], 1, share))
    total = sum(parts, start=torch.zeros(()))
    (total**2).sum().backward()
    home = torch.zeros_like(WHOLE)
    for index, local in enumerate(locals_):
        at, got = 0, local.grad
        assert got is not None
        for begin, end in sharding.token_ranges(LENGTH, index):
            home[:, begin:end] = got[:, at : at + end - begin]
            at += end - begin
    return total.detach(), home


FEW: dict[str, Compute] = {
    "the first": lambda x: x[:, 0],
    "the last": lambda x: x[:, -1],
    "one token of a sample": lambda x: x[1, 3],
    "one, kept": lambda x: x[:, -2:-1],
    "one, and some of its numbers": lambda x: x[:, 2, 1:],
    "one, and a new dim": lambda x: x[:, 4, None],
    "at the end": lambda x: x[..., 5, :],
    "by an index": lambda x: x[torch.arange(2), LAST],
    "by one index for all samples": lambda x: x[:, torch.tensor([0, 3, 3])],
    "one token of each sample": lambda x: x[torch.arange(2), -1],
    "a number": lambda x: x[torch.arange(2), LAST, 1],
    "a sum": lambda x: x.sum(1),
    "a sum of all": lambda x: x.sum(),
    "a mean": lambda x: x.mean(dim=1, keepdim=True),
    "a mean of tokens and numbers": lambda x: torch.mean(x, (1, 2)),
}


@pytest.mark.parametrize(
    "sharding",
    [
        SequenceSharding(2),
        SequenceSharding(3),
        SequenceSharding(2, num_inner_ranks=2, zigzag=False),
        SequenceSharding(9),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FEW)
def test_partial_values_add_up_to_those_of_one_device(name: str, sharding: SequenceSharding):
    made, home = run_on_ranks(FEW[name], sharding)
    whole = WHOLE.clone().requires_grad_()
    expected = FEW[name](whole)
    (expected**2).sum().backward()
    torch.testing.assert_close(made, expected.detach())
    torch.testing.assert_close(home, whole.grad)


def test_nan_of_another_rank_does_not_spread():
    share = TokenShard(LENGTH, ((0, 3),), sum_over_ranks=lambda part: part)
    x = make_sharded_tensor(torch.full((2, 3, 3), torch.nan), 1, share)
    assert x[:, 5].eq(0).all()
    assert x[torch.arange(2), torch.tensor([4, 6])].eq(0).all()


def test_the_mean_of_a_narrow_dtype_is_taken_in_a_wider_one():
    share = TokenShard(4096, ((0, 4096),), sum_over_ranks=lambda part: part)
    x = make_sharded_tensor(torch.full((1, 4096, 1), 100.0, dtype=torch.float16), 1, share)
    assert x.mean(1).item() == 100  # the sum is no number of float16


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x[:, 1:],
        lambda x: x[:, [0, 2]],
        lambda x: x[x[0, :, 0] > 0],
        lambda x: x.amax(1),
        lambda x: x.sum(2),
    ],
)
def test_other_operations_gather_all_tokens(compute: Compute):
    asked = []
    share = TokenShard(
        LENGTH, ((0, 3),), lambda local, dim: asked.append(dim) or WHOLE, lambda part: pytest.fail("a sum")
    )
    with suppress(IndexError):  # one that is an Apart itself
        compute(make_sharded_tensor(WHOLE[:, :3], 1, share))
    assert asked


@pytest.mark.parametrize("index", [LENGTH, -LENGTH - 1])
def test_an_index_out_of_range_is_an_error(index: int):
    x = make_sharded_tensor(WHOLE[:, :3], 1, TokenShard(LENGTH, ((0, 3),)))
    with pytest.raises(IndexError):
        x[:, index]
    with pytest.raises(IndexError):
        x[torch.arange(2), torch.tensor([0, index])]
