"""Training steps of a 25 M Llama on real text: a plain PyTorch loop, DDP, FSDP2, DeepSpeed, and ours.

    large   hidden 512, 8 layers, 25.6 M parameters, 8 x 256 tokens    compute dominates
    small   the same model, 2 x 128 tokens                             communication and Python dominate
    small4  the same model, 4 x 128 tokens: small, for four ranks
    short4  the same model, 4 x 64 tokens: the tokens of small, for four ranks
    toy     hidden 64, 8 thin layers, 1 x 64 tokens                    Python only
    toy8    the same model, 8 x 64 tokens

Text is the source of Python's standard library as bytes. All loops train the same parameters on the same
samples with the same fused AdamW, the same parameter groups (no decay on 1-D weights) and clipping to norm 1.
One thread per rank. With `half` they compute in bfloat16 and keep float32: DDP under autocast, FSDP2 by its
policy (gathers bfloat16, reduces float32).
"""

import os
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.api import analyze, default_strategies, make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.comm.world import TorchWorld
from meshwright.engine.optim.make_optimizers import make_param_groups
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit as SplitBatch
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.data.byte_text import TextDataset

VOCABULARY = 256
HEAVY = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "meshwright.api",
)  # what ranks import before they fork
OPTIMIZER = OptimizerConfig("adamw", lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))


@dataclass(frozen=True)
class Workload:
    """A Llama and the samples of one global step."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    batch: int
    sequence: int

    def model(self) -> nn.Module:
        """Returns the model with transformers' own initial values."""
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            use_cache=False,
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


WORKLOADS = {
    "large": Workload(512, 1376, 8, 8, 8, 256),
    "small": Workload(512, 1376, 8, 8, 2, 128),
    "small4": Workload(512, 1376, 8, 8, 4, 128),
    "short4": Workload(512, 1376, 8, 8, 4, 64),
    "toy": Workload(64, 172, 8, 4, 1, 64),
    "toy8": Workload(64, 172, 8, 4, 8, 64),
}


class Batches:
    """Batches of stdlib text, a new one each step, in the same order for every configuration."""

    def __init__(self, workload: Workload) -> None:
        folder = Path(sysconfig.get_path("stdlib")) / "json"
        self._data = TextDataset(DataConfig(str(folder), sequence=workload.sequence))
        self._batch, self._step = workload.batch, 0

    def next(self) -> dict[str, torch.Tensor]:
        """Returns the global batch of the next step: input_ids and shifted labels."""
        first, num = self._step * self._batch, len(self._data) - 1
        self._step += 1
        return self._data.batch([i % num for i in range(first, first + self._batch)])


def plain_loop(rank: int, size: int, workload: str, *, compiled: bool = False) -> Callable[[], object]:
    """Returns the step of a plain PyTorch loop on one device; `compiled`: each layer by torch.compile."""
    return torch_step(rank, size, WORKLOADS[workload], compile_layers if compiled else lambda model: model)


def compile_layers(model: nn.Module) -> nn.Module:
    """Compiles each layer of `model` in place, as torch's regional compilation does; returns the model."""
    for layer in model.get_submodule("model.layers").children():
        layer.compile()
    return model


def ddp(
    rank: int, size: int, workload: str, store: str, *, half: bool = False, compiled: bool = False
) -> Callable[[], object]:
    """Returns the same loop with torch's DistributedDataParallel over gloo, each rank on its share of the
    batch.
    """
    join(rank, size, store)

    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            compile_layers(model) if compiled else model, gradient_as_bucket_view=True
        )

    return torch_step(rank, size, WORKLOADS[workload], wrap, autocast=half)


def ours(
    rank: int,
    size: int,
    workload: str,
    store: str = "",
    world: World | None = None,
    *,
    compiled: bool = False,
) -> Callable[[], object]:
    """Returns the step of the engine on the same model: one device, or `batch_split` + `ddp` over gloo; in
    `world` unless it is None.
    """
    world = world or make_world(rank, size, store)
    return plan_step(workload, Mesh(dp_replicate=size), None, world, compiled=compiled)


def plan_step(
    workload: str,
    mesh: Mesh,
    strategies: Sequence[Strategy] | None,
    world: World,
    precision: PrecisionConfig | None = None,
    *,
    compiled: bool = False,
) -> Callable[[], object]:
    """Returns the step of a plan of ours for `workload`, on this rank of `world`; without `strategies` with
    those of `mesh`. `compiled`: with compiled blocks.
    """
    torch.set_num_threads(1)
    spec = WORKLOADS[workload]
    batches = Batches(spec)
    analyzed = analyze(spec.model(), Batches(spec).next(), loss=token_cross_entropy())
    train = TrainConfig(batch=spec.batch)
    data, precision = DataConfig("stdlib", sequence=spec.sequence), precision or PrecisionConfig()
    job = Job(ModelConfig("llama"), data, train, OPTIMIZER, precision=precision)
    strategies = default_strategies(mesh, analyzed.model_spec) if strategies is None else strategies
    strategies = (*strategies, CompiledBlocks()) if compiled else strategies
    engine = parallelize(analyzed, make_plan(analyzed, job, mesh, strategies), world=world)

    def step() -> float:
        return engine.step(engine.local_batch(batches.next())).loss

    return step


