"""Runs a benchmark in an environment of its own that has packages on which the library does not depend.

The first run makes the environment in build/peers: the packages of this one, and those that are named.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.result import ROOT

DEEPSPEED_VERSION = "0.19.8"


def ensure_deepspeed(module: str) -> None:
    """Runs `module` again where DeepSpeed is installed, and exits; returns there.

    DeepSpeed is told that there is only a CPU.
    """
    ensure_packages(module, "deepspeed", [f"deepspeed=={DEEPSPEED_VERSION}"], DS_BUILD_OPS="0")
    os.environ.update(DS_ACCELERATOR="cpu", DS_LOG_LEVEL="error")


def ensure_packages(module: str, imported: str, packages: Iterable[str], **variables: str) -> None:
    """Runs `module` again where `packages` are installed, with the same arguments, and exits; returns where
    `imported` can be imported. Environment `variables` are set for the installation.
    """
    if find_spec(imported) is None:
        command = [_environment_python(imported, packages, variables), "-m", module, *sys.argv[1:]]
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def _environment_python(name: str, packages: Iterable[str], variables: dict[str, str]) -> str:
    folder = ROOT / "build" / "peers" / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.check_output(ask, text=True).strip())
        (site / "meshwright.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
        install = [python, "-m", "pip", "install", "-q", *packages]
        subprocess.run(install, check=True, env={**os.environ, **variables})
        (folder / "ready").touch()
    return str(python)
