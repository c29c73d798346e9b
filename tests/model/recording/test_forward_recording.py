"""A recording says of each event what an analysis needs: tensors, places, block calls, what is inside."""

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.recording.forward_recording import AtenOp, TensorRecord, find_overload, tensor_records
from tests.model.recording.recorded_functions import record_function, record_of


def test_a_full_view_has_the_memory_the_shape_and_the_strides():
    x = torch.zeros(3, 4)
    first, view, part, turned = tensor_records(record_function(lambda: (x, x[0:], x[1:], x.t().t())).outputs)
    assert view.is_full_view(first)
    assert turned.is_full_view(first)
    assert not part.is_full_view(first)
    assert (part.storage, part.offset, part.shape) == (first.storage, 4, (2, 4))


def test_tensors_are_found_in_nested_containers_in_order():
    a, b, c = (record_of(torch.zeros(size)) for size in (1, 2, 3))
    assert tensor_records(([a, {"x": (b, None)}], 3, c)) == [a, b, c]
    assert (b.ndim, b.numel()) == (1, 2)


def test_operations_are_resolved_by_name_and_lie_inside_of_their_call():
    recording = record_function(lambda: F.softmax(torch.ones(2, 3) * 2, -1))
    calls = {call.name: call for call in recording.calls()}
    assert calls["softmax"].num_inner >= 1
    at = recording.events.index(calls["softmax"])
    inside = recording.events[at + 1 : at + 1 + calls["softmax"].num_inner]
    (op,) = (each for each in inside if isinstance(each, AtenOp))
    assert op.name == "aten._softmax.default"
    assert op.overload is torch.ops.aten._softmax.default is find_overload(op.name)
    assert op.packet is torch.ops.aten._softmax
    assert isinstance(op.results, TensorRecord)
    assert op.outputs[0].shape == op.inputs[0].shape == (2, 3)
    assert calls["softmax"].code_line.startswith("test_forward_recording.py:")
