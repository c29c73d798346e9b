"""Config values against the schema: conversions, and errors with location and repair."""

import pytest

from meshwright.plan.job.errors import PlanError
from tests.run.config.configs import read, refusal


def test_a_whole_number_in_place_of_a_number_becomes_one(tmp_path):
    assert type(read(tmp_path, "[optimizer]\nlr = 1").job.optimizer.lr) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\nsteps = '8'",
            (
                'run.toml: train.steps: given is "8"; needed is a whole number\n  repair: write a '
                "whole number, without quotes"
            ),
        ),
        ("[train]\nsteps = 8.0", "run.toml: train.steps: given is 8.0; needed is a whole number"),
        ("[train]\nsteps = true", "run.toml: train.steps: given is true; needed is a whole number"),
        (
            "[run]\nfolder = 3",
            'run.toml: run.folder: given is 3; needed is a string in quotes\n  repair: put it in quotes: "3"',
        ),
        (
            "[run]\nfolder = 2024-01-01",
            'run.toml: run.folder: 2024-01-01 is read as a date\n  repair: put it in quotes: "2024-01-01"',
        ),
        ("[optimizer]\nlr = '1'", 'run.toml: optimizer.lr: given is "1"; needed is a number'),
        (
            "[optimizer]\nname = 'adam'",
            "run.toml: optimizer.name: given is \"adam\"; needed is 'adamw', 'sgd', "
            "'adamw_bf16', "
            "'adamw_8bit', 'lion',"
            " 'lion_bf16', 'adafactor' or 'muon'\n  repair: did you mean 'adamw'?",
        ),
        ("[[optimizer.groups]]\nlr_factor = 1", "run.toml: optimizer.groups.0.pattern: this key is missing"),
        (
            "[data]\ninclude = '*.py'",
            'run.toml: data.include: given is "*.py"; needed is a list in [ ]\n  repair: write ["*.py"]',
        ),
        (
            "[model]\noverrides = {a = [1]}",
            (
                "run.toml: model.overrides.a: given is [1]; needed is a whole number, or a number, or true "
                "or false"
            ),
        ),
        ("train = 3", "run.toml: train: given is 3; needed is a table of keys"),
        (
            "[train]\nbach = 1",
            "run.toml: train.bach: there is no key 'bach' here\n  repair: did you mean 'batch'?",
        ),
        (
            "[optimizer]\nsteps = 1",
            (
                "run.toml: optimizer.steps: there is no key 'steps' here\n  repair: it belongs to "
                "another table: write train.steps"
            ),
        ),
        (
            "steps = 1",
            (
                "run.toml: steps: there is no key 'steps' here\n  repair: it belongs to another "
                "table: write train.steps"
            ),
        ),
        (
            "[optimiser]\nlr = 1",
            "run.toml: optimiser: there is no key 'optimiser' here\n  repair: did you mean 'optimizer'?",
        ),
        (
            "[mesh]\ndp_shart = 2",
            "run.toml: mesh.dp_shart: there is no axis 'dp_shart'\n  repair: did you mean 'dp_shard'?",
        ),
        (
            "[optimizer]\nbetas = 0.9",
            "optimizer.betas: given is 0.9; needed is a list in [ ]\n  repair: write 2 values: [0.9, 0.9]",
        ),
        (
            "[optimizer]\nbetas = [0.9]",
            "optimizer.betas.1: the list has too few values\n  repair: write 2 values in [ ]",
        ),
        ("[mesh]\ntp = 2.5", "run.toml: mesh.tp: given is 2.5; needed is a whole number"),
        (
            "[[strategies]]\nname = 'copie'",
            "run.toml: strategies.0.name: there is no strategy 'copie'\n  repair: did you mean 'copies'?",
        ),
        (
            "[[strategies]]\nbucket_mb = 2",
            (
                'strategies.0.name: the strategy has no name\n  repair: write name = "...": choose '
                "one of: copies, layers"
            ),
        ),
        (
            "[strategies]\nname = 'copies'",
            (
                "run.toml: strategies: strategies is not a list of tables\n  repair: [[strategies]] "
                "in double brackets"
            ),
        ),
        (
            "[[strategies]]\nname = 'copies'\nbuket_mb = 2",
            "run.toml: strategies.copies.buket_mb: there is no key 'buket_mb' here",
        ),
        (
            "[[strategies]]\nname = 'copies'\nbucket_mb = 'x'",
            'run.toml: strategies.copies.bucket_mb: given is "x"; needed is a number',
        ),
        (
            "[[strategies]]\nname = 'layers'\nchunks = [0]",
            "strategies.layers.chunks: chunks of (0,)\n  repair: write numbers of at least 1",
        ),
        ("[train]\nsteps = = 3", "run.toml:2: not TOML: Invalid value, in the line 'steps = = 3'"),
        ("[train]\nsteps = [3,\n", "run.toml:2: not TOML: Invalid value, in the line 'steps = [3,'"),
        ("# nothing\n", "run.toml: the file is empty: it sets no key"),
        ("", "run.toml: the file is empty: it sets no key"),
    ],
)
def test_a_diagnostic_names_its_location_and_its_repair(tmp_path, text, message):
    assert message in refusal(tmp_path, text)


def test_all_diagnostics_are_reported_at_once(tmp_path):
    text = (
        "[train]\nbach = 1\nsteps = '3'\n[optimizer]\nlr = 'x'\n[mesh]\nfoo = "
        "2\n[[strategies]]\nname = 'nope'"
    )
    with pytest.raises(PlanError) as caught:
        read(tmp_path, text, "--run.keep", "x", "stray")
    assert len(caught.value.diagnostics) == 7
