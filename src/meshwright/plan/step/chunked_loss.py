"""What a loss costs whose logits are never all there: LOSS multiplies with the head's weight, for some tokens at a time.

    at once      F(head)  logits of all tokens     LOSS  their gradient        B(head)  those of hidden and of the weight
    in pieces    F(head)  nothing                  LOSS  per piece: logits, their loss, their gradient, and both of those

The head's visit hands on what went into the head. The gradient of its weight is there behind LOSS; the visit's backward, which
follows, completes what else it belongs to, as ever.
"""

from dataclasses import dataclass

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.sharding.rank_share import flops_of, head_in_pieces, kept_share
from meshwright.plan.sharding.sharding_plan import Space

PIECE = 1 << 20  # elements of divided logits that the loss looks at at once, in float32 at least


@dataclass(frozen=True)
class Cost:
    """Of the LOSS of one micro-batch: the bytes of the gradient that it gives back, those for itself alone, its operations.

    `weights` are the parameters that it multiplies with.
    """

    returned: int
    scratch: int
    flops: int
    weights: tuple[str, ...]


def sizes(count: int, pieces: int) -> list[int]:
    """How many of `count` tokens are in each piece: as alike as can be, none empty; the first have one more."""
    pieces = max(1, min(pieces, count))
    each, more = divmod(count, pieces)
    return [each + (number < more) for number in range(pieces)]


def tokens_of(space: Space) -> int:
    """The rows of logits of a sample on the rank that sees `space`."""
    logits = space.anatomy.logits
    return 0 if logits is None else int(logits.tokens * kept_share(space, space.anatomy.visits[-1]))


def cost(space: Space, job: Job, rows: int) -> Cost | None:
    """What LOSS costs on micro-batches of so many `rows`; None where it takes all logits at once.

    A piece is there up to three times: what the loss keeps of it, the gradient of that, and the gradient of the logits.
    Of divided logits two of them are as narrow as products; and while the gradient of the weight is added up, all are.
    """
    call, logits = head_in_pieces(space), space.anatomy.logits
    if call is None or logits is None:
        return None
    precision, parameters = job.precision, NBYTES[job.precision.parameters]
    width, wide = NBYTES[precision.compute], max(NBYTES[precision.compute], NBYTES["float32"])
    homes = {name: home for home in space.homes for name in home.weight.names}
    mine = [homes[name] for name in (f"{call.name}.weight", f"{call.name}.bias") if name in homes]
    tokens, weight = tokens_of(space), mine[0].weight
    most = sizes(tokens, space.pieces)[0] * rows
    piece, taken = most * weight.shape[0], most * (call.into // logits.tokens) * width
    learnt = sum(home.weight.numel * parameters for home in mine if home.weight.trainable)
    cast = weight.numel * width if precision.compute != precision.parameters else 0
    looking = 2 * piece * width + min(piece, PIECE) * wide if space.logits.axes("S") else 3 * piece * wide
    adding = 2 * piece * width + cast if weight.trainable else 0  # a product in another dtype than what it is added to
    return Cost(
        returned=tokens * rows * (call.into // logits.tokens) * width,
        scratch=max(looking, adding) + taken + learnt + cast,
        flops=3 * flops_of(space, call) * rows,
        weights=tuple(home.weight.name for home in mine),
    )
