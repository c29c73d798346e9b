"""Whole forwards of a pipelined model: the outputs of one device, on every rank."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward import lockstep_pipeline_forward
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import sample_range
from tests.parallel.tensor import model_families
from tests.parallel.tensor.odd_llama import HEADS, SIZES, analyzed_llama, batches
from tests.tiny_model import VOCABULARY, WIDTH, tiny_job, token_samples

SHARD = BatchSplit(axis="dp_shard")
LLAMA = analyzed_llama(num_hidden_layers=3)
IDS = batches(1, 3)[0]["input_ids"]
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "three stages": (Mesh(pp=3), (Pipeline(),)),
    "two virtual stages on each of two ranks": (
        Mesh(pp=2),
        (Pipeline(schedule="interleaved", virtual_stages=2),),
    ),
    "shards": (Mesh(pp=2, dp_shard=3), (Pipeline(), SHARD, ZeRO())),
    "slices": (Mesh(pp=2, tp=3), (Pipeline(), TensorParallel(), VocabParallel())),
}
DATA = token_samples(12)
Use = Callable[[nn.Module], list[torch.Tensor]]


def use_after_step(
    analyzed: AnalyzedModel, mesh: Mesh, strategies: Iterable[Strategy], use: Use, batch: Any = None
) -> list[list[torch.Tensor]]:
    """Returns the result of `use` on each rank after a step, and the loss of the step that follows."""
    batch = batches(1, 12)[0] if batch is None else batch
    plan = make_plan(analyzed, tiny_job(), mesh, strategies, 2)

    def rank(world: World) -> list[torch.Tensor]:
        with parallelize(analyzed, plan, world=world) as engine:
            engine.step(engine.local_batch(batch))
            with engine.full_params() as module:
                found = use(module)
            return [*found, torch.tensor(engine.step(engine.local_batch(batch)).loss)]

    return run_on_threads(rank, mesh)


def generate_tokens(module: nn.Module) -> list[torch.Tensor]:
    """Logits and hidden states of a forward, greedy words without and with a cache,
    and of a search with it.
    """
    seen = module(IDS, output_hidden_states=True)
    module.eval()
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    words = [module.generate(IDS, use_cache=cached, **how) for cached in (False, True)]
    words.append(module.generate(IDS, use_cache=True, num_beams=2, **how))
    module.train()
    return [seen.logits, *seen.hidden_states, *words]


@cache
def generated_on_one_device() -> list[torch.Tensor]:
    """That of one device."""
    return use_after_step(LLAMA, Mesh(), (), generate_tokens)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_the_logits_and_the_tokens_of_one_device(layout: str):
    for found in use_after_step(LLAMA, *LAYOUTS[layout], generate_tokens):
        for mine, truth in zip(found, generated_on_one_device(), strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)


def test_sequence_parallel_slices_stay_slices_and_a_cache_is_refused():
    mesh, strategies = Mesh(pp=2, tp=3), (Pipeline(), TensorParallel(), SequenceParallel())
    for found in use_after_step(
        LLAMA, mesh, strategies, lambda module: [module(IDS, use_cache=False).logits]
    ):
        torch.testing.assert_close(found[0], generated_on_one_device()[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(
        PlanError,
        match=r"(cannot run on another rank|takes slices of .*), and is given a DynamicCache\n.*use_cache",
    ):
        use_after_step(LLAMA, mesh, strategies, lambda module: [module(IDS, use_cache=True).logits])


def with_tied_layers(model: nn.Module) -> nn.Module:
    """A GPT-2 whose last layer makes queries, keys and values with the weights of the first one."""
    first, last = model.transformer.h[0].attn.c_attn, model.transformer.h[-1].attn.c_attn
    last.weight, last.bias = first.weight, first.bias
    return model


DIVIDED: dict[str, Callable[[], AnalyzedModel]] = {
    **{
        family: lambda family=family: model_families.analyze_family(family)
        for family in ("gpt2", "falcon, alibi")
    },
    "gpt2, tied": lambda: analyze(
        with_tied_layers(model_families.FAMILIES["gpt2"]()), model_families.batches("gpt2", 1)[0]
    ),
}


@pytest.mark.parametrize("family", DIVIDED)
def test_a_block_of_another_rank_computes_as_in_the_whole_model(family: str):
    analyzed, batch = DIVIDED[family](), model_families.batches("gpt2", 1, samples=12)[0]

    def use(module: nn.Module) -> list[torch.Tensor]:
        ids = batch["input_ids"][:3]
        return [module(ids).logits, module.generate(ids, use_cache=True, max_new_tokens=3, do_sample=False)]

    (truth,) = use_after_step(analyzed, Mesh(), (), use, batch)
    for found in use_after_step(analyzed, Mesh(pp=2, tp=3), (Pipeline(), TensorParallel()), use, batch):
        for mine, expected in zip(found, truth, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


class Open(nn.Module):
    """Two skips; glue that looks at numbers; a block that gives back what it was given; a layer that no step
    reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Both() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for layer in self.layers:
            _, x = layer(first, x)
        return self.head(x)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first, torch.tanh(self.linear(x + first))


