"""Weights in and out: a run is exported to a folder, a folder starts a run, a pickle becomes safetensors."""

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from meshwright.api import parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.commands import export_import_convert
from meshwright.commands.export_import_convert import convert, export_checkpoint
from meshwright.commands.plan import resolve_config
from meshwright.model.hf import hub
from meshwright.model.loading.safetensors_reader import SINGLE_FILE
from meshwright.plan.job.errors import PlanError
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors
from meshwright.run.export import hf_export as export_module
from meshwright.run.export.roundtrip_check import RoundTripResult
from meshwright.run.training.train_loop import save_run_checkpoint
from tests.command_line import Said, checkpoint, forget_ranks, invoke, lay_out, refuse_to_start
from tests.model.published_models import published

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def say(capsys, monkeypatch) -> Callable[..., Said]:
    """The command in this process; it fails the test when it starts a rank."""
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    return lambda *words: invoke(capsys, *words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forks) -> Path:
    """A folder with published weights, and with a run of two steps from them,
    so small that nothing changed.
    """
    folder = tmp_path_factory.mktemp("trained")
    published(folder / "published", vocab_size=256)
    code, _, err = forks(
        "train", config_of(folder, "../published"), "--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0"
    )
    assert (code, err) == (0, "")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published Llama whose vocabulary holds all bytes."""
    published(tmp_path / "published", vocab_size=256)
    return tmp_path / "published"


def config_of(tmp_path: Path, weights: str, **model: object) -> Path:
    table = {"source": "", "weights": weights, **model}
    return lay_out(
        tmp_path / "job", model=table, mesh={"dp_replicate": 1}, train={"steps": 2}, run={"save_every": 0}
    )


def test_a_run_starts_from_its_weights_and_leaves_as_a_folder(tmp_path: Path, trained: Path, say):
    saved = load_tensors(checkpoint(trained / "job" / "run", 2))[0]
    given = load_file(trained / "published" / SINGLE_FILE)
    assert torch.equal(saved["model/lm_head.weight"], given["lm_head.weight"])
    code, out, err = say("export", trained / "job" / "run", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "round trip  the outputs for 2 x 8 tokens differ by 0 at most" in out
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(back.get_parameter(name), value) for name, value in given.items())


def test_a_plan_says_where_weights_come_from_and_its_hash_follows_their_values(
    tmp_path: Path, folder: Path, say
):
    config = config_of(tmp_path, str(folder))
    code, out, err = say("plan", config, "--actions", "--out", tmp_path / "plan.toml")
    assert (code, err) == (0, "")
    folded = " ".join(out.split())
    assert "weights " in folded
    assert "per rank (parameters, and 16 KiB to read one)" in folded
    assert "to read one)" in folded
    assert say("plan", tmp_path / "plan.toml")[0] == 0
    published(folder, seed=9, vocab_size=256)
    code, _, err = say("plan", tmp_path / "plan.toml")
    assert code == 2
    assert "the file was edited, or the model changed" in err


def test_weights_that_do_not_fit_are_refused_before_a_rank_starts(tmp_path: Path, folder: Path, say):
    code, out, err = say("train", config_of(tmp_path, str(folder)), "--model.overrides.hidden_size", "32")
    assert (code, out) == (2, "")
    assert "stored tensors have another shape than in the model" in err
    assert "model.embed_tokens.weight is [256, 16], the model needs [256, 32]" in err


def test_a_scaled_down_copy_is_verified_without_the_weights(tmp_path: Path, folder: Path, say):
    code, _, err = say("verify", config_of(tmp_path, str(folder)), "--shrink", "--steps", "1")
    assert (code, err) == (0, "")


def test_a_plan_holds_the_commit_of_a_hub_id(tmp_path: Path, say, monkeypatch):
    snapshot = tmp_path / COMMIT
    published(snapshot, vocab_size=256)
    asked = []
    monkeypatch.setattr(
        hub, "snapshot_download", lambda name, **given: asked.append(given["revision"]) or str(snapshot)
    )
    code, out, err = say(
        "plan", config_of(tmp_path, "org/name", revision="main"), "--out", tmp_path / "plan.toml"
    )
    assert (code, err) == (0, "")
    model = tomllib.loads((tmp_path / "plan.toml").read_text())["model"]
    assert (model["source"], model["weights"], model["revision"]) == ("org/name", "org/name", COMMIT)
    assert asked[0] == "main"
    assert set(asked[1:]) == {COMMIT}
    assert " ".join(say("plan", tmp_path / "plan.toml")[1].split()) in " ".join(out.split())


def test_import_compares_and_shows_the_table(folder: Path, say):
    code, out, err = say("import", folder)
    assert (code, err) == (0, "")
    assert out.startswith("round trip  the outputs for 2 x 8 tokens differ by 0 at most")
    table = tomllib.loads(out[out.index("[model]") :])
    assert table == {"model": {"source": str(folder), "weights": str(folder)}}


def test_an_export_that_differs_is_no_export(tmp_path: Path, trained: Path, say, monkeypatch):
    monkeypatch.setattr(
        export_module, "compare_logits", lambda *given: RoundTripResult("planted outputs", 0.5, 1e-6)
    )
    code, out, err = say("export", trained / "job" / "run", tmp_path / "out")
    assert (code, out) == (1, "")
    assert "not exported: planted outputs differ by 0.5" in err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_refused(tmp_path: Path, trained: Path, folder: Path, say):
    step = checkpoint(trained / "job" / "run", 2)
    cases = [
        ((tmp_path / "nowhere", tmp_path / "out"), "there is no folder"),
        ((folder, tmp_path / "out"), "is not a checkpoint, nor contains one"),
        ((step, folder), "exists and is not an empty folder"),
        ((step, tmp_path / "out", "--dtype", "bfloat"), "did you mean 'bfloat16'?"),
        ((step, tmp_path / "out", "--max-shard-size", "many"), "the size 'many'"),
        ((step, tmp_path / "out", "--max-shard-size", "0GB"), "the size '0GB'"),
    ]
    for words, reason in cases:
        code, _, err = say("export", *words)
        assert code == 2
        assert reason in err
    assert say("export", step, tmp_path / "small", "--max-shard-size", "20KB")[0] == 0
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1
    shutil.copytree(step, tmp_path / step.name)
    tensors = tmp_path / step.name / "rank-00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"!")
    with pytest.raises(PlanError, match=r"sha256|bit-flipped|checksum"):
        export_checkpoint(tmp_path / step.name, tmp_path / "out", "", "5GB")


def test_a_run_of_a_factory_leaves_as_one_file(tmp_path: Path, say):
    ready = resolve_config(lay_out(tmp_path / "job", mesh={"dp_replicate": 1}), [], None)[1]
    world = single_rank_world(torch.device("cpu"))
    with parallelize(ready.analyzed, ready.plan, loss=ready.loss, world=world) as engine:
        save_run_checkpoint(engine.executor, ready.plan, world, ready.dataset.digest)
    code, out, err = say("export", tmp_path / "job" / "run", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "tensors read back" in out
    assert "layers.0.mix.weight" in load_file(tmp_path / "out" / SINGLE_FILE)


# convert


class Evil:
    """Pickled, it runs a command when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def pickled(path: Path, value: object, **how: object) -> Path:
    torch.save(value, path, **how)
    return path


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_tensors_becomes_safetensors(tmp_path: Path, say, zipped: bool):
    shared = torch.randn(4, 3)
    given = {"a": shared, "tied": shared, "t": torch.randn(3, 4).t(), "n": torch.tensor(3)}
    file = pickled(tmp_path / "model.bin", given, _use_new_zipfile_serialization=zipped)
    code, out, err = say("convert", file, tmp_path / SINGLE_FILE)
    assert (code, err) == (0, "")
    assert out == f"4 tensors written to {tmp_path / SINGLE_FILE}\n"
    found = load_file(tmp_path / SINGLE_FILE)
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.bin", SINGLE_FILE]


