"""Corrects a machine's rates by a previous run: how much longer than planned its step took.

    compute_factor    efficiencies of matmuls, attention and memory are divided by it; the time of kernel
                      launches and the overhead per step are multiplied by it
    comm_factor       rates of links inside a host, and of network cards, are divided by it; latency is
                      multiplied by it

There are two constants only: a run has few step times, and the correction has to hold for other models and
plans on the same machine. All computation scales alike, so one factor explains a run's computation exactly.
"""

from dataclasses import dataclass, replace

from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.machine_rates import MachineRates

EFFICIENCY_RATES = ("matmul", "matmul_float8", "matmul_float8_blocks", "matmul_float4", "attention", "memory")
OVERHEAD_RATES = ("kernel_start_s", "kernel_launch_s", "step_overhead_s", "microbatch_overhead_s")


@dataclass(frozen=True)
class RunCalibration:
    """The factors by which computation and communication of a run took longer than planned.

    They are means over `num_steps` steps; `comm_factor` None: unknown. `is_traced` False: without a trace
    both are the factor of the whole step. `crosses_hosts`: the ranks were on several hosts, with as many
    ranks on each as the machine has.
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
                f"{text} took {self.compute_factor:.3g} times as long as planned (there is no trace, so "
                f"computation and communication are not distinguished)"
            )
        comm_text = (
            "too little was sent to measure communication"
            if self.comm_factor is None
            else f"communication {self.comm_factor:.3g} times"
        )
        return f"{text}, computation took {self.compute_factor:.3g} times as long as planned, {comm_text}"


def apply_calibration(machine: Machine, calibration: RunCalibration) -> Machine:
    """Returns `machine` with the rates of the run."""
    rates, compute_factor = machine.rates, calibration.compute_factor
    changed = {name: vars(rates)[name] / compute_factor for name in EFFICIENCY_RATES}
    changed |= {name: vars(rates)[name] * compute_factor for name in OVERHEAD_RATES}
    new_rates: MachineRates = replace(rates, **changed)
    if calibration.comm_factor is None:
        return replace(machine, rates=new_rates)
    links = {
        "link": rates.link / calibration.comm_factor,
        "latency_s": rates.latency_s * calibration.comm_factor,
    }
    if calibration.crosses_hosts or not calibration.is_traced:
        links["nic"] = rates.nic / calibration.comm_factor
    return replace(machine, rates=replace(new_rates, **links))
