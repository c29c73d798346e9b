"""Training steps of a tensor-parallel Llama, ours and torch's `parallelize_module`, and the bytes that each
sends.

In both, q, k, v, gate and up are colwise, o and down are rowwise; norms, embedding and LM head are
replicated. Torch's loop puts sharded and replicated weights in parameter groups of their own and computes
their norm in two parts, because fused and `foreach` kernels do not accept a mixture of DTensors and tensors.
Apart from that it is the loop of `llama_steps`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models.llama_steps import OPTIMIZER, VOCABULARY, WORKLOADS, Batches, compile_layers, join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.comm_volume import sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.comm.world import TorchWorld
from meshwright.engine.optim.make_optimizers import make_param_groups
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

Step = Callable[[], object]
COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
WAITS = ("wait_tensor", "_wrap_tensor_autograd")  # they issue nothing
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


def ours(
    rank: int,
    size: int,
    workload: str,
    store: str,
    tensor_parallel: Mapping[str, Any] | None = None,
    *,
    compiled: bool = False,
) -> Step:
    """Returns the step of the engine under tensor parallelism over all ranks; `tensor_parallel` are fields of
    `TensorParallel`. `compiled`: with compiled blocks.

    The model is passed as a factory, as config files do: an `nn.Module` that is passed stays in memory beside
    its shards.
    """
    strategies = (TensorParallel(**tensor_parallel or {}), *((CompiledBlocks(),) if compiled else ()))
    return _engine(workload, _world(rank, size, store), strategies)


def dtensor(
    rank: int, size: int, workload: str, store: str, *, prepared: bool = False, compiled: bool = False
) -> Step:
    """Returns the step of a plain loop with a model that `parallelize_module` has sharded over all ranks.

    With `prepared`, attention and mlp are also declared to take their input as one DTensor
    (`PrepareModuleInput`), so that their layers need no all-reduces of their own. Ours needs no such
    declaration.
    """
    join(rank, size, store)
    torch.set_num_threads(1)
    spec = WORKLOADS[workload]
    model = spec.model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.get_submodule("model.layers").children():
        parallelize_module(layer, mesh, _styles(prepared=prepared))
    if compiled:  # behind the sharding, as torchtitan does
        compile_layers(model)
    names = dict(model.named_parameters())
    by_sharding = [
        {name: param for name, param in names.items() if isinstance(param, DTensor) == is_sharded}
        for is_sharded in (True, False)
    ]
    groups = [group for params in by_sharding for group in make_param_groups(OPTIMIZER, params)]
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
    )
    batches = Batches(spec)

    def step() -> float:
        batch = batches.next()
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), batch["labels"].reshape(-1))
        loss.backward()
        _clip([list(params.values()) for params in by_sharding], 1.0)
        optimizer.step()
        return loss.item()

    return step


def byte_counting_step(
    rank: int, size: int, *, build_step: Callable[..., Step], **arguments: Any
) -> Callable[[], dict[str, float]]:
    """Returns a step that returns the bytes that this rank sent, by collective, and the number of collectives
    (`calls`).

    Ours are taken from the ledger; torch's are counted where they are dispatched. `build_step` is `ours` or
    `dtensor`.
    """
    if build_step is ours:
        return _ledger_step(rank, size, **arguments)
    run = build_step(rank, size, **arguments)

    def step() -> dict[str, float]:
        with CollectiveCounter(size) as counter:
            run()
        return {**counter.sent_nbytes, "calls": counter.calls}

    return step


class CollectiveCounter(TorchDispatchMode):
    """Sums the bytes that dispatched collectives send, by the formulas of our ledger.

    Raises KeyError for an unknown collective, so that none goes uncounted.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls = size, 0
        self.sent_nbytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with the tensors inside
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in NAMESPACES and name not in WAITS:
            collective = COLLECTIVES[name]
            self.sent_nbytes[collective] += sent_nbytes(collective, args[0].nbytes, self.size)
            self.calls += 1
        return func(*args, **kwargs or {})


def _ledger_step(rank: int, size: int, workload: str, store: str) -> Callable[[], dict[str, float]]:
    world = _world(rank, size, store)
    run = _engine(workload, world, (TensorParallel(),))
    ledger = world.ledger
    ledger.is_recording = True

    def step() -> dict[str, float]:
        ledger.entries.clear()
        run()
        sent: dict[str, float] = defaultdict(float)
        for entry in ledger.entries:
            sent[entry.collective] += entry.sent_nbytes
        return {**sent, "calls": len(ledger.entries)}

    return step


def _engine(workload: str, world: World, strategies: Sequence[Strategy]) -> Step:
    torch.set_num_threads(1)
    spec = WORKLOADS[workload]
    batches = Batches(spec)
    analyzed = analyze(spec.model, Batches(spec).next(), loss=token_cross_entropy())
    job = Job(
        ModelConfig("llama"),
        DataConfig("stdlib", sequence=spec.sequence),
        TrainConfig(batch=spec.batch),
        OPTIMIZER,
    )
    engine = parallelize(analyzed, make_plan(analyzed, job, world.mesh, strategies), world=world)

    def step() -> float:
        return engine.step(engine.local_batch(batches.next())).loss

    return step


def _world(rank: int, size: int, store: str) -> TorchWorld:
    join(rank, size, store)
    return TorchWorld(Mesh(tp=size), rank, "cpu", shared_memory=False)


def _styles(*, prepared: bool) -> dict[str, Any]:
    styles: dict[str, Any] = {name: ColwiseParallel() for name in COLWISE} | {
        name: RowwiseParallel() for name in ROWWISE
    }
    if prepared:
        replicate = Replicate()
        layouts: dict[str, Placement] = {"hidden_states": replicate}
        styles["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts=layouts, desired_input_kwarg_layouts=layouts
        )
        styles["mlp"] = PrepareModuleInput(input_layouts=(replicate,), desired_input_layouts=(replicate,))
    return styles


def _clip(params: list[list[nn.Parameter]], max_norm: float) -> None:
    """Clips the gradients of all lists of parameters by their joint norm."""
    norms = [get_total_norm([param.grad for param in each if param.grad is not None]) for each in params]
    full_norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(full_norms))
    for each in params:
        clip_grads_with_norm_(each, max_norm, total)
