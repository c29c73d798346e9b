"""Training steps of a Mixtral with distributed experts over gloo: ours, and transformers' expert parallelism.

64 experts, of which a token chooses 8; 4 layers of 256 features, 256 tokens in each of 2 samples per rank. In
both, experts are distributed over all ranks, other weights are sharded over them (ZeRO-3, FSDP2), and SGD
steps. Tokens are random: bytes of text make routers choose alike.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP

from benchmarks.models.llama_steps import join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.comm.current_world import current_world
from meshwright.comm.world import TorchWorld
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import Trainer

Step = Callable[[], dict[str, float]]
VOCABULARY, SEQUENCE, SAMPLES_PER_RANK, WIDTH, NUM_EXPERTS = 256, 256, 2, 256, 64
LEARNING_RATE = 1e-3


def model(num_experts: int = NUM_EXPERTS) -> nn.Module:
    """Returns the model with transformers' own initial values."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=num_experts,
        num_experts_per_tok=8,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config)


def batch(step: int, num_samples: int) -> dict[str, torch.Tensor]:
    """Returns the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (num_samples, SEQUENCE), generator=generator)
    return {"input_ids": ids, "labels": ids}


def join_and_parallelize(
    rank: int, size: int, store: str
) -> tuple[Trainer, Callable[[], dict[str, torch.Tensor]]]:
    """Returns our trainer with a ledger that records, and the global batches of its steps."""
    join(rank, size, store)
    torch.set_num_threads(1)
    world = TorchWorld(Mesh(ep=size), rank, "cpu", shared_memory=False)
    num_samples = SAMPLES_PER_RANK * size
    engine = _engine(NUM_EXPERTS, num_samples, world)
    world.ledger.is_recording = True
    number = iter(range(1 << 30))
    return engine, lambda: batch(next(number), num_samples)


def ours(rank: int, size: int, store: str) -> Step:
    """Returns our step; it returns the bytes that this rank sent to experts and back."""
    engine, next_batch = join_and_parallelize(rank, size, store)
    ledger = engine.world.ledger

    def step() -> dict[str, float]:
        ledger.entries.clear()
        loss = engine.step(engine.local_batch(next_batch())).loss
        exchanged = sum(
            entry.sent_nbytes for entry in ledger.entries if entry.collective.startswith("all_to_all")
        )
        return {"loss": loss, "exchanged": exchanged}

    return step


def alone(rank: int, size: int, store: str) -> Step:
    """Returns the step of a rank that sends nothing: the samples and the number of experts of one of ours."""
    torch.set_num_threads(1)
    engine = _engine(NUM_EXPERTS // size, SAMPLES_PER_RANK, current_world(Mesh()))
    number = iter(range(1 << 30))

    def step() -> dict[str, float]:
        return {"loss": engine.step(engine.local_batch(batch(next(number), SAMPLES_PER_RANK))).loss}

    return step


def _engine(num_experts: int, num_samples: int, world: World) -> Trainer:
    analyzed = analyze(model(num_experts), batch(0, num_samples))
    job = Job(
        train=TrainConfig(batch=num_samples, clip=0.0),
        optimizer=OptimizerConfig("sgd", lr=LEARNING_RATE, weight_decay=0.0),
    )
    return parallelize(analyzed, make_plan(analyzed, job, world.mesh), world=world)


def peer(rank: int, size: int, store: str) -> Step:
    """Returns the step of transformers' expert parallelism beside FSDP2, with what ours returns."""
    join(rank, size, store)
    torch.set_num_threads(1)
    folder = Path(f"{store}.model")  # beside the store of this group
    if rank == 0:
        cast(Any, model()).save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="all_to_all")
    sharded = transformers.MixtralForCausalLM.from_pretrained(folder, distributed_config=config)
    sharded.train()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE)
    rows: list[tuple[int, int]] = []
    _record_rows(rows, rank)
    number, num_samples = iter(range(1 << 30)), SAMPLES_PER_RANK * size

    def step() -> dict[str, float]:
        rows.clear()
        own = {
            key: value[rank * SAMPLES_PER_RANK : (rank + 1) * SAMPLES_PER_RANK]
            for key, value in batch(next(number), num_samples).items()
        }
        optimizer.zero_grad(set_to_none=True)
        loss = sharded(**own).loss
        loss.backward()
        optimizer.step()
        # rows there and back, and their gradients: each way in the other direction
        exchanged = sum(2 * 4 * WIDTH * (sent + received) for sent, received in rows)
        return {"loss": loss.item(), "exchanged": float(exchanged)}

    return step


def _record_rows(rows: list[tuple[int, int]], rank: int) -> None:
    """Makes transformers' exchange note the rows that it sends to other ranks, and receives from them."""
    combine = AllToAllEP._combine_tokens

    def noted(self: Any, expert_output: torch.Tensor, state: Any) -> torch.Tensor:
        sizes = (state.send_sizes, state.recv_sizes)
        sent, received = (sum(each) - each[rank] for each in sizes)
        rows.append((sent, received))
        return combine(self, expert_output, state)

    AllToAllEP._combine_tokens = noted
