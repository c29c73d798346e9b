"""A command that ends in an exception is told from a negative verdict and from a refusal."""

import pytest

from meshwright import cli
from meshwright.cli.error_output import UNFORESEEN_ERROR_EXIT_CODE


def test_an_exception_that_is_not_foreseen_has_an_exit_code_of_its_own(monkeypatch, capsys):
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    err = capsys.readouterr().err
    assert ended.value.code == UNFORESEEN_ERROR_EXIT_CODE == 3
    assert "ZeroDivisionError: planted\nerror the command ended with an exception" in err
    assert "repair: if the last lines are of your own code, correct it" in err
