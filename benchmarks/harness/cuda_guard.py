"""Runs Python in a process whose torch, a CPU build, has a CUDA device that does nothing (noop_cuda.cpp).

Autograd then runs on fake CUDA tensors, on a thread of its own, as on a GPU. A process that ran a backward
must end by `end_process`: nothing joins that thread, and an ordinary exit may abort.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch
from torch.utils.cpp_extension import include_paths

from benchmarks.harness.result import ROOT

LIBRARY = "libnoop_cuda.so"
GUARD = ROOT / "benchmarks" / "harness" / "noop_cuda.cpp"


def end_process() -> NoReturn:
    """Ends this process at once, after its output."""
    sys.stdout.flush()
    os._exit(0)


def why_no_fake_cuda() -> str:
    """Returns what is missing here; "" if nothing is."""
    if torch.version.cuda is not None:
        return "this build of torch has CUDA itself"
    return "" if which("g++") else "there is no g++"


def run_with_fake_cuda(arguments: Sequence[str]) -> str:
    """Returns what `python ARGUMENTS` prints; the device guard is loaded before torch.

    Raises subprocess.CalledProcessError if it fails.
    """
    env = {**os.environ, "LD_PRELOAD": str(Path(_built_guard().name) / LIBRARY)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


@cache
def _built_guard() -> TemporaryDirectory:
    """Returns a folder with the library of the guard, which lasts as long as this process."""
    folder, torch_lib = TemporaryDirectory(), Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in include_paths()]
    link = [f"-L{torch_lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_lib}"]
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", str(GUARD), "-o", str(Path(folder.name) / LIBRARY)]
    subprocess.run(["g++", *options, *includes, *link], check=True)
    return folder