def test_an_entry_is_chosen_by_its_key(tmp_path: Path, say):
    file = pickled(tmp_path / "run.pt", {"model": {"a": torch.ones(2)}, "step": 3})
    code, _, err = say("convert", file, tmp_path / SINGLE_FILE)
    assert code == 2
    assert "other things than tensors by name; it holds model (dict), step (int)" in err
    assert "--key NAME" in err
    assert say("convert", file, tmp_path / SINGLE_FILE, "--key", "model")[0] == 0
    assert say("convert", file, tmp_path / "b.safetensors", "--key", "models")[0] == 2


def test_a_pickle_that_would_run_something_does_not(tmp_path: Path, say):
    mark = tmp_path / "ran"
    code, _, err = say("convert", pickled(tmp_path / "evil.pt", {"a": Evil(mark)}), tmp_path / SINGLE_FILE)
    assert code == 2
    assert "it refers to posix.system: it contains more than tensors" in err
    assert "weights_only" not in err
    assert not mark.exists()
    assert not (tmp_path / SINGLE_FILE).exists()


def test_the_child_sees_nothing_of_the_environment(tmp_path: Path, monkeypatch):
    seen = tmp_path / "seen.json"
    script = tmp_path / "spy.py"
    script.write_text(f"import json, os\nopen({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))\n")
    monkeypatch.setattr(export_import_convert, "CONVERT_SCRIPT", script)
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(PlanError, match="ended with code 0"):
        convert(pickled(tmp_path / "a.pt", {}), tmp_path / SINGLE_FILE, "", {"PATH": "/bin"})
    assert set(json.loads(seen.read_text())) - {"LC_CTYPE"} == {"PATH"}


@pytest.mark.parametrize(
    ("content", "out", "reason"),
    [
        (b"not a pickle", SINGLE_FILE, "is not a file that torch.save wrote"),
        (b"", SINGLE_FILE, "is not a file that torch.save wrote"),
        (b"x", "model.bin", "exists"),
        (b"x", "other.pt", "does not end in .safetensors"),
        (b"x", "nowhere/model.safetensors", "is not in an existing folder"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, say, content: bytes, out: str, reason: str):
    (tmp_path / "model.bin").write_bytes(content)
    code, _, err = say("convert", tmp_path / "model.bin", tmp_path / out)
    assert code == 2
    assert reason in err
    assert say("convert", tmp_path / "missing.bin", tmp_path / SINGLE_FILE)[0] == 2
