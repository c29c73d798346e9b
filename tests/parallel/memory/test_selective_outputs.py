"""Checkpointed blocks that keep outputs of operations: the bits of any run, and the bytes of the plan."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from threading import local

import pytest
import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.harness.live_bytes import live_bytes
from meshwright.api import analyze, make_plan, parallelize, trace
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory import selective_outputs
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.selective_outputs import KeepOutputs, TakeOutputs
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.kept_outputs import kept_outputs_memory
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.parallel.expert.mixture_model import analyzed_mixtral
from tests.parallel.memory.tiers.test_offload_combinations import MIXED, job
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import TOKENS as LENGTH
from tests.tiny_model import VOCABULARY, case_of, executor_of, first_of, tiny_job, token_samples, verdict_of

CPU = torch.device("cpu")
FLOAT64 = PrecisionConfig("float64", "float64", "float64")
AUTOCAST = PrecisionConfig(compute="bfloat16")
SAVES = (("matmul",), ("attention",), ("matmul", "attention"))


def checkpointing(*save: str) -> ActivationCheckpointing:
    return ActivationCheckpointing(blocks=("*",), save=save)


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 8}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, use_cache=False))


def llama(dropout: float) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 20}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **heads, attention_dropout=dropout, use_cache=False)
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2, dropout": gpt2,
    "llama": lambda: llama(0.0),
    "llama, dropout": lambda: llama(0.1),
}


@cache
def analyzed(model: str) -> AnalyzedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return analyze(MODELS[model], token_samples(2), loss=token_cross_entropy())


def planned(model: str, precision: PrecisionConfig, *mine: Strategy) -> Plan:
    return make_plan(analyzed(model), replace(tiny_job(), precision=precision), Mesh(), mine, 4)


def kept_nbytes(plan: Plan) -> int:
    """The bytes that the plan states of kept outputs, of one microbatch."""
    forwards = [each for each in plan.for_rank(0).actions if each.kind == "F_CHECKPOINTED"]
    held = (hold for each in forwards if each.microbatch == 0 for hold in each.allocations)
    return sum(hold.nbytes for hold in held if hold.name.startswith("kept"))


def trained_alone(model: str, plan: Plan) -> tuple[dict[str, bytes], list[int]]:
    """The parameters after two steps, and the bytes that live at each LOSS."""
    executor, live = executor_of(analyzed(model), plan, single_rank_world(CPU)), list[int]()
    loss = executor._actions.handlers["LOSS"]

    def counted(action: Action) -> None:
        gc.collect()
        live.append(live_bytes())
        loss(action)

    executor._entries = [
        (each, counted if each.kind == "LOSS" else handler, waits)
        for each, handler, waits in executor._entries
    ]
    for _ in range(2):
        executor.step({key: value[: plan.local_batch] for key, value in token_samples().items()})
    found = bits(executor.gather_parameters())
    executor.close()
    return found, live


@pytest.mark.parametrize("precision", [FLOAT64, AUTOCAST], ids=lambda each: each.compute)
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_are_those_without_and_the_bytes_those_of_the_plan(model: str, precision: PrecisionConfig):
    _, plain_live = trained_alone(model, planned(model, precision, checkpointing()))
    usual, _ = trained_alone(model, planned(model, precision))
    has_attention = "dropout" not in model  # else its products are those of any matrices
    for save in SAVES if has_attention else SAVES[:1]:
        plan = planned(model, precision, checkpointing(*save))
        assert static_checks(plan) == []
        found, live = trained_alone(model, plan)
        assert found == usual
        assert kept_nbytes(plan) > 0
        assert [one - other for one, other in zip(live, plain_live, strict=True)] == [kept_nbytes(plan)] * 6


SPLIT = BatchSplit("dp_shard")
CASES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "tp 2": (Mesh(tp=2), (TensorParallel(),)),
    "tp 3, chunks, vocabulary": (Mesh(tp=3), (TensorParallel(num_overlap_chunks=2), VocabParallel())),
    "sp 3": (Mesh(tp=3), (TensorParallel(), SequenceParallel())),
    "pp 2, tp 2": (Mesh(pp=2, tp=2), (Pipeline(schedule="1f1b"), TensorParallel())),
    "pp 2, halves": (Mesh(pp=2), (Pipeline(schedule="zb_h1"),)),
    "zero 3": (Mesh(dp_shard=3), (SPLIT, ZeRO(stage=3))),
}


class Noted(KeepOutputs):
    """Notes the bytes that each forward keeps, in `sizes` of the thread."""

    of_thread = local()

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        returned = [each for call in self.kept for each in tree_leaves(call.returned)]
        storages = [each.untyped_storage() for each in returned if isinstance(each, torch.Tensor)]
        sizes = {each._cdata: each.nbytes() for each in storages}
        self.of_thread.__dict__.setdefault("sizes", []).append(sum(sizes.values()))


def trained(plan: Plan) -> list[tuple[dict[str, bytes], list[int]]]:
    """Per rank the bits after two steps, and the bytes that the block calls of the second keep."""

    def body(world: World) -> tuple[dict[str, bytes], list[int]]:
        with parallelize(analyzed_llama(), plan, world=world) as engine:
            for batch in batches(2, 12):
                Noted.of_thread.sizes = []
                engine.step(engine.local_batch(batch))
            return bits(engine.executor.gather_parameters()), Noted.of_thread.sizes

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize("precision", [FLOAT64, MIXED], ids=lambda each: each.compute)
@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_bits_of_the_plan_without_and_keep_what_theirs_says(
    case: str, precision: PrecisionConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(selective_outputs, "KeepOutputs", Noted)
    mesh, strategies = CASES[case]
    plan, plain = (
        make_plan(
            analyzed_llama(), job(precision), mesh, (*strategies, ActivationCheckpointing(save=save)), 2
        )
        for save in (SAVES[2], ())
    )
    assert static_checks(plan) == []
    found, wanted = trained(plan), trained(plain)
    assert [each for each, _ in found] == [each for each, _ in wanted]
    assert any(sizes for _, sizes in found)
    for rank, (_, sizes) in enumerate(found):
        memory = kept_outputs_memory(plan.rank_view(rank), plan.job, plan.micro_batch, SAVES[2])
        forwards = [each for each in plan.for_rank(rank).actions if each.kind == "F_CHECKPOINTED"]
        assert [memory[each.subject].nbytes for each in forwards if each.subject in memory] == sizes
    assert mesh.pp > 1 or trace(analyzed_llama(), plan).passed


def test_a_kept_output_out_of_order_is_noticed_by_its_shape():
    up, down, x = nn.Linear(4, 6), nn.Linear(6, 4), torch.ones(3, 4, requires_grad=True)
    with KeepOutputs(["matmul"]) as keeping:
        down(up(x).tanh())
    keeping.kept.reverse()
    text = r"the block 'mlp' runs again and calls aten.addmm.default on .*\[3, 4\].* was kept"
    with pytest.raises(PlanError, match=text), TakeOutputs(["matmul"], keeping.kept, "mlp"):
        up(x)


def test_kept_outputs_of_one_shape_that_change_places_are_noticed(monkeypatch: pytest.MonkeyPatch):
    class Swapped(TakeOutputs):
        def __init__(self, ops, kept, *more) -> None:
            if kept[1].called_with == kept[2].called_with:  # keys and values
                kept[1], kept[2] = kept[2], kept[1]
            super().__init__(ops, kept, *more)

    plan = planned("llama", FLOAT64, checkpointing("matmul"))
    usual = verdict_of(case_of(analyzed("llama"), plan))
    assert usual.passed, str(usual)
    monkeypatch.setattr(selective_outputs, "TakeOutputs", Swapped)
    assert first_of(verdict_of(case_of(analyzed("llama"), plan)))[:2] == (0, "gradient")


def test_a_rerun_that_ends_early_is_refused():
    with KeepOutputs(["matmul"]) as keeping:
        nn.Linear(4, 4)(torch.ones(3, 4))
    taking = TakeOutputs(["matmul"], keeping.kept, "mlp")
    with pytest.raises(PlanError, match=r"run again without 1 operations of its first run: aten\.addmm"):
        taking.check_all_taken()


def test_what_was_overwritten_runs_again():
    layer, x = nn.Linear(4, 4), torch.ones(3, 4, requires_grad=True)
    for overwrites_inside in (True, False):
        with KeepOutputs(["matmul"]) as keeping:
            made = layer(x)
            _ = made.mul_(2) if overwrites_inside else made
        assert (keeping.kept[0].returned is None) == overwrites_inside
        made.mul_(2)
        with TakeOutputs(["matmul"], keeping.kept, "mlp"):
            again = layer(x)
        assert torch.equal(again, layer(x))


class Overwriting(nn.Module):
    """A model whose layers write into what their first product returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Tanh())
            for _ in range(2)
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@cache
def overwriting() -> AnalyzedModel:
    blocks = ["embed", "layers.0", "layers.1", "head"]
    return analyze(lambda: Model(Overwriting(), blocks=blocks), token_samples(2), loss=token_cross_entropy())