def fsdp(
    rank: int,
    size: int,
    workload: str,
    store: str,
    *,
    reshard: bool = True,
    half: bool = False,
    offload: bool = False,
    compiled: bool = False,
) -> Callable[[], object]:
    """Returns the same loop with torch's FSDP2 (fully_shard of each layer and of the rest) over gloo;
    `reshard`: after forward too; `offload`: with CPUOffloadPolicy; `compiled`: each layer by torch.compile.
    """
    join(rank, size, store)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if half
        else MixedPrecisionPolicy()
    )

    offload_policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()

    def wrap(model: nn.Module) -> nn.Module:
        model = compile_layers(model) if compiled else model
        for part in (*model.get_submodule("model.layers").children(), model):
            fully_shard(part, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload_policy)
        return model

    return torch_step(rank, size, WORKLOADS[workload], wrap)


def deepspeed_zero(
    rank: int,
    size: int,
    workload: str,
    store: str,
    *,
    stage: int,
    half: bool = False,
    offload: Sequence[str] = (),
    folder: str = "",
    options: Mapping[str, object] | None = None,
) -> Callable[[], object]:
    """Returns the same step with DeepSpeed's ZeRO over gloo, with its defaults except for the optimizer
    (torch's fused AdamW; DeepSpeed's CPU Adam where states are offloaded). Without a `store` this process is
    a rank already.

    `half`: in bfloat16, with float32 masters. `offload`: of "optimizer" and "param", to the CPU, or to files
    in `folder`. `options` are more keys of "zero_optimization".
    """
    if store:
        join(rank, size, store)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    deepspeed, spec = import_module("deepspeed"), WORKLOADS[workload]
    plain = spec.model()
    groups = make_param_groups(OPTIMIZER, dict(plain.named_parameters()))
    fields: dict[str, Any] = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps}
    if offload:
        optimizer = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(groups, **fields)
    else:
        optimizer = torch.optim.AdamW(groups, **fields, fused=True)
    common = {
        "train_micro_batch_size_per_gpu": spec.batch // size,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": half},
    }
    place = {"device": "nvme", "nvme_path": folder} if folder else {"device": "cpu"}
    offloads = {f"offload_{each}": {**place, "pin_memory": False} for each in offload}
    zero = {"stage": stage, **offloads, **(options or {})}
    config = {**common, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(
        model=plain, optimizer=optimizer, config=config, dist_init_required=False
    )
    batches, share = Batches(spec), slice(rank * spec.batch // size, (rank + 1) * spec.batch // size)

    def step() -> float:
        batch = batches.next()
        inputs, labels = batch["input_ids"][share], batch["labels"][share]
        logits = engine(input_ids=inputs).logits
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.reshape(-1))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def sharded(
    rank: int,
    size: int,
    workload: str,
    store: str,
    zero: Mapping[str, Any],
    precision: Mapping[str, Any] | None = None,
    offload: Mapping[str, Any] | None = None,
    disk: Mapping[str, Any] | None = None,
    *,
    compiled: bool = False,
) -> Callable[[], object]:
    """Returns the step of the engine on the same model, with all ranks on dp_shard; `zero`, `precision`,
    `offload` and `disk` are fields of `ZeRO`, `PrecisionConfig`, `Offload` and `DiskOffload`; without one of
    the last two nothing leaves the device.
    """
    mesh = Mesh(dp_shard=size)
    join(rank, size, store)
    world = TorchWorld(mesh, rank, "cpu", shared_memory=False)
    offloads = () if offload is None else (Offload(**offload),)
    on_disk = () if disk is None else (DiskOffload(**disk),)
    strategies = (SplitBatch(axis="dp_shard"), ZeRO(**zero), *offloads, *on_disk)
    how = PrecisionConfig(**precision or {})
    return plan_step(workload, mesh, strategies, world, how, compiled=compiled)


def torch_step(
    rank: int,
    size: int,
    spec: Workload,
    wrap: Callable[[nn.Module], nn.Module],
    *,
    autocast: bool = False,
    begin: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object]] | None = None,
) -> Callable[[], object]:
    """Returns the step of a plain loop around the model that `wrap` returns, on this rank's samples; `begin`
    returns what is called behind each step of the optimizer.
    """
    torch.set_num_threads(1)
    plain = spec.model()
    names = dict(plain.named_parameters())
    groups = make_param_groups(OPTIMIZER, names)
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
    )
    model = wrap(plain)
    if any(
        parameter is not names[name] for name, parameter in model.named_parameters() if name in names
    ):  # fully_shard replaces parameters
        names = dict(model.named_parameters())
        groups = make_param_groups(OPTIMIZER, names)
        optimizer = torch.optim.AdamW(
            groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
        )
    batches, share = Batches(spec), slice(rank * spec.batch // size, (rank + 1) * spec.batch // size)
    end_step = begin(model, optimizer) if begin else None

    def step() -> float:
        batch = batches.next()
        inputs, labels = batch["input_ids"][share], batch["labels"][share]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(names.values(), 1.0)
        optimizer.step()
        if end_step is not None:
            end_step()
        return loss.item()

    return step


def fresh_store() -> str:
    """Returns the path of a rendezvous file that does not exist yet, in a new folder."""
    return str(Path(tempfile.mkdtemp(prefix="meshwright-bench-")) / "store")


def make_world(rank: int, size: int, store: str) -> World:
    """Returns the world of one of `size` ranks, over gloo without shared memory."""
    if size == 1:
        return single_rank_world(torch.device("cpu"))
    join(rank, size, store)
    return TorchWorld(Mesh(dp_replicate=size), rank, "cpu", shared_memory=False)


def join(rank: int, size: int, store: str) -> None:
    """Makes this process one of `size` ranks of torch.distributed, over gloo, with the file store `store`."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
