"""Exit codes of the command: a crash is neither a negative verdict nor a refusal."""

import pytest
import typer

from meshwright import cli
from meshwright.cli import plan_inspect_verify_train
from meshwright.cli.error_output import CRASH_EXIT_CODE, exit_on_error
from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.local_launcher import FirstFailure, LaunchResult, RanksFailed


def test_an_unexpected_error_ends_with_a_code_of_its_own_and_its_traceback(monkeypatch, capsys):
    def crash(name: str) -> None:
        raise KeyError(f"planted in {name}")

    monkeypatch.setattr(plan_inspect_verify_train, "import_command", crash)
    monkeypatch.setattr("sys.argv", ["meshwright", "verify", "config.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == CRASH_EXIT_CODE
    assert CRASH_EXIT_CODE not in (0, 1, 2)
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "KeyError: 'planted in verify'" in err
    assert "the command crashed: KeyError" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlanError("x", fix="y"), 2),
        (RanksFailed(LaunchResult(1, FirstFailure(0, "KeyError: 'planted'"))), CRASH_EXIT_CODE),
        (RanksFailed(LaunchResult(2, FirstFailure(0, "refused"))), 2),
        (RanksFailed(LaunchResult(143)), 143),
    ],
)
def test_a_rank_that_crashes_for_a_verdict_is_no_negative_verdict(error, code):
    with pytest.raises(typer.Exit) as ended, exit_on_error():
        raise error
    assert ended.value.exit_code == code
