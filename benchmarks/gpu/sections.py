"""Runs all sections on one GPU within nine minutes, and writes what each found as soon as it ends.

Each section is a process with a limit of its own: one that fails, or runs out of its time, is recorded, and
the next goes on. Results are `benchmarks/results/gpu/SECTION.json`. Without a GPU the command says `skipped`.

    python -m benchmarks.gpu.sections                    all, on the GPU of this host
    python -m benchmarks.gpu.sections races speed        some
    python -m benchmarks.gpu.sections --device cpu --tiny --out FOLDER     the same code on a CPU, small
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.harness.result import RESULTS, ROOT, commit
from meshwright.device.local_device import num_accelerators, own_device, use_device

TOTAL_S = 540.0
MIN_SECTION_S = 5.0  # less is not worth a start
TAIL_LINES = 25
# Kernels of cuBLAS that give the same bits each time, for the comparison of bits.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class Section:
    """A section: its module here, imported by its process alone; its function, and its limit in seconds."""

    module: str
    function: str
    limit_s: float

    def run(self, setting: Setting) -> dict[str, object]:
        """Returns what the section finds; `ok` says whether it is as it must be."""
        return vars(import_module(f"benchmarks.gpu.{self.module}"))[self.function](setting)


SECTIONS = {
    "environment": Section("environment", "environment", 60),
    "parity": Section("parity_on_one_gpu", "parity", 42),
    "drawn": Section("parity_on_one_gpu", "drawn_plans", 81),
    "races": Section("delayed_collectives", "races", 60),
    "speed": Section("step_speed", "speed", 88),
    "dropout": Section("step_speed", "dropout", 28),
    "float8": Section("step_speed", "float8", 30),
    "attention": Section("attention_speed", "attention_kernels", 16),
    "memory": Section("memory_peak", "memory", 30),
    "offload": Section("memory_peak", "offload", 45),
    "checkpoint": Section("checkpoint_io", "checkpoint", 40),
    "failure": Section("failing_rank", "failure", 20),
}


@dataclass(frozen=True)
class Record:
    """How a section ended: "ok", "failed", "out of time" or "not begun"; what it found, and else its last
    lines.
    """

    section: str
    status: str
    seconds: float
    limit_s: float
    found: dict[str, object]
    last_lines: list[str]


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    device: str
    tiny: bool
    out: Path
    total_s: float = TOTAL_S


def run_sections(names: Sequence[str], request: Request) -> Iterator[Record]:
    """Runs the sections in order, writes the record of each, and yields it."""
    end = perf_counter() + request.total_s
    request.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        limit_s = min(SECTIONS[name].limit_s, end - perf_counter())
        if limit_s < MIN_SECTION_S:
            record = Record(name, "not begun", 0.0, limit_s, {}, [])
        else:
            record = _run_process(name, request, limit_s)
        header = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
        text = json.dumps({**header, "device": request.device, **asdict(record)}, indent=1, default=str)
        (request.out / f"{name}.json").write_text(text + "\n")
        yield record


def _run_process(name: str, request: Request, limit_s: float) -> Record:
    start = perf_counter()
    with TemporaryDirectory() as folder:
        result, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, "-m", __spec__.name, "--as-section", name, "--device", request.device]
        command += ["--out", str(result), *(["--tiny"] if request.tiny else [])]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **VARIABLES},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                process.wait(limit_s)
                status = "failed"
            except subprocess.TimeoutExpired:
                status = "out of time"
            with_children_gone(process)
        found = json.loads(result.read_text()) if result.exists() else {}
        if status == "failed" and process.returncode == 0 and found.get("ok"):
            status = "ok"
        lines = [] if status == "ok" else log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return Record(name, status, perf_counter() - start, limit_s, found, lines)


def with_children_gone(process: subprocess.Popen[bytes]) -> None:
    """Ends `process` and what it has started, and waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_here(name: str, request: Request) -> None:
    """Runs a section in this process and writes what it found to `request.out`."""
    device = torch.device(request.device)
    use_device(device)
    torch.manual_seed(0)
    if request.tiny:
        torch.set_num_threads(1)  # operations are too small to share
    with TemporaryDirectory() as folder:
        try:
            setting = Setting(device, request.tiny, Path(folder), request.out)
            setting.keep(SECTIONS[name].run(setting))
        except Exception as error:
            traceback.print_exc()
            raise SystemExit(1) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that are named, or all; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"sections: {', '.join(SECTIONS)}")
    parser.add_argument("--device", default="", help="by default the GPU of this host")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can do")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="folder of the results")
    parser.add_argument("--as-section", choices=SECTIONS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}; one of {', '.join(SECTIONS)}")
    if given.as_section:
        run_here(given.as_section, Request(given.device, given.tiny, given.out))
        return 0
    if not given.device and not num_accelerators():
        print("skipped: torch sees no GPU here")
        return 0
    request = Request(given.device or str(own_device()), given.tiny, given.out)
    failed = 0
    for record in run_sections(given.names or list(SECTIONS), request):
        failed += record.status != "ok"
        print(f"{record.section:12} {record.status:12} {record.seconds:6.1f} s", flush=True)
        for line in record.last_lines:
            print(f"    {line}", flush=True)
    print(f"results      {request.out}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
