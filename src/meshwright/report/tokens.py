"""In words: which tokens of a sample each rank has, and what the busiest has to do of attention."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.core.plan import Plan
from meshwright.core.tokens import Deal, Tokens
from meshwright.model.sockets import NUMBERED

PACKED, ENDS = "documents of a sixth, a third and a half of a row", (1 / 6, 1 / 2)  # what masks are is not known before
EVEN = 0.05  # of the mean, which is not worth a word
LONG = 1 << 13  # tokens; longer rows are as even


def token_words(plan: Plan) -> dict[str, str]:
    """How tokens are dealt to ranks, by heading; nothing where every rank has all of its samples."""
    space, tokens = plan.space, plan.anatomy.tokens
    if space.deal is None or tokens is None:
        return {}
    said = f"{tokens.length:,} of each sample on {space.deal.ranks} ranks: {_each(space.deal, tokens.length)} each"
    said += "".join(f", and {length:,}: {_each(space.deal, length)}" for length in tokens.lengths[1:])
    said += "".join(f"; {each}" for each in _evenness(space.deal, tokens))
    reach = max((each.reach for each in tokens.convolves), default=0)
    said += f"; convolutions take in up to {reach:,} neighbours of a token, of other ranks too" if reach else ""
    whole = dict.fromkeys(NUMBERED.sub("*", each.visit) for each in tokens.visits if not tokens.run_by(each.visit))
    said += f"; every rank runs {', '.join(whole)} on all there is" if whole else ""
    if tokens.met:
        numel = sum(each.numel for each in tokens.met)
        behind = ", ".join(dict.fromkeys(f"glue behind {each.visit}" if each.visit else "the loss" for each in tokens.met))
        said += f"; {behind} needs other ranks' tokens: {numel:,} elements per sample are brought together"
        said += " for a batch like the example (it looks at values: another one may need others)" if tokens.looks else ""
    return {"tokens": said}


def _each(deal: Deal, length: int) -> str:
    counts = deal.counts(length)
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"


def _evenness(deal: Deal, tokens: Tokens) -> Iterator[str]:
    """How even ranks compute attention: under causal masks, and of masks, which are data, under one of packed documents."""
    kinds = {
        "causal attention": (any(attend.causal for attend in tokens.attends), ()),
        f"attention under a mask, such as {PACKED}": (any(attend.masked for attend in tokens.attends), ENDS),
    }
    for name, (met, ends) in kinds.items():
        if met:
            share = busiest(deal, tokens.length, ends)
            yield f"{name}: the busiest rank has {share:.2f} x the mean{_better(deal, tokens.length, ends, share)}"


def _better(deal: Deal, length: int, ends: Sequence[float], share: float) -> str:
    """What would be more even than `share`, if anything: `zigzag` before what serves less often."""
    ways = {"zigzag": replace(deal, folded=True, striped=False), "striped": replace(deal, folded=False, striped=True)}
    found = {name: busiest(way, length, ends) for name, way in ways.items()} if deal.ranks > deal.inner else {}
    name = min(found, key=lambda each: round(found[each], 2), default="")
    return f' (balance = "{name}": {found[name]:.2f})' if name and share - found[name] > EVEN else ""


def busiest(deal: Deal, length: int, ends: Sequence[float] = ()) -> float:
    """What the busiest rank has of the pairs of tokens that a mask leaves, over the mean of all ranks.

    Each token looks at itself and those before it in its document; documents end at `ends`, as shares of the row, and with it.
    """
    length = min(length, LONG)
    stops = [0, *(int(length * end) for end in ends), length]
    firsts = range(0, deal.ranks, deal.inner)  # of those that have the same tokens for attention, and some of the heads each
    work = [sum(_pairs(stops, *span) for span in deal.together(length, first)) for first in firsts]
    return max(work) * len(work) / sum(work)


def _pairs(stops: Sequence[int], begin: int, end: int) -> int:
    """Over the positions from `begin` up to `end`, the sum of how many each looks at."""
    found = 0
    for start, stop in pairwise(stops):
        low, high = max(begin, start) - start, min(end, stop) - start
        found += (high * (high + 1) - low * (low + 1)) // 2 if high > low else 0
    return found
