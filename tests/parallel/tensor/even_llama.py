"""A small Llama whose sizes divide by 2, 3, 4 and 6, and the elements that each rank receives under a
plan.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Transfer
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.odd_llama import TOKENS, analyzed_llama, llama

WIDTH, INNER, HEADS, WORDS = 48, 72, 24, 72
EVEN = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": 2,
}


def even_llama(**more: object) -> nn.Module:
    """With groups of two heads; `more` are fields of its config."""
    return llama(**{**EVEN, **more})


def analyzed_even_llama(**more: object) -> AnalyzedModel:
    """The analyzed model of `even_llama(**more)`, made once."""
    return analyzed_llama(**{**EVEN, **more})


def inputs(samples: int) -> Iterator[int]:
    """The elements of what the linear layers of one block take in, each once: what q, k and v do is one."""
    return (samples * TOKENS * width for width in (WIDTH, WIDTH, WIDTH, INNER))


def shards(analyzed: AnalyzedModel, ranks: int, within: str = "") -> int:
    """The elements of one of `ranks` equal shards of each block whose name has `within` in it, all blocks
    together.
    """
    numel = [
        sum(weight.numel for weight in analyzed.model_spec.params_of(block_call))
        for block_call in analyzed.model_spec.block_calls
        if within in block_call
    ]
    return sum(-(-each // ranks) for each in numel)


def elements_received(plan: Plan, kinds: Iterable[str], axis: str, within: str = "layers") -> float:
    """The elements that a rank receives along `axis` in actions of these kinds whose subject has `within` in
    it.
    """
    mine = [
        action
        for action in plan.program.actions(FIRST_ROLE)
        if action.kind in kinds and within in action.subject
    ]
    return sum(_elements(move, plan) for action in mine for move in action.transfers if move.axes == (axis,))


def _elements(move: Transfer, plan: Plan) -> float:
    ranks = plan.mesh.group_size(move.axes)
    per_put_in = {
        "all_gather": ranks - 1,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_reduce": 2 * (ranks - 1) / ranks,
    }
    return move.nbytes / FLOAT_NBYTES[move.dtype] * per_put_in[move.collective]


class LargestNorm(nn.Module):
    """A norm that follows no formula that is known: it divides by the largest magnitude."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().amax(-1, keepdim=True) + self.eps)
