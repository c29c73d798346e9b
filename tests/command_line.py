"""The command as a user runs it: a folder with a config, a text and a model file; real child processes, and
none left over.

`FACTORIES` are models of a few hundred parameters that need no transformers, so that a process is ready in
seconds. Some are broken on purpose.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import pytest
import tomli_w

from meshwright import cli
from meshwright.run.checkpoint.directories import step_folder
from meshwright.run.launch import local_launcher as launch_module
from meshwright.run.telemetry.metrics_log import read_metrics

ENV = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENV |= {
    "PYTHONPATH": str(Path(cli.__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "error::ResourceWarning",
}
SEQUENCE = 16
STEPS = 100
TEXT = "".join(f"{n} times {n + 1} makes {n * (n + 1)}\n" for n in range(300))
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16},
    **{"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False},
}
FACTORIES = '''
import os
import resource
import signal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import meshwright as mw


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.mix(self.norm(x)).cumsum(1)))


class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 256)

    def forward(self, input_ids):
        return self.head(self.rest(self.embed(input_ids)))

    def rest(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Centred(Bytes):
    """Computes a mean over the rows that happen to be on this rank."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(self.rest(x - x.mean(0)))


def _at_step(step, act):
    """A model whose loss acts in the `step`-th step of a process; what the analysis tries, on fake tensors or
    without gradients, is no step.
    """
    calls, usual = [], mw.token_cross_entropy()

    def total(outputs, batch):
        calls.extend([1] if outputs.requires_grad and not isinstance(outputs, FakeTensor) else [])
        if len(calls) == step:
            act()
        return usual.total(outputs, batch)

    return mw.Model(Bytes(), loss=mw.Loss(total, usual.count))


def build():
    return Bytes()


def centred():
    return Centred()


def fails():
    def act():
        if os.environ["RANK"] == "1":
            raise ValueError("planted in rank 1")

    return _at_step(3, act)


def fills():
    """From step 15 on, no file may grow beyond 8 KiB: writing a checkpoint fails, as on a full disk."""
    return _at_step(15, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)))


def constructs_badly():
    return nn.Linear(3, undefined_width)
'''


def lay_out(folder: Path, **tables: object) -> Path:
    """A config in `folder` beside the model file, a Llama config and a text; `tables` are merged into its
    own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(FACTORIES)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    (folder / "text.txt").write_text(TEXT)
    document: dict = {
        "model": {"source": "model.py:build"},
        "data": {"source": "text.txt", "sequence": SEQUENCE},
        "train": {"steps": STEPS, "batch": 12},
        "optimizer": {"lr": 1e-2},
        "mesh": {"dp_replicate": 2},
        "run": {"folder": str(folder / "run"), "save_every": 10, "keep": 3},
    }
    for name, table in tables.items():
        document[name] = {**document.get(name, {}), **table} if isinstance(table, dict) else table
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(document))
    return path


Said = tuple[int, str, str]  # exit code, stdout, stderr


def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """`meshwright ARGV...` as a process of its own; `close` ends it and everything below it."""

    def __init__(self, *argv: object, launcher: tuple[str, ...] = ()) -> None:
        words = [sys.executable, "-m", *launcher, *([] if launcher else ["meshwright"]), *map(str, argv)]
        self._out, self._err = TemporaryFile(), TemporaryFile()  # noqa: SIM115  closed by close()
        how: dict[str, Any] = {
            "env": ENV,
            "stdin": subprocess.DEVNULL,
            "stdout": self._out,
            "stderr": self._err,
        }
        # what a shell starts in the background ignores Ctrl-C, and so would all below it
        self.process = subprocess.Popen(words, start_new_session=True, preexec_fn=_hears_ctrl_c, **how)
        self._seen: dict[int, psutil.Process] = {}

    def printed(self) -> str:
        """Returns what it has written to stdout so far."""
        return os.pread(self._out.fileno(), 1 << 20, 0).decode(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """The ranks that run: the children of this process, in the order in which they were started."""
        own = psutil.Process(self.process.pid)
        self._seen |= {child.pid: child for child in own.children(recursive=True)}
        return sorted(
            (child for child in own.children() if child.is_running()),
            key=lambda child: (child.create_time(), child.pid),
        )

    def until(self, happened: Callable[[], bool]) -> None:
        """Return when `happened()`; fail when the command ends before."""
        while not happened():
            assert self.process.poll() is None, f"it ended too early: {self.output()}"
            time.sleep(0.002)
        self.ranks()

    def output(self) -> Said:
        """The exit code, what was written to stdout and to stderr; no process below it runs any more."""
        code = self.process.wait()
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=20)
        assert not alive, f"processes were left behind: {alive}"
        return code, self.printed(), os.pread(self._err.fileno(), 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.ranks()
        for process in [*self._seen.values(), self.process]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        self._out.close()
        self._err.close()


def command(*argv: object, launcher: tuple[str, ...] = ()) -> Said:
    """Returns how `meshwright ARGV...` ended as a process of its own: exit code, stdout, stderr."""
    running = Command(*argv, launcher=launcher)
    try:
        return running.output()
    finally:
        running.close()


def invoke(capsys: pytest.CaptureFixture[str], *words: object) -> Said:
    """Returns how `meshwright WORDS...` ends in this process: exit code, stdout, stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.app([str(word) for word in words])
    return (ended.value.code or 0, *capsys.readouterr())


def refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a command that starts a rank fail its test."""

    def started(*args: object) -> None:
        pytest.fail("a rank was started")

    monkeypatch.setattr(launch_module, "launch_ranks", started)


def forget_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that this process is no rank, whatever started the tests."""
    for key in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MESHWRIGHT_STORE",
        "MESHWRIGHT_LIFELINE",
        "MESHWRIGHT_ATTEMPT",
    ):
        monkeypatch.delenv(key, raising=False)


def become_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a job, as torchrun would start it."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)


def metrics(run: Path) -> dict[int, tuple[float, float, int, float]]:
    """Loss, gradient norm, tokens and learning rate of each step in the journal of a run; the last line of a
    step counts.
    """
    lines = read_metrics(run / "metrics.jsonl")
    return {line["step"]: (line["loss"], line["grad_norm"], line["tokens"], line["lr"]) for line in lines}


def checkpoint(run: Path, step: int) -> Path:
    """Returns where a run keeps its checkpoint of `step`."""
    return step_folder(run / "checkpoints", step)


def steps_kept(run: Path) -> list[str]:
    """The names in the folder of checkpoints, sorted."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())
