"""A module snapshot: a second run finds what the first found, and its writes are dropped."""

import pytest
import torch
from torch import nn

from meshwright.model.blocks.checkpointing import ModuleSnapshot


class Writing(nn.Module):
    """Writes a buffer in place, replaces another, moves a number, and makes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("read", torch.ones(2))
        self.register_buffer("missing", None)
        self.number = 0
        self.found: list[tuple[float, float, int, bool]] = []

    def forward(self) -> None:
        self.found.append(
            (self.written[0].item(), self.replaced[0].item(), self.number, "made" in vars(self))
        )
        self.written.add_(1)
        self.replaced = self.replaced + 1
        self.number += 1
        self.made = True


def held(module: Writing) -> tuple[float, float, int, bool]:
    return module.written[0].item(), module.replaced[0].item(), module.number, "made" in vars(module)


def test_a_second_run_finds_what_the_first_found_and_leaves_what_that_left():
    module = Writing()
    parts = nn.Sequential(module)
    before = ModuleSnapshot(parts)
    module()
    before.drop_unwritten()
    module()  # another forward in between
    buffers = dict(module.named_buffers())
    with before.restored_state():
        module()
    assert module.found == [(0, 0, 0, False), (1, 1, 1, True), (0, 0, 0, False)]
    assert held(module) == (2, 2, 2, True)
    assert all(buffers[name] is buffer for name, buffer in module.named_buffers())


def test_everything_is_back_also_after_a_run_that_fails():
    module = Writing()
    before = ModuleSnapshot(module)
    module()
    before.drop_unwritten()

    def fail() -> None:
        with before.restored_state():
            module()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert held(module) == (1, 1, 1, True)


@pytest.mark.parametrize(
    "make", [nn.BatchNorm1d, lambda width: nn.InstanceNorm1d(width, track_running_stats=True)]
)
def test_statistics_are_kept_though_kernels_write_them_without_a_new_version(make):
    norm, x = make(3), torch.randn(4, 3, 5)
    before = ModuleSnapshot(norm)
    norm(x)
    once = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    before.drop_unwritten()
    with before.restored_state():
        norm(x)
    assert once["running_mean"].abs().max() > 0
    assert all(torch.equal(once[name], buffer) for name, buffer in norm.named_buffers())


def test_nothing_is_kept_of_what_is_only_read():
    module = nn.Sequential(nn.Linear(2, 2), Writing())
    before = ModuleSnapshot(module)
    module[1].found.append((0, 0, 0, False))  # into a list of its own: not seen
    before.drop_unwritten()
    assert before._parts == []
