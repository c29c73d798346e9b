"""Corrects a machine's rates by a previous run.

How many times longer than planned its computation and communication took.

    compute_factor    matmuls, attention, memory, calls, overhead per step      efficiencies are divided by it
    comm_factor       links inside a host, cards out of it, latency             likewise

Two constants, no more: a run has few step times, and the correction has to hold for other models and plans on
the same machine. All computation scales alike, so one factor explains a run's computation exactly.
"""

from dataclasses import dataclass, replace

from meshwright.planner.machine.efficiency import MachineRates
from meshwright.planner.machine.machine import Machine

EFFICIENCY_RATES = ("matmul", "matmul_float8", "matmul_float8_blocks", "matmul_float4", "attention", "memory")
OVERHEAD_RATES = ("kernel_start_s", "kernel_launch_s", "step_overhead_s", "microbatch_overhead_s")


@dataclass(frozen=True)
class RunCalibration:
    """How many times longer than planned computation and communication took (None.

    Unknown), over `num_steps` steps. `is_traced` False: without a trace both are the factor of the whole
    step. `crosses_hosts`: whether its ranks were on several hosts, with as many ranks on each as the machine
    says.
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
            return (
                f"{text} took {self.compute_factor:.3g} times as long as planned (no trace: "
                f"computing and sending are not told "
                f"apart)"
            )
        sent = (
            "too little was sent to tell"
            if self.comm_factor is None
            else f"sending {self.comm_factor:.3g} times"
        )
        return f"{text}, computing took {self.compute_factor:.3g} times as long as planned, {sent}"


def apply_calibration(machine: Machine, calibration: RunCalibration) -> Machine:
    """Returns `machine` at the rates of the run."""
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
