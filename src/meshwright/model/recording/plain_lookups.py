"""Finds the embeddings of a model that are more than a lookup of rows of their weight.

    ModuleStart  table(ids)
    AtenOp       aten.embedding(table.weight, ids)     alone, with no other option than `padding_idx`: plain
    ModuleEnd    table -> the result of that
    AtenOp       aten.mean(table.weight)               anywhere: the block, or glue, reads the weight besides

Whoever looks up rows of a plain one elsewhere computes the same. A read of a shape is no operation.
Its ids are those of samples: as many per sample in every batch. So are those with samples along dim 0, and
those that are computed of what the forward was given; positions that are made once for all samples are not.
"""

from torch import nn

from meshwright.model.recording.forward_recording import (
    AtenOp,
    Event,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    Recording,
    tensor_records,
)

LOOKUP = "aten.embedding.default"
OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")


def not_plain_lookups(module: nn.Module, recording: Recording) -> dict[str, str]:
    """Returns, by the first name of its weight, why an embedding of `module` is more than a lookup; those
    that are plain are left out.
    """
    tables = {name: each for name, each in module.named_modules() if isinstance(each, nn.Embedding)}
    weights = {name: recording.parameters.get(f"{name}.weight") for name in tables}
    # one without a weight of its own computes it, as by a parametrization
    ids = {name: weight.id for name, weight in weights.items() if weight is not None}
    reads = _TableReads(recording, ids)
    for event in recording.events if ids else ():
        reads.read(event)
    reasons = {name: _own_reason(name, tables[name]) or reads.found.get(name, "") for name in ids}
    return {recording.parameter_names[ids[name]]: reason for name, reason in reasons.items() if reason}


def _own_reason(name: str, table: nn.Embedding) -> str:
    """Returns the option, or the forward, by which `table` differs from a plain embedding; "": none."""
    options = [option for option in OPTIONS if vars(table)[option]]
    if options:
        return f"{name} has {options[0]}"
    if type(table).forward is not nn.Embedding.forward or "forward" in vars(table):
        return f"{name}, of the class {type(table).__name__}, has a forward of its own"
    return ""


class _TableReads:
    """What a recording shows of tables, whose weights have the ids `weights`, by module: `found` has the
    first operation that reads one besides its lookup, or the first ids that are not those of samples.
    """

    def __init__(self, recording: Recording, weights: dict[str, int]) -> None:
        self.found = dict[str, str]()
        self._num_samples, self._weights = recording.num_samples, weights
        storages = {each.id: each.storage for each in recording.parameters.values()}
        self._names = {storages[weight]: name for name, weight in weights.items()}
        self._of_samples = set[int]()  # what the forward was given, and what was computed of it
        self._given = dict[str, list[int]]()  # to the calls of tables that run
        self._line = "?"

    def read(self, event: Event) -> None:
        """Takes the next event."""
        if type(event) is ModuleStart and event.name in ("", *self._weights):
            self._start_module(event)
        elif type(event) is ModuleEnd:
            self._given.pop(event.name, None)
        elif type(event) is FunctionCall:
            self._line = event.code_line
        elif type(event) is AtenOp:
            self._read_operation(event)

    def _start_module(self, event: ModuleStart) -> None:
        given = tensor_records((event.args, event.kwargs))
        if not event.name:
            self._of_samples.update(each.id for each in given)
            return
        self._given[event.name] = [each.id for each in given]
        for each in given:
            if each.shape[:1] != (self._num_samples,) and each.id not in self._of_samples:
                text = f"{event.name} looks up ids of shape {list(each.shape)} that are not those of samples"
                self.found.setdefault(event.name, text)

    def _read_operation(self, event: AtenOp) -> None:
        inputs = event.inputs
        operands = [each.id for each in inputs]
        if not self._of_samples.isdisjoint(operands):
            self._of_samples.update(each.id for each in event.outputs)
        for name in {self._names[each.storage] for each in inputs if each.storage in self._names}:
            lookup = [self._weights[name], *self._given.get(name, ())]
            if event.name != LOOKUP or operands != lookup:
                text = (
                    f"{name}.weight is read by {event.name.split('.')[1]} at {self._line} besides its lookup"
                )
                self.found.setdefault(name, text)
