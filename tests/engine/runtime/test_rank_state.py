"""The state of one rank during a step: parameters, buckets, and what is reset at its end."""

from collections.abc import Callable
from weakref import ref

import torch
from torch import nn

from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.grad_bucket import GradBucket
from meshwright.engine.runtime.rank_state import RankState, TrainedModule
from meshwright.model.blocks.block_forward_backward import BlockCall, ForwardPass
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.step.program import Action


def state_of(parameters: dict[str, nn.Parameter]) -> RankState:
    subject = TrainedModule(nn.Module(), {}, parameters, ModelSpec("paper", (), (), (), ()), {})
    return RankState(subject, single_rank_world(torch.device("cpu")), token_cross_entropy())


def test_trainable_parameters_are_those_that_require_gradients():
    parameters = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2), requires_grad=False)}
    assert list(state_of(parameters).trained_module.trainable_parameters) == ["a"]


def test_the_tensor_of_a_bucket_is_its_buffer_and_that_of_a_parameter_its_gradient():
    state = state_of({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))})
    state.buckets["0"] = GradBucket({"a": state.trained_module.parameters["a"]}, torch.float32)
    assert state.operand(Action("REDUCE", "0")).output is state.buckets["0"].buffer
    found = state.operand(Action("REDUCE", "b"))
    assert found.output.tolist() == [0.0] * 3
    assert found.input is found.output is state.trained_module.parameters["b"].grad
    state.trained_module.parameters["a"].grad = torch.ones(2)
    assert state.operand(Action("REDUCE", "a")).output is state.trained_module.parameters["a"].grad


def test_a_step_begins_empty_and_what_ended_is_forgotten_but_for_the_numbers():
    state = state_of({"a": nn.Parameter(torch.ones(2))})
    for number in range(2):
        state.begin_step(number)
        step = state.step
        assert (step.number, step.microbatches, step.forward_passes, step.final_glue, state.works) == (
            number,
            [],
            {},
            {},
            {},
        )
        assert step.loss_sum.item() == 0
        step.microbatches = [{"x": torch.zeros(2)}]
        step.forward_passes[0] = ForwardPass(lambda block_call: None)
        step.final_glue[0] = None, BlockCall("(outputs)")
        state.works["REDUCE(0)"] = CompletedWork()
        step.loss_sum.add_(3)
    state.end_step()
    assert (step.microbatches, step.forward_passes, step.final_glue, state.works) == ([], {}, {}, {})
    assert state.step.loss_sum.item() == 3


def test_its_sums_are_on_the_device_of_its_rank():
    subject = TrainedModule(nn.Module(), {}, {}, ModelSpec("paper", (), (), (), ()), {})
    state = RankState(subject, single_rank_world(torch.device("meta")), token_cross_entropy())
    assert {state.step.loss_sum.device.type, state.step.grad_norm_tensor.device.type} == {"meta"}


class Send(Work):
    """A send that holds its tensor until it has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.ended = tensor, False

    def wait(self) -> None:
        self.ended = True

    @property
    def is_done(self) -> bool:
        return self.ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError


def test_a_work_that_a_later_step_waits_for_outlives_its_step():
    state = RankState(None, single_rank_world(torch.device("cpu")), None)  # type: ignore[arg-type]
    state.awaited_later.add("AVERAGE(0)")
    works = [Send(torch.zeros(1)) for _ in range(3)]
    for work, action in zip(works, (Action("REDUCE", "0"), Action("AVERAGE", "0")), strict=False):
        state.issue(action, work)
    state.begin_step(1)
    assert (state.works, list(state.carried_works.values())) == ({}, [works[1]])
    state.wait_for_carried(("AVERAGE(1)",))
    assert not works[1].ended
    state.wait_for_carried(("AVERAGE(0)",))
    assert works[1].ended
    state.issue(Action("AVERAGE", "0"), works[2])
    state.wait_for_carried()
    assert (works[2].ended, state.carried_works) == (True, {})


def test_a_send_that_has_ended_lets_go_of_its_tensor_at_the_next_one():
    state = RankState(None, single_rank_world(torch.device("cpu")), None)  # type: ignore[arg-type]
    tensors = [torch.zeros(3) for _ in range(4)]
    alive = [ref(tensor) for tensor in tensors]
    sends = [Send(tensor) for tensor in tensors]
    del tensors
    for microbatch in range(4):
        state.issue_send(Action("SEND_GRAD", "x", microbatch), sends[microbatch])
        sends[microbatch].ended = microbatch != 2
    del sends
    assert [each() is not None for each in alive] == [False, False, True, True]
    assert state.works["SEND_GRAD(x, 0)"].is_done
    assert not state.works["SEND_GRAD(x, 2)"].is_done
    state.end_step()
    assert not any(each() is not None for each in alive)
