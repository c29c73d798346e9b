"""Blocks that compute with the number of tokens, and blocks that backward recomputes, cannot run on a token
shard.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.utils.checkpoint import checkpoint

from meshwright.model.sequence_analysis.analyze_sequence import resize_sequence
from meshwright.model.sequence_analysis.trial_lengths import BlockOnTwoLengths, ComputedOp, length_dependence
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo
from tests.model.sequence_analysis.test_token_rules import (
    WIDTH,
    Layer,
    Layers,
    Rule,
    attended,
    heads,
    layer,
    tokens_of,
)

COUNTED: dict[str, Rule] = {
    "logarithm": lambda self, x: x * (math.log(x.shape[1]) / math.log(32)),
    "one more": lambda self, x: x / (x.shape[1] + 1),
    "elements": lambda self, x: x * (100 / x.numel()),
    "tensor": lambda self, x: x / torch.tensor(float(x.shape[1])),
    "full": lambda self, x: x * torch.full((1,), 1.0 / x.shape[1]),
    "full for each": lambda self, x: x * x.new_full((*x.shape[:2], 1), x.shape[1] * 0.1),
    "scale of attention": lambda self, x: (
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x), scale=x.shape[1] ** -0.25)
        .transpose(1, 2)
        .reshape(x.shape)
    ),
}


@pytest.mark.parametrize("rule", COUNTED)
def test_a_value_computed_from_the_sequence_length_is_noticed(rule: str):
    assert "the number of tokens" in layer(COUNTED[rule]).not_sequence_parallel


def test_a_branch_on_the_sequence_length_is_noticed():
    assert layer(lambda self, x: x * 2 if x.shape[1] > 6 else x).not_sequence_parallel.startswith(
        "layers.0 runs more or fewer"
    )


def test_values_that_do_not_depend_on_the_length_are_harmless():
    assert (
        layer(lambda self, x: self.norm(x) * WIDTH**-0.5 + torch.full((1,), 3.0)).not_sequence_parallel == ""
    )


def test_operations_are_compared_in_order():
    one, two = (
        ComputedOp.from_call("a", "mul", (torch.ones(1), 2.0), {}),
        ComputedOp.from_call("a", "mul", (torch.ones(1), 3.0), {}),
    )
    assert length_dependence([one, two], [one, two], 5) == ""
    assert length_dependence([one, one], [one, two], 5) == "a computes with the number of tokens (mul)"
    assert length_dependence([one, two], [one], 5).startswith("a runs more or fewer operations")


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_that_backward_recomputes_is_refused(reentrant: bool):
    def again(self: Layer, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(attended, self, x, use_reentrant=reentrant)

    assert "torch.utils.checkpoint" in layer(again).not_sequence_parallel


class Again(Layers):
    """The model runs its layer in a checkpoint."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.layers[0], self.embed(input_ids), use_reentrant=False))


def test_a_block_that_backward_recomputes_is_refused():
    found: list[str] = [each.not_sequence_parallel for each in tokens_of(lambda: Again(attended)).block_calls]
    assert any("leave that to the strategy 'activation_checkpointing'" in each for each in found)


def test_padding_at_the_end_of_sequences_is_kept_on_fewer_tokens():
    mask = torch.ones(2, 31, dtype=torch.int64)
    mask[:, -1] = 0
    assert (resize_sequence(mask, {31: 5}) == 0).any()
    assert resize_sequence(torch.arange(62).view(2, 31), {31: 5})[0].tolist() == [0, 1, 2, 3, 4]


def test_token_dims_have_the_lengths_of_both_forwards():
    sizes = torch.Size((3, 12, 8)), torch.Size((7, 5, 8))
    mask = torch.Size((1, 4, 12, 11)), torch.Size((1, 4, 5, 13))
    found = BlockOnTwoLengths({"0.0": sizes, "0.1": mask}, {"": sizes}, {12: 5, 11: 13})
    info = BlockSequenceInfo("layers.0", ((1,), (2, 3)), ((1,),), arg_paths=("0.0", "0.1"))
    assert found.has_tokens_as(info)
    for wrong in (
        replace(info, input_token_dims=((2,), (2, 3))),
        replace(info, input_token_dims=((1,), (1, 2))),
        replace(info, input_num_tokens=(11, 12)),
        replace(info, arg_paths=("0.0", "mask")),
        replace(info, output_token_dims=((2,),)),
        replace(info, output_token_dims=((1,), (1,))),
    ):
        assert not found.has_tokens_as(wrong)


def test_a_gathered_input_grows_with_samples_if_both_forwards_show_it():
    sizes = torch.Size((3, 12, 8)), torch.Size((7, 5, 8))
    found = BlockOnTwoLengths({"0.0": sizes}, {}, {12: 5}, (3, 7), ["0.0"])
    assert found.is_per_sample("0.0", 3 * 12 * 8)
    assert not found.is_per_sample("0.1", 3 * 12 * 8)
    assert not found.is_per_sample("0.0", 12 * 8)
    assert not replace(found, in_parameter_dtype=()).is_per_sample("0.0", 3 * 12 * 8)
    for other in ((7, 3, 8), (3, 5, 8), (7, 5, 9), (7, 40)):
        wrong = replace(found, inputs={"0.0": (sizes[0], torch.Size(other))})
        assert not wrong.is_per_sample("0.0", 3 * 12 * 8)
