"""What a block of a trial takes in: which tensors have tokens, of which rows, and what it is given in their place.

apart                     what a block has given out, tokens along a dim that is known
plain                     made by glue of rows that every rank has read: a dim is known by its size
the first that attends    of a model that is not given rows of tokens: [rows, tokens, width] begins them
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.model.sequence_analysis.lengths import TrialLengths
from meshwright.model.sequence_analysis.token_rules import (
    MADE_IN_BLOCK,
    SHARDED,
    TokenLayout,
    TokenLayouts,
    find_token_dims,
)
from meshwright.model.sequence_parallel.attention_call import (
    SDPAArguments,
    describe_mask,
    split_bias_and_mask,
)
from meshwright.model.sequence_parallel.sharded_activation import SequenceShardedTensor, find_sharded_tensors
from meshwright.model.tensors.grad_alias import make_alias
from meshwright.model.tensors.pytree import tree_tensors, value_leaves
from meshwright.plan.model_spec.sequence_info import AttentionMaskSpec, AttentionSpec

LENGTH_ARGUMENT = "is told how many tokens there are: a rank has some of them, and their shape tells"


@dataclass
class TracedBlockCall:
    """A visit that runs: which modules are under way within, and what keeps it from running on some of the tokens."""

    name: str
    open_modules: list[tuple[str, nn.Module]]
    not_sequence_parallel: str = ""
    calls_attention: bool = False
    attends_elsewhere: bool = False  # it attends to something that has no tokens
    finished_modules: list[str] = field(default_factory=list)  # the modules that have been left
    num_open_experts: int = 0  # how many experts are under way: what they do is their own
    leaks_tokens: bool = False  # tokens go round what it gives out
    module_num_tokens: dict[str, int] = field(
        default_factory=dict
    )  # of how many tokens what modules within are called with
    reads_tokens: bool = False  # it computes with tokens that it was given, and does not only ask for shapes
    replicated_masks: frozenset[int] = (
        frozenset()
    )  # by identity, the masks that it is given of which every rank has all


@dataclass
class BlockInputs:
    """For each tensor that a visit takes in, which dims are tokens, and how many in the plan; `new` by identity, `why` not."""

    token_dims: list[tuple[int, ...]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    replacements: dict[int, torch.Tensor] = field(default_factory=dict)
    not_sequence_parallel: str = ""
    replicated_masks: set[int] = field(
        default_factory=set
    )  # of `new`, by identity: masks of all queries and heads, made by glue

    @property
    def has_tokens(self) -> bool:
        """Whether any of it has to do with tokens."""
        return bool(self.replacements)


def analyze_block_inputs(
    value: Any, trial_lengths: TrialLengths, token_layouts: TokenLayouts, *, starts_tokens: bool
) -> BlockInputs:
    """What a visit takes in that is given `value`; with `begins`, tokens begin there where it is given none."""
    found, counts = BlockInputs(), _inner_lengths(value, trial_lengths, begins=starts_tokens)
    known = {
        *map(trial_lengths.glue_length, trial_lengths.planned_lengths)
    } - trial_lengths.inner_primes.keys() | counts
    if any(type(each) is int and each in known for each in value_leaves(value)):
        found.not_sequence_parallel = LENGTH_ARGUMENT
    for tensor in tree_tensors(value):
        local = tensor.local_tensor if type(tensor) is SequenceShardedTensor else tensor
        local = trial_lengths.resize_for_block(local, _inner_token_dims(tensor, local, counts, trial_lengths))
        dims, last = find_token_dims(local, trial_lengths.prime_product), local.ndim - 1
        if (
            dims == (last,) and last > 1 and local.shape[-2] == 1
        ):  # a row of keys for every query, all of them
            along, dims = TokenLayout("keys"), ()
        else:
            along = SHARDED if len(dims) == 1 else TokenLayout("mask")
        if (len(dims) > 1 and dims != (last - 1, last)) or any(
            local.shape[dim] not in trial_lengths.planned_lengths for dim in dims
        ):
            found.not_sequence_parallel = (
                found.not_sequence_parallel
                or f"takes in a tensor of shape {describe_shape(local, trial_lengths)}, whose tokens cannot be told apart"
            )
        found.token_dims.append(dims)
        found.num_tokens.append(trial_lengths.planned_length(local.shape[dims[0]]) if dims else 0)
        if dims or along.kind == "keys":
            found.replacements[id(tensor)] = found.replacements.get(id(tensor), make_alias(local))
            token_layouts[found.replacements[id(tensor)]] = along
            by_head = local.ndim > 2 and local.shape[-3] > 1  # ranks may have some of them
            if (
                along.kind != "sharded"
                and not by_head
                and type(tensor) is not SequenceShardedTensor
                and not tensor.requires_grad
            ):
                found.replicated_masks.add(id(found.replacements[id(tensor)]))
    return found


def _inner_lengths(value: Any, sizes: TrialLengths, *, begins: bool) -> set[int]:
    """How many tokens glue sees of those that began within, and are taken in here."""
    given = find_sharded_tensors(value)
    plain = [
        each
        for each in tree_tensors(value)
        if type(each) is not SequenceShardedTensor and each.is_floating_point()
    ]
    if begins and not given and not any(find_token_dims(each, sizes.prime_product) for each in plain):
        rows = [
            each.shape[1]
            for each in plain
            if each.ndim == 3 and each.shape[0] == sizes.num_samples and each.shape[1] > 1
        ]
        for count in rows[:1]:
            sizes.start_tokens(count)
            return {count}
    return {each.token_shard.length for each in given if each.token_shard.length in sizes.inner_primes}


def _inner_token_dims(
    tensor: torch.Tensor, local: torch.Tensor, counts: set[int], sizes: TrialLengths
) -> list[int]:
    """Which dims of a tensor are tokens that began within, by their number in glue."""
    found = [
        dim for dim, size in enumerate(local.shape) if size in counts and (dim or size != sizes.num_samples)
    ]
    if local.ndim == 3 and type(tensor) is SequenceShardedTensor:
        return [dim for dim in found if dim == tensor.sequence_dim]
    if local.ndim == 3 and local.is_floating_point() and local.shape[0] == sizes.num_samples:
        return [dim for dim in found if dim == 1]  # the width may be as large
    return found


def describe_shape(tensor: torch.Tensor, trial_lengths: TrialLengths) -> str:
    """The shape of a tensor in a block, in words."""
    words = []
    for size in tensor.shape:
        prime = next((each for each in trial_lengths.planned_lengths if size and size % each == 0), 0)
        many = size // prime if prime else size
        word = "rows" if many == trial_lengths.num_samples else str(many)
        words.append(word if not prime else "tokens" if many == 1 else f"{word} * tokens")
    return f"[{', '.join(words)}]"


def describe_attention_call(
    block_call: TracedBlockCall,
    arguments: SDPAArguments,
    token_layouts: TokenLayouts,
    trial_lengths: TrialLengths,
    *,
    declared_causal: bool,
) -> AttentionSpec | str:
    """A call of attention within a visit; or why it is none by tokens. `declared`: whoever calls says that it is causal."""
    for each in (arguments.query, arguments.key, arguments.value):
        along, dims = token_layouts.get(each), find_token_dims(each, trial_lengths.prime_product)
        if (
            along is None
            or along.kind != "sharded"
            or dims != (each.ndim - 2,)
            or each.shape[-2] not in trial_lengths.planned_lengths
        ):
            return "attends to something else than its own tokens"
    if arguments.key.shape[-2] != arguments.value.shape[-2]:
        return "attends to keys and values of unlike rows"
    mask = None if arguments.attn_mask is None else token_layouts.get(arguments.attn_mask)
    if mask is not None and mask.kind not in ("mask", "keys"):
        return (
            MADE_IN_BLOCK.format(mask.origin)
            if mask.origin
            else "attends with a mask that has tokens in one dim alone"
        )
    return AttentionSpec(
        block_call.name,
        num_heads=arguments.query.shape[-3] if arguments.query.ndim > 3 else 1,
        num_kv_heads=arguments.key.shape[-3] if arguments.key.ndim > 3 else 1,
        head_dim=arguments.query.shape[-1],
        value_head_dim=arguments.value.shape[-1],
        query_len=trial_lengths.planned_lengths[arguments.query.shape[-2]],
        key_len=trial_lengths.planned_lengths[arguments.key.shape[-2]],
        is_causal=arguments.is_causal or (arguments.attn_mask is not None and declared_causal),
        has_mask=arguments.attn_mask is not None,
        needs_grad=any(each.requires_grad for each in arguments.tensors),
        mask=_describe_mask(arguments.attn_mask, block_call.replicated_masks),
        qkv_need_grad=(
            arguments.query.requires_grad,
            arguments.key.requires_grad,
            arguments.value.requires_grad,
        ),
    )


def _describe_mask(mask: torch.Tensor | None, known: Collection[int]) -> AttentionMaskSpec | None:
    """What the plan needs to know of a mask; of a bias less one of those that are `known`, what it needs to know of the bias."""
    made = None if mask is None else split_bias_and_mask(mask)
    if made is not None and id(made[1]) in known:
        return describe_mask(made[0])
    found = describe_mask(mask)
    return replace(found, is_replicated=True) if found is not None and id(mask) in known else found


def is_unrelated_to_tokens(arguments: SDPAArguments, trial_lengths: TrialLengths) -> bool:
    """Whether a call of attention has nothing to do with tokens that are dealt."""
    return not any(find_token_dims(each, trial_lengths.prime_product) for each in arguments.tensors)


def note_module_call(
    block_call: TracedBlockCall, name: str, args: tuple[Any, ...], trial_lengths: TrialLengths
) -> None:
    """Note in `visit` that a module within is called: with tokens of which row, where those are some."""
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and name not in block_call.module_num_tokens:
        found = {
            trial_lengths.planned_length(first.shape[dim])
            for dim in find_token_dims(first, trial_lengths.prime_product)
        } - {0}
        block_call.module_num_tokens |= {name: min(found)} if len(found) == 1 else {}
