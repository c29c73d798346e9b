"""Builds a parity case: the plan in float64 on the CPU, and the same job on one device."""

from collections.abc import Callable

import torch

from meshwright.engine.runtime.build_module import make_stateless_rng, make_trained_module
from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.plan_for_model import model_spec_for, plan_for_model
from meshwright.model.loss.loss_definition import Batch, Loss, check_loss
from meshwright.model.tensors.float64_mode import batch_in_float64, in_float64
from meshwright.plan.job.errors import raise_diagnostics
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.parity import parity_job, single_device_job
from meshwright.verifier.static_checks import static_checks

BatchReader = Callable[[Plan, int], Callable[[int], Batch | None]]


def make_parity_case(analyzed: AnalyzedModel, plan: Plan, loss: Loss, read_batch: BatchReader) -> ParityCase:
    """Returns `plan` as parity runs it, with the same job on one device; both compute in float64 with SGD on
    the CPU.

    The files of runs that `plan` names are neither read nor written, but for the order of a record.
    `read_batch(plan, rank)` returns a function from a step to the samples of `rank`.
    """
    check_loss(plan, loss)
    job, strategies = parity_job(plan.job), tuple(each.without_files() for each in plan.strategies)
    exact = Plan.make(
        job,
        plan.mesh,
        model_spec_for(analyzed, job, plan.mesh, strategies),
        strategies,
        plan.micro_batch,
        plan.run,
        alignment_optimizer=plan.job.optimizer,  # SGD, in shards aligned for the plan's own optimizer
        align_bytes=plan.align_bytes,
    )
    raise_diagnostics(static_checks(exact))

    def read_batch_in_float64(plan: Plan, rank: int) -> Callable[[int], Batch | None]:
        read = read_batch(plan, rank)
        return lambda step: None if (batch := read(step)) is None else batch_in_float64(batch)

    def make_module() -> TrainedModule:
        return make_trained_module(analyzed, torch.device("cpu"), torch.float64)

    def plan_for_batch(batch: Batch) -> Plan:
        example = {
            name: batch[name].to(value.dtype) for name, value in analyzed.example.items() if name in batch
        }
        other = analyzed.for_example(example)
        mine, theirs = analyzed.model_spec, other.model_spec
        if (theirs.block_calls, theirs.params) != (mine.block_calls, mine.params):
            return exact
        return exact.with_model_spec(model_spec_for(other, job, plan.mesh, strategies))

    return ParityCase(
        exact,
        plan_for_model(analyzed, single_device_job(exact.job), Mesh(), run=exact.run),
        loss.wrap_total(in_float64),
        make_module,
        lambda: make_stateless_rng(analyzed, exact),
        read_batch_in_float64,
        plan_for_batch,
        {server: order for each in plan.strategies for server, order in each.recorded_arrivals().items()},
    )
