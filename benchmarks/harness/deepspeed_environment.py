"""Runs a benchmark in an environment of its own that has DeepSpeed: the library does not depend on it.

The first run makes the environment in build/deepspeed: the packages of this one, and DeepSpeed.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.result import ROOT

DEEPSPEED_VERSION = "0.19.8"


def ensure_deepspeed(module: str) -> None:
    """Runs `module` again with DeepSpeed, with the same arguments, and exits; returns where it is installed.

    DeepSpeed is told that there is only a CPU.
    """
    if find_spec("deepspeed") is None:
        command = [_environment_python(), "-m", module, *sys.argv[1:]]
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    os.environ.update(DS_ACCELERATOR="cpu", DS_LOG_LEVEL="error")


def _environment_python() -> str:
    folder = ROOT / "build" / "deepspeed"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        print_purelib = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = Path(subprocess.check_output(print_purelib, text=True).strip())
        (packages / "meshwright.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
        install = [python, "-m", "pip", "install", "-q", f"deepspeed=={DEEPSPEED_VERSION}"]
        subprocess.run(install, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        (folder / "ready").touch()
    return str(python)
