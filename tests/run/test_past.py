"""What a run's folder tells: steps without the first, the slowest rank's computing, the shortest time of a message."""

from pathlib import Path

import pytest

from meshwright.core.errors import PlanError
from meshwright.run.past import past
from tests.run.pasts import COMPUTED_S, NBYTES, SENT_S, STEP_S, run_folder


def test_steps_and_where_they_went_are_read(tmp_path: Path):
    found = past(run_folder(tmp_path / "run"))
    assert (found.device, found.steps) == ("Abacus 7", 20)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.computed_s == pytest.approx(COMPUTED_S)
    assert [(each.collective, each.axes, each.nbytes) for each in found.messages] == [
        ("all_reduce", ("dp_replicate",), NBYTES),
        ("all_reduce", ("dp_replicate",), 8),
    ]
    assert found.messages[0].seconds == pytest.approx(SENT_S)


def test_a_run_that_was_not_traced_tells_its_steps_alone(tmp_path: Path):
    found = past(run_folder(tmp_path / "run", traced=False, device="NVIDIA H100 80GB HBM3"))
    assert (found.computed_s, found.messages) == (None, ())
    assert found.device == "NVIDIA H100 80GB HBM3"


def test_a_run_with_too_few_steps_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="9 steps beyond the first were timed; needed are 10") as raised:
        past(run_folder(tmp_path / "run", steps=9))
    assert "--train.steps 12 or more" in raised.value.faults[0].fix


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="there is no such folder"):
        past(tmp_path / "none")
    with pytest.raises(PlanError, match=r"there is no about.json in it"):
        past(tmp_path)
    folder = run_folder(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(PlanError, match=r"there is no metrics.jsonl in it: no step was timed"):
        past(folder)
    (folder / "about.json").write_text("{")
    with pytest.raises(PlanError, match="the file cannot be read"):
        past(folder)
