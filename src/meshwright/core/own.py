"""What a rank has of the tokens of a sample, where those are dealt: as a share of them, by what they go through."""

from fractions import Fraction

from meshwright.core.space import Space
from meshwright.core.tokens import Tokens


def own_tokens(space: Space) -> Fraction:
    """The share of the tokens of a sample that the rank at the coordinate of `space` runs."""
    known = _known(space)
    return Fraction(1) if known is None else _own(space, known.length)


def own_shares(space: Space) -> tuple[Fraction, ...]:
    """The same for each row of a sample, where those have unlike numbers of tokens."""
    known = _known(space)
    return () if known is None else tuple(_own(space, length) for length in known.lengths)


def own_share(space: Space, visit: str, module: str = "") -> Fraction:
    """The share of the tokens that go through `visit`, or a `module` of it, which the rank at the coordinate of `space` runs."""
    known = _known(space)
    return Fraction(1) if known is None else _own(space, known.run_by(visit, module))


def _known(space: Space) -> Tokens | None:
    return (space.whole or space).anatomy.tokens


def _own(space: Space, tokens: int) -> Fraction:
    if space.deal is None or not tokens:
        return Fraction(1)
    return Fraction(space.deal.run(tokens, space.mesh.index(dict(space.coordinate), space.token_axes)), tokens)
