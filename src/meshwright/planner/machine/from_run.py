"""What a run taught of its machine: how many times as long its computing, and its sending, took as was planned.

    computing    products, attention, memory, calls, what a step costs once     its shares of the peak become so many times less
    sending      links inside a host, cards out of it, latency                  their rates likewise

Two constants, no more: a run has few step times, and whatever is learnt from them shall hold for other models and other plans on
the same machine. Everything that is computed scales alike, so that one factor explains a run's computing exactly.
"""

from dataclasses import dataclass, replace

from meshwright.planner.machine.efficiency import Rates
from meshwright.planner.machine.machine import Machine

SHARES = ("product", "product_float8", "product_blocks", "product_float4", "attention", "memory")
SECONDS = ("start_s", "launch_s", "fixed_s", "turn_s")


@dataclass(frozen=True)
class Learnt:
    """So many times as long as planned took computing and sending (None: nothing was learnt of it), over so many `steps`.

    `apart` is False where the run was not traced: then both are the factor of the whole step. `between`: whether its ranks met
    over several hosts, of which a host has been taken to have as many ranks as the machine says.
    """

    source: str
    steps: int
    computing: float
    sending: float | None
    apart: bool
    between: bool = False

    def __str__(self) -> str:
        text = f"{self.source}: {self.steps} steps"
        if not self.apart:
            return f"{text} took {self.computing:.3g} times as long as planned (no trace: computing and sending are not told apart)"
        sent = "too little was sent to tell" if self.sending is None else f"sending {self.sending:.3g} times"
        return f"{text}, computing took {self.computing:.3g} times as long as planned, {sent}"


def taught(given: Machine, learnt: Learnt) -> Machine:
    """`given` at the rates that the run had."""
    rates, slower = given.rates, learnt.computing
    changed = {name: vars(rates)[name] / slower for name in SHARES}
    changed |= {name: vars(rates)[name] * slower for name in SECONDS}
    found: Rates = replace(rates, **changed)
    if learnt.sending is None:
        return replace(given, rates=found)
    links = {"link": rates.link / learnt.sending, "latency_s": rates.latency_s * learnt.sending}
    if learnt.between or not learnt.apart:
        links["nic"] = rates.nic / learnt.sending
    return replace(given, rates=replace(found, **links))
