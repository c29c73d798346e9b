"""Activations in a file on paper: reads and writes in order, buffers in turn, bytes of each tier."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.step.memory.activation_files import (
    ACTIVATION_FILE_KINDS,
    activation_nbytes,
    through_file,
)
from meshwright.plan.step.program import Action
from meshwright.planner.program_cost.rank_memory import peak_nbytes_by_category
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.parallel.memory.tiers.test_activation_offload import CHECKPOINTED, LAYERS, planned
from tests.tiny_model import edited

MOVES = ("OFFLOAD_ACTIVATIONS", *ACTIVATION_FILE_KINDS, "FETCH_ACTIVATIONS")
Change = Callable[[list[Action]], list[Action]]


def on_disk(prefetch: int = 0, micro_batch: int = 0) -> Plan:
    return planned(ActivationOffload(prefetch=prefetch, folder="folder"), micro_batch=micro_batch)


def order(plan: Plan, *kinds: str) -> list[str]:
    actions = [action for action in plan.program.actions(FIRST_ROLE) if action.kind in kinds]
    return [f"{action.kind.partition('_')[0]} {action.subject[-1]}" for action in actions]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_each_is_written_behind_its_copy_and_read_one_backward_ahead_of_its_own(prefetch: int):
    plan = on_disk(prefetch)
    assert static_checks(plan) == []
    left = [str(layer) for layer in range(LAYERS - 1 - prefetch)]
    assert order(plan, *MOVES[:2]) == [f"{kind} {layer}" for layer in left for kind in ("OFFLOAD", "WRITE")]
    back = order(plan, "READ_ACTIVATIONS", "FETCH_ACTIVATIONS", "B")
    for layer in reversed(left):
        read, fetch, backward = (back.index(f"{kind} {layer}") for kind in ("READ", "FETCH", "B"))
        assert [each for each in back[read:fetch] if each.startswith("B")] == [
            f"B {int(layer) + 1 + prefetch}"
        ]
        assert [each for each in back[fetch:backward] if each.startswith("B")] == [
            f"B {int(layer) + number}" for number in range(prefetch, 0, -1)
        ]


def test_two_buffers_of_each_direction_and_whole_blocks_in_the_file():
    plan = on_disk(micro_batch=2)  # of 4 samples
    actions, left = plan.program.actions(FIRST_ROLE), LAYERS - 1
    transfers = [each.transfer.nbytes for each in actions if each.kind in ACTIVATION_FILE_KINDS]
    assert transfers == [FILE_BLOCK_NBYTES] * 2 * 2 * left  # there and back, for two microbatches
    assert activation_nbytes(actions, "host") == 4 * FILE_BLOCK_NBYTES
    assert activation_nbytes(actions, "disk") == left * FILE_BLOCK_NBYTES
    assert peak_nbytes_by_category(plan, 0, "host") == {"buffers": 4 * FILE_BLOCK_NBYTES}
    assert peak_nbytes_by_category(plan, 0, "disk") == {"activations": left * FILE_BLOCK_NBYTES}
    buffers = [each.allocations[0].name for each in actions if each.kind == "READ_ACTIVATIONS"]
    assert buffers == [f"host activation buffer in {number % 2}" for number in range(2 * left)]


def test_inputs_of_checkpointed_blocks_go_to_the_file():
    plan = planned(CHECKPOINTED, ActivationOffload(prefetch=0, folder="folder"))
    assert static_checks(plan) == []
    back = order(plan, "READ_ACTIVATIONS", "FETCH_ACTIVATIONS", "RECOMPUTE", "B")
    assert back.index("READ 2") < back.index("RECOMPUTE 3") < back.index("FETCH 2")


def test_without_copies_nothing_changes():
    actions = planned().program.actions(FIRST_ROLE)
    assert through_file(actions) == list(actions)


def without_wait(kind: str, other: str) -> Change:
    """Removes what actions of `kind` wait for, if it is one of kind `other`."""

    def change(actions: list[Action]) -> list[Action]:
        return [
            replace(each, waits=tuple(name for name in each.waits if not name.startswith(other)))
            if each.kind == kind
            else each
            for each in actions
        ]

    return change


def without(kind: str) -> Change:
    return lambda actions: [each for each in actions if each.kind != kind]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            without_wait("FETCH_ACTIVATIONS", "READ"),
            r"FETCH_ACTIVATIONS\(layer0, 0\) does not wait for READ_ACTIVATIONS\(layer0, 0\)",
        ),
        (
            without_wait("READ_ACTIVATIONS", "WRITE"),
            r"READ_ACTIVATIONS\(layer4, 0\) does not wait for WRITE_ACTIVATIONS\(layer4, 0\)",
        ),
        (
            without_wait("READ_ACTIVATIONS", "FETCH"),
            r"READ_ACTIVATIONS\(layer2, 0\) does not wait for FETCH_ACTIVATIONS\(layer4, 0\)",
        ),
        (
            without_wait("OFFLOAD_ACTIVATIONS", "WRITE"),
            r"OFFLOAD_ACTIVATIONS\(layer2, 0\) does not wait for WRITE_ACTIVATIONS\(layer0, 0\)",
        ),
        (
            without_wait("WRITE_ACTIVATIONS", "OFFLOAD"),
            r"WRITE_ACTIVATIONS\(layer0, 0\) does not wait for OFFLOAD_ACTIVATIONS\(layer0, 0\)",
        ),
        (without("READ_ACTIVATIONS"), "leaves activations in the file, and no READ_ACTIVATIONS reads them"),
        (without("WRITE_ACTIVATIONS"), r"waits for WRITE_ACTIVATIONS\(layer0, 0\), which no rank runs"),
    ],
)
def test_what_comes_too_early_or_never_is_found(change: Change, text: str):
    found = "\n".join(str(diagnostic) for diagnostic in static_checks(edited(on_disk(), change)))
    assert re.search(text, found), found
