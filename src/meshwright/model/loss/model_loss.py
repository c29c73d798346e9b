"""Finds the loss that a model computes itself, from one forward with labels on fake tensors.

    forward(input_ids, labels)
      labels --pad--slice--view-----------------.          operations on labels alone: followed on numbers
      logits --float--view----------------- cross_entropy  copies and views of an output: followed by name
                                                |
      outputs.loss = cross_entropy + 0.01 * aux_loss       sums and multiples of scalars

A model of transformers returns `.loss` where it is given labels. Which labels that loss takes, shifted by a
token or as they are, with which label smoothing, and which auxiliary losses it adds, is a convention of the
model; to train with another one is a silent fault. The numbers that labels have when they reach the loss say
whether they were shifted. The same loss is then stated as a sum and a count (loss_definition.py), so that it
is exact under every plan.

Limits: cross-entropy over tokens, samples or pixels of two-dimensional logits, start and end positions, mean
squared error, binary cross-entropy. Anything else is refused, and the user states the loss.
"""

import inspect
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from meshwright.model.loss.load_balancing_loss import LoadBalancingCall, auxiliary_loss, find_calls
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Batch, Loss
from meshwright.model.loss.token_cross_entropy import LABELS_KEY, get_logits, token_cross_entropy
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.pytree import named_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError

POSITION_KEYS = ("start_positions", "end_positions")
LABEL_KEYS = (LABELS_KEY, *POSITION_KEYS)
DECODER_INPUT_KEYS = ("decoder_input_ids", "decoder_inputs_embeds")
ELEMENT_LOSSES = {
    "mse_loss": F.mse_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}
LOSS_FUNCTIONS = ("cross_entropy", *ELEMENT_LOSSES)
OWN_LOSS_FIX = (
    "state it: pass loss=meshwright.Loss(total=..., count=...), a sum and the count that divides it; or "
    "loss=meshwright.token_cross_entropy() for labels that are aligned with the logits"
)


@dataclass(frozen=True)
class LossCall:
    """A call of a loss function: its operands, the numbers that stand for its target, its mean."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    result: torch.Tensor
    options: dict[str, Any]


def label_keys(module: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Returns the keys of `batch` that are labels of the model's own loss: its forward names them."""
    named = inspect.signature(module.forward).parameters
    return tuple(key for key in LABEL_KEYS if key in batch and key in named)


def read_model_loss(
    module: nn.Module, batch: Batch, forward: Callable[[Mapping[str, torch.Tensor]], Any]
) -> Loss | None:
    """Returns the loss that `module` computes of `batch` itself; None if it computes none.

    `batch` holds fake tensors, or real ones; `forward(batch)` runs the module on them, labels included.

    Raises PlanError for a loss that cannot be stated as a sum and a count.
    """
    keys = label_keys(module, batch)
    if not keys:
        return None
    probes = {key: _probe_values(batch[key]) for key in keys}
    recorder = _LossRecorder({key: (batch[key], probes[key]) for key in keys})
    with find_calls(module) as balancing, recorder:
        outputs = forward(batch)
    loss = returned_loss(outputs)
    if loss is None:
        return None
    with unset_fake_temporarily():
        reading = _Reading(recorder, _named_outputs(outputs), probes, loss)
        found = reading.state(balancing, batch)
    return _with_decoder_inputs(found, module) if recorder.embeds_labels else found


