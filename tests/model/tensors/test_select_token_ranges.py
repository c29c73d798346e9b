"""Positions are selected in their order, and an index tensor is made once per device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.tensors import select_token_ranges
from meshwright.model.tensors.select_token_ranges import MAX_INDICES, PositionSelector

TENSOR = torch.arange(80.0).view(2, 40)
EVERY_SECOND = tuple((at, at + 1) for at in range(0, 40, 2))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The devices of the index tensors that are made."""
    found, make = list[object](), select_token_ranges.index_tensor
    monkeypatch.setattr(
        select_token_ranges, "index_tensor", lambda at, device: found.append(device) or make(at, device)
    )
    return found


def test_an_index_tensor_is_made_once(made: list[object]) -> None:
    selector = PositionSelector()
    for _ in range(3):
        assert torch.equal(selector.select_spans(TENSOR, 1, EVERY_SECOND), TENSOR[:, ::2])
        assert torch.equal(selector.select(TENSOR, 1, (3, 1)), TENSOR[:, [3, 1]])
        summed = TENSOR.clone()
        selector.add_to_spans(summed, 1, EVERY_SECOND, torch.ones(2, 20))
        assert torch.equal((summed - TENSOR)[0], torch.tensor([1.0, 0.0] * 20))
    assert len(made) == 2
    assert torch.equal(selector.select_spans(TENSOR, 1, ((1, 3), (7, 8))), TENSOR[:, [1, 2, 7]])
    assert len(made) == 2  # a few spans need none


def test_a_fake_tensor_gets_an_index_of_its_mode_and_a_real_one_a_real_one() -> None:
    selector = PositionSelector()
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(TENSOR)
            assert selector.select(fake, 1, (3, 1)).shape == (2, 2)
        assert torch.equal(selector.select(TENSOR, 1, (3, 1)), TENSOR[:, [3, 1]])


def test_the_index_that_was_not_used_for_longest_is_dropped(made: list[object]) -> None:
    selector = PositionSelector()
    for at in range(MAX_INDICES + 1):
        selector.select(TENSOR, 1, (0,))
        selector.select(TENSOR, 1, (1,) * (at + 1))
    assert len(made) == MAX_INDICES + 2
    selector.select(TENSOR, 1, (0,))
    assert len(made) == MAX_INDICES + 2
    selector.select(TENSOR, 1, (1,))
    assert len(made) == MAX_INDICES + 3
