"""The loss of a step: a sum over tokens or samples, and the count that it is divided by.

    loss = sum over all microbatches and ranks of total(outputs, batch) / the same sum of count(batch)

The engine does the one division. A loss that returned a mean would be wrong as soon as two microbatches, or
two ranks, hold different numbers of valid tokens: a mean of means is not the mean.

A loss that is not a sum over samples (contrastive: each sample is compared with all others) sets
`whole_batch`. The outputs and targets of all ranks are then gathered, in the order of the global batch, and
`total` gets all samples at once.

Batches come as users have them: `prepare` makes of each what the model and the loss read, once, before it is
divided among ranks. So labels that the loss shifts by a token are shifted while sequences are whole
(token_cross_entropy.py).

An auxiliary loss of the global batch (`auxiliary`) is no sum over tokens either, but it needs little of them:
sums over all tokens, which are known before the first backward, and then a sum over tokens that reads these.
How full the experts of a mixture are is such (load_balancing_loss.py).

A loss of logits may also say how it is computed where each rank has the logits of a part of the vocabulary
(`vocab_parallel`; model/loss/vocab_parallel_cross_entropy.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.model.recording.router_replay import ROUTED_EXPERTS, replay_diagnostics
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from meshwright.plan.plan import Plan

Batch = Mapping[str, torch.Tensor]
IGNORE_INDEX = -100  # the label of a token that does not count
SAME_LOSS_FIX = "pass the same loss to analyze(...) and to parallelize(...) or verify(...)"


@dataclass(frozen=True)
class VocabParallelLoss:
    """The computation of a loss on sharded logits.

    `logits(outputs)` are the logits, vocabulary along the last dim; `total(outputs, batch, vocab_shard)` is
    the sum that `Loss.total` is on full logits, the same on every rank. Ranks exchange `num_token_stats`
    numbers per token, by one call of `vocab_shard.all_gather`.
    """

    logits: Callable[[Any], torch.Tensor]
    total: Callable[[Any, Batch, VocabShard], torch.Tensor]
    num_token_stats: int


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A term that reads sums over the tokens of the global batch, which have no gradient.

        s = sum over all samples of sums(outputs, batch)      term = sum over them of total(outputs, batch, s)

    `sums` returns `num_sums` float64 numbers of some samples, `total` their part of the term: a scalar, which
    is linear in the samples once `s` is given. The term is divided by the count of the loss, like its total:
    a term that is not, such as a mean, has the count among its sums. It is left out of evaluations.
    """

    sums: Callable[[Any, Batch], torch.Tensor]
    total: Callable[[Any, Batch, torch.Tensor], torch.Tensor]
    num_sums: int


