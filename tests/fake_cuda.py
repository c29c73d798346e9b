"""Runs code in a process whose torch, a CPU build, has a CUDA device that does nothing (noop_cuda.cpp).

Autograd then runs on fake CUDA tensors.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
LOAD = "import ctypes; ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)\n"  # before torch


def run_with_fake_cuda(code: str, folder: Path) -> str:
    """Returns what `code` prints; skips the test without a C++ compiler, and where torch has CUDA itself."""
    compiler, home = shutil.which("c++"), Path(torch.__file__).parent
    if compiler is None or torch.version.cuda is not None:
        pytest.skip("needs a C++ compiler, and a CPU build of torch")
    library, link = folder / "noop_cuda.so", f"-Wl,-rpath,{home / 'lib'}"
    source = [str(ROOT / "tests" / "noop_cuda.cpp"), f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    options = ["-shared", "-fPIC", "-std=c++20", *source, link, "-lc10", "-ltorch_cpu", "-o", str(library)]
    subprocess.run([compiler, *options], check=True, capture_output=True, timeout=100)
    script = LOAD.format(library=str(library)) + code
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
