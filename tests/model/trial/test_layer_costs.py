"""Flops and saved elements of shardable layers: a pair has everything between its layers."""

import torch
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model
from meshwright.plan.sharding.mesh import Mesh
from tests.model.two_block_model import Net
from tests.parallel.tensor.odd_llama import NUM_SAMPLES, SIZES, TOKENS, batches, llama, planned


class Block(nn.Module):
    """A norm, a pair, and beside it a matrix of its own; what goes in is added to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.side = (
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.up(y))) + torch.tanh(self.side(y))


def test_a_pair_includes_its_products_and_the_operations_between():
    tokens = torch.zeros(2, 5, dtype=torch.long)
    roles = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.side": "replicated"}
    found = analyze(
        lambda: Model(Net(Block), layer_roles=roles), {"input_ids": tokens, "labels": tokens.roll(1, -1)}
    ).model_spec
    calls = {call.name: call for call in found.layer_calls}
    for layer in ("layers.0", "layers.1"):
        up, down, norm = (calls[f"{layer}.{leaf}"] for leaf in ("up", "down", "norm"))
        assert (up.flops, down.flops) == (5 * 2 * 8 * 12, 5 * 2 * 12 * 8)
        assert (up.saved_numel, down.saved_numel) == (
            0,
            5 * 12,
        )  # what tanh gives out; what the norm gives out is none of the pair's
        assert norm.flops == 0
        at = found.block_calls.index(layer)
        assert found.flops[at] == up.flops + down.flops + 5 * 2 * 8 * 8  # and the matrix that stays whole
        assert (
            found.saved_numel[at] >= down.saved_numel + 5 * 8 + 5 * 8
        )  # what the norm gives out, and the other tanh


def test_attention_between_heads_belongs_to_its_pair():
    analyzed, _ = planned(llama(), Mesh())
    layer = [call for call in analyzed.model_spec.layer_calls if call.block_call == "model.layers.0"]
    at = analyzed.model_spec.block_calls.index("model.layers.0")
    assert sum(call.flops for call in layer) == analyzed.model_spec.flops[at]
    width, attended = SIZES["hidden_size"], next(call for call in layer if call.name.endswith("o_proj"))
    assert attended.flops == TOKENS * 2 * width * width + 2 * 2 * TOKENS * TOKENS * width
    assert batches(1)[0]["input_ids"].shape == (NUM_SAMPLES, TOKENS)
