"""Overrides from the command line: precedence over the file, and errors named as typed."""

import pytest

from tests.run.config.configs import CONFIG, Copies, read, refusal


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--train.batch", "16"], lambda request: request.job.train.batch == 16),
        (["--train.batch=16"], lambda request: request.job.train.batch == 16),
        (["--mesh.tp", "-1"], lambda request: request.mesh == {"dp_replicate": -1, "tp": -1}),
        (["--micro_batch", "4"], lambda request: request.micro_batch == 4),
        (["--precision.compute", "bfloat16"], lambda request: request.job.precision.compute == "bfloat16"),
        (["--run.sample_prompt", ""], lambda request: request.run.sample_prompt == ""),
        (["--run.sample_prompt=-- a = b"], lambda request: request.run.sample_prompt == "-- a = b"),
        (["--run.folder", "2024-01-01"], lambda request: request.run.folder == "2024-01-01"),
        (
            ["--run.sample_prompt", "'a'\nsteps = 3"],
            lambda request: request.run.sample_prompt == "'a'\nsteps = 3",
        ),
        (["--optimizer.betas", "[0.5, 0.6]"], lambda request: request.job.optimizer.betas == (0.5, 0.6)),
        (["--optimizer.betas.1", "0.7"], lambda request: request.job.optimizer.betas == (0.9, 0.7)),
        (
            ["--optimizer.groups.0.weight_decay", "{}"],
            lambda request: request.job.optimizer.groups[0].weight_decay is None,
        ),
        (["--model.overrides.layers", "2"], lambda request: request.job.model.overrides == {"layers": 2}),
        (["--model.overrides.window", "{}"], lambda request: request.job.model.overrides == {"window": None}),
        (["--strategies.copies.bucket_mb", "1.5"], lambda request: request.strategies[0].bucket_mb == 1.5),
        (["--strategies.copies.bucket_mb", "{}"], lambda request: request.strategies[0].bucket_mb is None),
        (["--strategies.1.note", "x"], lambda request: request.strategies[1].note == "x"),
        (
            ["--strategies.copies.overlap", "--micro_batch", "1"],
            lambda request: request.strategies[0].overlap,
        ),
        (["--train.batch", "16", "--train.batch", "32"], lambda request: request.job.train.batch == 32),
    ],
)
def test_an_override_wins_over_the_file(tmp_path, words, found):
    text = CONFIG.replace("lr = 1", "lr = 1\nbetas = [0.9, 0.95]").replace(
        "bucket_mb = 4", "bucket_mb = 4\noverlap = false"
    )
    text = text.replace('pattern = "*.bias"', 'pattern = "*.bias"\nweight_decay = 0.5')
    assert not found(read(tmp_path, text))
    assert found(read(tmp_path, text, *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.bach", "1"], "--train.bach: there is no key 'bach' here\n  repair: did you mean 'batch'?"),
        (
            ["--optimiser.lr", "1"],
            "--optimiser.lr: there is no key 'optimiser' here\n  repair: did you mean 'optimizer'?",
        ),
        (
            ["--schedule.name", "linear"],
            "--schedule.name: there is no key 'schedule' here\n  repair: did you mean 'lr_schedule'?",
        ),
        (
            ["--lr_schedule.name", "cosine", "--lr_schedule.warmup", "long"],
            '--lr_schedule.warmup: given is "long"; needed is a whole number',
        ),
        (
            ["--precision.compute", "float8"],
            "--precision.compute: given is \"float8\"; needed is 'float64', 'float32', 'bfloat16' or "
            "'float16'\n  repair: choose one of: bfloat16, float16, float32, float64",
        ),
        (["--train.batch", "many"], '--train.batch: given is "many"; needed is a whole number'),
        (["--train.batch"], "--train.batch: given is true; needed is a whole number"),
        (["16"], "'16': this is not an override\n  repair: write --key.sub value"),
        (["--train..batch=1"], "'--train..batch=1': this is not an override"),
        (["--run.folder=\udcff"], "'run.folder=\\udcff' is not valid UTF-8"),
        (["--"], "'--': this is not an override"),
        (
            ["--micro_batch.x", "1"],
            (
                "--micro_batch.x: micro_batch is 2, which has no keys\n  repair: set it as a whole: "
                "--micro_batch VALUE"
            ),
        ),
        (
            ["--strategies.copis.overlap"],
            "--strategies.copis.overlap: this list has no 'copis'\n  repair: did you mean 'copies'?",
        ),
        (["--strategies.0.overlap", "2"], "--strategies.copies.overlap: given is 2; needed is true or false"),
        (["--strategies.2.overlap", "2"], "--strategies.2.overlap: this list has no '2'"),
    ],
)
def test_a_faulty_override_is_named_as_it_was_typed(tmp_path, words, message):
    assert message in refusal(tmp_path, CONFIG, *words)


def test_an_error_in_the_file_is_not_attributed_to_an_override_of_another_key(tmp_path):
    assert "run.toml: train.bach" in refusal(tmp_path, "[train]\nbach = 1", "--train.batch", "2")


def test_two_strategies_of_one_name_are_addressed_by_place(tmp_path):
    text = "[[strategies]]\nname = 'copies'\n[[strategies]]\nname = 'copies'\noverlap = false"
    assert "address one by its place: 0 or 1" in refusal(tmp_path, text, "--strategies.copies.bucket_mb", "1")
    assert read(tmp_path, text, "--strategies.1.bucket_mb", "1").strategies == (Copies(), Copies(1.0, False))
