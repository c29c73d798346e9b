"""What speaks against a plan of this very model, beside its shapes: all that its own code does and ranks cannot do likewise."""

from meshwright.core.errors import raise_faults
from meshwright.core.plan import Plan
from meshwright.model.buffers import buffer_faults
from meshwright.model.norms import split_faults
from meshwright.model.reading import Reading
from meshwright.model.reruns import rerun_faults
from meshwright.model.tables import table_faults
from meshwright.model.writing import unseen_faults


def refuse_model(plan: Plan, reading: Reading) -> None:
    """Raise PlanError with everything that the model of `reading` does and ranks of `plan` cannot do as one device does it."""
    module = reading.blueprint.instance()
    faults = [*split_faults(plan, module), *table_faults(plan, module, reading.tables), *rerun_faults(plan)]
    raise_faults([*faults, *buffer_faults(plan, module, reading.stateful), *unseen_faults(plan, reading.unseen)])
    if plan.space.deal is not None and plan.anatomy.tokens is not None:
        reading.alike.check(plan.anatomy.tokens, plan.space.deal, {})