class Choosing(Both):
    """It looks at the numbers within."""

    def forward(
        self, first: torch.Tensor, x: torch.Tensor, kept: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        samples = (x.sum((1, 2)) > 0).nonzero()[:, 0]
        return first, torch.tanh(self.linear(x + first)).index_fill(0, samples, 0.5)


class Choosy(Open):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Choosing()

    def forward(self, input_ids: torch.Tensor, kept: object = None) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            _, x = layer(first, x, kept) if number == 1 and kept is not None else layer(first, x)
        return self.head(x)


@pytest.mark.parametrize("build_model", [Open, Choosy])
def test_blocks_may_return_their_inputs_and_read_values(build_model: Callable[[], nn.Module]):
    analyzed = analyze(build_model, sample_range(DATA, 0, 2))

    def use(module: nn.Module) -> list[torch.Tensor]:
        return [module(DATA["input_ids"][:5]), module(DATA["input_ids"][5:7, :3])]

    (truth,) = use_after_step(analyzed, Mesh(), (), use, DATA)
    for found in use_after_step(analyzed, Mesh(pp=3), (Pipeline(),), use, DATA):
        for mine, expected in zip(found, truth, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_a_block_that_reads_values_and_gets_a_cache_is_refused_by_name():
    analyzed = analyze(Choosy, sample_range(DATA, 0, 2))

    def use(module: nn.Module) -> list[torch.Tensor]:
        return [module(DATA["input_ids"], kept=transformers.DynamicCache())]

    with pytest.raises(
        PlanError,
        match=r"'layers\.1' (reads values that|cannot run on) another rank(?s:.*)is given a DynamicCache",
    ):
        use_after_step(analyzed, Mesh(pp=2), (Pipeline(),), use, DATA)


def test_ranks_refuse_a_call_together_before_one_waits_for_another():
    """The rank that owns the block could run it: it would wait for a rank that has raised."""
    analyzed = analyze(Choosy, sample_range(DATA, 0, 2))
    plan = make_plan(analyzed, tiny_job(), Mesh(pp=3), (Pipeline(),), 2)

    def rank(world: World) -> str:
        with parallelize(analyzed, plan, world=world) as engine, engine.full_params() as module:
            try:
                module(DATA["input_ids"], kept=transformers.DynamicCache())
            except PlanError as error:
                return str(error)
        return ""

    for said in run_on_threads(rank, plan.mesh):
        assert "the block 'layers.1' " in said
        assert "is given a DynamicCache\n  repair: pass use_cache=False" in said


def test_experts_of_another_rank_fill_a_cache():
    """They read which token goes to which of them, and gather weights by token instead on fake tensors."""
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**SIZES, **HEADS, **experts)
    analyzed = analyze(transformers.MixtralForCausalLM(config), batches(1)[0])

    def use(module: nn.Module) -> list[torch.Tensor]:
        module.eval()
        tokens = module.generate(IDS, use_cache=True, max_new_tokens=3, do_sample=False, pad_token_id=0)
        module.train()
        return [tokens]

    ((truth, _),) = use_after_step(analyzed, Mesh(), (), use)
    for found, _ in use_after_step(analyzed, Mesh(pp=2), (Pipeline(),), use):
        assert torch.equal(found, truth)


def test_what_is_sent_is_in_the_ledger_block_by_block():
    plan = make_plan(LLAMA, tiny_job(), Mesh(pp=3), (Pipeline(),), 2)

    def rank(world: World) -> dict[str, float]:
        with parallelize(LLAMA, plan, world=world) as engine, engine.full_params() as module:
            module(IDS)
            return {
                name: sent
                for name, sent in world.ledger.sent_nbytes.items()
                if name.startswith("GATHER_FULL") and sent
            }

    sent = {name: nbytes for each in run_on_threads(rank, plan.mesh) for name, nbytes in each.items()}
    hidden, header = 3 * 9 * 48 * 8, 8 * (2 + lockstep_pipeline_forward.MAX_DIMS)
    assert sent["GATHER_FULL(model.layers.1)"] == hidden + header
    assert sent["GATHER_FULL(lm_head)"] == 3 * 9 * 67 * 8 + header


def test_missing_values_are_noticed(monkeypatch):
    monkeypatch.setattr(lockstep_pipeline_forward, "replace_tensors", lambda value, new: value)
    with pytest.raises(Exception, match=r"(?i)fake|without numbers|another rank"):
        use_after_step(LLAMA, Mesh(pp=2), (Pipeline(),), lambda module: [module(IDS).logits])