@dataclass(frozen=True)
class Loss:
    """A loss: `total(outputs, batch)` is a scalar sum, and the global sum of `count(batch)` divides it.

    `targets` are the keys of the batch that are not passed to the model; with "routed_experts" among them,
    forwards replay these routes (recording/router_replay.py). `count` sees the batch before the
    forward, and is a sum over samples, whole numbers or not, never below 0. `count_tokens(batch)` is the
    number of tokens in metrics; None where that is the count. With `whole_batch`, `total` gets the outputs of
    all samples of the global batch, and of the batch its targets. `vocab_parallel` computes it on sharded
    logits; None: it needs full logits. `is_token_sum`: the total is a sum over tokens, so it can be computed
    for a part of them. `is_token_nll`: it is the mean negative log-likelihood of a token, and its exponential
    a perplexity. `prepare(batch)` returns the batch that the model and the loss read; it treats each sample
    alone. `shifts_labels`: labels are a copy of the inputs, and `prepare` shifts them by a token. `auxiliary`
    is a term to be added to the total.
    """

    total: Callable[[Any, Batch], torch.Tensor]
    count: Callable[[Batch], torch.Tensor]
    targets: tuple[str, ...] = ("labels",)
    count_tokens: Callable[[Batch], torch.Tensor | None] = lambda batch: None
    whole_batch: bool = False
    vocab_parallel: VocabParallelLoss | None = None
    is_token_sum: bool = False
    is_token_nll: bool = False
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    shifts_labels: bool = False
    auxiliary: AuxiliaryLoss | None = None

    @property
    def num_batch_sums(self) -> int:
        """The number of sums over the global batch that the loss reads."""
        return 0 if self.auxiliary is None else self.auxiliary.num_sums

    def whole_total(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Returns the total of the global batch, given all its samples at once, with the auxiliary loss."""
        total = self.total(outputs, batch)
        if self.auxiliary is None:
            return total
        sums = self.auxiliary.sums(outputs, batch)
        return total + self.auxiliary.total(outputs, batch, sums)

    def wrap_total(
        self, wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
    ) -> "Loss":
        """Returns this loss with its totals as `wrap` changes them."""
        split = (
            None
            if self.vocab_parallel is None
            else replace(self.vocab_parallel, total=wrap(self.vocab_parallel.total))
        )
        return replace(self, total=wrap(self.total), vocab_parallel=split)

    def of_prepared_batches(self) -> "Loss":
        """Returns this loss for batches that are prepared already, such as the samples of a text."""
        return replace(self, prepare=lambda batch: batch, shifts_labels=False)

    def model_inputs(self, batch: Batch) -> Batch:
        """Returns the entries of `batch` that are passed to the model: all but the targets."""
        return {key: value for key, value in batch.items() if key not in self.targets}

    def count_weight_and_tokens(self, batch: Batch) -> tuple[float, float]:
        """Returns the weight of these samples (the divisor of the loss), and their number of tokens.

        Raises PlanError for a weight below 0 or not finite, and when `count` asks for a key that the batch
        does not have.
        """
        try:
            weight = float(self.count(batch))
        except KeyError as error:
            text = f"Loss.count reads {error} of the batch, which holds {', '.join(batch) or 'nothing'}"
            fix = "give the batch that key, or pass a loss of your own: Model(loss=...)"
            raise PlanError(text, fix=fix, location="loss") from error
        if not 0 <= weight < inf:
            text = f"the samples of this step weigh {weight}; needed is a number from 0 up"
            raise PlanError(text, fix="correct Loss.count, or the loss_weights of the batch", location="loss")
        tokens = self.count_tokens(batch)
        return weight, weight if tokens is None else float(tokens)


def check_loss(plan: Plan, loss: Loss) -> None:
    """Raises PlanError when `loss` is not of the kind for which `plan` was made, and when it reads routes of
    experts that the plan cannot replay.
    """
    if ROUTED_EXPERTS in loss.targets:
        raise_diagnostics(replay_diagnostics(plan.sharding))
    if loss.whole_batch != plan.model_spec.needs_global_batch:
        kinds = {True: "one of the whole batch", False: "a sum over samples"}
        text = (
            f"the loss is {kinds[loss.whole_batch]}, and the plan was made for "
            f"{kinds[plan.model_spec.needs_global_batch]}"
        )
        raise PlanError(text, fix=SAME_LOSS_FIX, location="loss")
    if loss.num_batch_sums != plan.model_spec.num_batch_sums:
        text = (
            f"the loss reads {loss.num_batch_sums} sums over the global batch, and the plan was made for one "
            f"that reads {plan.model_spec.num_batch_sums}"
        )
        raise PlanError(text, fix=SAME_LOSS_FIX, location="loss")
    logits = plan.model_spec.logits
    if (
        plan.sharding.logits_layout.placements
        and logits is not None
        and (loss.vocab_parallel is None or loss.vocab_parallel.num_token_stats != logits.num_reduced_values)
    ):
        problem = (
            "needs full logits"
            if loss.vocab_parallel is None
            else f"exchanges {loss.vocab_parallel.num_token_stats} numbers per token"
        )
        text = (
            f"the loss {problem}, and the plan shards them along the vocabulary and exchanges "
            f"{logits.num_reduced_values} numbers per token"
        )
        raise PlanError(text, fix=SAME_LOSS_FIX, location="loss")


def empty_loss_error(where: str) -> PlanError:
    """Returns the error for a step in which nothing counts; `where` says of what, "of the 12 samples"."""
    fix = "check how labels are made: -100 leaves a token out, and so does a loss weight of 0"
    return PlanError(f"nothing counts in any {where}: the loss is undefined", fix=fix, location="data")
