"""What of a visit falls to one rank: of its operations, of what it keeps inside for backward, and of what it hands on.

    divided with a layer       by the share of the layer's weight that the rank has       q k v -> attend -> o, gate up -> down
    all else of the visit      whole; where the stream goes in slices, a slice            norms, residuals, layers nobody divides
    a head's logits            where they go to the loss as they are: as the head         of the rank's own words

Shares are those of the rank's own sizes: of three groups of heads on two ranks, the first has two thirds.

What a rank has of the tokens of a sample, where those are dealt: as a share of them, by what they go through.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from meshwright.plan.model_spec.layer_calls import Call
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.model_spec.sequence_info import Tokens
from meshwright.plan.sharding.sharding_plan import Space


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


ALL = Fraction(1)
PRODUCTS = ("columns", "rows", "gathered")  # roles of layers that multiply with a matrix


@dataclass(frozen=True)
class Share:
    """Of one visit, per sample: the operations of a forward, the elements kept inside, and those handed on.

    `owed` are those of the gradients that weights need: of what layers give out, or as many as are kept where none is known.
    `weights` are the operations for the gradients of weights.
    """

    flops: int
    inside: int
    hands_on: int
    owed: int
    weights: int


@dataclass(frozen=True)
class _Held:
    """What a rank has of the weight of a layer, and the axes along which that is cut."""

    share: Fraction
    cut: frozenset[str]


WHOLE = _Held(ALL, frozenset())


def shares(space: Space) -> dict[str, Share]:
    """What of each visit falls to the rank that sees `space`."""
    anatomy, held = space.anatomy, _held(space)
    calls, learnt = _calls(anatomy), list(weight_flops(anatomy))
    head = anatomy.logits.layer if anatomy.logits is not None and space.logits.axes("S") else None
    later = head_in_pieces(space)
    inside = anatomy.inside_numel or (0,) * len(anatomy.visits)
    found = {}
    for at, visit in enumerate(anatomy.visits):
        flops, within, numel = anatomy.flops[at], inside[at], anatomy.stream_numel[at]
        mine = [(call, held.get(call.name, WHOLE)) for call in calls[visit] if call is not later]
        if later is not None and later in calls[visit]:  # LOSS does it
            flops, numel = flops - later.flops, numel - later.out
            learnt[at] = min(learnt[at], flops)
        kept = _divided(space, visit, within, [(weight, call.inside) for call, weight in mine])
        on = _divided(space, visit, numel, [(weight, call.out) for call, weight in mine if call.name == head])
        apart = [(weight, call.out) for call, weight in mine if call.role not in ("rows", "norm")]
        owed = _divided(space, visit, sum(call.out for call, _ in mine), apart) if mine else kept
        done = _divided(space, visit, flops, [(weight, call.flops) for call, weight in mine])
        found[visit] = Share(done, kept, on, max(on, owed), round(Fraction(learnt[at], flops or 1) * done))
    return found


def head_in_pieces(space: Space) -> Call | None:
    """The call of the head that LOSS makes in the place of its visit, in pieces; None where the visit does."""
    logits = space.anatomy.logits
    if space.pieces < 2 or logits is None:
        return None
    return next((call for call in space.anatomy.calls if call.name == logits.layer and call.role == "head"), None)


def flops_of(space: Space, call: Call) -> int:
    """The operations of a forward of `call`, per sample, on the rank that sees `space`."""
    return _divided(space, call.visit, call.flops, [(_held(space).get(call.name, WHOLE), call.flops)])


def weight_flops(anatomy: Anatomy) -> tuple[int, ...]:
    """Per visit and sample, the operations for the gradients of its weights; the rest of two forwards is for what went in.

    They are those of its products with weights that are trained: attention's have none. All, where nothing is known of them.
    """
    tokens = {passage.visit: passage.tokens for passage in anatomy.passages}
    trained = {layer for weight in anatomy.trainable for layer in weight.layers}
    found = []
    for flops, (visit, calls) in zip(anatomy.flops, _calls(anatomy).items(), strict=True):
        mine = [call for call in calls if call.role in PRODUCTS] if tokens.get(visit) else []
        each = [2 * call.into * call.out // tokens[visit] for call in mine]
        learnt = sum(product for call, product in zip(mine, each, strict=True) if call.name in trained)
        found.append(learnt if mine and sum(each) <= flops else flops)
    return tuple(found)


def _calls(anatomy: Anatomy) -> dict[str, list[Call]]:
    """The calls of each visit."""
    calls: dict[str, list[Call]] = {visit: [] for visit in anatomy.visits}
    for call in anatomy.calls:
        calls[call.visit].append(call)
    return calls


def _held(space: Space) -> Mapping[str, _Held]:
    """What the rank has of the weights of layers that are cut, by the layer's name."""
    found = {}
    for home, whole in zip(space.homes, space.logical, strict=True):
        if home.cut:
            held = _Held(Fraction(home.weight.numel, whole.weight.numel), frozenset(home.cut))
            names = (name.rpartition(".") for name in home.weight.names)
            found |= {layer: held for layer, _, leaf in names if leaf == "weight"}
    return found


def _divided(space: Space, visit: str, whole: int, parts: list[tuple[_Held, int]]) -> int:
    """`whole`, of which `parts` are divided as weights are, and the rest as the stream is."""
    mine = sum((weight.share * _slice(space, visit, weight.cut) * part for weight, part in parts), Fraction(0))
    return round(mine + _slice(space, visit) * (whole - sum(part for _, part in parts)))


def _slice(space: Space, visit: str, but: frozenset[str] = frozenset()) -> Fraction:
    """The share of the stream that goes through `visit`; along the axes `but` it does not count."""
    if space.through and visit not in space.through:
        return own_share(space, visit)
    return own_share(space, visit) / space.mesh.extent(axis for axis in space.stream.axes("S") if axis not in but)
