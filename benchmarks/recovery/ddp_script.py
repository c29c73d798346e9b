"""The plain script of `elastic_restart`: DDP over gloo, as in tutorials, with a save after every step.

torchrun --max-restarts 3 --nproc-per-node 2 benchmarks/recovery/ddp_script.py FOLDER STEPS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path, steps: int) -> None:
    """Train for `steps` steps, from the checkpoint in `folder` if there is one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    model, first = DistributedDataParallel(net), 0
    saved, journal = folder / "model.safetensors", folder / "steps.txt"
    if saved.exists():
        net.load_state_dict(load_file(saved))
        first = len(journal.read_text().splitlines())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dist.barrier()
    for step in range(first, steps):
        samples = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))
        optimizer.zero_grad()
        (model(samples) - samples).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = saved.with_suffix(".part")
            save_file(net.state_dict(), unfinished)
            unfinished.replace(saved)
            with journal.open("a") as file:
                file.write(f"{step}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
