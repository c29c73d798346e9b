"""Sums of what ranks with the same tokens compute of experts: each once, in the order of the step."""

import pytest

import meshwright as mw
from meshwright.plan.step.program import Transfer
from tests.nn.test_mixture_of_experts import analyzed_decoder, batch
from tests.parallel.expert.mixture_model import TOKENS, analyzed_mixtral, expert_strategies, sgd_job

ROW, CHOICE = 4 * 16, 4 * 2  # bytes of a token, and of the weights of its two experts


def transfers_of(kind: str, plan: mw.Plan) -> list[Transfer]:
    block = "model.layers.1"
    return next(
        list(action.inner_transfers)
        for action in plan.for_rank(0).actions
        if (action.kind, action.subject) == (kind, block)
    )


@pytest.mark.parametrize("strategy", [mw.ExpertParallel(("tp",)), mw.ExpertTensorParallel()], ids=str)
def test_a_call_has_one_sum_forward_and_two_backward(strategy: mw.Strategy):
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mw.Mesh(tp=2), (strategy,), 4)
    forward, backward = ([each.nbytes for each in transfers_of(kind, plan)] for kind in "FB")
    assert forward == [4 * TOKENS * ROW]
    assert backward == [4 * TOKENS * ROW, 4 * TOKENS * CHOICE]


def test_tokens_return_before_they_are_summed_and_so_do_gradients():
    strategies = expert_strategies(over=("ep", "tp"))
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mw.Mesh(ep=2, tp=2), strategies)
    forward, backward = ([each.collective for each in transfers_of(kind, plan)] for kind in "FB")
    assert forward == ["all_to_all", *["all_to_all_v"] * 2, "all_reduce"]
    assert backward == [*["all_to_all_v"] * 2, *["all_reduce"] * 2]


@pytest.mark.parametrize(("cp", "rows"), [(1, 12), (2, 12), (3, 8)])
@pytest.mark.parametrize("strategy", [mw.ExpertParallel(("tp",)), mw.ExpertTensorParallel()], ids=str)
def test_experts_that_choose_tokens_sum_a_row_for_each_choice_that_a_rank_may_have(
    strategy: mw.Strategy, cp: int, rows: int
):
    analyzed = analyzed_decoder("expert choice")  # 6 tokens, 4 experts with 3 each
    strategies = (strategy, *((mw.RingAttention(), mw.DDP("cp")) if cp > 1 else ()))
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(cp=cp, tp=2), strategies, 4)
    action = next(each for each in plan.for_rank(0).actions if each.name == "F(layers.1, 0)")
    sums = [each.nbytes for each in action.inner_transfers if each.axes == ("tp",)]
    assert sums == [4 * rows * 8 * 4]
    mw.verify(analyzed, plan, [batch(0)]).raise_if_failed()
