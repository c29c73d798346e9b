"""CPU seconds of a run of one step on two processes, beside those of a bare script under torchrun.

    ours    meshwright train, which checks the config, analyzes the model, plans, and starts its ranks
    bare    torchrun with a script that imports torch and transformers, and does one step of DDP (`SCRIPT`)

Both train the same small Llama in float32 on the same number of tokens and save its parameters once. All
sides take turns; CPU seconds of all processes decide, and a second bare side gives the noise.

    python -m benchmarks.startup
"""

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from benchmarks.harness.interleaved_timing import LEAST_ROUNDS, Cost, Window, compare, measure
from benchmarks.harness.result import ROOT, Result

NAME = "startup"
BAR = 1.6
CLAIM = f"one step on 2 processes costs at most {BAR} x the CPU seconds of a bare torchrun script"
WINDOW = Window(clean=LEAST_ROUNDS, most=4 * LEAST_ROUNDS, warmup=1)
MODEL = ROOT / "examples" / "llama-small.json"
BATCH, SEQUENCE = 8, 128
SCRIPT = f"""
import sys
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
config = transformers.AutoConfig.from_pretrained({str(MODEL)!r})
model = DistributedDataParallel(transformers.AutoModelForCausalLM.from_config(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
tokens = torch.tensor(list(open(sys.argv[1], "rb").read()[: {BATCH // 2 * SEQUENCE}])).view(-1, {SEQUENCE})
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
if dist.get_rank() == 0:
    save_file(model.module.state_dict(), sys.argv[2])
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Command:
    """A command line that is run once per step, in `folder`."""

    name: str
    words: Sequence[str]
    folder: Path

    def step(self) -> Cost:
        """Runs the command; returns the CPU seconds of all its processes, and its wall seconds."""
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(self.words, cwd=self.folder, check=True, capture_output=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Cost(cpu, wall)


def commands(folder: Path) -> list[Command]:
    """Returns the three sides; `folder` gets the text and the script."""
    text, script = folder / "text.txt", folder / "bare.py"
    text.write_bytes((ROOT / "README.md").read_bytes())
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    config = {
        "model": {"source": str(MODEL)},
        "data": {"source": str(text), "sequence": SEQUENCE},
        "train": {"batch": BATCH, "steps": 1},
        "mesh": {"dp_replicate": 2},
        "run": {"folder": str(folder / "run")},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    train = [sys.executable, "-m", "meshwright", "train", str(folder / "config.toml")]
    bare = Command("bare", [*torchrun, str(script), str(text), str(folder / "bare.safetensors")], folder)
    # the run folder is removed first, so that no step resumes
    ours = ["sh", "-c", 'rm -rf "$0" && exec "$@"', str(folder / "run"), *train]
    return [bare, Command("ours", ours, folder), replace(bare, name="twin")]


def main() -> None:
    """Measures and writes the result."""
    with TemporaryDirectory() as name:
        rounds = measure(commands(Path(name)), WINDOW)
    sides = partial(compare, rounds, "ours", base="bare", twin="twin", bar=BAR)
    cpu, wall = sides(figure="cpu_s"), sides(figure="wall_s")
    print(cpu.as_dict(), wall.as_dict(), sep="\n")
    print(Result.of_comparisons(NAME, CLAIM, {"one step": (rounds, cpu, wall)}).write(NAME))


if __name__ == "__main__":
    main()
