"""Choices of experts are recorded by forward, and the first token with others is named."""

import torch

from meshwright.model.recording.expert_choices import ChoiceRecorder, Choices, first_other_choice
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
