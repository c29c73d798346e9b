"""Training within the memory that the plan says, of a model whose optimizer states do not fit into it.

A Llama of 77 M parameters on one device, bf16 with float32 masters, AdamW: 12 bytes per parameter of states.
Each run is a process that enters a memory cgroup before it makes any weight. Device and host are one memory
here, so the limit is what the plan says of both, and 10 % more. The heap returns freed memory at once, so
that the system counts what is in use.

    disk_offload    must end within the limit, with at most 1 MiB in the page cache after each step, and with
                    the bits of the run in memory; what it states of host memory is at most a quarter of the
                    bytes of the states
    offload         states in host memory, under the same limit, which `parallelize` refuses; without that
                    check it must be killed by the system
    in memory       without a limit: the bits to compare with

    python -m benchmarks.memory.bounded_host            two minutes; needs root and cgroup v1
    python -m benchmarks.memory.bounded_host --quick    a model of 5 M; writes nothing
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import transformers
from torch import nn

from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.runtime.cpu_allocator import M_MMAP_THRESHOLD
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.oom_advice import OOMAdvisor
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes, state_bytes

NAME = "bounded_host"
CLAIM = (
    "disk_offload trains within the memory that the plan says (+ 10 %), with at most 1 MiB in the page cache "
    "and the same bits; the states are at least 4 x the host memory that the plan says"
)
CGROUPS = Path("/sys/fs/cgroup/memory")
RETURNED_NBYTES = 1 << 17
MARGIN, CACHE_BAR, RATIO_BAR, STEPS, TOKENS = 1.10, 1 << 20, 4.0, 4, 32
Sizes = tuple[int, int, int]  # hidden, intermediate, layers
SIZES: dict[str, Sizes] = {"large": (512, 1_408, 24), "small": (256, 704, 6)}
MASTERS = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")


@dataclass(frozen=True)
class Run:
    """What a run says: a digest of its masters, bytes in the page cache after each step, and its peak."""

    digest: str
    cached: tuple[int, ...]
    peak: int


class MemoryCgroup:
    """A memory cgroup (v1) of this process, and what it counts; a `limit` of 0 is none."""

    def __init__(self, limit: int) -> None:
        self._folder = CGROUPS / f"{NAME}-{os.getpid()}" if limit else None
        if self._folder is not None:
            self._folder.mkdir()
            (self._folder / "memory.limit_in_bytes").write_text(str(limit))
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def cached_nbytes(self) -> int:
        """Returns the bytes of files in memory; 0 without a limit."""
        if self._folder is None:
            return 0
        lines = (self._folder / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["cache"])

    def peak_nbytes(self) -> int:
        """Returns the most bytes so far, files included; 0 without a limit."""
        return 0 if self._folder is None else int((self._folder / "memory.max_usage_in_bytes").read_text())


def llama(sizes: Sizes) -> nn.Module:
    """Returns the model."""
    hidden, inner, layers = sizes
    config = transformers.LlamaConfig(
        vocab_size=1_000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Returns the samples of a step."""
    tokens = torch.randint(1_000, (1, TOKENS), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens.clone()}


def strategies_of(kind: str, folder: str) -> tuple[Strategy, ...]:
    """Returns what the run `kind` trains with."""
    return {
        "disk": (DiskOffload(folder, num_buffers=2),),
        "host": (Offload(step_on="host"),),
        "memory": (),
    }[kind]


def planned(kind: str, sizes: Sizes, folder: str) -> tuple[AnalyzedModel, Plan]:
    """Returns the analyzed model, and the plan of the run `kind`."""
    analyzed = analyze(lambda: llama(sizes), batch_of(0))
    job = Job(
        ModelConfig("model"),
        DataConfig("example", sequence=TOKENS),
        TrainConfig(batch=1),
        OptimizerConfig("adamw", lr=1e-3),
        precision=MASTERS,
    )
    return analyzed, make_plan(analyzed, job, Mesh(), strategies_of(kind, folder))


