"""In words: which tokens of a sample each rank has, and what the busiest has to do of attention."""

from meshwright.core.plan import Plan
from meshwright.core.tokens import Deal


def token_words(plan: Plan) -> dict[str, str]:
    """How tokens are dealt to ranks, by heading; nothing where every rank has all of its samples."""
    space, tokens = plan.space, plan.anatomy.tokens
    if space.deal is None or tokens is None:
        return {}
    counts = sorted(set(space.deal.counts(tokens.length)))
    each = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    said = f"{tokens.length:,} of each sample on {space.deal.ranks} ranks: {each} each"
    if any(attend.causal for attend in tokens.attends):
        said += f"; causal attention: the busiest rank has {busiest(space.deal, tokens.length):.2f} x the mean"
    if tokens.met:
        numel, behind = sum(numel for _, numel in tokens.met), ", ".join(visit or "the inputs" for visit, _ in tokens.met)
        said += f"; glue behind {behind} needs all tokens: {numel:,} elements per sample are brought together, not counted below"
    return {"tokens": said}


def busiest(deal: Deal, length: int) -> float:
    """What the busiest rank has of the pairs of tokens that a causal mask leaves, over the mean of all ranks."""
    firsts = range(0, deal.ranks, deal.inner)  # of those that have the same tokens for attention, and some of the heads each
    work = [sum(_pairs(*span) for span in deal.together(length, first)) for first in firsts]
    return max(work) * len(work) / sum(work)


def _pairs(begin: int, end: int) -> int:
    """Over the positions from `begin` up to `end`, the sum of how many each looks at."""
    return (end * (end + 1) - begin * (begin + 1)) // 2
