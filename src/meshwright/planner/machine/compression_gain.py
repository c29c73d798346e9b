"""What sums of codes gain over exact ones, and the speed of a link below which they do.

    exact     bytes sent / rate
    coded     bytes sent / rate + seconds to code
    pays      where rate < (exact bytes - coded bytes) / seconds to code

Bytes are those that a rank sends in a step; seconds to code are measured by `bench device`, per element of a
gradient. What computation hides is not looked at: where it hides exact sums, coded ones gain nothing.
"""

from dataclasses import dataclass

from meshwright.plan.job.errors import format_nbytes


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


def break_even_text(gain: CompressionGain) -> str:
    """Returns the link speed below which `gain` is one, what is not sent, and what coding takes; its
    `break_even_rate` is known.
    """
    rate = f"{8 * (gain.break_even_rate or 0.0) / 1e9:.3g} Gbit/s"
    saved = f"each rank sends {format_nbytes(round(gain.saved_nbytes))} less in a step"
    return f"over links slower than {rate}: {saved}, and coding takes {1e3 * (gain.coding_s or 0.0):.3g} ms"


def comparison_text(gain: CompressionGain) -> str:
    """Returns what coded and exact sums take on the links at hand; seconds to code are known."""
    coded, exact = 1e3 * (gain.coded_s + (gain.coding_s or 0.0)), 1e3 * gain.exact_s
    return f"on these links coded sums take {coded:.3g} ms, and exact ones {exact:.3g} ms"
