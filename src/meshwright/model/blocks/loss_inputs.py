"""What a forward hands to the loss: the tensors among its outputs, which of them are rows of the batch, which are used.

A loss that needs the rows of several ranks makes outputs travel, so the plan must know their sizes before anything runs.
They are read off the trial. A tensor is *per row* when its first dim is that of the batch; with two trials of different
size that is certain, with one it rests on the odd number of rows in it. What the loss takes is found by playing it, on the
trial's outputs and the rows' targets, and watching which of the outputs meet an operation; a loss that cannot be played
like this is taken to use them all.

    outputs   image_B*   text_B*   scale        two columns of rows, and one tensor that is none
    the loss  takes image_B*, text_B*, scale    a similarity image_B* text_*B inside the model would hold a rank's rows only
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.model.blocks.saved_activations import SavedActivations
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor

TensorBatch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LossSpec:
    """The loss as a trial sees it: `total(outputs, batch)`, its `targets`, and whether it needs the whole batch at once.

    `logits(outputs)` are those that it can take divided by words (None: it cannot); of each token ranks then tell `numbers`.
    `by_token`: what comes out for some of the tokens, and the same of the targets, gives their part of it.
    """

    total: Callable[[Any, TensorBatch], torch.Tensor]
    targets: tuple[str, ...]
    whole_batch: bool = False
    logits: Callable[[Any], torch.Tensor] | None = None
    num_token_stats: int = 0
    is_token_sum: bool = False


def batch_columns(batch: TensorBatch) -> tuple[BatchTensor, ...]:
    """The tensors of a batch as columns, by name."""
    return tuple(BatchTensor(name, tuple(value.shape[1:]), _dtype(value)) for name, value in batch.items())


def distinct_tensors(outputs: Any) -> list[torch.Tensor]:
    """The tensors in `outputs`, each once, in order."""
    return list({id(tensor): tensor for tensor in tree_tensors(outputs)}.values())


def loss_inputs(
    loss_spec: LossSpec, batch: TensorBatch, outputs: Any, other_outputs: Any = None
) -> tuple[BatchTensor, ...]:
    """The `distinct` outputs of a trial on `batch` as columns; `other` are those of a trial on another number of rows.

    Raises PlanError for a tensor that a loss of the whole batch takes and that was computed between rows, and for such a
    loss that asks for more than its targets.
    """
    num_rows, used = len(next(iter(batch.values()))), _used_outputs(loss_spec, outputs, batch)
    found, beside = [], None if other_outputs is None else distinct_tensors(other_outputs)
    for place, tensor in enumerate(distinct_tensors(outputs)):
        name, per_row = f"output{place}", tensor.ndim > 0 and tensor.shape[0] == num_rows
        takes = used is None or place in used
        if beside is not None:
            wide = beside[place]
            per_row = tensor.shape != wide.shape
            if per_row and takes and loss_spec.whole_batch and tensor.shape[1:] != wide.shape[1:]:
                raise _cross_sample_error(name, list(tensor.shape), list(wide.shape))
        found.append(
            BatchTensor(
                name, tuple(tensor.shape[1:] if per_row else tensor.shape), _dtype(tensor), per_row, takes
            )
        )
    return tuple(found)


def loss_saved_numel(loss_spec: LossSpec, batch: TensorBatch, outputs: Any) -> int:
    """The elements that the loss keeps of its own, from its forward to its backward, over all rows of `batch`.

    0 for a loss of the whole batch, and where it cannot be played.
    """
    inside = SavedActivations(lambda: "loss")
    try:
        with inside.recording():
            total = None if loss_spec.whole_batch else loss_spec.total(outputs, batch)
    except Exception:
        return 0  # as above
    inside.exclude(tree_tensors((outputs, dict(batch))))
    return sum(inside.numel(["loss"])) if total is not None else 0


def _used_outputs(judge: LossSpec, outputs: Any, batch: TensorBatch) -> set[int] | None:
    """The places of the outputs that the loss takes; None when it cannot be played here."""
    watch = _UseRecorder({id(tensor): place for place, tensor in enumerate(distinct_tensors(outputs))})
    rows = {key: value for key, value in batch.items() if key in judge.targets or not judge.whole_batch}
    try:
        with watch:
            judge.total(outputs, rows)
    except KeyError as error:
        if judge.whole_batch and error.args and error.args[0] in batch:
            text = f"the loss of the whole batch reads '{error.args[0]}', which is not among its targets {list(judge.targets)}"
            fix = "name it in Loss(targets=...); targets do not go to the model: give rows that both need under two names"
            raise PlanError(text, fix=fix, location="loss") from error
        return None
    except Exception:
        return (
            None  # it needs values, or other outputs than these: if it is wrong, the first step shows where
        )
    return watch.used


def _cross_sample_error(name: str, few: list[int], more: list[int]) -> PlanError:
    text = f"{name} of the model has the shape {few}, and {more} on more rows: it compares the rows of one rank with each other"
    fix = "return what belongs to each row, and compare rows in the loss, which gets those of all ranks"
    return PlanError(text, fix=fix, location="loss")


class _UseRecorder(TorchFunctionMode):
    """Notes which of some tensors, by id, meet an operation."""

    def __init__(self, places: Mapping[int, int]) -> None:
        super().__init__()
        self._places = places
        self.used: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.used |= {
            self._places[id(tensor)] for tensor in tree_tensors((args, kwargs)) if id(tensor) in self._places
        }
        return func(*args, **kwargs)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
