"""What one rank has in its hands."""

import torch
from torch import nn

from meshwright.api import alone
from meshwright.engine.runtime.loss import token_cross_entropy
from meshwright.engine.runtime.state import Bucket, State, Subject
from meshwright.model.blocks.driver import Pass, Visit
from meshwright.plan.model_spec.model_spec import Anatomy


def state_of(parameters: dict[str, nn.Parameter]) -> State:
    subject = Subject(nn.Module(), {}, parameters, Anatomy("paper", (), (), (), ()), {})
    return State(subject, alone(torch.device("cpu")), token_cross_entropy())


def test_trainable_parameters_are_those_that_require_gradients():
    parameters = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2), requires_grad=False)}
    assert list(state_of(parameters).subject.trainable) == ["a"]


def test_the_tensor_of_a_bucket_is_its_buffer_and_that_of_a_parameter_its_gradient():
    state = state_of({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))})
    state.buckets["0"] = Bucket({"a": state.subject.parameters["a"]}, torch.float32)
    assert state.tensor("0") is state.buckets["0"].flat
    assert state.tensor("b").tolist() == [0.0] * 3
    assert state.tensor("b") is state.subject.parameters["b"].grad
    state.subject.parameters["a"].grad = torch.ones(2)
    assert state.tensor("a") is state.subject.parameters["a"].grad


def test_a_step_begins_empty_and_what_ended_is_forgotten_but_for_the_sums():
    state = state_of({"a": nn.Parameter(torch.ones(2))})
    for _ in range(2):
        rows = {"x": torch.zeros(2)}
        state.begin([rows], 1)
        assert (state.micros, state.num_real, state.passes, state.closings, state.works) == ([rows], 1, {}, {}, {})
        assert state.tally.item() == 0
        state.passes[0], state.closings[0] = Pass(lambda visit: None), (None, Visit("(outputs)"))
        state.tally += 3
        state.header += 1
    state.forget()
    assert (state.micros, state.passes, state.closings, state.works) == ([], {}, {}, {})
    assert state.tally.item() == 3
    assert state.header.tolist() == [2, 2, 2, 2]
