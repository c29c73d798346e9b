"""Says of a plan from which link speed on its compressed sums pay (planner/machine/compression_gain.py), and
of weights and activations that travel as codes whether the seconds to code them are known.

Bytes are those that a rank sends in a step, by the formulas of collectives. The rank with most to save
counts.
"""

from collections.abc import Iterator

from meshwright.comm.collectives.comm_volume import sent_nbytes
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Transfer
from meshwright.planner.machine.compression_gain import CompressionGain, break_even_text, comparison_text
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.device_time import ExecutionTarget


def compression_gain(plan: Plan, target: ExecutionTarget) -> CompressionGain:
    """Returns the gain of the rank that saves most bytes."""
    ranks = (role.ranks[0] for role in plan.program.roles)
    return max((_gain_of(plan, rank, target) for rank in ranks), key=lambda each: each.saved_nbytes)


def compression_notes(plan: Plan, target: ExecutionTarget) -> Iterator[str]:
    """Yields what a compressed plan gains, and from which link speed on, and whether coding is not counted;
    nothing of other plans.
    """
    if plan.sharding.compressed_params:
        yield from _sum_notes(plan, target)
    unknown = _unknown_passes(plan, target)
    if unknown:
        text = f"the seconds to code what travels as codes are not known on {target.name} and not counted"
        yield f"{text} ({', '.join(unknown)}): `meshwright bench device` measures them"


def _sum_notes(plan: Plan, target: ExecutionTarget) -> Iterator[str]:
    gain = compression_gain(plan, target)
    if not gain.saved_nbytes:
        return
    if gain.saved_nbytes < 0:
        more = format_nbytes(round(-gain.saved_nbytes))
        yield f"compressed sums send {more} more in a step than exact ones: remove compress, or lose more"
        return
    if gain.break_even_rate is None:
        saved = f"each rank sends {format_nbytes(round(gain.saved_nbytes))} less in a step"
        yield (
            f"compressed sums: {saved}; the seconds to code are not known on {target.name} and not counted: "
            "`meshwright bench device` measures them"
        )
        return
    yield f"compressed sums pay {break_even_text(gain)}"
    if gain.pays is not None:
        text = comparison_text(gain)
        yield text if gain.pays else f"{text}: remove the strategy compress"


def _unknown_passes(plan: Plan, target: ExecutionTarget) -> list[str]:
    """Returns what codes weights and activations of `plan` and has no known seconds."""
    lossy = [each for each in plan.strategies if not each.exact]  # no other one codes anything
    found = {
        name
        for role in plan.role_plans()
        for action in (role.actions if lossy else ())
        for strategy in lossy
        for name in strategy.coding_passes(action, role.view)
        if name != strategy.mode
    }
    return sorted(name for name in found if target.device_time.coding_seconds(name, 1) is None)


def _gain_of(plan: Plan, rank: int, target: ExecutionTarget) -> CompressionGain:
    costs, view, gain = ActionCosts(plan, rank, target), plan.rank_view(rank), CompressionGain()
    for action in plan.for_rank(rank).actions:
        transfer = action.transfer
        if transfer is None or not any(
            each.mode in each.coding_passes(action, view) for each in plan.strategies
        ):
            continue
        seconds, (exact_s, coded_s) = costs.coding_seconds(action), costs.exact_and_coded_seconds(transfer)
        gain = CompressionGain(
            gain.saved_nbytes + _saved_nbytes(transfer, plan.mesh),
            None if seconds is None or gain.coding_s is None else gain.coding_s + seconds,
            gain.exact_s + exact_s,
            gain.coded_s + coded_s,
        )
    return gain


def _saved_nbytes(transfer: Transfer, mesh: Mesh) -> float:
    """Returns the bytes that a rank sends less than if `transfer` carried itself."""
    coded = sum(sent_nbytes(each.collective, each.nbytes, each.num_ranks(mesh)) for each in transfer.messages)
    return sent_nbytes(transfer.collective, transfer.nbytes, transfer.num_ranks(mesh)) - coded
