"""Actions that offload to host memory and to disk share."""

import pytest

from meshwright.parallel.memory.tiers.offload_actions import copy_of_group, refuse_above
from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.program import Action

STEP = Action("STEP", "head", tensors=("head.weight",))


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        *((kind, "copy_in") for kind in ("FETCH_STATES", "FETCH_PARAM")),
        *((kind, "copy_out") for kind in ("OFFLOAD_STATES", "OFFLOAD_GRAD")),
        *((kind, "disk") for kind in ("READ_STATES", "WRITE_STATES")),
    ],
)
def test_each_copy_is_on_the_stream_of_its_direction(kind: str, stream: str):
    copy = copy_of_group(kind, STEP, 12, ("CLIP()",))
    assert (copy.name, copy.stream, copy.transfer.nbytes) == (f"{kind}(head)", stream, 12)
    assert (copy.tensors, copy.waits) == (STEP.tensors, ("CLIP()",))


def test_the_repair_of_a_bound_is_enough():
    needed = 5 * 2**30
    refuse_above(needed, None, "disk_gb", "disk", "disk_offload")
    refuse_above(needed, 5, "disk_gb", "disk", "disk_offload")
    with pytest.raises(PlanError, match=r"needs 5 GiB of disk, and disk_gb = 4\.9 allows less") as refused:
        refuse_above(needed, 4.9, "disk_gb", "disk", "disk_offload")
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.fix.startswith("set disk_gb = 5.05 or more")