def trained(kind: str, sizes: Sizes, folder: str, limit: int) -> Run:
    """Trains in this process, which enters a cgroup of `limit` bytes before it has weights."""
    analyzed, plan = planned(kind, sizes, folder)
    cgroup, cached = MemoryCgroup(limit), []
    world = single_rank_world(torch.device("cpu"))
    unchecked = patch.object(OOMAdvisor, "check_rank_fits_here") if kind == "host" else nullcontext()
    with unchecked, parallelize(analyzed, plan, world=world) as engine:
        _return_freed_memory()
        for step in range(STEPS):
            engine.step(batch_of(step))
            cached.append(cgroup.cached_nbytes())
        peak, digest = cgroup.peak_nbytes(), sha256()
        for name, value in sorted(engine.executor.gather_parameters(use_masters=True).items()):
            digest.update(name.encode())
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Run(digest.hexdigest(), tuple(cached), peak)


def _return_freed_memory() -> None:
    """Lets the heap return freed tensors at once: what it would keep is counted, and no plan knows it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, RETURNED_NBYTES)
    libc.malloc_trim(0)


def run_process(kind: str, size: str, folder: str, limit: int) -> Run | int:
    """Returns what the run says, in a process of its own, or the signal that ended it."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory.bounded_host",
        "--run",
        kind,
        size,
        folder,
        str(limit),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    with removed(CGROUPS / f"{NAME}-{process.pid}"):
        if process.returncode:
            return -process.returncode
        found = json.loads(output.splitlines()[-1])
        return Run(found["digest"], tuple(found["cached"]), found["peak"])


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    """Removes the cgroup of a process that has ended."""
    try:
        yield
    finally:
        if folder.exists():
            folder.rmdir()


@dataclass(frozen=True)
class Figures:
    """What all three runs show; bytes."""

    parameters: int
    states: int
    host: int
    device: int
    limit: int
    peak: int
    page_cache: tuple[int, ...]
    ended: bool
    same_bits: bool
    offload_is_killed: bool

    @property
    def ratio(self) -> float:
        """The states over the host memory that the plan says."""
        return self.states / self.host

    @property
    def holds(self) -> bool:
        """Whether all bars hold."""
        bounded = self.ended and max(self.page_cache) <= CACHE_BAR and self.ratio >= RATIO_BAR
        return bounded and self.same_bits and self.offload_is_killed


def measured(size: str, folder: str) -> Figures:
    """Returns the figures of all three runs."""
    _, plan = planned("disk", SIZES[size], folder)
    on_host, on_device = peak_nbytes(plan, 0, "host"), peak_nbytes(plan, 0, "device")
    states = state_bytes(plan, 0, "disk").total
    limit = int(MARGIN * (on_host + on_device))
    disk, host, memory = (
        run_process(kind, size, folder, 0 if kind == "memory" else limit)
        for kind in ("disk", "host", "memory")
    )
    ended = isinstance(disk, Run)
    return Figures(
        plan.model_spec.numel,
        states,
        on_host,
        on_device,
        limit,
        disk.peak if isinstance(disk, Run) else 0,
        disk.cached if isinstance(disk, Run) else (),
        ended,
        isinstance(disk, Run) and isinstance(memory, Run) and disk.digest == memory.digest,
        host == signal.SIGKILL,
    )


def main() -> None:
    """Measure, and write the result."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--run"]:
        kind, size, folder, limit = sys.argv[2:]
        found = trained(kind, SIZES[size], folder, int(limit))
        print(json.dumps(vars(found)))
        return
    quick = "--quick" in sys.argv[1:]
    with TemporaryDirectory(dir="/var/tmp") as folder:
        found = measured("small" if quick else "large", folder)
    print(json.dumps(asdict(found), indent=1), file=sys.stderr)
    if quick:
        return
    ratio = found.ratio
    result = Result.of(
        NAME,
        CLAIM,
        values=[ratio],
        median=ratio,
        spread=(ratio, ratio),
        bar=RATIO_BAR,
        holds=found.holds,
        repeats=1,
        detail=asdict(found),
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