def refusal(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy) -> str:
    with pytest.raises(PlanError) as error:
        make_plan(analyzed, tiny_job(), mesh, strategies)
    return str(error.value)


def test_what_cannot_be_kept_is_refused_by_name():
    where = "strategies.activation_checkpointing.save: "
    ring = (RingAttention(), DDP(axis="cp"))
    for model, save, text in (
        ("llama", SAVES[2], 'a part for each rank, not one output\n  repair: write save = ["matmul"]'),
        ("llama, dropout", SAVES[0], "attention with dropout overwrites what its products return"),
    ):
        found = refusal(analyzed(model), Mesh(cp=2), *ring, checkpointing(*save))
        assert f"{where}ranks share the tokens of a sample, and " in found
        assert text in found
    square = (BatchSplit("dp_shard"), ZeRO(), TensorParallel2D(), checkpointing("matmul"))
    assert f"{where}the residual stream is sharded by features" in refusal(
        analyzed_even_llama(), Mesh(dp_shard=2, tp=2), *square
    )
    assert f"{where}no block of model that runs again is known to keep what attention returns" in refusal(
        overwriting(), Mesh(), checkpointing("attention")
    )
    assert "'matmul' or 'attention'" in refusal_of_field()
    mixtral = refusal(analyzed_mixtral(), Mesh(), checkpointing("matmul"))
    assert f"{where}'model.layers.0' calls experts, and the data decides how many rows" in mixtral


def refusal_of_field() -> str:
    with pytest.raises(PlanError) as error:
        checkpointing("softmax")
    return str(error.value)


def test_an_output_that_the_block_overwrites_is_neither_planned_nor_kept():
    """Of a layer it is the first product; the second is kept."""
    assert [each.numel for each in overwriting().model_spec.kept_outputs] == [6 * LENGTH, 6 * LENGTH]
    plan = make_plan(overwriting(), tiny_job(), Mesh(), (ActivationCheckpointing(save=("matmul",)),))
    verdict = verdict_of(case_of(overwriting(), plan))
    assert verdict.passed, str(verdict)


def test_ring_attention_runs_again_beside_kept_products(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selective_outputs, "KeepOutputs", Noted)
    mesh, ring = Mesh(cp=3), (RingAttention(), DDP(axis="cp"))
    plan, plain = (
        make_plan(analyzed_llama(), job(FLOAT64), mesh, (*ring, ActivationCheckpointing(save=save)), 2)
        for save in (SAVES[0], ())
    )
    found, wanted = trained(plan), trained(plain)
    assert [each for each, _ in found] == [each for each, _ in wanted]
    assert {sum(sizes) for _, sizes in found} == {kept_nbytes(plan) * plan.num_microbatches}
