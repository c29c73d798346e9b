"""What a job says about a model that a Python program made by itself.

A job names a model and its data, so that the command line can open them. Where a program hands both over, there is nothing to
open: the names may be left out, and are filled in here. What else the job says about the model (frozen parameters, weights) is
done when a model is loaded by name; the reader of a ready model has to do it himself, and a wish that he has not is refused.

What speaks against a plan of this very model, beside its shapes: all that its own code does and ranks cannot do likewise.
"""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.model.analysis.analyze import Reading
from meshwright.model.blocks.batch_coupling import buffer_faults, split_faults, table_faults
from meshwright.model.blocks.inplace_writes import unseen_faults
from meshwright.model.blocks.user_checkpointing import rerun_faults
from meshwright.plan.job.errors import Fault, raise_faults
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.plan import Plan

EXAMPLE = "example"  # data that comes with the model, not from a file


def completed(job: Job, anatomy: Anatomy) -> Job:
    """`job` with a name for the model and for the data where it has none.

    Raises PlanError when `job` freezes or loads what the model of `anatomy` trains or draws from the seed.
    """
    raise_faults(_ignored(job, anatomy))
    model = job.model if job.model.source else replace(job.model, source=anatomy.name)
    data = job.data if job.data.source or job.data.mixture else replace(job.data, source=EXAMPLE)
    return replace(job, model=model, data=data)


def _ignored(job: Job, anatomy: Anatomy) -> Iterator[Fault]:
    trained = {name for weight in anatomy.weights if weight.trainable for name in weight.names}
    for pattern in job.model.frozen:
        found = sorted(name for name in trained if fnmatchcase(name, pattern))
        if found:
            text = f"'{pattern}' is to be frozen, and the model that was read trains {found[0]}"
            fix = "call requires_grad_(False) on it before read(), or in the factory that read() calls"
            yield Fault(text, fix, "model.frozen")
    if job.model.weights and anatomy.origin is None:
        text = f"weights = '{job.model.weights}', and the model that was read has its values from elsewhere"
        yield Fault(text, "pass them to read(..., weights=...)", "model.weights")


def refuse_model(plan: Plan, reading: Reading) -> None:
    """Raise PlanError with everything that the model of `reading` does and ranks of `plan` cannot do as one device does it."""
    module = reading.blueprint.instance()
    faults = [*split_faults(plan, module), *table_faults(plan, module, reading.tables), *rerun_faults(plan)]
    raise_faults([*faults, *buffer_faults(plan, module, reading.stateful), *unseen_faults(plan, reading.unseen)])
    if plan.space.deal is not None and plan.anatomy.tokens is not None:
        reading.alike.check(plan.anatomy.tokens, plan.space.deal, {})
