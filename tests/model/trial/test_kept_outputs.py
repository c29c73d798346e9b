"""What matrix products and attention return in a recorded forward: elements, layers, operations."""

import torch
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.model_spec.op_sizes_and_memory import KeptOutputs
from tests.parallel.tensor.odd_llama import SIZES, TOKENS, analyzed_llama
from tests.tiny_model import TOKENS as LENGTH
from tests.tiny_model import VOCABULARY, token_samples

HIDDEN, INNER = SIZES["hidden_size"], SIZES["intermediate_size"]
HEADS, GROUPS, WIDTH = 6, 3, HIDDEN // 6


def test_a_llama_layer_returns_what_the_formula_says_each_with_the_layer_that_shards_it():
    found = [each for each in analyzed_llama().model_spec.kept_outputs if each.block_call == "model.layers.1"]
    keys, layer = GROUPS * WIDTH, "model.layers.1"
    scores = 4 * TOKENS * TOKENS * HIDDEN

    def linear(name: str, inner: int, outer: int, saved: int, *, is_sum: bool = False) -> KeptOutputs:
        flops = 2 * TOKENS * inner * outer
        return KeptOutputs(
            layer, "matmul", TOKENS * outer, TOKENS * saved, 0, 0, flops, f"{layer}.{name}", is_sum
        )

    attention = TOKENS * HIDDEN, TOKENS * HIDDEN, TOKENS * HEADS, TOKENS * HEADS
    assert found == [
        linear("self_attn.q_proj", HIDDEN, HIDDEN, 0),  # attention saves what rotation returns
        linear("self_attn.k_proj", HIDDEN, keys, 0),
        linear("self_attn.v_proj", HIDDEN, keys, 0),  # repeated for each head
        KeptOutputs(layer, "attention", *attention, scores, f"{layer}.self_attn.o_proj"),
        linear("self_attn.o_proj", HIDDEN, HIDDEN, 0, is_sum=True),
        linear("mlp.gate_proj", HIDDEN, INNER, INNER),
        linear("mlp.up_proj", HIDDEN, INNER, INNER),
    ]  # what down_proj returns is added to the residual stream, and nothing reads it


class Layer(nn.Module):
    """A product whose result is kept, a convolution that is overwritten, and a product that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv, self.out = nn.Linear(6, 8), nn.Conv1d(8, 4, 3, padding=1), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(self.up(x).tanh().mT.contiguous()).mul_(2.0).mT.contiguous())


class Net(nn.Module):
    """Two such layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_what_a_block_returns_is_not_kept_twice_and_writes_are_seen():
    spec = analyze(lambda: Model(Net()), token_samples(2), loss=token_cross_entropy()).model_spec
    assert spec.kept_outputs == tuple(
        KeptOutputs(f"layers.{at}", "matmul", 8 * LENGTH, 0, flops=2 * 6 * 8 * LENGTH) for at in range(2)
    )
