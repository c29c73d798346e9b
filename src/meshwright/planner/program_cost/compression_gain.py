"""Says from which link speed on compressed sums pay: what coding takes, beside what it leaves unsent.

    exact     bytes sent / rate
    coded     bytes sent / rate + seconds to code
    pays      where rate < (exact bytes - coded bytes) / seconds to code

Bytes are those that a rank sends in a step, by the formulas of collectives; seconds to code are measured by
`bench device`, per element of a gradient. The rank with most to save counts. What computation hides is not
looked at: where it hides exact sums, coded ones gain nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.comm.collectives.comm_volume import sent_nbytes
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Transfer
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.device_time import ExecutionTarget


@dataclass(frozen=True)
class CompressionGain:
    """The coded sums of one rank in a step: bytes that it does not send, seconds to code (None: unknown), and
    seconds of the messages, exact and coded.
    """

    saved_nbytes: float = 0.0
    coding_s: float | None = 0.0
    exact_s: float = 0.0
    coded_s: float = 0.0

    @property
    def break_even_rate(self) -> float | None:
        """The bytes per second of a link below which coding pays; None: unknown."""
        return self.saved_nbytes / self.coding_s if self.coding_s else None

    @property
    def pays(self) -> bool | None:
        """Whether coded sums take less time on the links of the plan; None: unknown."""
        if self.coding_s is None or not self.exact_s:
            return None
        return self.coded_s + self.coding_s < self.exact_s


def compression_gain(plan: Plan, target: ExecutionTarget) -> CompressionGain:
    """Returns the gain of the rank that saves most bytes."""
    ranks = (role.ranks[0] for role in plan.program.roles)
    return max((_gain_of(plan, rank, target) for rank in ranks), key=lambda each: each.saved_nbytes)


def compression_notes(plan: Plan, target: ExecutionTarget) -> Iterator[str]:
    """Yields what a compressed plan gains, and from which link speed on; nothing of other plans."""
    if not plan.sharding.compressed_params:
        return
    gain = compression_gain(plan, target)
    if not gain.saved_nbytes:
        return
    if gain.saved_nbytes < 0:
        more = format_nbytes(round(-gain.saved_nbytes))
        yield f"compressed sums send {more} more in a step than exact ones: remove compress, or lose more"
        return
    saved = f"each rank sends {format_nbytes(round(gain.saved_nbytes))} less in a step"
    if gain.coding_s is None or gain.break_even_rate is None:
        yield (
            f"compressed sums: {saved}; the seconds to code are not known on {target.name} and not counted: "
            "`meshwright bench device` measures them"
        )
        return
    rate = f"{8 * gain.break_even_rate / 1e9:.3g} Gbit/s"
    yield (
        f"compressed sums pay over links slower than {rate}: {saved}, and coding takes "
        f"{1e3 * gain.coding_s:.3g} ms"
    )
    if gain.pays is not None:
        coded, exact = 1e3 * (gain.coded_s + gain.coding_s), 1e3 * gain.exact_s
        text = f"on these links coded sums take {coded:.3g} ms, and exact ones {exact:.3g} ms"
        yield text if gain.pays else f"{text}: remove the strategy compress"


def _gain_of(plan: Plan, rank: int, target: ExecutionTarget) -> CompressionGain:
    costs, view, gain = ActionCosts(plan, rank, target), plan.rank_view(rank), CompressionGain()
    for action in plan.for_rank(rank).actions:
        transfer = action.transfer
        if transfer is None or not any(each.coded_numel(action, view) for each in plan.strategies):
            continue
        seconds, (exact_s, coded_s) = costs.coding_seconds(action), costs.exact_and_coded_seconds(transfer)
        gain = CompressionGain(
            gain.saved_nbytes + _saved_nbytes(transfer, transfer.num_ranks(plan.mesh)),
            None if seconds is None or gain.coding_s is None else gain.coding_s + seconds,
            gain.exact_s + exact_s,
            gain.coded_s + coded_s,
        )
    return gain


def _saved_nbytes(transfer: Transfer, num_ranks: int) -> float:
    """Returns the bytes that a rank sends less than if `transfer` carried itself."""
    coded = sum(sent_nbytes(each.collective, each.nbytes, num_ranks) for each in transfer.messages)
    return sent_nbytes(transfer.collective, transfer.nbytes, num_ranks) - coded
