"""A forward that skips blocks in some steps, or on some ranks, ends with the same bits where states or
activations rest in another tier.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import bits
from tests.tiny_model import executor_of, tiny_job, token_samples

ALL = ("optimizer_states", "gradients", "weights")
OFFLOADS: dict[str, tuple[Strategy, ...]] = {
    "device steps": (Offload(prefetch=0),),
    "host steps": (Offload(step_on="host"),),
    "everything on the host": (Offload(ALL, "host"),),
    "disk": (DiskOffload("FOLDER", num_buffers=1),),
    "activations": (ActivationOffload(prefetch=0),),
    "kept inputs": (ActivationCheckpointing(), ActivationOffload(prefetch=0)),
}


class Layer(nn.Module):
    """Two linear layers, which save more than they take."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Skipping(nn.Module):
    """Four layers, of which a batch skips two if it begins with a small token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers if input_ids[0, 0] < 7 else self.layers[2:]:
            x = layer(x)
        return self.head(x)


def analyzed() -> AnalyzedModel:
    torch.manual_seed(0)
    return analyze(Skipping(), {key: torch.zeros_like(value) for key, value in token_samples(2).items()})


def ended(strategies: tuple[Strategy, ...], stage: int) -> list[dict[str, bytes]]:
    store = DDP() if stage == 0 else ZeRO("dp_replicate", stage)
    shared = (BatchSplit("dp_replicate"), store, *strategies)
    model = analyzed()
    plan = make_plan(
        model, tiny_job(optimizer=OptimizerConfig("adamw", lr=0.01)), Mesh(dp_replicate=3), shared
    )

    def body(world: World) -> dict[str, bytes]:
        executor = executor_of(model, plan, world)
        rows = torch.tensor(plan.samples_read(world.rank))
        firsts = set()
        for step in range(4):
            batch = {key: value[12 * step :][:12][rows] for key, value in token_samples(48).items()}
            firsts.add(bool(batch["input_ids"][0, 0] < 7))
            executor.step(batch)
        found = bits(executor.gather_parameters(use_masters=True))
        executor.close()
        return found | {"skips": bytes(sorted(firsts))}

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("stage", [0, 3])
def test_skipped_blocks_change_no_bit(name: str, stage: int, tmp_path: Path):
    if name == "everything on the host" and stage != 3:
        pytest.skip("there are no such shards")
    offloads = tuple(
        DiskOffload(str(tmp_path), 1) if isinstance(each, DiskOffload) else each for each in OFFLOADS[name]
    )
    plain = tuple(each for each in offloads if isinstance(each, ActivationCheckpointing))
    found = ended(offloads, stage)
    assert found == ended(plain, stage)
    assert bytes([0, 1]) in [each["skips"] for each in found]
