"""`serve` is refused before a rank starts; a run is served by real processes until a signal comes, and shown
on the board.
"""

import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Command, forget_ranks, invoke, lay_out, refuse_to_start

pytest.importorskip("starlette", reason="an extra: pip install meshwright[serve]")

BODY = {"prompt": "2 times 3", "max_tokens": 12, "temperature": 2, "seed": 4}


@pytest.fixture(scope="module")
def config(tmp_path_factory, forks) -> Path:
    """The config of a run that two copies have trained."""
    tables = {"train": {"steps": 4}, "run": {"save_every": 2}, "model": {"source": "llama.json"}}
    path = lay_out(tmp_path_factory.mktemp("serve"), **tables)
    assert forks("train", path)[0] == 0
    (path.parent / "text.txt").unlink()  # nobody reads it now
    return path


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for each in started:
        each.close()


def ask(url: str, path: str, body: object = None) -> Any:
    connection = http.client.HTTPConnection(url.removeprefix("http://").removesuffix("/v1"), timeout=60)
    how = {} if body is None else {"body": json.dumps(body)}
    connection.request("GET" if body is None else "POST", path, **how)
    answered = json.loads(connection.getresponse().read())
    connection.close()
    return answered


def served(commands: list[Command], *argv: object) -> tuple[Command, str, dict[str, str]]:
    """The command when it serves, its address, and what it printed by word."""
    command = Command("serve", *argv, "--port", 0)
    commands.append(command)
    command.until(lambda: "\nurl " in command.printed())
    said = dict(line.split(maxsplit=1) for line in command.printed().splitlines()[-4:])
    return command, said["url"], said


@pytest.fixture(scope="module")
def texts() -> set[str]:
    """Those that the model has answered, under any plan."""
    return set()


OTHER_PLAN = ["--mesh.dp_replicate", 1, "--mesh.pp", 2]


@pytest.mark.parametrize(
    ("number", "code", "plan"), [(signal.SIGTERM, 143, "dp_replicate 2"), (signal.SIGINT, 130, "pp 2")]
)
def test_a_run_is_served_under_its_plan_and_under_another(
    config: Path, commands: list[Command], texts: set[str], number: int, code: int, plan: str
):
    run = config.parent / "run"
    argv = [run, "--optimizer.name", "sgd"] if code == 143 else [config, "--checkpoint", run, *OTHER_PLAN]
    command, url, said = served(commands, *argv)
    assert said["plan"].endswith(f" on {plan}")
    assert str(run / "checkpoints" / "step-00000004") in said["model"]
    assert "a sequence of 64 tokens; 8 sequences at once, memory for " in said["cache"]
    name = ask(url, "/v1/models")["data"][0]["id"]
    texts.add(ask(url, "/v1/completions", {**BODY, "model": name})["choices"][0]["text"])
    assert (len(texts), "" in texts) == (1, False)
    assert ask(url, "/v1/completions", {**BODY, "top_p": 2})["error"]["param"] == "top_p"
    command.process.send_signal(number)
    ended, _, errors = command.output()
    assert (ended, errors) == (code, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_is_shown_on_the_board_until_a_signal_comes(
    config: Path, commands: list[Command], number, code
):
    command = Command("board", config.parent / "run", "--port", 0)
    commands.append(command)
    command.until(lambda: "Ctrl-C" in command.printed())
    url = command.printed().split()[3]
    assert command.printed().startswith("1 run at http://127.0.0.1:")
    assert ask(url, "/run/run/state")["text"] == "ended after step 4 of 4"
    command.process.send_signal(number)
    assert command.output()[::2] == (code, "")


def test_a_board_of_no_folder_is_refused(capsys, tmp_path: Path):
    code, _, err = invoke(capsys, "board", tmp_path / "none")
    assert code == 2
    assert "there is no such folder" in err


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["--host", "0.0.0.0"], ["lets other hosts ask, and there is no API key", "--api-key-file"]),
        (["--max-model-len", "65"], ["--max-model-len 65; the model has 64 positions"]),
        (["--api-key-file", "empty.txt"], ["contains 0 words; needed is one", "write the key into it"]),
        (["--api-key-file", "absent.txt"], ["absent.txt cannot be read"]),
        (["--decode-context-parallel"], ["the plan shards no sequence", "plan with mesh.cp > 1"]),
        (["--checkpoint", "."], ["there is no complete checkpoint in ."]),
        (["--mesh.tpp", "2"], ["tpp"]),
    ],
)
def test_what_cannot_work_is_refused(
    config: Path, argv: list[str], texts: list[str], capsys, monkeypatch, tmp_path: Path
):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    monkeypatch.delenv("MESHWRIGHT_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    code, _, err = invoke(capsys, "serve", config.parent / "run", "--port", "0", *argv)
    assert code == 2
    assert [text for text in texts if text not in " ".join(err.split())] == []
