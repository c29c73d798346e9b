"""Finds block calls that cannot run on a sequence shard, and that every rank can run on all tokens.

a block that mixes tokens        takes inputs that every rank reads; each continues with its own tokens
a block that pools tokens        takes gathered tokens, and returns none
"""

from dataclasses import replace
from typing import Any

from meshwright.model.sequence_analysis.block_input_token_dims import BlockInputs
from meshwright.model.sequence_analysis.token_rules import find_token_dims
from meshwright.model.sequence_analysis.trial_lengths import TrialLengths
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo


def try_replicated(
    block_info: BlockSequenceInfo, outputs: Any, block_inputs: BlockInputs, trial_lengths: TrialLengths
) -> BlockSequenceInfo:
    """Returns a block call that cannot run on a shard as one that runs on all tokens, if it takes no gathered
    ones; else unchanged.
    """
    tensors_found, no_dims = tree_tensors(outputs), ((),) * len(block_info.input_token_dims)
    output_dims = tuple(find_token_dims(each, trial_lengths.prime_product) for each in tensors_found)
    output_shards = [
        each.shape[dims[0]] in trial_lengths.planned_lengths
        for each, dims in zip(tensors_found, output_dims, strict=True)
        if len(dims) == 1
    ]
    if output_shards and all(output_shards) and not any(len(dims) > 1 for dims in output_dims):
        return replace(
            block_info,
            input_token_dims=no_dims,
            input_num_tokens=(),
            output_token_dims=output_dims,
            not_sequence_parallel="",
            is_replicated=True,
        )
    if block_inputs.has_tokens:
        return block_info
    # another size equals the length
    return replace(
        block_info,
        input_token_dims=no_dims,
        input_num_tokens=(),
        output_token_dims=((),) * len(tensors_found),
        not_sequence_parallel="",
    )


def try_replicated_pooling(
    block_info: BlockSequenceInfo, outputs: Any, prime_product: int
) -> BlockSequenceInfo:
    """Returns a block call without token outputs as one that runs on gathered tokens; any other unchanged."""
    is_pooling = bool(block_info.output_token_dims) and not any(
        find_token_dims(each, prime_product) for each in tree_tensors(outputs)
    )
    return (
        replace(
            block_info,
            input_token_dims=((),) * len(block_info.input_token_dims),
            input_num_tokens=(),
            not_sequence_parallel="",
            is_replicated=True,
        )
        if is_pooling
        else block_info
    )
