"""A step that does not wait for a copy, and a copy that does not wait for a step, are told by name."""

import pytest

from meshwright.plan.hardware.memory_tiers import ON_DEVICE, MemoryTiers
from meshwright.plan.step.memory.tier_copies import tier_copy_conflicts
from meshwright.plan.step.program import Action, Allocation

STREAMED = MemoryTiers("host")
BUFFER = Allocation("state buffer 0", 8)


def streamed(*, step_waits: bool = True, copy_waits: bool = True, refill_waits: bool = True) -> list[Action]:
    """Two groups that pass through one buffer."""
    found = list[Action]()
    for name in ("a", "b"):
        before = (f"OFFLOAD_STATES({found[-1].subject})",) if found and refill_waits else ()
        fetch = Action("FETCH_STATES", name, None, "copy_in", before, (name,), allocations=(BUFFER,))
        step = Action("STEP", name, waits=(fetch.name,) if step_waits else (), tensors=(name,))
        waits = (step.name,) if copy_waits else ()
        found += [fetch, step]
        found.append(Action("OFFLOAD_STATES", name, None, "copy_out", waits, (name,), frees=(BUFFER.name,)))
    return found


@pytest.mark.parametrize(
    ("left_out", "text"),
    [
        ("step_waits", "STEP(a) does not wait for FETCH_STATES(a)"),
        ("copy_waits", "OFFLOAD_STATES(a) does not wait for STEP(a)"),
        ("refill_waits", "FETCH_STATES(b) does not wait for OFFLOAD_STATES(a)"),
    ],
)
def test_each_wait_is_needed(left_out: str, text: str):
    assert list(tier_copy_conflicts(STREAMED, streamed())) == []
    assert text in list(tier_copy_conflicts(STREAMED, streamed(**{left_out: False})))


def test_what_rests_on_the_device_is_not_copied():
    assert list(tier_copy_conflicts(ON_DEVICE, streamed(step_waits=False))) == []
