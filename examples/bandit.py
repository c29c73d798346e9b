"""A bandit: an observer draws arms with the weights of each step, and the workers train on the rewards.

python examples/bandit.py                              2 workers and an observer, as threads
torchrun --nproc-per-node 3 examples/bandit.py         as processes
"""

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import run_on_threads

PULLS, REWARDS, MESH = 32, torch.tensor([0.2, 0.9, 0.5]), mw.Mesh(dp_replicate=3)  # mean reward by arm


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.arms = nn.Linear(1, len(REWARDS), bias=False)  # a logit for each arm, whatever the context

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.arms(context)


def choose(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Runs on the observer, with the weights of `version`."""
    chances = model(torch.ones(PULLS, 1)).softmax(-1)
    arm = torch.multinomial(chances, 1, generator=generator).squeeze(1)
    return {"arm": arm, "reward": torch.bernoulli(REWARDS[arm], generator=generator)}


def total(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logprobs = logits.log_softmax(-1).gather(1, batch["arm"].unsqueeze(1)).squeeze(1)
    return -(logprobs * (batch["reward"] - 0.5)).sum()


def train(world: World | None = None, steps: int = 60) -> list[float]:
    """Trains one rank; returns the chance of each arm in the end."""
    loss = mw.Loss(total, count=lambda batch: torch.ones(len(batch["arm"])).sum(), targets=("arm", "reward"))
    batch = {"context": torch.ones(PULLS, 1), "arm": torch.arange(PULLS) % 3, "reward": torch.zeros(PULLS)}
    analyzed = mw.analyze(Policy, batch, loss=loss)
    observer = mw.Observer(f"{__file__}:choose", every=1, answers=("arm:int64", "reward:float32"))
    sgd = mw.OptimizerConfig("sgd", lr=1.0, weight_decay=0.0)
    job = mw.Job(train=mw.TrainConfig(steps, PULLS), optimizer=sgd)
    plan = mw.make_plan(analyzed, job, MESH, (mw.BatchSplit(), observer, mw.DDP()))
    with mw.parallelize(analyzed, plan, world=world) as trainer:
        for _ in range(steps):
            trainer.step(trainer.local_batch(batch))
            batch |= trainer.answers[0].tensors if trainer.answers else {}
        return trainer.module.arms.weight.softmax(0).flatten().tolist()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    chances = train() if dist.is_initialized() else run_on_threads(train, MESH)[0]
    if not dist.is_initialized() or dist.get_rank() == 0:  # the observer has no weights between two periods
        print(chances)
