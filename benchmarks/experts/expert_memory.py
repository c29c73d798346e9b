"""Peak live bytes of distributed experts, against what the plan expects and against its most.

    families   Mixtral, gpt-oss (biases), DeepSeek-V3 (a shared expert), Llama 4 (the dense form); 8 experts,
               of which 2 are chosen
    plans      ep 2 and ep 3 with ZeRO-3; ep 2 x dp_shard 2 with ZeRO-3 and recomputation; experts over tp 2,
               and over ep 2 and tp 2, but of Llama 4, where this is refused
    routes     chosen alike; half as many again for the first rank; the experts of the first rank by all

Live bytes are all storages of tensors that the rank's operations make, also those that only autograd holds
(benchmarks/harness/peak_bytes.py): their maximum in the third step. The plan does not count the buffers in
which messages of dense weights arrive. The figure is the largest distance of a
rank from its expected peak where experts are chosen alike; the bar is 10 %. The claim holds if besides no
rank is above its peak "at most" on any route.

    python -m benchmarks.experts.expert_memory      three minutes on two cores
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4Router

from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool

NAME, BAR = "expert_memory", 0.10
CLAIM = (
    "peak live bytes of distributed experts are within 10 % of the plan's where experts are chosen alike, "
    "and never above its most, also where all tokens choose the experts of one rank"
)
NUM_EXPERTS, VOCABULARY, TOKENS, SAMPLES_PER_RANK = 8, 128, 64, 10
SIZES: Mapping[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "use_cache": False},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_experts_per_tok": 2},
}
LATENT: Mapping[str, Any] = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
    **{"v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
DENSE = "Llama 4"  # the family in the dense form
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Mixtral": ("Mixtral", {"intermediate_size": 96, "num_local_experts": NUM_EXPERTS}),
    "gpt-oss": ("GptOss", {"intermediate_size": 96, "num_local_experts": NUM_EXPERTS, "head_dim": 16}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {**LATENT, "intermediate_size": 128, "moe_intermediate_size": 96, "n_routed_experts": NUM_EXPERTS},
    ),
    DENSE: (
        "Llama4",
        {
            **{"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": NUM_EXPERTS},
            **{"head_dim": 16, "interleave_moe_layer_step": 1, "attn_implementation": "sdpa"},
        },
    ),
}
EXPERTS = (BatchSplit("ep"), BatchSplit("dp_shard"), ZeRO())
PLANS: Mapping[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "ep 2": (Mesh(ep=2), EXPERTS),
    "ep 3": (Mesh(ep=3), EXPERTS),
    "ep 2 x dp_shard 2, recomputed": (Mesh(dp_shard=2, ep=2), (*EXPERTS, ActivationCheckpointing())),
    "over tp 2": (Mesh(tp=2), EXPERTS[1:]),
    "over ep 2 and tp 2": (Mesh(ep=2, tp=2), EXPERTS),
}
EVEN, UNEVEN, ONE_RANK = ROUTES = ("alike", "half as many again", "one rank")


@dataclass(frozen=True)
class Case:
    """One of FAMILIES under one of PLANS on one of ROUTES; `checkpoint_load` is that of expert_parallel."""

    family: str
    plan_name: str
    route: str
    checkpoint_load: float = ExpertParallel().checkpoint_load

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return PLANS[self.plan_name][0]

    @property
    def over(self) -> tuple[str, ...]:
        """The axes over which experts lie."""
        return tuple(axis for axis in ("ep", "tp") if self.mesh.size(axis) > 1)

    @property
    def batch_size(self) -> int:
        """The samples of a step: ranks along tp have the same."""
        return SAMPLES_PER_RANK * (self.mesh.world_size // self.mesh.tp)

    @property
    def analyzed(self) -> AnalyzedModel:
        """The analyzed model."""
        return analyzed_model(self.family, self.route, self.mesh.group_size(self.over))

    def plan(self) -> Plan:
        """Returns the plan, with AdamW."""
        mesh, strategies = PLANS[self.plan_name]
        train = TrainConfig(steps=3, batch=self.batch_size)
        job = Job(train=train, optimizer=OptimizerConfig("adamw", lr=1e-3))
        experts = ExpertParallel(self.over, self.checkpoint_load)
        return make_plan(self.analyzed, job, mesh, (experts, *strategies))


def choose(num_tokens: int, route: str, num_ranks: int) -> torch.Tensor:
    """Returns the experts [num_tokens, 2] of tokens on a route."""
    position = torch.arange(num_tokens)
    first = position % NUM_EXPERTS
    second = (first + 1 + position // NUM_EXPERTS % (NUM_EXPERTS - 1)) % NUM_EXPERTS
    of_rank = -(-NUM_EXPERTS // num_ranks) / NUM_EXPERTS  # the share of experts of the first rank
    share = {EVEN: 0.0, UNEVEN: 0.5 * of_rank / (1 - of_rank), ONE_RANK: 1.0}[route]
    to_first = (position * share).floor() != ((position + 1) * share).floor()
    index = torch.stack([first, second], dim=1)
    return torch.where(to_first.unsqueeze(1), torch.tensor([0, 1]), index)


def _route(
    route: str, num_ranks: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def routed(given: Any) -> Any:
        is_choice = isinstance(given, torch.Tensor) and not given.dtype.is_floating_point
        return choose(len(given), route, num_ranks).to(given.dtype) if is_choice else given

    return tuple(map(routed, args)), {name: routed(given) for name, given in kwargs.items()}


def _route_scores(
    route: str, num_ranks: int, module: nn.Module, args: object, given: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scores that are not zero for the experts of `choose`, and the logits."""
    scores, logits = given
    index = choose(len(logits), route, num_ranks).to(logits.device)
    return torch.zeros_like(scores).scatter(1, index, logits.gather(1, index).sigmoid()), logits


