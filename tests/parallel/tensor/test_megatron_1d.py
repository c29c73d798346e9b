"""Tensor parallelism, mode 1d: bytes of the paper, sharded memory, and refusals of what cannot be sharded."""

from math import prod

import pytest
import torch
from torch import nn

from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.odd_llama import NUM_SAMPLES, SIZES, TOKENS, analyzed_llama, planned


def sums(plan: Plan, kind: str) -> list[int]:
    return [
        move.nbytes
        for action in plan.program.actions(FIRST_ROLE)
        if action.kind == kind
        for move in action.inner_transfers
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_sends_the_papers_bytes(ranks: int):
    _, plan = planned(analyzed_llama(), Mesh(tp=ranks), (TensorParallel(),))
    stream, layers = NUM_SAMPLES * TOKENS * SIZES["hidden_size"] * 4, SIZES["num_hidden_layers"]
    assert sums(plan, "F") == sums(plan, "B") == [stream] * 2 * layers  # k = 2 pairs, forward and backward
    sent = sum(2 * nbytes * (ranks - 1) / ranks for kind in ("F", "B") for nbytes in sums(plan, kind))
    k, b, s, h = 2, NUM_SAMPLES, TOKENS, SIZES["hidden_size"]
    assert sent == layers * 4 * k * b * s * h * (ranks - 1) / ranks * 4


def test_ranks_hold_slices_of_their_own_sizes():
    analyzed, plan = planned(analyzed_llama(), Mesh(tp=2), (TensorParallel(),))
    shapes = [
        {
            param_sharding.param.name: param_sharding.param.shape
            for param_sharding in plan.for_rank(rank).view.param_shardings
        }
        for rank in range(2)
    ]
    down, query = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    assert [each[down] for each in shapes] == [(48, 27), (48, 26)]
    assert [each[query] for each in shapes] == [(32, 48), (16, 48)]  # two groups of two heads, and one
    for weight in analyzed.model_spec.params:
        held = sum(prod(each[weight.name]) for each in shapes)
        assert held == (weight.numel if weight.role in ("colwise", "rowwise") else 2 * weight.numel)


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(
        PlanError, match=r"divides? into 6 units.*and tp has 7 ranks\n.*set mesh.tp to at most 6"
    ):
        planned(analyzed_llama(), Mesh(tp=7))


def test_key_heads_fewer_than_ranks_stay_whole_and_their_gradients_are_summed():
    _, plan = planned(analyzed_llama(), Mesh(tp=4), (TensorParallel(),))
    homes = {
        param_sharding.param.name: param_sharding for param_sharding in plan.rank_view(0).param_shardings
    }
    assert [
        param_sharding.param.shape[0]
        for name, param_sharding in homes.items()
        if name.endswith("layers.0.self_attn.q_proj.weight")
    ] == [16]
    keys = [
        param_sharding for name, param_sharding in homes.items() if ".k_proj." in name or ".v_proj." in name
    ]
    assert [param_sharding.sliced_dims for param_sharding in keys] == [{}] * 2 * SIZES["num_hidden_layers"]
    stream = NUM_SAMPLES * TOKENS * SIZES["hidden_size"] * 4
    assert (
        sums(plan, "B")
        == [stream, keys[0].param.numel * 4, keys[0].param.numel * 4, stream] * SIZES["num_hidden_layers"]
    )


class Plain(nn.Module):
    """Nothing is declared of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIZES["vocab_size"], 8)
        self.head = nn.Linear(8, SIZES["vocab_size"])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))


def test_a_model_without_layer_roles_is_refused_with_a_declaration():
    with pytest.raises(
        PlanError, match=r"no pair of linear layers.*is known to split \(.*\)\n(?s:.*)layer_roles="
    ):
        planned(Plain(), Mesh(tp=2))
