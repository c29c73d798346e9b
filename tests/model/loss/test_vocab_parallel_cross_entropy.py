"""Cross-entropy on logits of a vocabulary shard equals that on all logits, in value and gradient, and sends
two numbers per token.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.peak_bytes import PeakLive
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.redistribute import all_gather
from meshwright.model.loss import vocab_parallel_cross_entropy as pieces
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard, vocab_parallel_cross_entropy
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads

NUM_SAMPLES, TOKENS, WORDS = 2, 5, 67
LOGITS = 3 * torch.randn(
    NUM_SAMPLES, TOKENS, WORDS, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)
LABELS = torch.tensor(
    [[0, IGNORE_INDEX, 33, 34, 66], [IGNORE_INDEX, 22, 23, 44, 45]]
)  # at the borders of 2 and 3 parts
WEIGHTS = torch.tensor([[0.5, float("nan"), 0.0, 2.0, 1.0], [3.0, 0.25, 1.0, 1.0, 7.0]], dtype=torch.float64)
BATCHES = {"labels": {"labels": LABELS}, "weights": {"labels": LABELS, "loss_weights": WEIGHTS}}


def vocab_range_of(world: World) -> VocabShard:
    group = world.group(("tp",))
    each, more = divmod(WORDS, group.size)
    first = group.index * each + min(group.index, more)

    def told(numbers: torch.Tensor) -> torch.Tensor:
        return all_gather(numbers, group, 0, "LOSS").view(group.size, *numbers.shape)

    return VocabShard(first, each + (group.index < more), WORDS, told)


def taken(
    world: World, loss: Loss, batch: dict[str, torch.Tensor], given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The total, and the gradient of this rank's logits."""
    words = vocab_range_of(world)
    mine = given[..., words.start : words.start + words.size].clone().requires_grad_()
    assert loss.vocab_parallel is not None
    total = loss.vocab_parallel.total(mine, batch, words)
    (3 * total).backward()
    assert mine.grad is not None
    return total.detach(), mine.grad


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("batch", BATCHES)
def test_it_equals_the_loss_on_the_whole_vocabulary(
    ranks: int, smoothing: float, batch: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pieces, "MAX_CHUNK_NUMEL", 100)  # a few tokens at a time
    loss, whole = token_cross_entropy(smoothing), LOGITS.clone().requires_grad_()
    total = loss.total(whole, BATCHES[batch])
    (3 * total).backward()
    found = run_on_threads(lambda world: taken(world, loss, BATCHES[batch], LOGITS), Mesh(tp=ranks))
    assert len({one.item() for one, _ in found}) == 1, "every rank has the same bits"
    assert torch.allclose(found[0][0], total, rtol=1e-14)
    assert torch.allclose(
        torch.cat([gradient for _, gradient in found], -1), whole.grad, rtol=1e-12, atol=1e-14
    )


def test_half_precision_is_summed_in_float32_and_its_gradient_is_half():
    loss, half = token_cross_entropy(), LOGITS.bfloat16()
    whole = loss.total(half, {"labels": LABELS})
    for total, gradient in run_on_threads(
        lambda world: taken(world, loss, {"labels": LABELS}, half), Mesh(tp=2)
    ):
        assert total.dtype == torch.float32
        assert torch.allclose(total, whole, rtol=1e-6)
        assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 2), (0.1, 3)])
def test_ranks_send_a_few_numbers_per_token_once(smoothing: float, numbers: int):
    def issued(world: World) -> list[tuple[str, int]]:
        world.ledger.is_recording = True
        taken(world, token_cross_entropy(smoothing), {"labels": LABELS}, LOGITS)
        return [(entry.collective, entry.nbytes) for entry in world.ledger.entries]

    assert run_on_threads(issued, Mesh(tp=3)) == [[("all_gather", numbers * NUM_SAMPLES * TOKENS * 8)]] * 3


def test_tokens_that_do_not_count_do_no_harm():
    broken = LOGITS.clone()
    broken[LABELS == IGNORE_INDEX] = float("inf")
    loss = token_cross_entropy()
    (right, _), *_ = run_on_threads(lambda world: taken(world, loss, {"labels": LABELS}, LOGITS), Mesh(tp=2))
    for total, gradient in run_on_threads(
        lambda world: taken(world, loss, {"labels": LABELS}, broken), Mesh(tp=2)
    ):
        assert torch.equal(total, right)
        assert gradient.isfinite().all()


def test_huge_logits_do_not_overflow():
    loss, huge = token_cross_entropy(), 1e4 * LOGITS
    whole = loss.total(huge, {"labels": LABELS})
    assert torch.allclose(
        run_on_threads(lambda world: taken(world, loss, {"labels": LABELS}, huge), Mesh(tp=3))[0][0], whole
    )


@pytest.mark.parametrize("label", [WORDS, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int):
    labels = LABELS.clone()
    labels[0, 0] = label
    with pytest.raises(PlanError, match=r"labels from .* the model has 67 tokens, numbered from 0"):
        run_on_threads(
            lambda world: taken(world, token_cross_entropy(), {"labels": labels}, LOGITS), Mesh(tp=2)
        )


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made beside `given`."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.numel, self._given = 0, given.data_ptr()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple) else (out,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self._given:
                self.numel = max(self.numel, made.untyped_storage().nbytes() // made.itemsize)
        return out


def test_a_forward_makes_no_second_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "MAX_CHUNK_NUMEL", 100)
    mine = torch.randn(50, 67, dtype=torch.bfloat16)
    with torch.no_grad(), Largest(mine) as made:
        vocab_parallel_cross_entropy(
            mine, torch.arange(50), torch.ones(50), VocabShard(0, 67, 67, lambda numbers: numbers[None])
        )
    assert made.numel <= 100, f"{made.numel} elements, of {mine.numel()} in the logits"


def test_one_chunk_exists_at_a_time_beside_the_logits_and_their_gradient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "MAX_CHUNK_NUMEL", 67 * 100)
    mine = torch.randn(400, 67, requires_grad=True)
    with PeakLive([mine]) as live:
        loss = vocab_parallel_cross_entropy(
            mine,
            torch.arange(400) % 67,
            torch.ones(400),
            VocabShard(0, 67, 67, lambda numbers: numbers[None]),
        )
        loss.backward()
    assert live.peak < (2 + 1.5 / 4) * mine.nbytes
