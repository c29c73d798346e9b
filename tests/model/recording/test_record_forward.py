"""Recording a forward: one identity for each tensor, its versions, its end, and the calls around it."""

import gc

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.recording.forward_recording import (
    AtenOp,
    BlockEnd,
    BlockStart,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    SavedTensor,
    TensorFreed,
    tensor_records,
)
from meshwright.model.recording.record_forward import ForwardRecorder
from tests.model.recording.recorded_functions import record_function


def test_a_tensor_has_one_id_above_and_below_autograd_and_a_version_that_grows():
    def run() -> torch.Tensor:
        x = torch.ones(3, requires_grad=True) * 2
        x.add_(1)
        return x

    recording = record_function(run)
    mul = next(each for each in recording.events if isinstance(each, AtenOp) and "mul" in each.name)
    add = next(each for each in recording.events if isinstance(each, FunctionCall) and each.name == "add_")
    assert mul.results.id == add.args[0].id == recording.outputs.id
    assert (mul.results.requires_grad, add.args[0].requires_grad) == (False, True)
    assert [add.args[0].version, recording.outputs.version] == [0, 1]


def test_a_tensor_that_is_gone_gives_its_id_to_no_other():
    def run() -> list[torch.Tensor]:
        return [(torch.ones(3) * number).sum() for number in range(5)]

    recording = record_function(run)
    made = [each.results.id for each in recording.events if isinstance(each, AtenOp)]
    freed = [each.id for each in recording.events if isinstance(each, TensorFreed)]
    assert len(set(made)) == len(made) == 15
    assert len(freed) == 10
    assert not {each.id for each in recording.outputs} & set(freed)
    storages = {record.storage for e in recording.events if isinstance(e, AtenOp) for record in e.outputs}
    assert len(storages) == 15


def test_views_share_a_storage_and_setting_data_changes_it():
    def run() -> tuple[torch.Tensor, ...]:
        x, y = torch.ones(3), torch.zeros(3)
        x.data = y
        return x, y

    recording = record_function(run)
    first, second = recording.outputs
    assert first.storage == second.storage
    assert first.id != second.id
    (call,) = (each for each in recording.calls() if each.name == "__set__")
    assert (call.owner, call.target) == ("data", first)


def test_indices_of_a_list_are_known_and_those_of_fake_tensors_are_not():
    recording = record_function(lambda: torch.ones(5)[torch.tensor([3, 1])])
    (op,) = (each for each in recording.events if isinstance(each, AtenOp) and "index" in each.name)
    assert op.args[1][0].values == (3, 1)


class Pair(nn.Module):
    """Two layers; the second is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.second(self.first(x))))


def test_modules_and_blocks_are_recorded_with_what_they_take_and_return():
    module = Pair()
    blocks = {"first": module.first, "second": module.second}
    own_forwards = [dict(vars(each)) for each in blocks.values()]
    recorder = ForwardRecorder(module, blocks, 3)
    with recorder.recording():
        driver = ForwardDriver(blocks)
        outputs, _, _ = driver.forward(recorder.begin_block_call, lambda: module(torch.ones(3, 4)))
        driver.detach()
    recording = recorder.finish(outputs)
    assert recording.block_calls == ("first", "second", "second#2")
    assert [dict(vars(each)) for each in blocks.values()] == own_forwards
    starts = [event for event in recording.events if isinstance(event, BlockStart)]
    ends = [event for event in recording.events if isinstance(event, BlockEnd)]
    assert [event.block_call for event in ends] == list(recording.block_calls)
    assert starts[1].args[0].requires_grad
    assert starts[1].args[0].id != starts[0].args[0].id
    # between a module's start and the start of its block, and after its end, runs glue
    kinds = [(type(e).__name__, e.name) for e in recording.events if isinstance(e, (ModuleStart, BlockStart))]
    assert kinds[:3] == [("ModuleStart", ""), ("ModuleStart", "first"), ("BlockStart", "first")]
    last = [event for event in recording.events if isinstance(event, ModuleEnd)][-1]
    assert last.name == ""
    assert tensor_records(recording.outputs)[0].shape == (3, 4)
    saved = [event.block_call for event in recording.events if isinstance(event, SavedTensor)]
    assert "second#2" in saved


def test_nothing_is_left_behind_by_a_forward_that_fails():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    recorder = ForwardRecorder(module, {"0": module[0]}, 1)
    with pytest.raises(RuntimeError, match="shapes"), recorder.recording():
        module(torch.ones(1, 2))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert "forward" not in vars(module[0])
    assert gc.isenabled()
    failed = next(recorder.finish(None).calls())
    assert failed.name in ("linear", "ones")


def test_the_results_of_a_forward_are_known_before_and_after_its_hooks():
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda module, args, out: out * 2)
    recording = record_function(lambda: module(torch.ones(1, 2)), module)
    (end,) = (event for event in recording.events if isinstance(event, ModuleEnd))
    assert end.own_results.id != end.results.id == recording.outputs.id


def test_a_backward_inside_works_on_what_autograd_saved():
    def run() -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        (grad,) = torch.autograd.grad((x.exp() * F.softplus(x)).sum(), x)
        return grad

    x = torch.ones(3, requires_grad=True)
    (expected,) = torch.autograd.grad((x.exp() * F.softplus(x)).sum(), x)
    recorder = ForwardRecorder(nn.Module(), {}, 1)
    with recorder.recording():
        assert torch.equal(run(), expected)
