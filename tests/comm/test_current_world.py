"""The world and the device of a process that has initialized torch.distributed by itself, or has not."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import current_world as module
from meshwright.comm.current_world import current_world
from meshwright.device import local_device
from meshwright.device.platforms import CUDA
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.device.fake_accelerator import fake_accelerator

NCCL, GLOO, BOTH = "cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A host with four GPUs, on which worlds have no members; the devices that were set."""
    chosen = fake_accelerator(monkeypatch, count=4, current=2)
    monkeypatch.setattr(module, "single_rank_world", lambda device: device)
    monkeypatch.setattr(module, "TorchWorld", lambda mesh, rank, device: device)
    return chosen


def initialized(
    monkeypatch: pytest.MonkeyPatch, backends: str, rank: int, bound: torch.device | None = None
) -> None:
    """Lets torch.distributed say that it is initialized."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound)))


def test_alone_it_is_the_gpu_that_torch_calls_current(gpus: list[torch.device]):
    assert current_world(Mesh()) == torch.device("cuda", 2)
    assert current_world(Mesh(), torch.device("cpu")) == torch.device("cpu")


def test_alone_without_a_gpu_it_is_the_cpu():
    assert current_world(Mesh()).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("backends", "bound", "local_rank", "device"),
    [
        (NCCL, None, "1", "cuda:1"),
        (BOTH, None, "1", "cuda:1"),
        (NCCL, None, "", "cuda:1"),  # rank 5 of hosts with 4 GPUs
        (NCCL, torch.device("cuda", 3), "1", "cuda:3"),
        (GLOO, None, "1", "cpu"),
    ],
)
def test_the_device_follows_from_the_default_group(
    gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    backends: str,
    bound: torch.device | None,
    local_rank: str,
    device: str,
):
    initialized(monkeypatch, backends, 5, bound)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert current_world(Mesh(dp_shard=8)) == torch.device(device)
    assert gpus == ([torch.device(device)] if device != "cpu" else [])


def test_a_rank_that_sees_one_gpu_computes_on_it(gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch):
    initialized(monkeypatch, NCCL, 5)
    fake_accelerator(monkeypatch, count=1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert current_world(Mesh(dp_shard=8)) == torch.device("cuda", 0)


def test_a_rank_beyond_the_gpus_of_its_host_is_refused(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
):
    initialized(monkeypatch, NCCL, 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(PlanError, match=r"rank 4 of this host needs a GPU of its own, and 4 are visible"):
        current_world(Mesh(dp_shard=8))


@pytest.mark.parametrize(
    ("backends", "device", "told"),
    [
        ("cpu:mpi", None, r'on cpu:mpi, cpu needs gloo, and torch sees 4 devices of CUDA\n.*group\("nccl"\)'),
        ("cpu:gloo", torch.device("cuda", 1), r'on cpu:gloo, cuda:1 needs nccl.*\n.*group\("nccl"\)'),
        (GLOO, torch.device("cuda", 1), r"on cpu:gloo,cuda:gloo, cuda:1 needs nccl"),
        (NCCL, torch.device("cpu"), r"on cuda:nccl, cpu needs gloo"),
    ],
)
def test_a_group_that_cannot_carry_the_tensors_of_the_device_is_refused(
    gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    backends: str,
    device: torch.device | None,
    told: str,
):
    initialized(monkeypatch, backends, 1)
    with pytest.raises(PlanError, match=told):
        current_world(Mesh(dp_shard=8), device)


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    initialized(monkeypatch, NCCL, 1)
    with pytest.raises(PlanError, match=r'cpu needs gloo, and torch sees no GPU\n.*process_group\("gloo"\)'):
        current_world(Mesh(dp_shard=8))


def test_a_group_for_gpus_that_are_not_seen_does_not_train_on_the_cpu_unasked(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
):
    fake_accelerator(monkeypatch, count=0)
    monkeypatch.setattr(local_device, "unseen_platform", lambda: CUDA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    initialized(monkeypatch, BOTH, 1)
    with pytest.raises(PlanError, match=r"torch sees none \(CUDA_VISIBLE_DEVICES names 9\)"):
        current_world(Mesh(dp_shard=8))
    initialized(monkeypatch, GLOO, 1)
    assert current_world(Mesh(dp_shard=8)) == torch.device("cpu")


def test_a_process_of_torchrun_that_initialized_nothing_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    with pytest.raises(PlanError, match=r"the plan has 2\n.*call torch\.distributed\.init_process_group\(\)"):
        current_world(Mesh(dp_shard=2))
    assert current_world(Mesh()).mesh.world_size == 1
