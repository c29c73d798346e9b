"""The cases of `generation_parity`: families of transformers under every axis, and random plans.

    families   all decoders of benchmarks/models/model_families.py, with three layers and a vocabulary of 251
               tokens: keys and values of all heads and of groups, sliding windows, latent vectors, recurrent
               states, positions that are learnt, rotated or biases, experts
    plans      copies, ZeRO-3; tp, pp and cp of 2 and 3 ranks; ep of 2 where there are experts
    random     benchmarks/random_plans/random_draws.py, of the models that predict a next token

Weights are drawn again, ten times as large as a fresh model has them, and biases and norms are noise: else
the most likely token hardly depends on those before it, and a wrong position could pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from random import Random
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models.model_families import DECODERS
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_models import MODELS
from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.tensors.float64_mode import run_in_float64
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

FAMILIES = tuple(family.name for family in DECODERS)
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe")
PLANS: Mapping[str, Mesh] = {
    "copies": Mesh(dp_replicate=3),
    "ZeRO-3": Mesh(dp_shard=3),
    **{f"{axis} {size}": Mesh(**{axis: size}) for axis in ("tp", "pp", "cp") for size in (2, 3)},
}
OF_EXPERTS = {"ep 2": Mesh(ep=2)}
FLOAT64 = PrecisionConfig("float64", "float64", "float64")
LAYER_FIELDS, NUM_LAYERS, VOCAB_SIZE = ("num_hidden_layers", "n_layer"), 3, 251
BATCH, TOKENS, WEIGHT_STD = 12, 12, 0.2
SEED = 31
DRAWN_MODELS = ("llama", "gpt2", "llama, even", "gpt2, even")  # some llamas become mixtures


@dataclass(frozen=True)
class Case:
    """A model under a plan; `model` is a name of `make_model`."""

    name: str
    model: str
    make: Callable[[], Plan]

    def plan(self) -> Plan:
        """Makes the plan, in float64. Raises PlanError if it is refused."""
        return self.make()


def family_cases() -> Iterator[Case]:
    """Yields all families under all plans."""
    for family in FAMILIES:
        meshes = {**PLANS, **(OF_EXPERTS if family in WITH_EXPERTS else {})}
        for name, mesh in meshes.items():
            yield Case(f"{family}, {name}", family, partial(plan_of, family, mesh))


def random_cases() -> Iterator[Case]:
    """Yields random plans that nothing perturbs, without end; some are refused when they are made."""
    for number in count():
        model = Random(f"{SEED}/{number}/model").choice(DRAWN_MODELS)
        drawn = draw(SEED, number, model)
        if not drawn.perturbation and not MODELS[drawn.model].has_batch_norms:  # they take pictures
            yield Case(f"random {drawn}", f"random {drawn.model}", partial(_drawn_plan, drawn))


def plan_of(
    model: str,
    mesh: Mesh,
    strategies: Sequence[Strategy] | None = None,
    batch: int = BATCH,
    micro_batch: int = 1,
) -> Plan:
    """Returns the plan in float64; without `strategies`, with those that a mesh has by default."""
    length = analyzed_model(model).example["input_ids"].shape[1]
    job = Job(
        ModelConfig(model),
        DataConfig("random", sequence=length),
        TrainConfig(batch=batch),
        OptimizerConfig("sgd", lr=0.1),
        precision=FLOAT64,
    )
    return make_plan(analyzed_model(model), job, mesh, strategies, micro_batch)


def _drawn_plan(drawn: Draw) -> Plan:
    strategies = [each.without_files() for each in drawn.strategies]
    return plan_of(f"random {drawn.model}", drawn.mesh, strategies, drawn.num_samples, drawn.micro_batch)


def make_model(name: str) -> nn.Module:
    """Returns the model of a family, or of a random plan ("random llama"), with larger weights."""
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    kind, _, drawn = name.partition(" ")
    model = MODELS[drawn].make() if kind == "random" else _family(name)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * WEIGHT_STD
        parameter.data = noise if parameter.ndim > 1 else parameter.data + noise / 2
    return model


def _family(name: str) -> nn.Module:
    fields = dict(next(each.config for each in DECODERS if each.name == name))
    fields |= {"vocab_size": VOCAB_SIZE} | {each: NUM_LAYERS for each in LAYER_FIELDS if each in fields}
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    return transformers.AutoModelForCausalLM.from_config(config)


@cache
def analyzed_model(name: str) -> AnalyzedModel:
    """Returns the analysis of `make_model(name)`."""
    kind, _, drawn = name.partition(" ")
    if kind == "random":
        return analyze(make_model(name), MODELS[drawn].batches(1, 2)[0], loss=MODELS[drawn].loss())
    ids = torch.randint(0, VOCAB_SIZE, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    return analyze(make_model(name), {"input_ids": ids, "labels": ids})


@cache
def reference_model(name: str) -> Any:
    """Returns the model on one device, in float64 throughout and in eval mode; its answers have no end."""
    model: Any = make_model(name).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    if "expert" in repr(model).lower():
        model.set_experts_implementation("eager")  # grouped products have no float64
    model.generation_config.eos_token_id = None
    run_in_float64(model)
    return model
