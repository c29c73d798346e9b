"""Finds the token dims of the inputs of a block call, and makes the tensors on which the block runs in a
trial.

    SequenceShardedTensor    output of a block, with a known sequence dim
    other tensors            made by glue from inputs that every rank reads: a token dim is known by its size
    first attention input    of a model without token inputs: tokens start with its [samples, tokens, width]
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from meshwright.model.context_parallel.attention_call import (
    SDPAArguments,
    describe_mask,
    split_bias_and_mask,
)
from meshwright.model.context_parallel.sharded_activation import SequenceShardedTensor, find_sharded_tensors
from meshwright.model.sequence_analysis.token_rules import (
    MADE_IN_BLOCK,
    SHARDED,
    TokenLayout,
    TokenLayouts,
    find_token_dims,
)
from meshwright.model.sequence_analysis.trial_lengths import TrialLengths
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles
from meshwright.model.tensors.inplace_leaf_alias import make_alias
from meshwright.model.tensors.pytree import opaque_tensors, tree_tensors, value_leaves
from meshwright.nn.experts import Experts
from meshwright.nn.mixture_of_experts import ExpertRows, MixtureOfExperts
from meshwright.nn.routing.capacity import SAMPLE, GroupRouting
from meshwright.nn.whole_samples import WholeSamples
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.sequence_info import (
    AttentionMaskSpec,
    AttentionSpec,
    GatheredValue,
    SampleGather,
)

LENGTH_ARGUMENT = "gets the number of tokens as an argument: a rank has some of them, so use their shape"


@dataclass
class TracedBlockCall:
    """A running block call: open modules, and the reason why it cannot run on a sequence shard."""

    name: str
    open_modules: list[tuple[str, nn.Module]]
    not_sequence_parallel: str = ""
    calls_attention: bool = False
    attends_elsewhere: bool = False  # it attends to a tensor without tokens
    finished_modules: list[str] = field(default_factory=list)  # modules that have returned
    num_unchecked: int = 0  # open modules whose operations are not checked: experts, and WholeSamples
    leaks_tokens: bool = False  # tokens leave the block other than through its outputs
    # length of the inputs of inner modules
    module_num_tokens: dict[str, int] = field(default_factory=dict)
    reads_tokens: bool = False  # it computes with its tokens, beyond reading shapes
    # ids of input masks that every rank has in full
    replicated_masks: frozenset[int] = frozenset()

    def end_module(self, module: nn.Module) -> bool:
        """Notes that `module` has returned. Returns whether it is the one that was open."""
        if not self.open_modules or self.open_modules[-1][1] is not module:
            return False
        self.finished_modules.append(self.open_modules.pop()[0])
        return True


@dataclass
class BlockInputs:
    """Per input tensor of a block call its token dims and planned length; `replacements` by id, and why it
    cannot be sharded.
    """

    token_dims: list[tuple[int, ...]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    replacements: dict[int, torch.Tensor] = field(default_factory=dict)
    not_sequence_parallel: str = ""
    # ids of replacements: masks of all queries and heads, made by glue
    replicated_masks: set[int] = field(default_factory=set)

    @property
    def has_tokens(self) -> bool:
        """Whether any input has tokens."""
        return bool(self.replacements)


def analyze_block_inputs(
    value: Any, trial_lengths: TrialLengths, token_layouts: TokenLayouts, *, starts_tokens: bool
) -> BlockInputs:
    """Returns the token dims of the inputs `value` of a block call; with `starts_tokens`, tokens start there
    if it has none.
    """
    inputs_found, inner_lengths = BlockInputs(), _inner_lengths(value, trial_lengths, begins=starts_tokens)
    shared_lengths = {
        *map(trial_lengths.glue_length, trial_lengths.planned_lengths)
    } - trial_lengths.inner_primes.keys() | inner_lengths
    if any(type(each) is int and each in shared_lengths for each in value_leaves(value)):
        inputs_found.not_sequence_parallel = LENGTH_ARGUMENT
    for tensor in tree_tensors(value):
        local_tensor = tensor.local_tensor if type(tensor) is SequenceShardedTensor else tensor
        local_tensor = trial_lengths.resize_for_block(
            local_tensor, _inner_token_dims(tensor, local_tensor, inner_lengths, trial_lengths)
        )
        dims, last_dim = find_token_dims(local_tensor, trial_lengths.prime_product), local_tensor.ndim - 1
        # one row of keys, the same for every query
        if dims == (last_dim,) and last_dim > 1 and local_tensor.shape[-2] == 1:
            layout, dims = TokenLayout("keys"), ()
        else:
            layout = SHARDED if len(dims) == 1 else TokenLayout("mask")
        if (len(dims) > 1 and dims != (last_dim - 1, last_dim)) or any(
            local_tensor.shape[dim] not in trial_lengths.planned_lengths for dim in dims
        ):
            inputs_found.not_sequence_parallel = inputs_found.not_sequence_parallel or (
                f"takes a tensor of shape {describe_shape(local_tensor, trial_lengths)}, whose "
                f"tokens cannot be distinguished"
            )
        inputs_found.token_dims.append(dims)
        inputs_found.num_tokens.append(
            trial_lengths.planned_length(local_tensor.shape[dims[0]]) if dims else 0
        )
        if dims or layout.kind == "keys":
            inputs_found.replacements[id(tensor)] = inputs_found.replacements.get(
                id(tensor), make_alias(local_tensor)
            )
            token_layouts[inputs_found.replacements[id(tensor)]] = layout
            is_per_head = local_tensor.ndim > 2 and local_tensor.shape[-3] > 1  # heads may be sharded
            if (
                layout.kind != "sharded"
                and not is_per_head
                and type(tensor) is not SequenceShardedTensor
                and not tensor.requires_grad
            ):
                inputs_found.replicated_masks.add(id(inputs_found.replacements[id(tensor)]))
    return inputs_found


def _inner_lengths(value: Any, sizes: TrialLengths, *, begins: bool) -> set[int]:
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
    tensor: torch.Tensor, local_tensor: torch.Tensor, inner_lengths: set[int], sizes: TrialLengths
) -> list[int]:
    inputs_found = [
        dim
        for dim, size in enumerate(local_tensor.shape)
        if size in inner_lengths and (dim or size != sizes.num_samples)
    ]
    if local_tensor.ndim == 3 and type(tensor) is SequenceShardedTensor:
        return [dim for dim in inputs_found if dim == tensor.sequence_dim]
    if (
        local_tensor.ndim == 3
        and local_tensor.is_floating_point()
        and local_tensor.shape[0] == sizes.num_samples
    ):
        return [dim for dim in inputs_found if dim == 1]  # the hidden size may equal the length
    return inputs_found


def note_opaque_outputs(block_call: TracedBlockCall, outputs: Any, prime_product: int) -> None:
    """Notes that `block_call` cannot run on a shard if its `outputs` hold tokens in an object of a class that
    is no container.
    """
    if any(find_token_dims(tensor, prime_product) for tensor in opaque_tensors(outputs)):
        reason = (
            f"returns tokens inside a {type(outputs).__name__}: return a tensor, tuple, dict or dataclass"
        )
        block_call.leaks_tokens = True
        block_call.not_sequence_parallel = (
            block_call.not_sequence_parallel or f"{block_of(block_call.name)} {reason}"
        )


def describe_shape(tensor: torch.Tensor, trial_lengths: TrialLengths) -> str:
    """Returns the shape of a tensor in a block in words."""
    sizes = []
    for size in tensor.shape:
        prime = next((each for each in trial_lengths.planned_lengths if size and size % each == 0), 0)
        multiple = size // prime if prime else size
        count_word = "samples" if multiple == trial_lengths.num_samples else str(multiple)
        sizes.append(count_word if not prime else "tokens" if multiple == 1 else f"{count_word} * tokens")
    return f"[{', '.join(sizes)}]"


def describe_attention_call(
    block_call: TracedBlockCall,
    arguments: SDPAArguments,
    token_layouts: TokenLayouts,
    trial_lengths: TrialLengths,
    *,
    declared_causal: bool,
) -> AttentionSpec | str:
    """Returns the spec of an attention call, or why it does not attend token by token; `declared_causal` if
    the module says so.
    """
    for each in (arguments.query, arguments.key, arguments.value):
        layout, dims = token_layouts.get(each), find_token_dims(each, trial_lengths.prime_product)
        if (
            layout is None
            or layout.kind != "sharded"
            or dims != (each.ndim - 2,)
            or each.shape[-2] not in trial_lengths.planned_lengths
        ):
            return "attends to other tokens than its own"
    if arguments.key.shape[-2] != arguments.value.shape[-2]:
        return "attends to keys and values of different sequences"
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


def _describe_mask(mask: torch.Tensor | None, shared_lengths: Collection[int]) -> AttentionMaskSpec | None:
    """Returns the spec of a mask; of a combined bias and replicated mask, that of the bias."""
    parts = None if mask is None else split_bias_and_mask(mask)
    if parts is not None and id(parts[1]) in shared_lengths:
        return describe_mask(parts[0])
    inputs_found = describe_mask(mask)
    return (
        replace(inputs_found, is_replicated=True)
        if inputs_found is not None and id(mask) in shared_lengths
        else inputs_found
    )


def is_unrelated_to_tokens(arguments: SDPAArguments, trial_lengths: TrialLengths) -> bool:
    """Returns whether no operand of an attention call has sharded tokens."""
    return not any(find_token_dims(each, trial_lengths.prime_product) for each in arguments.tensors)


def note_module_call(
    block_call: TracedBlockCall, name: str, args: tuple[Any, ...], trial_lengths: TrialLengths
) -> None:
    """Notes in `block_call` the sequence length with which an inner module is called."""
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and name not in block_call.module_num_tokens:
        inputs_found = {
            trial_lengths.planned_length(first.shape[dim])
            for dim in find_token_dims(first, trial_lengths.prime_product)
        } - {0}
        block_call.module_num_tokens |= {name: min(inputs_found)} if len(inputs_found) == 1 else {}


def unchecked_modules(module: nn.Module) -> set[int]:
    """Returns the ids of modules whose operations need no check: experts that treat each token by itself,
    although they sort the rows of all tokens or run differently in a trial; and `WholeSamples`.
    """
    experts = {each.name for each in find_layer_roles(module) if each.kind == "experts"}
    return {
        id(part)
        for name, part in module.named_modules()
        if isinstance(part, (ExpertRows, WholeSamples)) or (name in experts and _computes_per_token(part))
    }


def _computes_per_token(experts: nn.Module) -> bool:
    return isinstance(experts, Experts) or type(experts).__module__.startswith("transformers.")


def group_by_sample(module: nn.Module) -> None:
    """Makes the groups of `module`, if it is a mixture of experts with capacity, whole samples, which may
    have any length in a trial.
    """
    if isinstance(module, MixtureOfExperts) and isinstance(module.routing, GroupRouting):
        module.routing = replace(module.routing, group_tokens=SAMPLE)


def note_gather(
    block_call: TracedBlockCall,
    args: tuple[Any, ...],
    calls: tuple[Sequence[AttentionSpec], list[SampleGather]],
    trial_lengths: TrialLengths,
) -> str:
    """Adds the call of `WholeSamples` with `args` to the `calls` of attention and gathers. Returns why its
    values cannot be gathered; "" if they can.
    """
    given, lengths = tree_tensors(args), set[int]()
    for each in given:
        lengths.add(trial_lengths.planned_lengths.get(each.shape[1], 0) if each.ndim > 1 else 0)
        if find_token_dims(each, trial_lengths.prime_product) != (1,):
            lengths.add(0)
    if len(lengths) != 1 or 0 in lengths:
        return "computes of whole samples what is not [samples, tokens, ..]"
    values = (
        GatheredValue(prod(each.shape[2:]), each.is_floating_point(), each.requires_grad) for each in given
    )
    attended = sum(each.block_call == block_call.name for each in calls[0])
    where = block_call.name, block_call.open_modules[-1][0], lengths.pop()
    calls[1].append(SampleGather(*where, tuple(values), attended, tuple(block_call.finished_modules)))
    return ""
