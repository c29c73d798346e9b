"""Finds the calls of experts in a recorded forward: modules with the weights of many experts, given a choice.

    experts(hidden [tokens, features], index [tokens, k], weights [tokens, k]) -> [tokens, features]

That is the experts interface of transformers, and of `meshwright.nn.MixtureOfExperts`. Every parameter of the
module itself has the experts along dim 0.

    experts(rows [experts * tokens, features]) -> [experts * tokens, features]

That is the dense form, of Llama 4: each token stands once for every expert, times its score there, and the
score is 0 where the expert is not chosen. It is found only if the recorded operations show that each expert
computes on its own rows, that it makes zeros of zeros, and that the gradient of such a row is zero: then rows
of zeros need no expert.
Limits: experts that are called otherwise (with other rows, or one module per expert) are not found.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from meshwright.model.recording.forward_recording import (
    AtenOp,
    BlockEnd,
    BlockStart,
    Event,
    ModuleEnd,
    ModuleStart,
    Recording,
    TensorRecord,
    tensor_records,
)
from meshwright.plan.model_spec.model_spec import ChoiceBias, ExpertsCall

BIAS_NAMES = ("e_score_correction_bias", "choice_bias")  # of transformers, and of meshwright.nn.Router

# what the experts of the dense form may compute; an elementwise function makes 0 of 0
VIEWS = ("view", "_unsafe_view", "clone", "_to_copy", "split", "split_with_sizes", "slice")
ZERO_AT_ZERO = ("silu", "gelu", "relu", "tanh")


def experts_calls(recording: Recording) -> Iterator[ExpertsCall]:
    """Yields the calls of experts in block calls, in order."""
    open_calls: list[tuple[ModuleStart, int]] = []
    ended: list[str] = []  # in the block call
    top_k = 0  # of the last choice in the block call; 0: none
    own_params = _own_params(recording)
    for number, event in enumerate(recording.events):
        if type(event) is BlockStart:
            ended.clear()
            top_k = 0
        elif type(event) is AtenOp and event.name.startswith("aten.topk"):
            top_k = event.outputs[0].shape[-1]
        elif type(event) is ModuleStart:
            open_calls.append((event, number))
        elif type(event) is ModuleEnd:
            start, first = open_calls.pop() if open_calls else (None, 0)
            if start is None or start.name != event.name:  # the call of the whole model began before
                continue
            call = _experts_call(start, event.results, own_params.get(start.name, {}), recording.num_samples)
            if call is not None and call.form == "dense":
                ops = [each for each in recording.events[first:number] if type(each) is AtenOp]
                is_exact = _makes_zeros(call, start, ops, event.results)
                call = replace(call, top_k=top_k or call.num_experts) if is_exact else None
            if call is not None:
                shared = _called_meanwhile(recording.events[number + 1 :], event.results)
                yield replace(call, prior_layers=tuple(ended), shared_experts=shared)
            ended.append(event.name)


def choice_biases(module: nn.Module, calls: Iterable[ExpertsCall]) -> Iterator[ChoiceBias]:
    """Yields the saved buffers beside the experts of `calls` that are biases of the choice."""
    saved = module.state_dict().keys()
    for name, call in {call.name: call for call in calls}.items():
        parent = name.rpartition(".")[0]
        for path, buffer in module.get_submodule(parent).named_buffers():
            full = f"{parent}.{path}" if parent else path
            is_bias = path.rpartition(".")[2] in BIAS_NAMES and buffer.shape == (call.num_experts,)
            if is_bias and full in saved:
                yield ChoiceBias(full, name, call.block_call, call.num_experts)


def _called_meanwhile(events: Iterable[Event], result: object) -> str:
    """Returns the last module of whose whole call `events` tell before an operation reads `result`, or the
    block call ends; "" if there is none. A view of `result` does not read it.
    """
    storages = {each.storage for each in tensor_records(result)}
    depth, found = 0, ""
    for event in events:
        if type(event) is ModuleStart:
            depth += 1
        elif type(event) is ModuleEnd and depth:  # the others have called the experts
            depth -= 1
            found = found if depth else event.name
        elif type(event) is BlockEnd or (type(event) is AtenOp and _reads(event, storages)):
            break
    return found


def _reads(op: AtenOp, storages: set[int]) -> bool:
    is_view = op.packet.__name__ == "view"
    return not is_view and any(each.storage in storages for each in op.inputs)


def _own_params(recording: Recording) -> dict[str, dict[str, TensorRecord]]:
    found: dict[str, dict[str, TensorRecord]] = {}
    for name, record in recording.parameters.items():
        found.setdefault(name.rpartition(".")[0], {})[name] = record
    return found


def _experts_call(
    start: ModuleStart, result: object, params: dict[str, TensorRecord], num_samples: int
) -> ExpertsCall | None:
    given = [each for each in (*start.args, *start.kwargs.values()) if isinstance(each, TensorRecord)]
    counts = {record.shape[0] if record.shape else 0 for record in params.values()}
    has_matrices = any(len(record.shape) == 3 for record in params.values())
    if not start.block_call or len(given) not in (1, 3) or len(counts) != 1 or not has_matrices:
        return None
    rows, *choice = given
    num_rows, num_experts = rows.shape[0] if rows.shape else 0, counts.pop()
    is_dense = not choice
    fits = (
        len(rows.shape) == 2
        and isinstance(result, TensorRecord)
        and result.shape == rows.shape
        and num_rows % (num_samples * num_experts if is_dense else num_samples) == 0
        and (is_dense or _is_choice(choice, num_rows))
    )
    if not fits:
        return None
    return ExpertsCall(
        start.name,
        start.block_call,
        tuple(params),
        num_experts,
        num_experts if is_dense else choice[0].shape[1],
        num_rows // (num_samples * num_experts if is_dense else num_samples),
        rows.shape[1],
        rows.requires_grad,
        not is_dense and choice[1].requires_grad,
        form="dense" if is_dense else "choice",
    )


def _is_choice(given: Sequence[TensorRecord], num_rows: int) -> bool:
    index, weights = given
    matrices = len(index.shape) == 2 and index.shape == weights.shape and index.shape[0] == num_rows
    return matrices and not index.dtype.is_floating_point


def _makes_zeros(call: ExpertsCall, start: ModuleStart, ops: Sequence[AtenOp], result: TensorRecord) -> bool:
    """Returns whether `ops` compute `result` of each row by itself, with a zero of order 2 or more at a row
    of zeros: there its gradient is zero too.
    """
    (rows,) = tensor_records((start.args, start.kwargs))
    shapes = rows.shape[:1], (call.num_experts, rows.shape[0] // call.num_experts)  # before the features
    orders = {rows.id: 1}
    for op in ops:
        known = [orders.get(each.id, 0) for each in op.inputs]
        if not any(known):
            continue
        order = _order(op, known)
        if not order or any(each.shape[:-1] not in shapes for each in op.outputs):
            return False
        orders |= {each.id: order for each in op.outputs}
    return orders.get(result.id, 0) >= 2


def _order(op: AtenOp, orders: Sequence[int]) -> int:
    """Returns the order of the zero of what `op` makes of operands with zeros of `orders` (0: none); 0 if it
    is not known to make zeros, of each row by itself.
    """
    name = op.packet.__name__
    if name == "mul" and len(orders) == 2 and all(orders):
        return sum(orders)
    is_function = name in (*VIEWS, *ZERO_AT_ZERO) and len(orders) == 1
    is_product = name == "bmm" and not orders[1]
    return orders[0] if is_function or is_product else 0
