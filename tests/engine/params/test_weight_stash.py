"""Old versions of weights for live autograd graphs: gradients are those of the version that the
forward used.
"""

import torch
from torch import nn

from meshwright.engine.params.weight_stash import WeightStash
from meshwright.plan.step.program import Action

ROOM = "old weights(0)"


def model() -> nn.Module:
    """A product of matrices, of whose weight autograd saves a view, and a norm, of which it saves the weight
    itself.
    """
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def gradients(of: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(of.parameters())))


def stepped(*, restore: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], WeightStash]:
    """The gradients of a loss whose forward ran before a step and whose backward runs after it, and what they
    should be.
    """
    mine, samples = model(), torch.arange(20.0, dtype=torch.float64).view(4, 5).sin()
    expected = gradients(mine, mine(samples).square().sum())
    weights = dict(mine.named_parameters())
    beside = {name: nn.Parameter(weight.data) for name, weight in weights.items()}
    versions = WeightStash(weights, beside)
    loss = mine(samples).square().sum()
    versions.stash(Action("STASH", ROOM, 0))
    with torch.no_grad():
        for parameter in beside.values():
            parameter.mul_(1.5)
    if restore:
        versions.load_stashed(Action("LOAD_STASHED", ROOM, 0))
    found = gradients(mine, loss)
    versions.load_latest(Action("LOAD_LATEST", ROOM, 0, frees=(ROOM,)))
    for name, weight in weights.items():
        assert weight.data_ptr() == beside[name].data_ptr(), "the newest ones are there again"
    return found, expected, versions


def test_a_backward_uses_the_weights_of_its_forward():
    found, expected, versions = stepped(restore=True)
    assert all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))
    assert versions.nbytes == sum(parameter.nbytes for parameter in model().parameters())


def test_without_restore_a_norm_uses_the_newest_weights():
    found, expected, _ = stepped(restore=False)
    assert not torch.allclose(found[0], expected[0])


def test_freed_memory_is_reused_for_the_next_version():
    weight = nn.Parameter(torch.ones(3))
    versions = WeightStash({"w": weight}, {})
    for _ in range(4):
        versions.stash(Action("STASH", ROOM))
        versions.load_latest(Action("LOAD_LATEST", ROOM, frees=(ROOM,)))
    assert versions.nbytes == weight.nbytes


def test_a_step_that_failed_leaves_the_newest_weights():
    weight = nn.Parameter(torch.ones(3))
    versions = WeightStash({"w": weight}, {})
    versions.stash(Action("STASH", ROOM))
    weight.data.fill_(2.0)
    versions.load_stashed(Action("LOAD_STASHED", ROOM))
    assert weight.tolist() == [1.0] * 3
    versions.discard_all()
    assert weight.tolist() == [2.0] * 3
