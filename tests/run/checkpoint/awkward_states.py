"""A state with values that are hard to save, and checkpoints of it, for the tests of checkpoints."""

from pathlib import Path

import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import Group
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.run.checkpoint.manifest import CheckpointError

META = {"seed": 3, "plan": {"tp": 2}, "loss": 0.1}
THREE = Mesh(dp_shard=3)


def alone() -> Group:
    return FakeWorld(Mesh(), 0).group(("dp_shard",))


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Awkward tensors: views into one buffer, foreign strides, many dtypes, a scalar, an empty tensor, a
    Parameter.
    """
    flat_param = torch.arange(50, dtype=torch.float32) + seed
    return {
        "model/a.weight": flat_param[3:15].view(4, 3),
        "model/b.weight": flat_param[15:31].view(4, 4).t(),
        "model/c.weight": flat_param[::7],
        "model/embedding": torch.nn.Parameter(torch.linspace(-1, 1, 24).view(8, 3) * (seed + 1)),
        "optimizer/exp_avg/a.weight": (flat_param[:12].view(3, 4) / 7).to(torch.bfloat16).expand(2, 3, 4),
        "optimizer/step": torch.tensor(seed, dtype=torch.int64),
        "model/nothing": torch.empty(0, 3),
        "model/mask": flat_param[:9] > seed + 4,
        "model/double": torch.full((5,), 1 / 3, dtype=torch.float64),
        "model/odd": torch.tensor([1, 255, 7], dtype=torch.uint8),
        "model/tiny": torch.tensor([0.5, float("nan"), -0.0]).to(torch.float8_e4m3fn),
    }


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    loaded, _ = load_tensors(path, expected(tensors))
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(folder: Path, *steps: int, keep: int = 9) -> list[Path]:
    return [save_tensors(folder, step, state(step), META, alone(), keep) for step in steps]


def partial(folder: Path) -> list[str]:
    return [name for name in names(folder) if ".partial-" in name]


def attempt(folder: Path, step: int, group: Group) -> CheckpointError | None:
    """The error of a save that keeps all of the tests' checkpoints; None when it went well."""
    try:
        save_tensors(folder, step, state(step), META, group, keep=9)
    except CheckpointError as error:
        return error
    return None
