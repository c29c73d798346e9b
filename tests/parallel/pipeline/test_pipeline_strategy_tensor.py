"""Matrices and the stream in slices inside the stages of a pipeline: one device's numbers, and every byte
between stages.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from meshwright.api import analyze, make_plan, trace, verify
from meshwright.engine.forward_backward.stage_send_recv import StageIO
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, TrainConfig
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.stage_value_shards import StageValueShards
from meshwright.plan.step.matrix_owner_actions import owned_params
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.parallel.data.optimizer_cases import RULES, error, outcome
from tests.parallel.tensor.declared_pairs import WIDTH, pairs
from tests.parallel.tensor.odd_llama import SIZES, analyzed_llama, batches
from tests.parallel.tensor.odd_llama import planned as planned_llama
from tests.tiny_model import VOCABULARY, tiny_job

NUM_SAMPLES, LENGTH, WIDE = 6, 6, 8
SLICES, SHARD = (TensorParallel(), SequenceParallel()), BatchSplit(axis="dp_shard")
CASES = {
    "matrices": (Mesh(pp=2, tp=2), (Pipeline(), TensorParallel())),
    "tokens": (Mesh(pp=2, tp=2), (Pipeline(), *SLICES)),
    "rings of three": (Mesh(pp=3, tp=3), (Pipeline(), *SLICES)),
    "words": (Mesh(pp=2, tp=3), (Pipeline(schedule="gpipe"), *SLICES, VocabParallel())),
    "gathered again, and recomputed": (
        Mesh(pp=2, tp=2),
        (Pipeline(), TensorParallel(), SequenceParallel(regather=True), ActivationCheckpointing()),
    ),
    "two stages each": (Mesh(pp=2, tp=2), (Pipeline(schedule="interleaved", virtual_stages=2), *SLICES)),
    "stage 1": (Mesh(pp=2, dp_shard=2, tp=2), (Pipeline(), *SLICES, SHARD, ZeRO(stage=1))),
    "stage 3": (Mesh(pp=2, dp_shard=3, tp=2), (Pipeline(), *SLICES, SHARD, ZeRO())),
    "pieces": (Mesh(pp=2, tp=2), (Pipeline(scatter=True), TensorParallel())),
    "pieces of three": (
        Mesh(pp=3, tp=3),
        (Pipeline(scatter=True, schedule="gpipe"), TensorParallel(), VocabParallel()),
    ),
}


def tokens(count: int = NUM_SAMPLES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    found = [torch.randint(VOCABULARY, (count, LENGTH), generator=generator) for _ in range(2)]
    return {"input_ids": found[0], "labels": found[1]}


@cache
def model(p: float = 0.0) -> AnalyzedModel:
    return pairs(p, tokens(2), layers=4)


def planned(mesh: Mesh, *strategies: Strategy, p: float = 0.0) -> Plan:
    job = tiny_job(
        train=TrainConfig(batch=NUM_SAMPLES, clip=0.5),
        optimizer=OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
    )
    return make_plan(model(p), job, mesh, strategies, 1)


def sent(plan: Plan, kind: str) -> dict[str, set[int]]:
    """Returns what is sent between stages by actions of that kind, and the bytes that each rank puts in."""
    found: dict[str, set[int]] = {}
    for action in (action for role in plan.program.roles for action in role.actions if action.kind == kind):
        found.setdefault(action.subject, set()).update(move.nbytes for move in action.transfers)
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_one_device_computes(case: str):
    mesh, strategies = CASES[case]
    plan = planned(mesh, *strategies)
    assert static_checks(plan) == []
    verdict = verify(model(), plan, [tokens()] * 2)
    assert verdict.passed, verdict


def test_masks_on_slices_are_those_of_one_device():
    plan = planned(Mesh(pp=2, tp=2), Pipeline(), *SLICES, p=0.2)
    assert verify(model(0.2), plan, [tokens()]).passed


def test_a_slice_is_sent_by_each_rank_and_a_piece_likewise():
    stream = LENGTH * WIDTH * WIDE  # of one row
    whole, slices = (
        planned(Mesh(pp=2, tp=3), Pipeline(), TensorParallel()),
        planned(Mesh(pp=2, tp=3), Pipeline(), *SLICES),
    )
    pieces = planned(Mesh(pp=2, tp=3), Pipeline(scatter=True), TensorParallel())
    for kind in ("SEND", "SEND_GRAD", "RECV", "RECV_GRAD"):
        assert [nbytes for each in sent(whole, kind).values() for nbytes in each] == [stream]
        assert sent(slices, kind) == sent(pieces, kind)
        assert [nbytes for each in sent(slices, kind).values() for nbytes in each] == [stream // 3]
    assert sent(slices, "CONCAT") == sent(slices, "CONCAT_GRAD") == {}
    joins = [action.transfer for action in pieces.for_rank(5).actions if action.kind == "CONCAT"]
    assert [(move.collective, move.axes, move.nbytes) for move in joins] == [
        ("all_gather", ("tp",), stream // 3)
    ] * NUM_SAMPLES


def test_pieces_that_do_not_divide_are_filled_up():
    analyzed = pairs(0.0, tokens(2), layers=3, width=7)  # 42 elements on 4 ranks
    plan = make_plan(
        analyzed,
        tiny_job(train=TrainConfig(batch=4)),
        Mesh(pp=2, tp=4),
        (Pipeline(scatter=True), TensorParallel()),
        2,
    )
    assert {nbytes for each in sent(plan, "SEND").values() for nbytes in each} == {21 * WIDE}
    plan = make_plan(
        analyzed,
        tiny_job(train=TrainConfig(batch=4)),
        Mesh(pp=2, tp=4),
        (Pipeline(scatter=True), TensorParallel()),
        1,
    )
    assert {nbytes for each in sent(plan, "SEND").values() for nbytes in each} == {11 * WIDE}
    assert verify(analyzed, plan, [tokens(4)]).passed


def test_all_that_is_sent_is_planned():
    for case in ("words", "pieces"):
        mesh, strategies = CASES[case]
        traced = trace(model(), planned(mesh, *strategies), range(mesh.world_size), fake=case == "pieces")
        assert traced.passed, str(traced)


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_families_of_models_go_in_slices(family: str):
    common = {
        "vocab_size": 67,
        "tie_word_embeddings": False,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if family == "llama":
        analyzed = analyzed_llama(12, num_hidden_layers=3)
    elif family == "gpt2":
        shape = {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 16}
        config = transformers.GPT2Config(**common, **shape, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        analyzed = analyze(transformers.GPT2LMHeadModel(config), batches(1, length=12)[0])
    else:  # attention and mlp side by side, in one sum
        shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 29}
        config = transformers.GPTNeoXConfig(**common, **shape, max_position_embeddings=16)
        analyzed = analyze(transformers.GPTNeoXForCausalLM(config), batches(1, length=12)[0])
    _, plan = planned_llama(analyzed, Mesh(pp=2, tp=3), (Pipeline(), *SLICES, VocabParallel()), 1, length=12)
    assert static_checks(plan) == []
    verdict = verify(analyzed, plan, batches(1, length=12))
    assert verdict.passed, verdict


def test_tables_by_head_cross_with_the_heads_of_a_rank():
    shape = {
        "vocab_size": 67,
        "d_model": 24,
        "d_kv": 8,
        "d_ff": 29,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    words = batches(1, length=12)[0]["input_ids"]
    batch = {"input_ids": words, "decoder_input_ids": words.flip(1), "labels": words}
    config = transformers.T5Config(**shape, tie_word_embeddings=False)
    analyzed = analyze(lambda: transformers.T5ForConditionalGeneration(config), batch)
    pipeline = Pipeline(split_points=("encoder.block.1", "decoder.block.1"))
    _, plan = planned_llama(analyzed, Mesh(pp=3, tp=3), (pipeline, *SLICES), 2, length=12)
    two, stream = 2 * 2 * 12 * 12 * 4, 2 * 12 * 24 * 4  # two of four heads are on the first rank; two rows
    found = sent(plan, "SEND")
    assert found["encoder.block.0 to 1"] == {stream // 3}
    assert found["encoder.block.0:1 to 1"] == {two // 2}, "it is the same for all rows"
    assert found["encoder.final_layer_norm to 2"] == {stream}, "several blocks take it in"
    verdict = verify(analyzed, plan, [batch])
    assert verdict.passed, verdict


@pytest.mark.parametrize("strategy", [TensorParallel2D(), TensorParallel3D()], ids=["square", "cube"])
def test_a_stream_in_slices_of_the_width_crosses_as_those(strategy: Strategy):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 68, "intermediate_size": 56}
    depth = 2 if strategy.mode == "3d" else 1
    mesh = Mesh(pp=2, dp_shard=2, tp_depth=depth, tp=2)
    analyzed, plan = planned_llama(analyzed_llama(**sizes), mesh, (Pipeline(), strategy, SHARD, ZeRO()), 1)
    width = SIZES["hidden_size"] // (2 * depth)
    assert {nbytes for each in sent(plan, "SEND").values() for nbytes in each} == {9 * width * 4}
    verdict = verify(analyzed, plan, batches(1))
    assert verdict.passed, verdict


@pytest.mark.parametrize("rule", ["adamw", "muon", "several"])
@pytest.mark.parametrize("case", ["tokens", "stage 3"])
def test_rules_step_what_one_device_steps(rule: str, case: str):
    mesh, strategies = CASES[case]
    analyzed = pairs(layers=3)
    job = tiny_job(optimizer=RULES[rule])
    without = tuple(each for each in strategies if each.name != "sequence_parallel")  # five tokens
    plan = make_plan(analyzed, job, mesh, without, 2)
    assert static_checks(plan) == []
    assert error(outcome(analyzed, plan), outcome(analyzed, make_plan(analyzed, job))) < 1e-10


def test_the_owner_of_a_matrix_runs_its_part():
    plan = make_plan(
        pairs(layers=3),
        tiny_job(optimizer=RULES["muon"]),
        Mesh(pp=3, tp=2),
        (Pipeline(), TensorParallel()),
        1,
    )
    owned = []
    for rank in range(plan.mesh.world_size):
        mine = plan.for_rank(rank)
        found = [weight.name for _, weight in owned_params(plan.rank_view(rank))]
        assert set(found) <= {param_sharding.param.name for param_sharding in mine.view.param_shardings}
        owned += found
    matrices = [each.param.name for each in plan.sharding.param_shardings if each.owner_axes]
    assert sorted(owned) == sorted(matrices)


def test_pieces_in_a_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch):
    joined = StageIO._concat

    def swapped(self: StageIO, *given: object) -> torch.Tensor:
        whole = joined(self, *given)
        work = self._state.works[given[0].name]
        work.wait()
        return whole.flatten().roll(whole.numel() // 2).view(whole.shape)

    monkeypatch.setattr(StageIO, "_concat", swapped)
    assert not verify(
        model(), planned(Mesh(pp=2, tp=2), Pipeline(scatter=True), TensorParallel()), [tokens()]
    ).passed


def test_a_value_of_another_shape_than_planned_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    whole = StageValueShards.local_shape

    def other(self: StageValueShards, value: StageValue, samples: int) -> tuple[int, ...]:
        shape = whole(self, value, samples)
        return (*shape[:-1], shape[-1] + 1)

    plan = planned(Mesh(pp=2, tp=2), Pipeline(), *SLICES)
    monkeypatch.setattr(StageValueShards, "local_shape", other)
    with pytest.raises(
        PlanError, match=r"SEND\(layers.1 to 1, 0\) is to send float64 \[1, 3, 22\].* is float64 \[1, 3, 21\]"
    ):
        verify(model(), plan, [tokens()])


def test_what_cannot_work_is_refused():
    with pytest.raises(PlanError, match="scatter = true, and no two ranks of a stage hold the same value"):
        planned(Mesh(pp=2, tp=2), Pipeline(scatter=True), *SLICES)
    with pytest.raises(PlanError, match="scatter = true, and no two ranks of a stage hold the same value"):
        planned(Mesh(pp=2, dp_shard=2), Pipeline(scatter=True), SHARD, ZeRO())
    alike = StageValue("layers.1:1", "layers.1", ("layers.2",), ((0, 1), (LENGTH, 0), (WIDTH, 0)), "float64")
    model_spec = planned(Mesh(pp=2), Pipeline()).model_spec
    boundaries = replace(model_spec.stage_boundaries, values=(*model_spec.stage_boundaries.values, alike))
    job = tiny_job(train=TrainConfig(batch=NUM_SAMPLES))
    with pytest.raises(PlanError, match=r"'layers.1' returns 'layers.1' and 'layers.1:1' of the same shape"):
        Plan.make(
            job, Mesh(pp=2, tp=2), replace(model_spec, stage_boundaries=boundaries), (Pipeline(), *SLICES), 1
        )
    scores = replace(alike, dim_sizes=((0, 1), (3, 0)))
    boundaries = replace(model_spec.stage_boundaries, values=(*model_spec.stage_boundaries.values, scores))
    grid = (Pipeline(), TensorParallel2D(), SHARD, ZeRO())
    with pytest.raises(
        PlanError, match=r"'layers.1:1' \(samples x 3\) crosses a stage boundary: the slice that a rank has"
    ):
        Plan.make(
            job, Mesh(pp=2, dp_shard=2, tp=2), replace(model_spec, stage_boundaries=boundaries), grid, 1
        )
