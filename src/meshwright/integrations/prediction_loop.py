"""Evaluation and prediction as transformers does it, over ranks: each sample once, in the order of the data.

    row of batches      one batch of per_device_eval_batch_size samples on each data rank
    eval_loss           mean over samples of the loss of the batch that each lies in, as in transformers
    predictions         logits of all samples, padded to one length with -100; labels likewise

The loss of a batch is the one of the plan. So `eval_loss`, metrics and predictions are what transformers'
Trainer finds on one device; they do not depend on the number of ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalPrediction

from meshwright.model.loss.loss_definition import Batch
from meshwright.run.training.gathered_predictions import Predictions, gathered_predictions
from meshwright.run.training.trainer import Trainer, batch_tensors

LOSS_KEY, LOGITS_KEY, LABELS_KEY, INPUTS_KEY = "loss", "logits", "labels", "inputs"
PADDING = -100
Preprocess = Callable[[Any, Any], Any]  # of logits and labels, for metrics


@dataclass(frozen=True)
class PredictionOptions:
    """What is predicted: the keys of labels, of the model's inputs if they are kept, and of outputs that are
    left out.
    """

    label_names: tuple[str, ...]
    ignore_keys: tuple[str, ...]
    loss_only: bool
    input_name: str | None = None
    preprocess: Preprocess | None = None


@dataclass
class GlobalBatch:
    """What was predicted of one batch of one data rank: its loss (None: no labels), and values by kind."""

    num_samples: int
    loss: float | None
    logits: Any = None
    labels: Any = None
    inputs: Any = None


class PredictionLoop:
    """Runs the model over `batches`, those of this data rank, and yields those of all data ranks in order."""

    def __init__(self, trainer: Trainer, options: PredictionOptions) -> None:
        self._trainer, self._options = trainer, options
        self._loss, self._raw = trainer.executor.loss, {}
        self._tree_specs: dict[str, TreeSpec] = {}

    def run(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[list[GlobalBatch]]:
        """Yields, for each of `batches` (empty: no samples), those of all data ranks that have samples."""
        with self._trainer.oom_advisor:
            for row in gathered_predictions(self._trainer.executor, self._prepared(batches), self._predict):
                yield [self._global_batch(found) for found in row]

    def _prepared(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Batch | None]:
        for batch in batches:
            tensors = batch_tensors(batch, self._trainer.analyzed) if batch else {}
            self._raw = {key: value.to(self._trainer.world.device) for key, value in tensors.items()}
            yield self._loss.prepare(self._raw) if self._raw else None

    def _predict(self, outputs: Any, batch: Batch) -> Predictions:
        options, raw = self._options, self._raw or batch
        found: dict[str, torch.Tensor] = {
            "size": torch.tensor([len(next(iter(batch.values())))], device=next(iter(batch.values())).device)
        }
        labels = tuple(raw[name] for name in options.label_names if name in raw)
        if labels and len(labels) == len(options.label_names):
            weight = self._loss.count_weight_and_tokens(batch)[0]
            total = self._loss.whole_total(outputs, batch)
            found[LOSS_KEY] = (total.double() / (weight or 1.0)).reshape(1)
        if options.loss_only:
            return found
        logits = _single(_outputs_without(outputs, options.ignore_keys))
        kept_labels = _single(labels) if LOSS_KEY in found else None
        if options.preprocess is not None:
            logits = options.preprocess(logits, kept_labels)
        found |= self._flatten(LOGITS_KEY, logits)
        found |= self._flatten(LABELS_KEY, kept_labels)
        if options.input_name is not None:
            found |= self._flatten(INPUTS_KEY, raw[options.input_name])
        return found

    def _flatten(self, key: str, value: Any) -> dict[str, torch.Tensor]:
        if value is None:
            return {}
        leaves, self._tree_specs[key] = tree_flatten(value)
        return {f"{key}.{index}": tensor for index, tensor in enumerate(leaves)}

    def _global_batch(self, found: Mapping[str, torch.Tensor]) -> GlobalBatch:
        values = {
            key: tree_unflatten([found[f"{key}.{index}"] for index in range(spec.num_leaves)], spec)
            for key, spec in self._tree_specs.items()
        }
        loss = found[LOSS_KEY].item() if LOSS_KEY in found else None
        return GlobalBatch(int(found["size"].item()), loss, **values)


@dataclass
class PredictionArrays:
    """The predictions of all batches so far, concatenated and padded as transformers does it."""

    concatenate: bool
    losses: list[np.ndarray] = field(default_factory=list)
    num_samples: int = 0

    def __post_init__(self) -> None:
        self._containers = {
            key: EvalLoopContainer(self.concatenate, padding_index=PADDING)
            for key in (LOGITS_KEY, LABELS_KEY, INPUTS_KEY)
        }

    def add(self, batch: GlobalBatch, *, keep_values: bool = True) -> None:
        """Adds `batch`; without `keep_values` its loss and size alone."""
        self.num_samples += batch.num_samples
        if batch.loss is not None:
            self.losses.append(np.repeat(batch.loss, batch.num_samples))
        for key, container in self._containers.items() if keep_values else ():
            if vars(batch)[key] is not None:
                container.add(vars(batch)[key])

    def mean_loss(self, *, finite_only: bool) -> float:
        """Returns the mean of the losses over samples."""
        losses = np.concatenate(self.losses)
        finite = np.isfinite(losses)
        return float(losses[finite].mean() if finite_only and finite.any() else losses.mean())

    def to_cpu(self) -> None:
        """Moves what was added so far to arrays on the CPU."""
        for container in self._containers.values():
            container.to_cpu_and_numpy()

    def arrays(self, key: str) -> Any:
        """Returns the values of `key` as arrays; None where there are none."""
        return self._containers[key].get_arrays()

    def prediction(self, kept: Iterable[str]) -> EvalPrediction:
        """Returns what `compute_metrics` gets; `kept` are the extras that it asked for."""
        kept = set(kept)
        return EvalPrediction(
            predictions=self.arrays(LOGITS_KEY),
            label_ids=self.arrays(LABELS_KEY),
            inputs=self.arrays(INPUTS_KEY) if INPUTS_KEY in kept else None,
            losses=np.concatenate(self.losses) if LOSS_KEY in kept and self.losses else None,
        )


def _outputs_without(outputs: Any, ignored: tuple[str, ...]) -> Any:
    """Returns the outputs that are tensors, or tuples of tensors."""
    if isinstance(outputs, Mapping):
        outputs = tuple(value for key, value in outputs.items() if key not in (*ignored, LOSS_KEY))
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(
        value for value in values if all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])
    )


def _single(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values
