"""Lets torch, cuBLAS and NCCL take kernels that give the same bits each time: `run.deterministic`.

On a CPU the same plan gives the same bits anyway. On a GPU several kernels add in an order that differs from
run to run: atomic additions in the backward of attention, embeddings and indexing, the workspaces of cuBLAS,
and the algorithm that NCCL chooses.

    torch.use_deterministic_algorithms(True)    another kernel where there is one; else an error that names it
    CUBLAS_WORKSPACE_CONFIG = :4096:8           one workspace for each stream
    NCCL_ALGO = Ring                            the same order of summands in each run

Cost: slower kernels, the more the larger the share of attention and embeddings; 8 x 4 MiB for cuBLAS.
Limits: operations without a deterministic kernel raise an error in the first step. Another number of ranks
adds in another order, as always; so may another kind of device or another version of torch.
Source: torch 2.13, notes/randomness; NVIDIA cuBLAS 13, results reproducibility.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.device.local_device import local_platform
from meshwright.plan.job.errors import PlanError

WORKSPACES = (":4096:8", ":16:8")


@contextmanager
def deterministic_kernels(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Takes deterministic kernels while active; `variables` is the environment of this process, before its
    device and its backend have begun.

    Raises PlanError if a variable of the user asks for other kernels.
    """
    given = variables.get("CUBLAS_WORKSPACE_CONFIG")
    if given is not None and given not in WORKSPACES:
        text = f"run.deterministic = true, and CUBLAS_WORKSPACE_CONFIG={given} lets cuBLAS add in any order"
        fix = f"unset it, or set it to {' or '.join(WORKSPACES)}"
        raise PlanError(text, fix=fix, location="environment")
    wanted = {"CUBLAS_WORKSPACE_CONFIG": WORKSPACES[0], **local_platform().sum_variables}
    for name, value in wanted.items():
        variables.setdefault(name, value)
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it costs a pass over every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
