"""Steps whose matrices are divided by columns and rows: ours, and torch's `parallelize_module`; and the bytes
that each sends.

q, k, v, gate and up by columns, o and down by rows; norms, embedding and head are whole on every rank, in
both. Torch's loop trains divided and whole weights in groups of their own and takes their norm in two parts,
because fused and `foreach` kernels take no mixture of DTensors and tensors; apart from that it is the loop of
`llama_steps`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models.llama_steps import OPTIMIZER, VOCABULARY, WORKLOADS, Batches, join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.collective_call import sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.comm.world import TorchWorld
from meshwright.engine.optim.optimizers import make_param_groups
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.sharding.mesh import Mesh

Step = Callable[[], object]
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
SPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
WAITS = ("wait_tensor", "_wrap_tensor_autograd")  # for what has been issued
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


def ours(rank: int, size: int, workload: str, store: str, line: Mapping[str, Any] | None = None) -> Step:
    """The step of the engine with matrices divided over all ranks; `line` are fields of `Line`.

    The model is given as what makes it, as config files do: an `nn.Module` that is handed over stays in
    memory beside its slices.
    """
    return _engine(workload, _world(rank, size, store), TensorParallel(**line or {}))


def dtensor(rank: int, size: int, workload: str, store: str, *, prepared: bool = False) -> Step:
    """The step of an ordinary loop round a model that `parallelize_module` has divided over all ranks.

    With `prepared`, users have also declared that attention and mlp take their input in as one DTensor
    (`PrepareModuleInput`), which spares the layers their own all-reduces; there is no need of that in ours.
    """
    join(rank, size, store)
    torch.set_num_threads(1)
    spec = WORKLOADS[workload]
    model = spec.model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.get_submodule("model.layers").children():
        parallelize_module(layer, mesh, _styles(prepared=prepared))
    names = dict(model.named_parameters())
    apart = [
        {name: each for name, each in names.items() if isinstance(each, DTensor) == divided}
        for divided in (True, False)
    ]
    groups = [group for part in apart for group in make_param_groups(OPTIMIZER, part)]
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
        _clip([list(part.values()) for part in apart], 1.0)
        optimizer.step()
        return loss.item()

    return step


def counted(
    rank: int, size: int, *, whose: Callable[..., Step], **arguments: Any
) -> Callable[[], dict[str, float]]:
    """A step whose note are the bytes that left this rank in collectives, by collective, and how many there
    were (`calls`).

    Ours are taken from the ledger; torch's are counted where they are dispatched. `whose` is `ours` or
    `dtensor`.
    """
    if whose is ours:
        return _from_ledger(rank, size, **arguments)
    run = whose(rank, size, **arguments)

    def step() -> dict[str, float]:
        with Dispatched(size) as seen:
            run()
        return {**seen.sent, "calls": seen.calls}

    return step


class Dispatched(TorchDispatchMode):
    """Adds up what the collectives under it send, by the formulas of our ledger.

    Raises KeyError for one that it does not know: nothing shall go uncounted.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls = size, 0
        self.sent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with the tensors inside
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space in SPACES and name not in WAITS:
            collective = COLLECTIVES[name]
            self.sent[collective] += sent_nbytes(collective, args[0].nbytes, self.size)
            self.calls += 1
        return func(*args, **kwargs or {})


def _from_ledger(rank: int, size: int, workload: str, store: str) -> Callable[[], dict[str, float]]:
    world = _world(rank, size, store)
    run = _engine(workload, world, TensorParallel())
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


def _engine(workload: str, world: World, line: TensorParallel) -> Step:
    torch.set_num_threads(1)
    spec = WORKLOADS[workload]
    batches = Batches(spec)
    reading = analyze(spec.model, Batches(spec).next())
    job = Job(
        ModelConfig("llama"),
        DataConfig("stdlib", sequence=spec.sequence),
        TrainConfig(batch=spec.batch),
        OPTIMIZER,
    )
    engine = parallelize(reading, make_plan(reading, job, world.mesh, (line,)), world=world)

    def step() -> float:
        return engine.step(engine.local_batch(batches.next())).loss

    return step


def _world(rank: int, size: int, store: str) -> TorchWorld:
    join(rank, size, store)
    return TorchWorld(Mesh(tp=size), rank, "cpu", shared_memory=False)


def _styles(*, prepared: bool) -> dict[str, Any]:
    styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {
        name: RowwiseParallel() for name in ROWS
    }
    if prepared:
        whole = Replicate()
        styles["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        styles["mlp"] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
    return styles


def _clip(parts: list[list[nn.Parameter]], most: float) -> None:
    """Scale the gradients of all `parts` down to the norm `most`, of all of them together."""
    norms = [get_total_norm([each.grad for each in part if each.grad is not None]) for part in parts]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for part in parts:
        clip_grads_with_norm_(part, most, total)
