"""What a run taught of its machine: how many times as long its computing, and its sending, took as was planned.

    computing    products, attention, memory, calls, what a step costs once     its shares of the peak become so many times less
    sending      links inside a host, cards out of it, latency                  their rates likewise

Two constants, no more: a run has few step times, and whatever is learnt from them shall hold for other models and other plans on
the same machine. Everything that is computed scales alike, so that one factor explains a run's computing exactly.
"""

from dataclasses import dataclass, replace

from meshwright.planner.machine.efficiency import MachineRates
from meshwright.planner.machine.machine import Machine

EFFICIENCY_RATES = ("matmul", "matmul_float8", "matmul_float8_blocks", "matmul_float4", "attention", "memory")
OVERHEAD_RATES = ("kernel_start_s", "kernel_launch_s", "step_overhead_s", "microbatch_overhead_s")


@dataclass(frozen=True)
class RunCalibration:
    """So many times as long as planned took computing and sending (None: nothing was learnt of it), over so many `steps`.

    `apart` is False where the run was not traced: then both are the factor of the whole step. `between`: whether its ranks met
    over several hosts, of which a host has been taken to have as many ranks as the machine says.
    """

    source: str
    num_steps: int
    compute_factor: float
    comm_factor: float | None
    is_traced: bool
    crosses_hosts: bool = False

    def __str__(self) -> str:
        text = f"{self.source}: {self.num_steps} steps"
        if not self.is_traced:
            return f"{text} took {self.compute_factor:.3g} times as long as planned (no trace: computing and sending are not told apart)"
        sent = (
            "too little was sent to tell"
            if self.comm_factor is None
            else f"sending {self.comm_factor:.3g} times"
        )
        return f"{text}, computing took {self.compute_factor:.3g} times as long as planned, {sent}"


def apply_calibration(machine: Machine, calibration: RunCalibration) -> Machine:
    """`given` at the rates that the run had."""
    rates, slower = machine.rates, calibration.compute_factor
    changed = {name: vars(rates)[name] / slower for name in EFFICIENCY_RATES}
    changed |= {name: vars(rates)[name] * slower for name in OVERHEAD_RATES}
    found: MachineRates = replace(rates, **changed)
    if calibration.comm_factor is None:
        return replace(machine, rates=found)
    links = {
        "link": rates.link / calibration.comm_factor,
        "latency_s": rates.latency_s * calibration.comm_factor,
    }
    if calibration.crosses_hosts or not calibration.is_traced:
        links["nic"] = rates.nic / calibration.comm_factor
    return replace(machine, rates=replace(found, **links))
