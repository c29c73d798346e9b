"""Finds the linear layers of a model that another product may replace: nothing but their own calls reads
their weights.

    ModuleStart  layer(x)
    AtenOp       aten.mm(x, layer.weight)       inside: the product of nn.Linear's own forward
    ModuleEnd    layer -> the result of that
    AtenOp       aten.mm(x, layer.weight)       anywhere else: whoever replaces the call would miss this one

A layer of a class of its own, with a parametrization, or that is never called, is not among them.
"""

from torch import nn

from meshwright.model.recording.forward_recording import AtenOp, ModuleEnd, ModuleStart, Recording


def plain_linear_layers(module: nn.Module, recording: Recording) -> tuple[str, ...]:
    """Returns the names of the layers of `module` of the class nn.Linear whose weights are read in their own
    calls, and nowhere else, in the order of modules.
    """
    layers = [
        name
        for name, each in module.named_modules()
        if type(each) is nn.Linear and "forward" not in vars(each)
    ]
    found = {name: recording.parameters.get(f"{name}.weight") for name in layers}
    weights = {record.storage: name for name, record in found.items() if record is not None}
    running, called, read_elsewhere = set[str](), set[str](), set[str]()
    for event in recording.events if weights else ():
        if type(event) is ModuleStart:
            running.add(event.name)
        elif type(event) is ModuleEnd:
            running.discard(event.name)
        elif type(event) is AtenOp:
            names = {weights[each.storage] for each in event.inputs if each.storage in weights}
            called |= names & running
            read_elsewhere |= names - running
    return tuple(name for name in layers if name in called - read_elsewhere)
