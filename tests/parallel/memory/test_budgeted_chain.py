"""The chain that a memory budget chooses for: its bytes, and the peaks of its choices, are those of the
program, and it knows what may be dropped.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.random_plans.random_models import analyzed_model
from meshwright.api import analyze, make_plan
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.budgeted_chain import BlockTimes, BudgetedChain, apply_choice, budgeted_chain
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.activation_budget import ActivationBudget
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.parallel.memory.unequal_model import SAMPLES, Unequal, activations, float32_job, planned, unequal
from tests.parallel.tensor.odd_llama import analyzed_llama
from tests.tiny_model import edited, tiny_job, token_samples

NOT_MEASURED = BlockTimes()
LEAVES_ALL = MemoryBudget(budget_mb=1e6)  # changes nothing, and asks for what segments need to know


def chain_of(plan: Plan, rank: int = 0, *more: str, times: BlockTimes = NOT_MEASURED) -> BudgetedChain:
    view, actions = plan.rank_view(rank), plan.for_rank(rank).actions
    choices = ("recompute", "segment", *more)
    return budgeted_chain(actions, view, plan.job, times, lambda call: True, choices)


def llama_plan(*mine: Strategy) -> Plan:
    return make_plan(analyzed_llama(num_hidden_layers=4), float32_job(4), Mesh(), mine)


@pytest.mark.parametrize(
    ("of", "more", "times"),
    [
        (planned, (), NOT_MEASURED),
        (planned, ("gist",), NOT_MEASURED),
        (planned, ("offload",), BlockTimes((1.0, 2.0) * 5, link_rate=1e8)),
    ],
)
def test_every_choice_has_the_peak_of_its_program(
    of: Callable[..., Plan], more: tuple[str, ...], times: BlockTimes
):
    plan = of(LEAVES_ALL)
    chain = chain_of(plan, 0, *more, times=times)
    assert chain.peak_nbytes(None) == activations(plan)
    choices = ActivationBudget(chain.blocks, chain.loss_nbytes).choices()
    assert len(choices) > 20
    for choice in choices:
        assert chain.peak_nbytes(choice) == choice.peak_nbytes
        chosen = edited(plan, partial(apply_choice, choice=choice, view=plan.rank_view(0), job=plan.job))
        assert static_checks(chosen) == []
        # the program leaves out gradients between blocks, and what a rerun saves until it ends
        assert activations(chosen) <= choice.peak_nbytes


def test_outputs_that_only_the_next_block_reads_may_be_dropped():
    chain = chain_of(planned(LEAVES_ALL))
    droppable = [block.block_call for block in chain.blocks if block.can_drop_output]
    assert droppable == [f"layers.{number}" for number in range(7)]  # the head may be all that the loss reads


class Skips(Unequal):
    """Layer 4 reads what layer 1 has returned, too, and code behind layer 5 scales its output."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        kept = [x]
        for number, layer in enumerate(self.layers):
            x = layer(x + kept[2] if number == 4 else x)
            kept.append(x)
            x = x * 0.5 if number == 5 else x
        return self.head(x)


def test_outputs_that_others_read_are_kept():
    analyzed = analyze(Skips, token_samples(2), loss=token_cross_entropy())
    chain = chain_of(make_plan(analyzed, float32_job(), Mesh(), (LEAVES_ALL,)))
    droppable = [block.block_call for block in chain.blocks if block.can_drop_output]
    assert droppable == ["layers.0", "layers.6"]


class InPlace(nn.Module):
    """Code between blocks writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Unequal()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(input_ids)
        for layer in self.inner.layers:
            x += layer(x)
        return self.inner.head(x)


def test_a_model_that_writes_in_place_drops_nothing():
    analyzed = analyze(InPlace, token_samples(2), loss=token_cross_entropy())
    chain = chain_of(make_plan(analyzed, float32_job(), Mesh(), (LEAVES_ALL,)))
    assert not any(block.can_drop_output for block in chain.blocks)


def test_without_the_boundaries_nothing_is_dropped():
    chain = chain_of(planned())
    assert not any(block.can_drop_output for block in chain.blocks)


def test_microbatches_in_flight_are_those_of_the_stage():
    plan = planned(Pipeline(schedule="1f1b"), LEAVES_ALL, mesh=Mesh(pp=2), micro_batch=SAMPLES // 4)
    in_flight = [{block.in_flight for block in chain_of(plan, rank).blocks} for rank in (0, 1)]
    assert in_flight == [{2}, {1}]


def test_ranks_with_other_slices_see_the_same_chain():
    plan = make_plan(
        analyzed_llama(num_hidden_layers=4), tiny_job(4), Mesh(cp=2), (RingAttention(), DDP("cp")), 1
    )
    chains = [chain_of(plan, rank) for rank in range(2)]
    assert chains[0].blocks == chains[1].blocks
    assert chains[0].loss_nbytes == chains[1].loss_nbytes
    peaks = [chain.peak_nbytes(None) for chain in chains]
    assert peaks[0] == peaks[1] > 0


def test_ranks_that_differ_in_a_second_length_alone_see_the_same_chain():
    """T5 over 3 ranks: 12 tokens of the encoder are 4 for each, and 8 of the decoder 2, 3 and 3."""
    plan = make_plan(
        analyzed_model("t5, even"), tiny_job(4), Mesh(cp=3), (Ulysses(), DDP("cp"), LEAVES_ALL), 4
    )
    chains = [chain_of(plan, rank) for rank in range(3)]
    assert chains[0].blocks == chains[1].blocks == chains[2].blocks
    assert len({chain.peak_nbytes(None) for chain in chains}) == 1


def test_seconds_are_operations_and_bytes_read_and_written():
    chain = chain_of(planned())
    seconds = {block.block_call: block.forward_s for block in chain.blocks}
    assert seconds["layers.5"] > seconds["layers.2"] * 0.5 > seconds["layers.1"]
    calls = unequal().model_spec.block_calls
    plan = planned()
    view, actions = plan.rank_view(0), plan.for_rank(0).actions
    times = BlockTimes(range(len(calls)))
    given = budgeted_chain(actions, view, plan.job, times, lambda call: True, ("recompute",))
    assert [block.forward_s for block in given.blocks] == [number / 1e3 for number in range(len(calls))]


def test_a_rerun_that_keeps_outputs_takes_what_is_left_of_the_measured_time():
    plan, forward = llama_plan(), 1000.0
    view, actions, calls = plan.rank_view(0), plan.for_rank(0).actions, plan.model_spec.block_calls
    seconds = []
    for matmul in (0.0, 400.0):
        times = BlockTimes([forward] * len(calls), {"matmul": [matmul] * len(calls)})
        chain = budgeted_chain(actions, view, plan.job, times, lambda call: True, ("selective",))
        options = [option for block in chain.blocks for option in block.options]
        seconds.append([option.seconds for option in options if option.name == "save matmul"])
    assert len(seconds[0]) == 4
    assert min(seconds[0]) > forward / 1e3  # calls of Python
    differences = [one - other for one, other in zip(*seconds, strict=True)]
    assert differences == pytest.approx([0.4] * len(differences))


def test_the_program_of_a_choice_is_the_same_for_all_microbatches():
    plan = planned(MemoryBudget(), micro_batch=SAMPLES // 3)
    by_microbatch = [
        [(each.kind, each.subject) for each in plan.for_rank(0).actions if each.microbatch == microbatch]
        for microbatch in range(3)
    ]
    assert by_microbatch[0] == by_microbatch[1] == by_microbatch[2]
    assert isinstance(replace(plan).program, Program)
