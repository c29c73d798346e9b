"""Rows of pairs are taken from two tensors, and the sums return there."""

import torch

from meshwright.parallel.expert.expert_pairs import add_pairs, take_pairs

OWN_ROW, OTHER_ROW = torch.tensor([0, 0, 2]), torch.tensor([1, 0])


def test_pairs_come_from_their_rows_and_their_sums_return():
    own, others = torch.arange(6.0).view(3, 2), 10 + torch.arange(4.0).view(2, 2)
    pairs = take_pairs(own, others, OWN_ROW, OTHER_ROW)
    assert torch.equal(pairs, torch.cat([own[OWN_ROW], others[OTHER_ROW]]))
    sums = add_pairs(pairs, OWN_ROW, OTHER_ROW, (3, 2))
    assert torch.equal(sums[0], own * torch.tensor([[2.0], [0.0], [1.0]]))
    assert torch.equal(sums[1], others)


def test_each_is_the_adjoint_of_the_other_to_any_order():
    generator = torch.Generator().manual_seed(0)
    own, others = (
        torch.randn(number, 2, dtype=torch.float64, generator=generator, requires_grad=True)
        for number in (3, 2)
    )

    def there_and_back(own: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_pairs(take_pairs(own, others, OWN_ROW, OTHER_ROW) ** 3, OWN_ROW, OTHER_ROW, (3, 2))

    assert torch.autograd.gradcheck(there_and_back, (own, others))
    assert torch.autograd.gradgradcheck(there_and_back, (own, others))
