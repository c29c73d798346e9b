"""Describes a plan in notes: dtypes, sequence sharding, an auxiliary loss, and staleness of weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.optimizer_per_param import BFLOAT16_STATES, EIGHT_BIT_STATES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.step.weight_stashing import staleness
from meshwright.report.table import Table

PACKED_EXAMPLE, PACKED_ENDS = (
    "documents of a sixth, a third and a half of a sequence",
    (1 / 6, 1 / 2),
)  # what masks are is not known before
IMBALANCE_TOLERANCE = 0.05  # of the mean, which is not worth a word
MAX_CHECKED_TOKENS = 1 << 13  # tokens; longer rows are as even


def sequence_sharding_text(plan: Plan) -> dict[str, str]:
    """Returns how sequences are sharded, by heading; empty if every rank has unsharded samples."""
    sharding, tokens = plan.sharding, plan.model_spec.sequence_info
    if sharding.sequence_sharding is None or tokens is None:
        return {}
    text = (
        f"{tokens.length:,} of each sample, sharded over {sharding.sequence_sharding.num_ranks} ranks: "
        f"{_tokens_per_rank(sharding.sequence_sharding, tokens.length)} each"
    )
    text += "".join(
        f", and {length:,}: {_tokens_per_rank(sharding.sequence_sharding, length)}"
        for length in tokens.lengths[1:]
    )
    text += "".join(f"; {each}" for each in _balance_texts(sharding.sequence_sharding, tokens))
    halo = max((each.halo for each in tokens.conv_calls), default=0)
    text += f"; convolutions exchange up to {halo:,} neighbours of a token with other ranks" if halo else ""
    unsharded = dict.fromkeys(
        LAYER_NUMBER.sub("*", each.block_call)
        for each in tokens.block_calls
        if not tokens.num_sharded_tokens(each.block_call)
    )
    text += f"; every rank runs {', '.join(unsharded)} on all tokens" if unsharded else ""
    if tokens.gathers:
        numel = sum(each.numel for each in tokens.gathers)
        consumers = ", ".join(
            dict.fromkeys(
                f"glue after {each.block_call}" if each.block_call else "the loss" for each in tokens.gathers
            )
        )
        text += f"; {consumers} needs the tokens of other ranks: {numel:,} elements per sample are gathered"
        text += (
            " for a batch like the example (the forward reads values: another batch may need others)"
            if tokens.reads_values
            else ""
        )
    return {"tokens": text}


def _tokens_per_rank(sequence_sharding: SequenceSharding, length: int) -> str:
    counts = sequence_sharding.num_tokens_by_rank(length)
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"


def _balance_texts(sequence_sharding: SequenceSharding, tokens: SequenceInfo) -> Iterator[str]:
    kinds = {
        "causal attention": (any(attend.is_causal for attend in tokens.attention_calls), ()),
        f"attention under a mask, such as {PACKED_EXAMPLE}": (
            any(attend.has_mask for attend in tokens.attention_calls),
            PACKED_ENDS,
        ),
    }
    for name, (is_used, ends) in kinds.items():
        if is_used:
            share = max_over_mean_attention(sequence_sharding, tokens.length, ends)
            yield (
                f"{name}: the busiest rank has {share:.2f} x the "
                f"mean{_better_balance(sequence_sharding, tokens.length, ends, share)}"
            )


def _better_balance(
    sequence_sharding: SequenceSharding, length: int, ends: Sequence[float], share: float
) -> str:
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
    """Returns the unmasked token pairs of the busiest rank over the mean of all ranks.

    Each token attends to itself and to those before it in its document; documents end at `document_ends`, as
    fractions of the sequence, and at its end.
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
    "parameters": "what blocks compute with, and what is gathered",
    "master": "what the optimizer updates and checkpoints contain",
    "compute": "operands of matrix products",
    "gradients": "the accumulated sum that the optimizer reads",
    "reduce": "gradients in collectives",
    "optimizer_states": "what the optimizer keeps per parameter",
}


def precision_roles(plan: Plan) -> dict[str, str]:
    """Returns the dtype of each role, as text."""
    roles, rule = plan.job.precision.roles, plan.job.optimizer.name
    optimizer_states = (
        "bfloat16"
        if rule in BFLOAT16_STATES
        else "8 bits, scales float32"
        if rule in EIGHT_BIT_STATES
        else roles["optimizer_states"]
    )
    return {**roles, "optimizer_states": optimizer_states}


def precision_text(plan: Plan) -> str:
    """Returns the roles by dtype, in one line."""
    roles_by_dtype: dict[str, list[str]] = {}
    roles = precision_roles(plan)
    if _steps_params_directly(plan):
        roles.pop("master")
    for role, dtype in roles.items():
        roles_by_dtype.setdefault(dtype, []).append(role)
    text = "; ".join(f"{dtype} {', '.join(roles)}" for dtype, roles in roles_by_dtype.items())
    precision = plan.job.precision
    return f"{text}; loss scale from {precision.loss_scale:g}" if precision.scales_loss else text


def precision_table(plan: Plan) -> Table:
    """Returns a table of role, dtype, and meaning."""
    texts = dict(ROLE_TEXTS)
    if _steps_params_directly(plan):
        texts["master"] = "the parameters themselves"
    return Table(
        ["role", "dtype", "meaning"],
        [(role, dtype, texts[role]) for role, dtype in precision_roles(plan).items()],
    )


def _steps_params_directly(plan: Plan) -> bool:
    return plan.job.precision.effective.master == plan.job.precision.parameters


def batch_sums_text(plan: Plan) -> dict[str, str]:
    """Returns what an auxiliary loss of the global batch costs; empty without one."""
    if not plan.model_spec.num_batch_sums:
        return {}
    text = f"of the global batch: {plan.model_spec.num_batch_sums} sums, known before the first backward"
    if plan.num_microbatches > 1:
        text += f"; so all {plan.num_microbatches} microbatches run forward first, and keep their activations"
    return {"auxiliary loss": text}


def staleness_text(plan: Plan) -> dict[str, str]:
    """Returns summary rows of a plan that is not exact: which weight versions gradients use."""
    if plan.exact:
        return {}
    names = ", ".join(strategy.name for strategy in plan.strategies if not strategy.exact)
    rows = {"not exact": f"{names} does not compute the same as one device"}
    if plan.sharding.tiers.delay:
        rows |= {"gradients": "at weights that lack the last update, which the host makes beside a step"}
    if any(each.is_gathered_as_codes for each in plan.sharding.param_shardings):
        text = "gathered as codes: the loss of a step and gradients are at their values; what is stepped, "
        rows |= {"weights": f"{text}evaluated, saved and exported is exact"}
    lists = [role.actions for role in plan.program.roles]
    if not any(map(stepped_microbatches, lists)):
        return rows
    old = ", ".join(str(staleness(actions)) for actions in lists)
    stashes = [stashed_nbytes(actions) for actions in lists]
    stashed_text = ", ".join(
        f"{len(each)} ({format_nbytes(sum(each.values()))})" if each else "none" for each in stashes
    )
    updates = (
        f"{plan.num_microbatches}, one per microbatch, with gradients at weights "
        f"that are up to {old} updates old, by stage"
    )
    return rows | {"updates per step": updates, "stashed weights": f"{stashed_text}, by stage"}


def stashed_nbytes(actions: tuple[Action, ...]) -> dict[str, int]:
    """Returns the memory of old weight versions on a rank: bytes by name."""
    return {
        hold.name: hold.nbytes for action in actions if action.kind == "STASH" for hold in action.allocations
    }
