"""Forward and backward of one layer of experts: ours, transformers' experts, and DeepSpeed's layer over gloo.

Each rank has `TOKENS` random tokens. The loss is the mean square of what the layer returns. The experts are
gated MLPs with SiLU, and all sides have the same sizes. DeepSpeed's layer has a capacity of 1.25: it drops
what exceeds it; ours drops nothing.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.models.llama_steps import join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.world import TorchWorld
from meshwright.model.loss.loss_definition import Loss
from meshwright.nn import MixtureOfExperts, TopK
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.sharding.mesh import Mesh

Step = Callable[[], object]
TOKENS, WIDTH, CAPACITY_FACTOR = 1024, 256, 1.25


class LayerSize(NamedTuple):
    """Experts, how many of them a token chooses, and the features inside of an expert."""

    num_experts: int
    k: int
    intermediate: int


def our_module(size: LayerSize) -> MixtureOfExperts:
    """Returns `mw.nn.MixtureOfExperts` of this size."""
    return MixtureOfExperts(WIDTH, size.intermediate, size.num_experts, TopK(size.k))


def their_module(size: LayerSize) -> nn.Module:
    """Returns Mixtral's layer with transformers' grouped products."""
    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=size.intermediate,
        num_local_experts=size.num_experts,
        num_experts_per_tok=size.k,
    )
    config._experts_implementation = "grouped_mm"
    layer = MixtralSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer


MODULES: Mapping[str, Callable[[LayerSize], nn.Module]] = {"ours": our_module, "transformers": their_module}


def one_process(rank: int, size: int, store: str, layer_size: tuple[int, int, int], kind: str) -> Step:
    """Returns forward and backward of a layer of `MODULES` on one thread; there are no other ranks."""
    del rank, size, store
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = MODULES[kind](LayerSize(*layer_size))
    hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        hidden.grad = None
        layer(hidden).square().mean().backward()

    return step


class LayerModel(nn.Module):
    """A model of one layer, behind a parameter, so that its input needs a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.shift = layer, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what the layer returns for `hidden` [samples, tokens, WIDTH]."""
        return self.layer(hidden + self.shift)


def _sum_of_squares() -> Loss:
    return Loss(
        lambda outputs, batch: outputs.square().sum(),
        lambda batch: torch.tensor(batch["like"].numel()),
        targets=("like",),
    )


def our_distributed(rank: int, size: int, store: str, layer_size: tuple[int, int, int]) -> Step:
    """Returns our layer with its experts on all ranks: a training step of a model of that layer alone."""
    join(rank, size, store)
    torch.set_num_threads(1)
    world = TorchWorld(Mesh(ep=size), rank, "cpu", shared_memory=False)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size, TOKENS, WIDTH, generator=generator)
    batch = {"hidden": hidden, "like": hidden}
    analyzed = analyze(LayerModel(our_module(LayerSize(*layer_size))), batch, loss=_sum_of_squares())
    job = Job(
        train=TrainConfig(batch=size, clip=0.0), optimizer=OptimizerConfig("sgd", lr=1e-3, weight_decay=0.0)
    )
    strategies = ExpertParallel(), BatchSplit("ep"), BatchSplit("dp_replicate"), DDP()
    engine = parallelize(analyzed, make_plan(analyzed, job, world.mesh, strategies), world=world)

    def step() -> float:
        return engine.step(engine.local_batch(batch)).loss

    return step


class _GatedMLP(nn.Module):
    """One expert of DeepSpeed's layer."""

    def __init__(self, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def deepspeed_distributed(rank: int, size: int, store: str, layer_size: tuple[int, int, int]) -> Step:
    """Returns DeepSpeed's layer with its experts on all ranks; the router's gradients are averaged."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    join(rank, size, store)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = LayerSize(*layer_size)
    import_module("deepspeed").init_distributed("gloo", dist_init_required=False)
    layer = import_module("deepspeed.moe.layer").MoE(
        WIDTH,
        _GatedMLP(given.intermediate),
        num_experts=given.num_experts,
        ep_size=size,
        k=given.k,
        capacity_factor=CAPACITY_FACTOR,
    )
    layer.set_deepspeed_parallelism()
    model = LayerModel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hidden = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    copies = layer.deepspeed_moe.gate.wg.weight, model.shift

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        output, _, _ = model(hidden)
        loss = output.square().mean()
        loss.backward()
        for parameter in copies:
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        return loss.item()

    return step