def model(family: str, route: str, num_ranks: int) -> nn.Module:
    """Returns the model, whose experts are chosen by the position of a token alone."""
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = kind.config_class(**SIZES, **sizes)
    return with_route(kind(config), route, num_ranks)


def with_route(module: nn.Module, route: str, num_ranks: int) -> nn.Module:
    """Makes the experts of `module` those of `choose`, and returns it."""
    for path, part in module.named_modules():
        if isinstance(part, Llama4Router):
            part.register_forward_hook(partial(_route_scores, route, num_ranks))
        elif path.endswith(".experts"):
            part.register_forward_pre_hook(partial(_route, route, num_ranks), with_kwargs=True)
    return module


@cache
def analyzed_model(family: str, route: str, num_ranks: int) -> AnalyzedModel:
    """Returns the analyzed model."""
    return analyze(partial(model, family, route, num_ranks), batch(2))


def batch(num_samples: int) -> dict[str, torch.Tensor]:
    """Returns a batch of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (num_samples, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def measure_rank(world: World, case: Case) -> int:
    """Returns the peak live bytes of one rank in the third step of `case`."""
    tokens = batch(case.batch_size)
    with parallelize(case.analyzed, case.plan(), world=world) as trainer:
        module = trainer.executor.state.trained_module.module
        with PeakLive([*module.parameters(), *module.buffers()]) as live:
            for _ in range(3):
                gc.collect()
                live.reset_peak()
                trainer.step(trainer.local_batch(tokens))
        return live.peak


def measure(pool: ProcessPool, case: Case) -> Iterator[dict[str, Any]]:
    """Yields for each rank of `case` its measured peak, and those of its plan."""
    plan = case.plan()
    for rank, measured in enumerate(pool.run(measure_rank, case.mesh, case, timeout_s=600)):
        expected, most = (peak_nbytes(plan, rank, at_most=at_most) for at_most in (False, True))
        sizes = {"measured": measured, "expected": expected, "at_most": most}
        ratios = {"of_expected": measured / expected, "of_at_most": measured / most}
        yield (
            {"family": case.family, "plan": case.plan_name, "route": case.route, "rank": rank}
            | sizes
            | ratios
        )


def result(rows: list[dict[str, Any]]) -> Result:
    """Returns the result: how far peaks are from those expected, and whether any is above the most."""
    values = [abs(row["of_expected"] - 1) for row in rows if row["route"] == EVEN]
    is_bounded = all(row["of_at_most"] <= 1 for row in rows)
    return Result.of(
        NAME,
        CLAIM,
        values=values,
        median=max(values),
        spread=(min(values), max(values)),
        bar=BAR,
        holds=max(values) <= BAR and is_bounded,
        repeats=len(values),
        detail={"rows": rows},
    )


def main() -> None:
    """Measures on processes, and writes the result."""
    rows: list[dict[str, Any]] = []
    for name, (mesh, _) in PLANS.items():
        with ProcessPool(mesh.world_size, shared_memory=False) as pool:
            for family in (each for each in FAMILIES if each != DENSE or mesh.tp == 1):
                for route in ROUTES:
                    rows += measure(pool, Case(family, name, route))
                    print(rows[-mesh.world_size], file=sys.stderr)
    print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
