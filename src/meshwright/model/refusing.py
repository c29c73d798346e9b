"""What speaks against a plan of this very model, beside its shapes: all that its own code does and ranks cannot do likewise."""

from collections.abc import Iterator

from meshwright.core.errors import Fault
from meshwright.core.plan import Plan
from meshwright.model.buffers import buffer_faults
from meshwright.model.norms import split_faults
from meshwright.model.reading import Reading
from meshwright.model.reruns import rerun_faults
from meshwright.model.tables import table_faults
from meshwright.model.writing import unseen_faults


def model_faults(plan: Plan, reading: Reading) -> Iterator[Fault]:
    """Everything that the model of `reading` does and ranks of `plan` cannot do as one device does it."""
    module = reading.blueprint.instance()
    yield from split_faults(plan, module)
    yield from table_faults(plan, module, reading.tables)
    yield from rerun_faults(plan)
    yield from buffer_faults(plan, module, reading.stateful)
    yield from unseen_faults(plan, reading.unseen)
