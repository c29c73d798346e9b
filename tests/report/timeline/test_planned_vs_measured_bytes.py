"""Peak memory of a program, and bytes by action beside the ledger."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.plan.step.program import Action, Allocation
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory, sent_by_action
from meshwright.report.timeline.run_folder_reader import read_run_record
from tests.paper_model import FIRST_ROLE
from tests.report.small_runs import train_small_run


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return read_run_record(train_small_run(tmp_path_factory.mktemp("run")))


def test_memory_is_that_of_the_moment_when_all_of_it_is_largest():
    """Both a and b are alive together (15), b and the gradient (12), the gradient and the bucket (13)."""
    actions = [
        Action("F", "a", allocations=(Allocation("output(a, 0)", 10),)),
        Action("F", "b", allocations=(Allocation("output(b, 0)", 5),)),
        Action("B", "b", frees=("output(a, 0)",)),
        Action("B", "a", allocations=(Allocation("gradient(a)", 7),), frees=("output(b, 0)",)),
        Action("PACK", "a", allocations=(Allocation("bucket(0)", 6),), frees=("gradient(a)",)),
        Action("STEP", frees=("bucket(0)",)),
    ]
    fullest, most = planned_memory(actions, {"parameters": 100, "optimizer_states": 0})
    assert fullest == {"parameters": 100, "activations": 15}
    assert most == {"parameters": 100, "gradients": 7, "buckets": 6, "activations": 15}


def test_what_each_action_sends_equals_what_its_ledger_has(record):
    found = {each.action: each for each in sent_by_action(record)}
    actions = [action for action in record.program.actions(FIRST_ROLE) if action.transfer]
    assert len(actions) >= 3
    for action in actions:
        each = found.pop(action.name)
        assert each.planned == pytest.approx(action.transfer.nbytes * 2 * 2 / 3)
        assert each.measured == pytest.approx(each.planned)
        assert f"all_reduce of {action.transfer.nbytes:,} B" in each.description
    assert found, "saving sends some bytes too"
    assert all(each.planned is None and each.measured > 0 for each in found.values())


@pytest.mark.parametrize(
    ("algorithm", "share"), [("tree", 2), ("reduce_broadcast", 2), ("ring", 4 / 3), ("one_shot", 2)]
)
def test_an_algorithm_sends_what_its_busiest_rank_sends(tmp_path: Path, algorithm: str, share: float):
    record = read_run_record(train_small_run(tmp_path, steps=2, algorithm=algorithm))
    found = {each.action: each for each in sent_by_action(record)}
    (move,) = (action.transfer for action in record.program.actions(FIRST_ROLE) if action.kind == "REDUCE")
    assert found["REDUCE(0)"].planned == pytest.approx(
        move.nbytes * share, abs=2 * 8
    )  # a piece may have an odd element
    assert found["REDUCE(0)"].measured == found["REDUCE(0)"].planned
    assert found["REDUCE(0)"].description.endswith(f"over dp_replicate by {algorithm}")


def test_without_ledgers_or_sizes_nothing_is_made_up(record):
    assert all(each.measured is None for each in sent_by_action(replace(record, rank_accounts={})))
    assert all(each.planned is None for each in sent_by_action(replace(record, run_info={})))
    assert sent_by_action(replace(record, rank_accounts={}, program=None)) == []
