"""Weight versions of microbatches, derived from a program, and programs in which a microbatch uses
several.
"""

from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.step.weight_stashing import forward_versions, staleness, version_conflicts

ROOM = "old weights(0)"


def listed(*words: str) -> list[Action]:
    """Actions such as "F0", "STEP 1", "STASH", "LOAD_STASHED 1": of one block call, one stash."""
    found = []
    for word in words:
        kind, microbatch = word.rstrip("0123456789").strip(), "".join(filter(str.isdigit, word))
        subject = {"F": "x", "B": "x", "STEP": ""}.get(kind, ROOM)
        found.append(Action(kind, subject, int(microbatch) if microbatch else None))
    return found


RIGHT = listed(
    "F0",
    "F1",
    "B0",
    "STASH",
    "STEP 0",
    "F2",
    "LOAD_STASHED 1",
    "B1",
    "LOAD_LATEST 1",
    "STASH 1",
    "STEP 1",
    "LOAD_STASHED 2",
    "B2",
    "LOAD_LATEST 2",
)


def test_a_forward_uses_the_weights_of_the_steps_before_it():
    assert forward_versions(RIGHT) == {0: 0, 1: 0, 2: 1}
    assert stepped_microbatches(RIGHT) == (0, 1)
    assert staleness(RIGHT) == 1
    assert not list(version_conflicts(RIGHT))


def test_one_step_for_all_micro_batches_needs_no_versions():
    actions = listed("F0", "F1", "B0", "B1", "STEP")
    assert stepped_microbatches(actions) == ()
    assert staleness(actions) == 0
    assert not list(version_conflicts(actions))


def test_a_backward_with_other_weights_than_its_forward_is_reported():
    actions = [action for action in RIGHT if action.kind not in ("LOAD_STASHED", "LOAD_LATEST")]
    text = list(version_conflicts(actions))
    assert (
        text[0] == "B(x, 1) uses the weights after 1 steps, and the forward of its microbatch those after 0"
    )
    assert len(text) == 2


def test_weights_that_were_not_stashed_are_reported():
    actions = [action for action in RIGHT if action.kind != "STASH"]
    assert f"LOAD_STASHED({ROOM}, 1) loads weights that no STASH has kept" in list(version_conflicts(actions))


def test_a_step_of_old_weights_is_reported():
    actions = [action for action in RIGHT if action.kind != "LOAD_LATEST"]
    assert (
        f"STEP(1) finds the weights of LOAD_STASHED({ROOM}, 1) in the model, and not the newest ones"
        in list(version_conflicts(actions))
    )
