"""In words: which tokens of a sample each rank has, and what the busiest has to do of attention.

The dtype of each role as a table (`engine/precision.py` says what they are for), and in one line.

What a plan says that does not compute what one device computes: how old the weights are, and what is kept of
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rich.table import Column, Table
from rich.text import Text

from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.model_spec.sequence_info import SequenceInfo, SequenceSharding
from meshwright.plan.optimizer_spec import BFLOAT16_STATES, EIGHT_BIT_STATES
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import stepped_microbatches
from meshwright.plan.step.weight_stashing import staleness

PACKED_EXAMPLE, PACKED_ENDS = (
    "documents of a sixth, a third and a half of a row",
    (1 / 6, 1 / 2),
)  # what masks are is not known before
IMBALANCE_TOLERANCE = 0.05  # of the mean, which is not worth a word
MAX_CHECKED_TOKENS = 1 << 13  # tokens; longer rows are as even


def sequence_sharding_text(plan: Plan) -> dict[str, str]:
    """How tokens are dealt to ranks, by heading; nothing where every rank has all of its samples."""
    space, tokens = plan.sharding, plan.model_spec.sequence_info
    if space.sequence_sharding is None or tokens is None:
        return {}
    said = (
        f"{tokens.length:,} of each sample on {space.sequence_sharding.num_ranks} ranks: "
        f"{_tokens_per_rank(space.sequence_sharding, tokens.length)} "
        f"each"
    )
    said += "".join(
        f", and {length:,}: {_tokens_per_rank(space.sequence_sharding, length)}"
        for length in tokens.lengths[1:]
    )
    said += "".join(f"; {each}" for each in _balance_texts(space.sequence_sharding, tokens))
    reach = max((each.halo for each in tokens.conv_calls), default=0)
    said += (
        f"; convolutions take in up to {reach:,} neighbours of a token, of other ranks too" if reach else ""
    )
    whole = dict.fromkeys(
        LAYER_NUMBER.sub("*", each.block_call)
        for each in tokens.block_calls
        if not tokens.num_sharded_tokens(each.block_call)
    )
    said += f"; every rank runs {', '.join(whole)} on all there is" if whole else ""
    if tokens.gathers:
        numel = sum(each.numel for each in tokens.gathers)
        behind = ", ".join(
            dict.fromkeys(
                f"glue behind {each.block_call}" if each.block_call else "the loss" for each in tokens.gathers
            )
        )
        said += f"; {behind} needs other ranks' tokens: {numel:,} elements per sample are brought together"
        said += (
            " for a batch like the example (it looks at values: another one may need others)"
            if tokens.reads_values
            else ""
        )
    return {"tokens": said}


def _tokens_per_rank(sequence_sharding: SequenceSharding, length: int) -> str:
    counts = sequence_sharding.num_tokens_by_rank(length)
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"


def _balance_texts(sequence_sharding: SequenceSharding, tokens: SequenceInfo) -> Iterator[str]:
    """How even ranks compute attention: under causal masks, and of masks, which are data, under one of packed
    documents.
    """
    kinds = {
        "causal attention": (any(attend.is_causal for attend in tokens.attention_calls), ()),
        f"attention under a mask, such as {PACKED_EXAMPLE}": (
            any(attend.has_mask for attend in tokens.attention_calls),
            PACKED_ENDS,
        ),
    }
    for name, (met, ends) in kinds.items():
        if met:
            share = max_over_mean_attention(sequence_sharding, tokens.length, ends)
            yield (
                f"{name}: the busiest rank has {share:.2f} x the "
                f"mean{_better_balance(sequence_sharding, tokens.length, ends, share)}"
            )


def _better_balance(
    sequence_sharding: SequenceSharding, length: int, ends: Sequence[float], share: float
) -> str:
    """What would be more even than `share`, if anything: `zigzag` before what serves less often."""
    ways = {
        "zigzag": replace(sequence_sharding, zigzag=True, striped=False),
        "striped": replace(sequence_sharding, zigzag=False, striped=True),
    }
    found = (
        {name: max_over_mean_attention(way, length, ends) for name, way in ways.items()}
        if sequence_sharding.num_ranks > sequence_sharding.num_inner_ranks
        else {}
    )
    name = min(found, key=lambda each: round(found[each], 2), default="")
    return (
        f' (load_balance = "{name}": {found[name]:.2f})'
        if name and share - found[name] > IMBALANCE_TOLERANCE
        else ""
    )


def max_over_mean_attention(
    sequence_sharding: SequenceSharding, length: int, document_ends: Sequence[float] = ()
) -> float:
    """What the busiest rank has of the pairs of tokens that a mask leaves, over the mean of all ranks.

    Each token looks at itself and those before it in its document; documents end at `ends`, as shares of the
    row, and with it.
    """
    length = min(length, MAX_CHECKED_TOKENS)
    stops = [0, *(int(length * end) for end in document_ends), length]
    firsts = range(
        0, sequence_sharding.num_ranks, sequence_sharding.num_inner_ranks
    )  # of those that have the same tokens for attention, and some of the heads each
    work = [
        sum(_num_attended_pairs(stops, *span) for span in sequence_sharding.inner_group_ranges(length, first))
        for first in firsts
    ]
    return max(work) * len(work) / sum(work)


def _num_attended_pairs(stops: Sequence[int], begin: int, end: int) -> int:
    """Over the positions from `begin` up to `end`, the sum of how many each looks at."""
    found = 0
    for start, stop in pairwise(stops):
        low, high = max(begin, start) - start, min(end, stop) - start
        found += (high * (high + 1) - low * (low + 1)) // 2 if high > low else 0
    return found


ROLE_TEXTS = {
    "parameters": "what blocks use and what is gathered",
    "master": "what the optimizer steps, and checkpoints hold",
    "compute": "operands of matrix products",
    "gradients": "the sum that the optimizer reads",
    "reduce": "gradients under way",
    "optimizer_states": "what the optimizer remembers",
}


def precision_roles(plan: Plan) -> dict[str, str]:
    """The dtype of each role, in words."""
    roles, rule = plan.job.precision.roles, plan.job.optimizer.name
    moments = (
        "bfloat16"
        if rule in BFLOAT16_STATES
        else "8 bits, scales float32"
        if rule in EIGHT_BIT_STATES
        else roles["optimizer_states"]
    )
    return {**roles, "optimizer_states": moments}


def precision_text(plan: Plan) -> str:
    """The roles by dtype, in one line: those of one dtype together."""
    found: dict[str, list[str]] = {}
    roles = precision_roles(plan)
    if _steps_params_directly(plan):
        roles.pop("master")
    for role, dtype in roles.items():
        found.setdefault(dtype, []).append(role)
    said = "; ".join(f"{dtype} {', '.join(roles)}" for dtype, roles in found.items())
    precision = plan.job.precision
    return f"{said}; loss scale from {precision.loss_scale:g}" if precision.scales_loss else said


def precision_table(plan: Plan) -> Table:
    """Role, dtype, and what it is."""
    table = Table(
        Column("role", min_width=12),
        "dtype",
        Column("what it is", overflow="fold"),
        box=None,
        header_style="bold",
    )
    table.padding = (0, 2, 0, 0)
    same = {"master": "the parameters themselves"} if _steps_params_directly(plan) else {}
    for role, dtype in precision_roles(plan).items():
        table.add_row(role, Text(dtype), Text(same.get(role, ROLE_TEXTS[role])))
    return table


def _steps_params_directly(plan: Plan) -> bool:
    """Whether the optimizer steps the parameters, and no copy of them."""
    return plan.job.precision.effective.master == plan.job.precision.parameters


def staleness_text(plan: Plan) -> dict[str, str]:
    """Rows of a summary of a plan that is not exact: which weights gradients meet, where every micro-batch is
    an update.
    """
    if plan.exact:
        return {}
    names = ", ".join(strategy.name for strategy in plan.strategies if not strategy.exact)
    found = {"not exact": f"{names} does not compute what one device computes"}
    lists = [actions for _, actions in plan.program.roles]
    if not any(map(stepped_microbatches, lists)):
        return found
    old = ", ".join(str(staleness(actions)) for actions in lists)
    kept = [stashed_nbytes(actions) for actions in lists]
    said = ", ".join(
        f"{len(each)} ({format_nbytes(sum(each.values()))})" if each else "none" for each in kept
    )
    updates = (
        f"{plan.num_microbatches}, one per micro-batch, with gradients at weights that "
        f"are "
        f"up to {old} updates old, by stage"
    )
    return found | {"updates per step": updates, "old weights kept": f"{said}, by stage"}


def stashed_nbytes(actions: tuple[Action, ...]) -> dict[str, int]:
    """The memory in which a rank keeps old versions of its weights: bytes by name."""
    return {
        hold.name: hold.nbytes for action in actions if action.kind == "STASH" for hold in action.allocations
    }
