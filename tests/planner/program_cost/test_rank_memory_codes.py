"""Codes of sums in the planned peak: they last as long as a sum, and a rank makes one sum after the other."""

import torch
from torch import nn

import meshwright as mw
from meshwright.plan.plan import Plan
from meshwright.plan.step.memory.memory_names import is_coded_sum
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes_by_category, state_bytes
from tests.tiny_model import VOCABULARY, tiny_job, token_samples

WIDTH, INT8 = 48, mw.Int8Compression(min_numel=1)
FEW, MANY = 2, 600  # samples of a step: then sums, or activations, are what is largest


class Wide(nn.Module):
    """An embedding, linear layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


ANALYZED = mw.analyze(Wide, token_samples(), loss=mw.token_cross_entropy())


def ddp_plan(samples: int, *strategies: Strategy, guard: mw.LossGuard | None = None) -> Plan:
    job = tiny_job(samples, optimizer=mw.OptimizerConfig("sgd", lr=0.1), guard=guard or mw.LossGuard())
    ddp = mw.BatchSplit(), mw.DDP(bucket_mb=0.001)
    return mw.make_plan(ANALYZED, job, mw.Mesh(dp_replicate=2), (*ddp, *strategies))


def codes(plan: Plan) -> list[int]:
    allocations = [each for action in plan.for_rank(0).actions for each in action.allocations]
    return [each.nbytes for each in allocations if is_coded_sum(each.name)]


def test_the_largest_codes_alone_are_in_the_peak_and_none_between_steps():
    exact, coded = ddp_plan(FEW), ddp_plan(FEW, INT8)
    before, now = (peak_nbytes_by_category(each, 0) for each in (exact, coded))
    assert len(codes(coded)) > 2
    added = sum(now.values()) - now["strategy_states"] - sum(before.values())
    assert 0 < added <= max(codes(coded))
    assert state_bytes(coded, 0).buffers == state_bytes(exact, 0).buffers


def test_codes_of_sums_behind_the_fullest_moment_take_nothing():
    exact, coded = ddp_plan(MANY), ddp_plan(MANY, INT8)
    before, now = (peak_nbytes_by_category(each, 0) for each in (exact, coded))
    assert now.pop("strategy_states") == before["parameters"]
    assert now == before


def test_new_residuals_are_states_too_until_a_step_has_decided():
    plain, guarded = (ddp_plan(FEW, INT8, guard=guard) for guard in (None, mw.LossGuard("skip", window=2)))
    before, now = (peak_nbytes_by_category(each, 0) for each in (plain, guarded))
    kept = before["strategy_states"]
    assert 1.9 * kept < now["strategy_states"] <= 2 * kept
    assert state_bytes(guarded, 0) == state_bytes(plain, 0)
