"""How long a failed rank takes to end, and whether it says why: one rank on the backend of its device.

A process joins a world of one rank through torch.distributed, sums once, and raises. What is measured is the
time from its error to its end. As a program (`python -m benchmarks.gpu.failing_rank DEVICE STORE`) it is that
rank.
"""

import subprocess
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.gpu.setting import Setting
from benchmarks.harness.result import ROOT
from meshwright.comm.world import init_world
from meshwright.device.local_device import platform_of, use_device
from meshwright.plan.sharding.mesh import Mesh

PLANTED = "planted: the loss is not a number"
LIMIT_S, MAX_EXIT_S = 30, 15.0


def failure(setting: Setting) -> dict[str, object]:
    """Returns the seconds until the failed rank has ended, its exit status, and the end of what it said."""
    command = [sys.executable, "-m", __spec__.name, str(setting.device), str(setting.folder / "store")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    raised_at = next((float(line) for line in run.stdout.split() if line), 0.0)
    seconds = time.time() - raised_at
    is_said = "Traceback" in run.stderr and PLANTED in run.stderr
    return {
        "ok": is_said and run.returncode != 0 and seconds < MAX_EXIT_S,
        "backend": platform_of(setting.device).backend,
        "seconds to exit": seconds,
        "exit status": run.returncode,
        "traceback printed": is_said,
        "said": run.stderr.strip().splitlines()[-12:],
    }


def main() -> None:
    """Fail as a rank; prints the time of the error."""
    device = torch.device(sys.argv[1])
    use_device(device)
    with init_world(Mesh(), 0, store_path=sys.argv[2], device=device):
        tensor = torch.ones(1000, device=device)
        for _ in range(2):
            dist.all_reduce(tensor)
        print(time.time(), flush=True)
        raise FloatingPointError(PLANTED)


if __name__ == "__main__":
    main()