class _Reading:
    """The terms of a recorded loss, and the loss that they state."""

    def __init__(
        self,
        recorder: "_LossRecorder",
        outputs: Mapping[str, torch.Tensor],
        probes: Mapping[str, torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        self._recorder, self._outputs, self._probes, self._loss = recorder, outputs, probes, loss
        self._names = {recorder.root(tensor): name for name, tensor in outputs.items()}
        self._terms = recorder.terms(loss, {*self._names, *(id(call.result) for call in recorder.calls)})
        self._calls = [call for call in recorder.calls if id(call.result) in self._terms]

    def state(self, balancing: Sequence[LoadBalancingCall], batch: Batch) -> Loss:
        """Returns the loss; raises PlanError for terms that are none of those known.

        `balancing` are the calls of a load balancing loss in the forward on `batch`.
        """
        results = {id(call.result) for call in self._calls}
        others = {key: factor for key, factor in self._terms.items() if key not in results}
        factors = [self._terms[id(call.result)] for call in self._calls]
        if len(self._calls) == 2 and set(self._probes) == set(POSITION_KEYS) and not others:
            return self._positions(factors)
        if len(self._calls) != 1 or factors != [1.0]:
            raise self._refused("is not one mean over tokens or samples")
        (call,) = self._calls
        main = self._cross_entropy(call) if call.name == "cross_entropy" else self._element_loss(call)
        for balance in balancing:
            if list(others) == [key := self._recorder.root(balance.result)]:
                found = auxiliary_loss(balance, self._outputs, batch, others[key], main.count)
                return replace(main, auxiliary=found) if found else self._with_scalars(main, others)
        return self._with_scalars(main, others) if others else main

    def _cross_entropy(self, call: LossCall) -> Loss:
        options, labels = call.options, self._probes.get(LABELS_KEY)
        if options.get("weight") is not None:
            raise self._refused("weights classes")
        if (
            labels is None
            or labels.is_floating_point()
            or call.source.ndim != 2
            or not self._is_of_logits(call)
        ):
            raise self._refused("is a cross-entropy of something else than its logits")
        shift = _is_shifted(labels, call.target)
        if shift is None:
            raise self._refused("takes labels that it rearranges")
        return token_cross_entropy(
            options.get("label_smoothing", 0.0),
            shift_labels=shift,
            ignore_index=options.get("ignore_index", IGNORE_INDEX),
        )

    def _element_loss(self, call: LossCall) -> Loss:
        labels = self._probes.get(LABELS_KEY)
        extra = {name for name in ("weight", "pos_weight") if call.options.get(name) is not None}
        same = labels is not None and torch.equal(call.target.flatten(), labels.flatten())
        if extra or not same or not self._is_of_logits(call):
            raise self._refused("is not one of its logits and labels alone")
        return Loss(partial(_element_total, function=ELEMENT_LOSSES[call.name]), _count_elements)

    def _positions(self, factors: list[float]) -> Loss:
        read = [self._output_of(call.source) for call in self._calls]
        if factors != [0.5, 0.5] or read != ["start_logits", "end_logits"]:
            raise self._refused("weighs start and end positions in another way than one half each")
        return Loss(_positions_total, _count_positions, targets=POSITION_KEYS)

    def _with_scalars(self, main: Loss, others: Mapping[int, float]) -> Loss:
        """Returns `main` with each further scalar that the model returns added, times its factor."""
        if unknown := [key for key in others if key not in self._names]:
            raise self._refused(f"adds {len(unknown)} terms that it does not return")
        return _add_scalars(main, {self._names[key]: factor for key, factor in others.items()})

    def _is_of_logits(self, call: LossCall) -> bool:
        """Returns whether `call` takes what `get_logits` finds among the outputs without a loss."""
        first = next((name for name, tensor in self._outputs.items() if tensor is not self._loss), "")
        return self._output_of(call.source) in ("logits", "", first if first.isdigit() else "")

    def _output_of(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of the output of which `tensor` is a copy or a view; None if it is of none."""
        return self._names.get(self._recorder.root(tensor))

    def _refused(self, reason: str) -> PlanError:
        functions = ", ".join(dict.fromkeys(self._recorder.functions)) or "by no function that is known"
        text = f"the loss that the model computes itself ({functions}) {reason}"
        return PlanError(text, fix=OWN_LOSS_FIX, location="loss")


@dataclass
class _LossRecorder(TorchFunctionMode):
    """Follows labels, copies of tensors, and sums of scalars through a forward.

    `labels` holds by key the tensor of the forward and the numbers that stand for it. `embeds_labels`: the
    model makes the inputs of its decoder from them.
    """

    labels: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    calls: list[LossCall] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    embeds_labels: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self._numbers = {id(fake): numbers for fake, numbers in self.labels.values()}
        self._roots: dict[int, int] = {}
        self._sums: dict[int, dict[int, float]] = {}
        self._alive: list[Any] = [fake for fake, _ in self.labels.values()]  # so that no id is used twice

    def root(self, tensor: torch.Tensor) -> int:
        """Returns the id of the tensor of which `tensor` is a copy or a view."""
        return self._roots.get(id(tensor), id(tensor))

    def terms(self, scalar: torch.Tensor, known: Container[int]) -> dict[int, float]:
        """Returns the factors of the scalars in the sum that `scalar` is, by id: of those that are `known`,
        or no sums themselves.
        """
        found: dict[int, float] = {}
        pending = list(self._sums.get(self.root(scalar), {self.root(scalar): 1.0}).items())
        while pending:
            key, factor = pending.pop()
            if key in known or key not in self._sums:
                found[key] = found.get(key, 0.0) + factor
            else:
                pending += [(other, factor * times) for other, times in self._sums[key].items()]
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.__name__
        if name.endswith("_loss") or name in LOSS_FUNCTIONS:
            self.functions.append(name)
        operands = tree_tensors((args, kwargs))
        if operands and all(id(each) in self._numbers for each in operands):
            self._follow_labels(func, args, kwargs, result)
        elif name == "embedding":
            self.embeds_labels |= any(id(each) in self._numbers for each in operands)
        elif name in LOSS_FUNCTIONS and isinstance(result, torch.Tensor):
            self._record_call(func, name, args, kwargs, result)
        elif isinstance(result, torch.Tensor) and result.ndim == 0 and result.is_floating_point():
            self._add_terms(name, args, result)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self._forget_written(operands)
        if _arranges_first(name) and isinstance(result, torch.Tensor) and args and id(result) != id(args[0]):
            self._roots[id(result)] = self.root(args[0])
            self._alive.append(result)
        return result

    def _follow_labels(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Applies an operation on labels to the numbers that stand for them, too."""
        known = self._numbers
        swapped = _swap((args, kwargs), known)
        try:
            with unset_fake_temporarily():
                numbers = func(*swapped[0], **swapped[1])
        except Exception:
            return  # the result is unknown: a loss that takes it is refused
        for fake, real in zip(tree_tensors(result), tree_tensors(numbers), strict=False):
            known[id(fake)] = real
            self._alive.append(fake)

    def _forget_written(self, operands: list[torch.Tensor]) -> None:
        """Forgets the numbers of labels that something else than labels was written to."""
        if operands and not all(id(each) in self._numbers for each in operands):
            self._numbers.pop(id(operands[0]), None)

    def _record_call(self, func: Any, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        source, target = (given.pop(key) for key in ("input", "target"))
        if id(target) in self._numbers and given.get("reduction", "mean") == "mean":
            self.calls.append(LossCall(name, source, self._numbers[id(target)], result, given))
            self._alive += [source, result]

    def _add_terms(self, name: str, args: Any, result: torch.Tensor) -> None:
        """Notes that `result` is a sum or a multiple of scalars."""
        numbers = [arg for arg in args if isinstance(arg, (int, float))]
        scalars = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(arg.ndim for arg in scalars):
            return
        computed = find_op(name).arithmetic
        if computed == "add" and (len(scalars) == 2 or numbers == [0]):
            factors = [1.0] * len(scalars)
        elif computed == "mul" and len(scalars) == len(numbers) == 1:
            factors = [float(numbers[0])]
        elif computed == "div" and len(scalars) == len(numbers) == 1 and scalars[0] is args[0]:
            factors = [1 / numbers[0]]
        else:
            return
        terms: dict[int, float] = {}
        for scalar, factor in zip(scalars, factors, strict=True):
            terms[self.root(scalar)] = terms.get(self.root(scalar), 0.0) + factor
        self._sums[id(result)] = terms
        self._alive += [result, *scalars]


def _probe_values(labels: torch.Tensor) -> torch.Tensor:
    """Returns distinct numbers in the shape of `labels`, so that they show where each one ends up."""
    with unset_fake_temporarily():
        numbers = torch.arange(1, labels.numel() + 1).reshape(labels.shape)
        return numbers.to(labels.dtype)


def _arranges_first(name: str) -> bool:
    """Returns whether the function copies elements of its first operand, or is a view of some."""
    op = find_op(name)
    is_view = op.kind == "view" and op.dims not in ("broadcast", "join", "stack", "rearrange", "window")
    return is_view or (op.is_copy and not op.cuts_graph) or name == "__getitem__"


def _is_shifted(labels: torch.Tensor, target: torch.Tensor) -> bool | None:
    """Returns whether `target` are `labels` shifted by one token; None if they are neither shifted nor the
    same.
    """
    flat = target.flatten()
    if torch.equal(flat, labels.flatten()):
        return False
    cut = labels[..., 1:]
    padded = F.pad(cut, (0, 1), value=IGNORE_INDEX)
    return True if torch.equal(flat, cut.flatten()) or torch.equal(flat, padded.flatten()) else None


def returned_loss(outputs: Any) -> torch.Tensor | None:
    """Returns the loss among the outputs of a model: `.loss`, or the first scalar of a tuple."""
    if isinstance(outputs, (tuple, list, torch.Tensor)):
        scalars = [tensor for tensor in tree_tensors(outputs) if tensor.ndim == 0]
        return next((scalar for scalar in scalars if scalar.is_floating_point()), None)
    return _named_outputs(outputs).get("loss")


def _named_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors among the outputs of a model by name; those of a plain object by attribute."""
    is_plain = not isinstance(outputs, (tuple, list, dict, torch.Tensor)) and "__dict__" in dir(outputs)
    return dict(named_tensors(dict(vars(outputs)) if is_plain else outputs))


def _swap(value: Any, numbers: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return numbers[id(value)]
    if isinstance(value, (tuple, list)):
        return type(value)(_swap(item, numbers) for item in value)
    if isinstance(value, dict):
        return {key: _swap(item, numbers) for key, item in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _with_decoder_inputs(loss: Loss, module: nn.Module) -> Loss:
    """Returns `loss` with inputs of the decoder made from the labels, as the model makes them.

    Raises PlanError if no function for it is found.
    """
    make = _decoder_inputs_maker(module)
    if make is None:
        text = f"{type(module).__name__} makes the inputs of its decoder from labels in an unknown way"
        fix = f"put {DECODER_INPUT_KEYS[0]} into the batch: DataCollatorForSeq2Seq(tokenizer, model=model)"
        raise PlanError(text, fix=fix, location="batch")
    return replace(loss, prepare=partial(_add_decoder_inputs, prepare=loss.prepare, make=make))


def _decoder_inputs_maker(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns the model's function from labels to the inputs of its decoder: a method, or the
    `shift_tokens_right` of its file.
    """
    owner: Any = module
    if "prepare_decoder_input_ids_from_labels" in dir(type(module)):
        return owner.prepare_decoder_input_ids_from_labels
    shift = vars(sys.modules[type(module).__module__]).get("shift_tokens_right")
    config = vars(module).get("config")
    if shift is None or config is None:
        return None
    return partial(
        shift, pad_token_id=config.pad_token_id, decoder_start_token_id=config.decoder_start_token_id
    )


def _add_decoder_inputs(
    batch: Batch, prepare: Callable[[Batch], Batch], make: Callable[[torch.Tensor], torch.Tensor]
) -> Batch:
    if any(key in batch for key in DECODER_INPUT_KEYS) or LABELS_KEY not in batch:
        return prepare(batch)
    return prepare({**batch, DECODER_INPUT_KEYS[0]: make(batch[LABELS_KEY])})


def _add_scalars(loss: Loss, factors: Mapping[str, float]) -> Loss:
    """Returns `loss` with scalars that the model returns added to the mean, each with its factor."""

    def total(outputs: Any, batch: Batch) -> torch.Tensor:
        named = _named_outputs(outputs)
        added = sum(factor * named[name].reshape(()) for name, factor in factors.items())
        return loss.total(outputs, batch) + added * loss.count(batch)

    return replace(loss, total=total, vocab_parallel=None, is_token_sum=False, is_token_nll=False)


def _element_total(outputs: Any, batch: Batch, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    logits = get_logits(outputs)
    return function(logits.reshape(-1), batch[LABELS_KEY].reshape(-1).to(logits.dtype), reduction="sum")


def _count_elements(batch: Batch) -> torch.Tensor:
    return torch.tensor(batch[LABELS_KEY].numel())


def _positions_total(outputs: Any, batch: Batch) -> torch.Tensor:
    sums = [
        F.cross_entropy(_named_outputs(outputs)[logits], batch[key].reshape(-1), reduction="sum")
        for logits, key in zip(("start_logits", "end_logits"), POSITION_KEYS, strict=True)
    ]
    return sum(sums, start=torch.zeros((), dtype=sums[0].dtype, device=sums[0].device)) / 2


def _count_positions(batch: Batch) -> torch.Tensor:
    return torch.tensor(len(batch[POSITION_KEYS[0]]))
