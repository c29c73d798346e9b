"""The model outputs that the loss takes: their shapes, which are per sample, and which are used.

A loss that needs the samples of several ranks makes outputs travel, so the plan must know their sizes before
anything runs. They are read off the trial. A tensor is *per sample* if its first dim is that of the batch;
two trials of different size make that certain, with one it rests on the prime batch size. The used outputs
are found by running the loss on the trial's outputs and the targets, and recording which outputs take part in
an operation; a loss that cannot run like this is assumed to use all of them. A loss in which an operation of
torch fails on these shapes would fail in the first step: it is refused.

    outputs   image_B*   text_B*   scale        two tensors per sample, and one that is not
    the loss  takes image_B*, text_B*, scale    image_B* text_*B in the model would compare one rank's samples
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.model.blocks.saved_activations import SavedActivations
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.recording.record_forward import ForwardRecorder
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.tensors.pytree import named_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor

TensorBatch = Mapping[str, torch.Tensor]


def batch_columns(batch: TensorBatch) -> tuple[BatchTensor, ...]:
    """Returns the tensors of a batch, by name, as batch tensors of the model spec."""
    return tuple(BatchTensor(name, tuple(value.shape[1:]), _dtype(value)) for name, value in batch.items())


def distinct_tensors(outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors in `outputs`, each once, in order."""
    return list({id(tensor): tensor for tensor in tree_tensors(outputs)}.values())


def loss_inputs(
    loss: Loss, batch: TensorBatch, outputs: Any, other_outputs: Any = None
) -> tuple[BatchTensor, ...]:
    """Returns the `distinct_tensors` of a trial on `batch`; `other_outputs` are those with another batch
    size.

    Raises PlanError if the loss fails on the shapes of outputs and targets, if a loss of the whole batch
    takes a tensor that compares samples, and if such a loss reads more than its targets.
    """
    num_rows, used_indices = len(next(iter(batch.values()))), _used_outputs(loss, outputs, batch)
    tensors, others = [], None if other_outputs is None else distinct_tensors(other_outputs)
    for index, tensor in enumerate(distinct_tensors(outputs)):
        name, per_row, rows = f"output{index}", tensor.ndim > 0 and tensor.shape[0] == num_rows, 1
        used_by_loss = used_indices is None or index in used_indices
        if others is not None:
            larger = others[index]
            per_row = tensor.shape != larger.shape
            rows = _rows_per_sample(tensor, larger, num_rows) if per_row else 1
            if not rows and used_by_loss and loss.whole_batch:
                raise _cross_sample_error(name, list(tensor.shape), list(larger.shape))
        tensors.append(
            BatchTensor(
                name,
                tuple(tensor.shape[1:] if per_row else tensor.shape),
                _dtype(tensor),
                per_row,
                used_by_loss,
                rows,
            )
        )
    return tuple(tensors)


def loss_saved_numel(loss: Loss, batch: TensorBatch, outputs: Any) -> int:
    """Returns the elements that the loss itself saves for backward, for all samples of `batch`.

    0 for a loss of the whole batch, and for one that cannot run on the trial's outputs.
    """
    recorder = ForwardRecorder(nn.Module(), {}, len(next(iter(batch.values()))))
    try:
        with recorder.recording():
            total = None if loss.whole_batch else loss.whole_total(outputs, batch)
    except Exception:
        return 0  # it needs values, or other outputs than these
    kept = map(recorder.storage_number, tree_tensors((outputs, dict(batch))))
    saved_activations = SavedActivations(recorder.finish(total), kept)
    return sum(saved_activations.numel([""])) if total is not None else 0


def _used_outputs(loss: Loss, outputs: Any, batch: TensorBatch) -> set[int] | None:
    """The indices of the outputs that the loss takes; None if it cannot run here."""
    recorder = OutputUseRecorder(
        {id(tensor): index for index, tensor in enumerate(distinct_tensors(outputs))}
    )
    loss_batch = {key: value for key, value in batch.items() if key in loss.targets or not loss.whole_batch}
    try:
        with recorder:
            loss.whole_total(outputs, loss_batch)
    except KeyError as error:
        if loss.whole_batch and error.args and error.args[0] in batch:
            text = (
                f"the loss of the whole batch reads '{error.args[0]}', which is not among its targets "
                f"{list(loss.targets)}"
            )
            fix = (
                "name it in Loss(targets=...); targets do not go to the model: give a tensor that both need "
                "under two names"
            )
            raise PlanError(text, fix=fix, location="loss") from error
        return None
    except PlanError:
        raise
    except Exception as error:
        if error is recorder.error and not depends_on_values(error):
            raise _failed_loss_error(error, outputs, loss_batch) from error
        return (
            None  # it needs values, or other outputs than these; if it is wrong, the first step shows where
        )
    return recorder.used


def _rows_per_sample(tensor: torch.Tensor, larger: torch.Tensor, num_samples: int) -> int:
    """Returns the rows along dim 0 that each of the `num_samples` samples of `tensor` adds; 0 if it grows in
    another way with the samples, of which `larger` has more.
    """
    rows, rest = divmod(tensor.shape[0], num_samples)
    grows = not rest and rows > 0 and not larger.shape[0] % rows
    return rows if grows and tensor.shape[1:] == larger.shape[1:] else 0


def _failed_loss_error(error: Exception, outputs: Any, batch: TensorBatch) -> PlanError:
    returned = ", ".join(f"{name or 'output'} {list(t.shape)}" for name, t in named_tensors(outputs))
    read = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
    text = (
        f"the loss fails on what the model returns ({returned}) and the batch ({read}): "
        f"{type(error).__name__}: {error}"
    )
    fix = (
        "give a batch whose labels fit the outputs of the model; a model of transformers that makes the "
        "inputs of its decoder from labels does so where no loss is stated"
    )
    return PlanError(text, fix=fix, location="loss")


def _cross_sample_error(name: str, shape: list[int], larger_shape: list[int]) -> PlanError:
    text = (
        f"{name} of the model has the shape {shape}, and {larger_shape} for more samples: it compares the "
        "samples of one rank with each other"
    )
    fix = "return values per sample, and compare samples in the loss, which gets those of all ranks"
    return PlanError(text, fix=fix, location="loss")


class OutputUseRecorder(TorchFunctionMode):
    """Records which tensors operations take: `used`, of those whose `indices` are given by id."""

    def __init__(self, indices: Mapping[int, int]) -> None:
        super().__init__()
        self._places = indices
        self.used: set[int] = set()
        self.error: Exception | None = None  # of an operation, not of the code around it

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.used |= {
            self._places[id(tensor)] for tensor in tree_tensors((args, kwargs)) if id(tensor) in self._places
        }
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
