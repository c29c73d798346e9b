"""Choices of experts are recorded by forward, and the first token with others is named."""

import torch

from meshwright.model.recording.expert_choices import ChoiceRecorder, Choices, first_other_choice
from meshwright.nn import ExpertChoice, MixtureOfExperts, TopK
from meshwright.nn.experts import ExpertMLP, Experts
from meshwright.plan.model_spec.model_spec import ExpertsCall


def choices(index: list[list[int]], weights: list[list[float]]) -> Choices:
    return Choices(torch.tensor(index), torch.tensor(weights, dtype=torch.float64))


def test_the_first_call_of_a_forward_is_recorded():
    experts, keys = Experts(4, 3, 2, ExpertMLP()), iter([0, 0, None, 1])
    model = torch.nn.ModuleDict({"experts": experts})
    recorder = ChoiceRecorder(lambda: next(keys))
    recorder.attach(model, [ExpertsCall("experts", "block", (), 3, 1, 1, 4)])
    for each in range(4):
        experts(torch.ones(1, 4), top_k_index=torch.tensor([[each % 2]]), top_k_weights=torch.ones(1, 1))
    recorder.detach()
    experts(torch.ones(1, 4), torch.tensor([[0]]), torch.ones(1, 1))
    assert {key: each.index.tolist() for key, each in recorder.found.items()} == {
        ("experts", 0): [[0]],
        ("experts", 1): [[1]],
    }


def test_order_and_experts_of_weight_0_do_not_count():
    truth = choices([[0, 1], [2, 3]], [[0.5, 0.5], [1.0, 0.0]]).of_samples(2)
    other = choices([[1, 0], [2, 0]], [[0.5, 0.5], [1.0, 0.0]]).of_samples(2)
    assert first_other_choice(other, truth, [0, 1], [0]) == ""


def test_a_token_is_named_by_sample_and_position_in_the_batch():
    truth = choices([[0, 1]] * 6, [[0.5, 0.25]] * 6).of_samples(2)
    found = choices([[0, 1], [0, 2]], [[0.5, 0.25], [0.5, 0.375]]).of_samples(1)
    text = "sample 1, position 2 (experts [0, 1] on one device, [0, 2] under the plan, margin 0.1)"
    assert first_other_choice(found, truth, [1], [0, 2]) == text


def test_where_experts_choose_tokens_the_margin_is_that_of_the_tokens_which_change_places():
    scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.61, 0.39], [0.2, 0.8], [0.5, 0.5], [0.55, 0.45]])

    def taken(*tokens: int) -> Choices:  # expert 0 takes one of the first three, expert 1 none of those
        index = torch.full((6, 2), 2)
        index[list(tokens), 0] = 0
        weights = scores.masked_fill(index == 2, 0)
        return Choices(index, weights, scores, group_tokens=3).of_samples(1)

    truth, found = taken(0, 5), taken(0, 4)
    text = "sample 0, position 4 (experts [] on one device, [0] under the plan, margin 0.05)"
    assert first_other_choice(found, truth, [0], range(6)) == text
    of_rank = Choices(found.index[:, 5:], found.weights[:, 5:])  # which has no other token
    text = "sample 0, position 5 (experts [0] on one device, [] under the plan, margin 0.05)"
    assert first_other_choice(of_rank, truth, [0], [5]) == text


def test_the_scores_of_routes_are_recorded_where_experts_choose_tokens():
    for routing, has_scores in ((ExpertChoice(1.0, 2), True), (TopK(1, normalized=False), False)):
        layer = MixtureOfExperts(4, 3, 2, routing)
        recorder = ChoiceRecorder(lambda: 0)
        recorder.attach(layer, [ExpertsCall("experts", "block", (), 2, 1, 4, 4)])
        layer(torch.randn(3, 4, 4))
        recorder.detach()
        found = recorder.pop_choices(3)["experts"]
        assert (found.scores is not None) == has_scores
        if found.scores is not None:
            assert found.group_tokens == 2
            assert found.scores.sum(-1).allclose(torch.ones(3, 4))
