"""loss_free_balancing: the same biases, to the bit, as one device under every plan; the paper's rule."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.parallel.expert import loss_free_balancing as file
from meshwright.parallel.expert.loss_free_balancing import ChoiceCounts, step_biases
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ChoiceBias
from meshwright.testing.ranks import run_on_threads
from tests.parallel.expert.mixture_model import SIZES, batch_of, expert_strategies, sgd_job
from tests.tiny_model import analyzed_model

RATE = 0.02  # so that a step moves tokens
BIAS = mw.LossFreeBalancing(rate=RATE)
NAMES = ("blocks.0.moe.experts", "blocks.1.moe.experts")


def deepseek() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_hidden_layers": 3, "moe_intermediate_size": 8, "n_routed_experts": 6, "n_group": 2},
        **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1},
        **{
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
        **{"num_local_experts": 6, "pad_token_id": 0},
    )
    return transformers.DeepseekV3ForCausalLM(config)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = mw.nn.MixtureOfExperts(8, 12, 5, mw.nn.SigmoidGroups(k=2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.moe(hidden)


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(80, 8), nn.Linear(8, 80)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def own_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    batch = batch_of(12, seed)
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"].roll(-1, 1)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]] = {
    "deepseek": (deepseek, partial(batch_of, 12)),
    "own": (OwnModel, own_batch),
}


@cache
def analyzed(name: str = "own") -> mw.AnalyzedModel:
    build, batch = MODELS[name]
    return mw.analyze(build, batch(0))


PLANS = {
    "one device": (mw.Mesh(), (), 4),
    "dp 6": (mw.Mesh(dp_replicate=6), (mw.BatchSplit(), mw.DDP()), 1),
    "zero 3, recomputed": (
        mw.Mesh(dp_shard=3),
        (mw.BatchSplit(axis="dp_shard"), mw.ZeRO(stage=3), mw.ActivationCheckpointing()),
        2,
    ),
    "ep": (mw.Mesh(ep=3), expert_strategies(), 2),
    "cp": (mw.Mesh(cp=2), (mw.RingAttention(), mw.DDP(axis="cp")), 4),
    "folded": (mw.Mesh(dp_shard=2, cp=2), expert_strategies(over=("dp_shard", "cp")), 3),
    "1f1b": (mw.Mesh(pp=2, dp_shard=2), (mw.Pipeline(), *expert_strategies()[2:]), 2),
}


def plan_of(name: str, model: str = "own") -> mw.Plan:
    mesh, strategies, micro_batch = PLANS[name]
    return mw.make_plan(analyzed(model), sgd_job(), mesh, (*strategies, BIAS), micro_batch)


def verdict_of(name: str, model: str = "own") -> mw.Verdict:
    batch = MODELS[model][1]
    incomplete = {key: value[:7] for key, value in batch(1).items()}
    return mw.verify(analyzed(model), plan_of(name, model), [batch(0), incomplete, batch(2)])


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "own") for name in PLANS if name not in ("cp", "folded")),
        *((name, "deepseek") for name in ("cp", "ep", "folded")),
    ],
)
def test_it_equals_one_device(name: str, model: str):
    verdict = verdict_of(name, model)
    assert verdict.passed, str(verdict)


def test_the_rule_is_that_of_the_paper():
    module = nn.Module()
    module.register_buffer("bias", torch.tensor([1.0, 0.0, -1.0]))
    biases = (ChoiceBias("bias", "", "", 3),)
    counts = ChoiceCounts(biases, torch.device("cpu"))
    counts.add(0, (torch.rand(4, 2), torch.tensor([[0, 1], [0, 3], [0, 1], [2, 3]])), {})  # 3: no expert
    assert counts.values.tolist() == [3, 2, 1]
    step_biases(module, biases, counts.values.double(), 0.5)
    assert module.get_buffer("bias").tolist() == [0.5, 0.0, -0.5]


def biases_after_steps(world: World, name: str, into: Path | None = None) -> torch.Tensor:
    """The biases of all layers after three steps, with evaluations between; saves before the last of them."""
    plan = plan_of(name)
    with mw.parallelize(analyzed(), plan, world=world) as trainer:
        for seed in range(3):
            if seed == 2 and into is not None:
                trainer.save(into)
            trainer.step(trainer.local_batch(own_batch(seed)))
            trainer.evaluate([trainer.local_batch(own_batch(5))])
        return biases_of(trainer)


def biases_of(trainer: mw.Trainer) -> torch.Tensor:
    module = trainer.executor.state.trained_module.module
    return torch.stack([module.get_buffer(f"blocks.{at}.moe.router.choice_bias").clone() for at in range(2)])


def biases_after_resuming(world: World, name: str, folder: Path) -> torch.Tensor:
    with mw.parallelize(analyzed(), plan_of(name), world=world) as trainer:
        trainer.load(folder)
        trainer.step(trainer.local_batch(own_batch(2)))
        return biases_of(trainer)


def test_all_plans_have_the_same_biases_also_from_a_checkpoint_and_evaluations_do_not_count(tmp_path: Path):
    found = run_on_threads(partial(biases_after_steps, name="ep", into=tmp_path), PLANS["ep"][0])
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    other, mesh = "zero 3, recomputed", PLANS["zero 3, recomputed"][0]
    found += run_on_threads(partial(biases_after_steps, name="one device"), mw.Mesh())
    found += run_on_threads(partial(biases_after_steps, name=other), mesh)
    found += run_on_threads(partial(biases_after_resuming, name=other, folder=folder), mesh)
    assert all(torch.equal(biases, found[0]) for biases in found)
    steps = (found[0] / RATE).round()
    assert steps.abs().max() <= 3
    assert steps.count_nonzero() > 5


@pytest.mark.parametrize("fault", ["of another layer", "never stepped"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    if fault == "of another layer":
        monkeypatch.setattr(file, "load_count_begins", lambda sharding: dict.fromkeys(NAMES, 0))
    else:
        monkeypatch.setattr(file, "_with_biases", lambda runtime, rate, handler: handler)
    verdict = verdict_of("dp 6")
    assert not verdict.passed
    assert verdict.first_difference.name.endswith("choice_bias")


def test_what_cannot_be_balanced_is_refused():
    with pytest.raises(PlanError, match=r"no experts of this model have a bias(?s:.*)SigmoidGroups"):
        mw.make_plan(analyzed_model(), sgd_job(), mw.Mesh(), [BIAS])
    with pytest.raises(PlanError, match=r"strategies\.loss_free_balancing\.rate"):
        mw.LossFreeBalancing(rate=0)
    with pytest.raises(PlanError, match="every microbatch is an update of its own"):
        mw.make_plan(analyzed(), sgd_job(clip=0.0), mw.Mesh(pp=2), [mw.PipeDream(), BIAS], 3)
    master = [mw.BatchSplit(), mw.DataParallelMaster(), BIAS]
    with pytest.raises(PlanError, match="each has its own biases"):
        mw.make_plan(analyzed(), sgd_job(), mw.Mesh(dp_replicate=2), master)
