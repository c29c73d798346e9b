"""Says what a plan sends as codes: the codec, the collective, where it is, and its bytes in a step.

    int8: all_reduce over tp in layers.0 .. layers.3, 16 x, 1.02 MiB in place of 4 MiB

Forwards and backwards of one collective are one entry, over all roles; number and bytes are those of the rank
that sends most of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Transfer
from meshwright.plan.step.single_device_program import PARAM_USE_KINDS
from meshwright.plan.strategy_interface import Strategy


@dataclass(frozen=True)
class CodedMessage:
    """A transfer of `rank` that codes of `codec` carry, where it is, and its bytes with and without codes."""

    rank: int
    codec: str
    sent: str  # the collective and its axes
    place: str  # a block, or an action
    coded_nbytes: float
    exact_nbytes: float
    num_exact_steps: int


def coded_messages_text(plan: Plan) -> dict[str, str]:
    """Returns a line for the summary of a plan; none if it sends no codes."""
    by_kind: dict[tuple[str, str], list[CodedMessage]] = {}
    for each in coded_messages(plan):
        by_kind.setdefault((each.codec, each.sent), []).append(each)
    texts = [_text(f"{codec}: {sent}", found) for (codec, sent), found in by_kind.items()]
    return {"sent as codes": "; ".join(texts)} if texts else {}


def coded_messages(plan: Plan) -> Iterator[CodedMessage]:
    """Yields what the first rank of each role sends as codes in a step, in the order of its actions."""
    lossy = [each for each in plan.strategies if not each.exact]  # no other one codes anything
    for role in plan.program.roles if lossy else ():
        rank, view = role.ranks[0], plan.rank_view(role.ranks[0])
        for action in role.actions:
            for transfer in (each for each in action.sent_transfers if each.carried_by):
                codec = _codec(action, transfer, lossy, view)
                if codec:
                    yield _coded_message(plan, rank, codec, action, transfer)


def _coded_message(plan: Plan, rank: int, codec: str, action: Action, transfer: Transfer) -> CodedMessage:
    exact = replace(transfer, carried_by=())
    coded_nbytes, exact_nbytes = (min_max_sent_nbytes(each, plan.mesh, rank)[1] for each in (transfer, exact))
    sent = f"{transfer.collective} over {', '.join(in_mesh_order(transfer.axes))}"
    place = action.subject if action.kind in PARAM_USE_KINDS else f"{action.kind} {action.subject}"
    return CodedMessage(rank, codec, sent, place, coded_nbytes, exact_nbytes, transfer.carried_from)


def _codec(action: Action, transfer: Transfer, lossy: Sequence[Strategy], view: RankView) -> str:
    """Returns what codes one transfer of an action; "" if it is carried by other messages that are exact."""
    is_own = transfer is action.transfer
    alone = replace(
        action, transfer=transfer if is_own else None, inner_transfers=() if is_own else (transfer,)
    )
    passes = (name for strategy in lossy for name in strategy.coding_passes(alone, view))
    return next(passes, "").rpartition(" ")[2]  # "int8", or "encode int8"


def _text(what: str, found: Sequence[CodedMessage]) -> str:
    places = list(dict.fromkeys(each.place for each in found))
    where = places[0] if len(places) == 1 else f"{places[0]} .. {places[-1]}"
    by_rank = ([each for each in found if each.rank == rank] for rank in {each.rank for each in found})
    most = max(by_rank, key=lambda sent: sum(each.exact_nbytes for each in sent))
    coded, exact = sum(each.coded_nbytes for each in most), sum(each.exact_nbytes for each in most)
    steps = most[0].num_exact_steps
    nbytes = f"{format_nbytes(coded)} in place of {format_nbytes(exact)}"
    return f"{what} in {where}, {len(most):,} x, {nbytes}{f', behind {steps} exact steps' if steps else ''}"
