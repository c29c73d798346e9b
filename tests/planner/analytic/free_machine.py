"""A GPU cluster, and the same one where nothing but arithmetic costs time."""

from dataclasses import replace

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.machine.machine import make_machine

SHAPE = ModelShape("gpt", 48, 4096, 32, vocab=128)  # hardly any head, so that ranks along pp are alike
MACHINE = make_machine("A100", 512)
FREE = replace(
    MACHINE,
    rates=replace(
        MACHINE.rates,
        link=1e9,
        nic=1e9,
        latency_s=0.0,
        kernel_start_s=0.0,
        kernel_launch_s=0.0,
        microbatch_overhead_s=0.0,
        step_overhead_s=0.0,
    ),
)  # no transfer costs
