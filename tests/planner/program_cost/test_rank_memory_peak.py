"""The planned peak equals the memory of ranks at their fullest moment, with tensor parallelism too."""

from dataclasses import replace

import pytest

from benchmarks.harness.peak_bytes import PeakLive
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.odd_llama import analyzed_llama, batches, llama, planned

WORDS = {
    "vocab_size": 1999,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TABLES = {**WORDS, "vocab_size": 6007, "num_hidden_layers": 1}
DEEP = {"num_hidden_layers": 7, "intermediate_size": 301, "tie_word_embeddings": True}
ALLOWED, HALF = 0.05, PrecisionConfig("float32", "bfloat16")


def measured(analyzed: AnalyzedModel, plan: Plan, samples: int) -> list[int]:
    """The most bytes that each rank holds in a third step; moments are made in the first."""

    def on_rank(world: World) -> int:
        with parallelize(analyzed, plan, world=world) as engine:
            module = engine.executor.state.trained_module.module
            with PeakLive([*module.parameters(), *module.buffers()]) as live:
                for batch in batches(3, samples):
                    live.reset_peak()
                    engine.step(engine.local_batch(batch))
            return live.peak

    return run_on_threads(on_rank, plan.mesh)


@pytest.mark.parametrize(
    ("mesh", "micro", "sizes"),
    [(Mesh(tp=2), 0, WORDS), (Mesh(tp=2), 4, WORDS), (Mesh(tp=3), 0, DEEP), (Mesh(), 4, DEEP)],
    ids=["vocabulary", "vocabulary, microbatches", "layers", "one device"],
)
def test_the_peak_equals_the_planned_peak(mesh: Mesh, micro: int, sizes: dict[str, int]):
    analyzed, plan = planned(llama(**sizes), mesh, micro=micro, samples=8)
    for rank, peak in enumerate(measured(analyzed, plan, 8)):
        assert peak_nbytes(plan, rank) == pytest.approx(peak, rel=ALLOWED), rank


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_gradient_of_an_embedding_is_as_large_as_a_ranks_vocabulary_shard(tied: bool, ranks: int):
    analyzed, plan = planned(llama(**TABLES, tie_word_embeddings=tied), Mesh(tp=ranks), samples=2)
    for rank, peak in enumerate(measured(analyzed, plan, 2)):
        assert peak_nbytes(plan, rank) == pytest.approx(peak, rel=ALLOWED), rank


@pytest.mark.parametrize("precision", [PrecisionConfig(), HALF], ids=["float32", "half"])
def test_chunks_of_vocab_parallel_logits_have_the_planned_size(precision: PrecisionConfig):
    tiled = TensorParallel(), VocabParallel(), ChunkedLoss(2)
    analyzed, plan = planned(llama(**WORDS), Mesh(tp=2), tiled, samples=8, precision=precision)
    for rank, peak in enumerate(measured(analyzed, plan, 8)):
        assert peak_nbytes(plan, rank) == pytest.approx(peak, rel=ALLOWED), rank


@pytest.mark.parametrize(
    "rule", ["sgd", "adamw", "adamw_bf16", "adamw_8bit", "lion", "lion_bf16", "adafactor", "muon"]
)
def test_temporary_memory_of_the_optimizer_is_in_the_peak(rule: str):
    plan, rank, peak = stepped_with(rule)
    assert peak_nbytes(plan, rank) == pytest.approx(peak, rel=0.02)


def test_gradients_cast_for_master_weights_are_in_the_peak():
    plan, rank, peak = stepped_with("adamw", PrecisionConfig("bfloat16", "bfloat16", master="float32"))
    assert peak_nbytes(plan, rank) == pytest.approx(peak, rel=ALLOWED)


def stepped_with(rule: str, precision: PrecisionConfig | None = None) -> tuple[Plan, int, int]:
    optimizer = OptimizerConfig(rule, lr=1e-3, betas=(0.9, 0.95), momentum=0.95 if rule == "muon" else 0.0)
    analyzed = analyzed_llama(**TABLES)
    job = Job(
        ModelConfig("llama"), DataConfig("random", sequence=9), TrainConfig(batch=1, clip=0.5), optimizer
    )
    plan = make_plan(analyzed, replace(job, precision=precision or PrecisionConfig()), Mesh())
    return plan, 0, measured(analyzed, plan, 1)[0]


def test_counting_sharded_blocks_as_whole_is_noticed():
    analyzed, plan = planned(llama(**DEEP), Mesh(tp=2), samples=8)
    calls = tuple(replace(call, saved_numel=0) for call in analyzed.model_spec.layer_calls)
    whole = make_plan(
        replace(analyzed, model_spec=replace(analyzed.model_spec, layer_calls=calls)), plan.job, plan.mesh
    )
    assert peak_nbytes(whole, 0) > (1 + 2 * ALLOWED) * peak_nbytes(plan, 0)
