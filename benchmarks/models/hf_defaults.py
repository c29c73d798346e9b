"""Models of transformers with a head, a stock collator and the default loss: the numbers of the model's own
`model(**batch).loss.backward()`, on one device and under every plan that is not refused.

A user who brings a model of transformers and a batch of one of its collators passes no loss. The default loss
is read from the model's own forward. For each head below, two things are compared, in float64:

    one device    loss and gradients of one step of `parallelize`, against `loss.backward()` of the model on
                  the whole batch, with the same dropout masks
    plans         `verify` under data, tensor, pipeline (three micro-batches) and context parallelism, on 2
                  and on 3 ranks, against one device

The error is the largest difference, relative to the largest magnitude in its block. Rows of a batch are
padded, so that ranks and micro-batches have different numbers of labels that count. A plan may be refused,
when it is made and with a repair; a head may be refused when it is analyzed. A cell that neither equals nor
is refused is a fault, and the claim does not hold.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import meshwright as mw
from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result
from benchmarks.models.head_batches import TEXTS, Batch
from benchmarks.models.head_families import ALL_HEADS, Head
from meshwright.model.loss.loss_definition import AuxiliaryLoss, Loss
from meshwright.model.tensors.float64_mode import batch_in_float64
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.one_device.parity_case import Reference
from meshwright.verifier.reference import run_reference

NAME, BAR, TOLERANCE = "hf_defaults", 30, 1e-10
CLAIM = (
    "at least 30 models of transformers with a head, given a batch of a stock collator and no loss, have the "
    "loss and the gradients of their own `loss.backward()` to 1e-10 in float64 on one device; under data, "
    "tensor, pipeline and context parallelism on 2 and on 3 ranks they equal one device, or are refused when "
    "the plan is made"
)
LEARNING_RATE = 2.0**10  # so large that a gradient follows from a parameter before and after the step
MICRO_BATCH = 2  # samples of a pipeline's micro-batch: three of them
PLANS = {f"{axis} {ranks}": (axis, ranks) for axis in ("dp_replicate", "tp", "pp", "cp") for ranks in (2, 3)}
# the model gets the whole batch, labels too, and its loss is taken as it is
OWN_LOSS = Loss(lambda outputs, batch: outputs["loss"], lambda batch: torch.tensor(1), targets=())


def _own_loss(num_sums: int) -> Loss:
    """Returns OWN_LOSS for a plan whose loss reads sums over the global batch: it has its term already."""

    def sums(outputs: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.zeros(num_sums, dtype=torch.float64)

    def total(outputs: object, batch: Mapping[str, torch.Tensor], sums: torch.Tensor) -> torch.Tensor:
        return sums.sum()

    return replace(OWN_LOSS, auxiliary=AuxiliaryLoss(sums, total, num_sums) if num_sums else None)


def check_head(head: Head) -> dict[str, Any]:
    """Returns the largest error of `head` on one device and under each plan, or why it was refused."""
    row: dict[str, Any] = {"case": head.name, "kind": head.kind, "collator": head.collate.__name__}
    model = head.build()
    batch = head.collate(model)
    try:
        analyzed = mw.analyze(model, batch)
    except mw.PlanError as error:
        return {**row, "refused": str(error)}
    row["one device"] = _outcome(lambda: one_device_error(analyzed, batch))
    row["plans"] = {name: _outcome(lambda name=name: plan_outcome(analyzed, batch, name)) for name in PLANS}
    return row


def one_device_error(analyzed: mw.AnalyzedModel, batch: Batch) -> float:
    """Returns the largest error of the loss and the gradients of one step, against the model's own."""
    job = mw.Job(
        train=mw.TrainConfig(batch=len(TEXTS), steps=1, clip=0),
        optimizer=mw.OptimizerConfig("sgd", lr=LEARNING_RATE, weight_decay=0.0),
        precision=mw.PrecisionConfig("float64", "float64", "float64"),
    )
    plan = mw.make_plan(analyzed, job)
    own = run_reference(
        make_parity_case(
            analyzed, plan, _own_loss(plan.model_spec.num_batch_sums), lambda plan, rank: lambda step: batch
        ),
        num_steps=1,
    )
    with mw.parallelize(analyzed, plan) as trainer:
        metrics = trainer.step(trainer.local_batch(batch_in_float64(batch)))
        after = trainer.executor.gather_parameters()
        gradients = {
            name: (own.initial_values[name] - after[name].detach()) / LEARNING_RATE
            for name in own.steps[0].gradients
        }
    loss_error = abs(metrics.loss - own.steps[0].loss) / abs(own.steps[0].loss)
    return max(loss_error, _gradient_error(gradients, own))


def plan_outcome(analyzed: mw.AnalyzedModel, batch: Batch, name: str) -> float | str:
    """Returns the largest error of the plan `name` against one device; why it was refused, or that it
    differs.
    """
    axis, ranks = PLANS[name]
    job = mw.Job(train=mw.TrainConfig(batch=len(TEXTS), steps=1))
    try:
        plan = mw.make_plan(
            analyzed, job, mw.Mesh(**{axis: ranks}), micro_batch=MICRO_BATCH if axis == "pp" else 0
        )
    except mw.PlanError as error:
        return f"refused: {error}"
    verdict = mw.verify(analyzed, plan, [batch])
    return max(verdict.max_errors.values()) if verdict.passed else f"differs: {verdict}"


def is_refused(outcome: float | str) -> bool:
    """Returns whether a cell is a refusal."""
    return isinstance(outcome, str) and outcome.startswith("refused")


def worst_error(row: dict[str, Any]) -> float:
    """Returns the largest error of a head that was analyzed; infinite if a cell is neither equal nor
    refused.
    """
    outcomes = [row["one device"], *(each for each in row["plans"].values() if not is_refused(each))]
    return max(each if isinstance(each, float) else float("inf") for each in outcomes)


def main(only: str = "") -> None:
    """Check every head, and write the result; or only those whose name begins with `only`."""
    torch.set_num_threads(1)
    store = CaseStore(NAME)
    found = {} if only else store.read()
    for head in (head for head in ALL_HEADS if head.name.startswith(only) and head.name not in found):
        found[head.name] = check_head(head)
        print(found[head.name], file=sys.stderr, flush=True)
        if not only:
            store.add(found[head.name])
    if only:
        return
    rows = [found[head.name] for head in ALL_HEADS]
    errors = [worst_error(row) for row in rows if "refused" not in row]
    print(Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=BAR, detail={"heads": rows}).write(NAME))


def _outcome(measure: Callable[[], float | str]) -> float | str:
    """Returns what `measure` returns, or the error that it raised: a row, so that the others still run."""
    try:
        return measure()
    except Exception as error:
        return f"crashed: {type(error).__name__}: {error}"


def _gradient_error(gradients: dict[str, torch.Tensor], own: Reference) -> float:
    scales: dict[str, float] = {}
    truth = own.steps[0].gradients
    for name, gradient in truth.items():
        block = own.block_of[name]
        scales[block] = max(scales.get(block, 1e-30), gradient.abs().max().item())
    return max(
        (gradients[name] - gradient).abs().max().item() / scales[own.block_of[name]]
        for name, gradient in truth.items()
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
