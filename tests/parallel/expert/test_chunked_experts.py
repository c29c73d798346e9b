"""Experts return for pairs in chunks what they return for all at once, and save the rows alone."""

import pytest
import torch

import meshwright as mw
from benchmarks.experts.expert_memory import ONE_RANK, with_route
from meshwright.nn.experts import ExpertMLP, Experts
from meshwright.parallel.expert.chunked_experts import PairPlaces, add_in_chunks
from meshwright.parallel.expert.expert_pairs import add_pairs, take_pairs
from tests.parallel.expert.mixture_model import batch_of, expert_strategies, gpt_oss, sgd_job

ROWS, FEATURES, NUM_EXPERTS = 7, 6, 3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def sums_of_pairs(
    experts: Experts, hidden: torch.Tensor, weights: torch.Tensor, num_pairs: int
) -> torch.Tensor:
    """The sums for own rows and for others, with one or two experts each, `num_pairs` at a time."""
    choice = (torch.arange(2 * ROWS) % 3).nonzero().squeeze(1)
    row = choice // 2
    places = PairPlaces(row, choice, choice % NUM_EXPERTS)
    half = len(row) // 2
    own, others = (
        places.part(0, half),
        places.part(half, len(row)),
    )  # of the same rows: they may have pairs in both

    def results(own: PairPlaces, others: PairPlaces) -> torch.Tensor:
        taken = (
            take_pairs(each, 2 * each, *rows)
            for each, rows in ((hidden, (own.row, others.row)), (weights, (own.choice, others.choice)))
        )
        pairs, pair_weights = taken
        index = torch.cat([own.expert, others.expert]).unsqueeze(1)
        return experts(pairs, index, pair_weights.unsqueeze(1))

    num_rows = (ROWS, ROWS)
    if num_pairs >= len(row):
        return torch.cat(add_pairs(results(own, others), own.row, others.row, num_rows))
    return torch.cat(add_in_chunks(results, experts, (own, others), num_rows, num_pairs))


def values_and_grads(num_pairs: int) -> tuple[list[torch.Tensor], int]:
    """The sums with all gradients, and the elements of floating-point tensors that are saved for backward."""
    torch.manual_seed(0)
    experts = Experts(FEATURES, 5, NUM_EXPERTS, ExpertMLP(bias=True)).double()
    hidden, weights = draw(ROWS, FEATURES).requires_grad_(), draw(2 * ROWS).requires_grad_()
    saved = dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            saved[tensor.untyped_storage()._cdata] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        sums = sums_of_pairs(experts, hidden, weights, num_pairs)
    sums.backward(draw(*sums.shape).flip(0))
    leaves = [hidden, weights, *experts.parameters()]
    return [sums.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], sum(saved.values())


@pytest.mark.parametrize("num_pairs", [1, 4])
def test_chunks_give_the_sums_and_gradients_of_all_at_once_and_save_no_activation(num_pairs: int):
    (expected, saved), (found, saved_by_chunks) = values_and_grads(100), values_and_grads(num_pairs)
    assert len(found) == len(expected) == 7
    for each, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(each, truth, rtol=1e-12, atol=1e-12)
    assert saved > 0
    assert saved_by_chunks == 0


def test_slices_of_experts_with_biases_are_the_same_in_the_second_run():
    mesh = mw.Mesh(ep=2, tp=2)
    strategies = expert_strategies(mw.ExpertTensorParallel(), mw.ActivationCheckpointing())
    strategies = (mw.ExpertParallel(checkpoint_load=1), *strategies[1:])
    analyzed = mw.analyze(lambda: with_route(gpt_oss(), ONE_RANK, 2), batch_of(4))
    plan = mw.make_plan(analyzed, sgd_job(), mesh, strategies, 3)
    verdict = mw.verify(analyzed, plan, [batch_of(12), batch_of(12, 1)])
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("mesh", "over"),
    [({"tp": 3}, ("tp",)), ({"ep": 2, "tp": 2}, ("ep", "tp"))],
    ids=["tp", "ep and tp"],
)
def test_chunks_of_ranks_with_the_same_tokens_equal_one_device(mesh: dict[str, int], over: tuple[str, ...]):
    strategies = (mw.ExpertParallel(over, 1), *expert_strategies(over=over)[1:], mw.MemoryBudget())
    analyzed = mw.analyze(lambda: with_route(gpt_oss(), ONE_RANK, 5), batch_of(4))
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(**mesh), strategies, 3)
    verdict = mw.verify(analyzed, plan, [batch_of(12), batch_of(12, 1)])
    assert verdict.passed, str(verdict)


def test_a_load_below_one_is_refused():
    with pytest.raises(mw.PlanError, match=r"checkpoint_load = 0\.5; needed is a number of at least 1"):
        mw.ExpertParallel(checkpoint_load=0.5)
