"""What a rank has of the tokens of a sample, where those are dealt: as a share of them, by what they go through."""

from fractions import Fraction

from meshwright.core.space import Space
from meshwright.core.tokens import Tokens


def own_tokens(space: Space) -> Fraction:
    """The share of the tokens of a sample that the rank at the coordinate of `space` runs."""
    known = _known(space)
    return Fraction(1) if known is None else _own(space, known.length)


def own_shares(space: Space) -> tuple[tuple[Fraction, Fraction], ...]:
    """For each row of a sample, where those have unlike numbers of tokens, the share that is run, and that without stand-ins."""
    known = _known(space)
    return () if known is None else tuple((_own(space, length), _kept(space, length)) for length in known.lengths)


def own_share(space: Space, visit: str, module: str = "") -> Fraction:
    """The share of the tokens that go through `visit`, or a `module` of it, which the rank at the coordinate of `space` runs."""
    known = _known(space)
    return Fraction(1) if known is None else _own(space, known.run_by(visit, module))


def kept_share(space: Space, visit: str) -> Fraction:
    """The share of the tokens that come out of `visit` on that rank: of stand-ins nothing does."""
    known = _known(space)
    return Fraction(1) if known is None else _kept(space, known.run_by(visit))


def _known(space: Space) -> Tokens | None:
    return (space.whole or space).anatomy.tokens


def _own(space: Space, tokens: int) -> Fraction:
    if space.deal is None or not tokens:
        return Fraction(1)
    return Fraction(space.deal.run(tokens, _place(space)), tokens)


def _kept(space: Space, tokens: int) -> Fraction:
    if space.deal is None or not tokens:
        return Fraction(1)
    return Fraction(space.deal.count(tokens, _place(space)), tokens)


def _place(space: Space) -> int:
    return space.mesh.index(dict(space.coordinate), space.token_axes)
