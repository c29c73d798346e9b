"""Experts that are called on every token each, as in Llama 4: only rows that are not zeros travel."""

from functools import cache

import pytest
import torch
import transformers
from torch import nn

import meshwright as mw
from benchmarks.experts.expert_memory import ONE_RANK, with_route
from meshwright.comm.collectives.group import World
from meshwright.parallel.expert import dense_experts
from meshwright.parallel.expert.dense_experts import pad_by_expert
from meshwright.testing.ranks import run_on_threads
from tests.parallel.expert.mixture_model import SIZES, TOKENS, batch_of, expert_strategies, sgd_job

BATCHES = [batch_of(12), batch_of(12, 1)]
NUM_EXPERTS, TOP_K, NUM_LAYERS = 5, 2, 2


def llama4() -> nn.Module:
    """A Llama 4 of text, of which each token chooses 2 of 5 experts."""
    config = transformers.Llama4TextConfig(
        **SIZES,
        **{"head_dim": 8, "intermediate_size_mlp": 12, "interleave_moe_layer_step": 1},
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        attn_implementation="sdpa",
    )
    return transformers.Llama4ForCausalLM(config)


@cache
def analyzed_llama4() -> mw.AnalyzedModel:
    """The analysis of `llama4()`."""
    return mw.analyze(llama4, batch_of(4))


@pytest.mark.parametrize(
    ("mesh", "strategies", "micro_batch"),
    [
        (mw.Mesh(ep=3), expert_strategies(mw.ActivationCheckpointing()), 2),
        (mw.Mesh(ep=2, tp=2), None, 0),
    ],
    ids=["uneven, recomputed", "tp"],
)
def test_they_equal_one_device(mesh: mw.Mesh, strategies: tuple[mw.Strategy, ...] | None, micro_batch: int):
    plan = mw.make_plan(analyzed_llama4(), sgd_job(clip=0.5), mesh, strategies, micro_batch)
    verdict = mw.verify(analyzed_llama4(), plan, BATCHES)
    assert verdict.passed, str(verdict)


def test_all_tokens_at_one_expert_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch):
    analyzed = mw.analyze(lambda: with_route(llama4(), ONE_RANK, 3), batch_of(4))
    strategies = (mw.ExpertParallel(checkpoint_load=1), *expert_strategies()[1:])
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=3), strategies, 2)
    computed, pad = set[int](), dense_experts.pad_by_expert

    def record(rows: torch.Tensor, expert: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
        padded, place = pad(rows, expert, num_experts)
        computed.add(len(padded))
        return padded, place

    monkeypatch.setattr(dense_experts, "pad_by_expert", record)
    verdict = mw.verify(analyzed, plan, BATCHES)
    assert verdict.passed, str(verdict)
    expected = 3 * 2 * TOKENS * TOP_K * 2 / NUM_EXPERTS  # of the first two ranks, with two experts each
    assert max(computed) <= -(-expected // 1)
    assert len(computed) > 1


def test_only_rows_of_chosen_experts_travel():
    analyzed = analyzed_llama4()
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=3), expert_strategies())
    num_tokens = 4 * TOKENS

    def rows_sent(world: World) -> tuple[int, int]:
        chosen: list[torch.Tensor] = []
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            for layer in trainer.executor.state.trained_module.module.model.layers:
                layer.feed_forward.router.register_forward_hook(
                    lambda module, args, out: chosen.append(out[0] != 0)
                )
            world.ledger.is_recording = True
            trainer.step(trainer.local_batch(BATCHES[0]))
            sent = sum(n for name, n in world.ledger.counts.items() if name.startswith("rows to"))
        here = plan.for_rank(world.rank).rank
        own = slice(*[(0, 2), (2, 4), (4, 5)][here])
        return sent, sum(int(each.sum() - each[:, own].sum()) for each in chosen)

    found = run_on_threads(rows_sent, plan.mesh)
    assert [sent for sent, _ in found] == [away for _, away in found]
    assert 0 < sum(sent for sent, _ in found) < 3 * NUM_LAYERS * num_tokens * TOP_K


def test_a_trace_on_fake_tensors_issues_what_the_plan_states():
    analyzed = analyzed_llama4()
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=3), expert_strategies())
    assert mw.trace(analyzed, plan).passed
    sizes = {
        each.runtime_size
        for action in plan.for_rank(2).actions
        for each in action.transfers
        if each.runtime_size is not None and each.runtime_size.count.startswith("rows to")
    }
    pairs = 4 * TOKENS * TOP_K  # of which 4 in 5 go to other ranks than the last, which has one expert
    assert {(size.expected_rows, size.max_rows) for size in sizes} == {(round(pairs * 4 / 5), pairs)}


def test_each_expert_gets_as_many_rows_as_the_one_with_the_most():
    rows, expert = torch.arange(1.0, 5)[:, None], torch.tensor([2, 0, 2, 0])
    padded, place = pad_by_expert(rows, expert, 3)
    assert padded.flatten().tolist() == [2, 4, 0, 0, 1, 3]
    assert torch.equal(padded[place], rows)
