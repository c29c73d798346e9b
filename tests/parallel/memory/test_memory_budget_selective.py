"""Blocks that a memory budget makes keep outputs of operations: bits, live bytes, and what is chosen."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
import transformers
from rich.console import Console

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory import budgeted_chain, selective_outputs
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.selective_outputs import TakeOutputs
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.kept_outputs import kept_ops
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.terminal.action_table import plan_details
from meshwright.verifier.static_checks import static_checks
from tests.parallel.expert.mixture_model import analyzed_mixtral
from tests.parallel.memory.test_memory_budget_numbers import llama_plan, trained
from tests.parallel.memory.test_selective_outputs import FLOAT64, analyzed, kept_nbytes, trained_alone
from tests.parallel.memory.test_selective_outputs import planned as planned_alone
from tests.parallel.memory.unequal_model import MIB, activations, float32_job
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import case_of, first_of, tiny_job, token_samples, verdict_of

SELECTIVE = MemoryBudget(choices=("selective",))
BOTH = ("matmul", "attention")


def kept(plan: Plan, rank: int = 0) -> dict[str, tuple[str, ...]]:
    """What the block calls of a rank keep, by name; those that run again alone."""
    actions = plan.for_rank(rank).actions
    return {each.subject: kept_ops(each) for each in actions if each.kind == "F_CHECKPOINTED"}


@pytest.mark.parametrize("case", ["one device", "zero 3 of 3", "zb_h1", "tp 2"])
def test_the_bits_are_those_of_the_plan_without(case: str):
    plan = llama_plan(case, SELECTIVE)
    assert static_checks(plan) == []
    assert any(any(kept(plan, rank).values()) for rank in range(plan.mesh.world_size))
    assert trained(plan) == trained(llama_plan(case))


@pytest.mark.parametrize("case", ["one device", "zero 3 of 3", "1f1b"])
def test_it_equals_one_device_and_sends_what_is_planned(case: str):
    verdict = verify(analyzed_llama(num_hidden_layers=6), llama_plan(case, SELECTIVE), batches(2, 12))
    assert verdict.passed, str(verdict)


def alone(budget: Strategy) -> Plan:
    return planned_alone("llama", FLOAT64, budget)


def test_live_bytes_are_those_of_the_plan():
    plan, plain = alone(SELECTIVE), alone(ActivationCheckpointing(tuple(kept(alone(SELECTIVE)))))
    found, wanted = (trained_alone("llama", each)[1] for each in (plan, plain))
    assert kept_nbytes(plan) > 0
    assert [one - other for one, other in zip(found, wanted, strict=True)] == [kept_nbytes(plan)] * 6


def test_an_output_in_the_place_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budgeted_chain, "SAVED_OPS", {"save matmul": ("matmul",)})
    plan = alone(SELECTIVE)
    assert verdict_of(case_of(analyzed("llama"), plan)).passed

    class Swapped(TakeOutputs):
        def __init__(self, ops, kept, *more) -> None:
            kept[1], kept[2] = kept[2], kept[1]  # keys and values
            super().__init__(ops, kept, *more)

    monkeypatch.setattr(selective_outputs, "TakeOutputs", Swapped)
    assert first_of(verdict_of(case_of(analyzed("llama"), plan)))[:2] == (0, "gradient")


def wide_llama() -> AnalyzedModel:
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 4, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes)
    samples = {key: value.repeat(1, 32) for key, value in token_samples(2).items()}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    return analyze(model.to_empty(device="cpu"), samples, loss=token_cross_entropy())


def test_each_block_keeps_what_is_fastest_within_the_bytes():
    """Without the choice, more operations run in as many bytes."""
    model = wide_llama()

    def of(*mine: Strategy) -> Plan:
        return make_plan(model, float32_job(2), Mesh(), mine)

    least, full = activations(of(MemoryBudget())), activations(of())
    for fraction in (0.4, 0.6, 0.8):  # with less, one layer keeps everything
        nbytes = least + fraction * (full - least)
        plan, without = (
            of(MemoryBudget(nbytes / MIB, choices))
            for choices in (MemoryBudget().choices, ("recompute", "segment"))
        )
        assert activations(plan) <= nbytes
        assert any(kept(plan).values())
        assert not any(kept(without).values())
        flops = [sum(each.flops for each in one.for_rank(0).actions) for one in (plan, without)]
        assert flops[0] < flops[1]


def test_the_plan_names_what_each_block_keeps():
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan_details(alone(SELECTIVE)))
    text = console.export_text()
    ops = " and ".join(next(each for each in kept(alone(SELECTIVE)).values() if each))
    assert f"keeps what {ops} returned" in text
    assert f"takes what {ops} returned" in text


def test_what_selective_checkpointing_refuses_is_not_chosen():
    mine = (RingAttention(), DDP("cp"), SELECTIVE)
    ring = make_plan(analyzed_llama(num_hidden_layers=6), tiny_job(12), Mesh(cp=3), mine, 2)
    assert {*kept(ring).values()} == {("matmul",)}
    mixture = make_plan(analyzed_mixtral(), replace(tiny_job()), Mesh(), (MemoryBudget(),))
    assert not any(kept(mixture).values())
