"""Step time of the engine on one device, against a plain PyTorch loop.

The engine executes a list of actions and cuts the autograd graph at every block. The benchmark shows that
this costs next to nothing. Bars: 1.02 on the large and the small step, 1.1 on the toy, which is Python only.
"""

from benchmarks.harness.interleaved_timing import Window
from benchmarks.harness.side_by_side import Side, WorkloadBar, compare_steps
from benchmarks.models.llama_steps import ours, plain_loop

WORKLOADS = {
    "large": WorkloadBar(1.02, Window(24, 60, 300)),
    "small": WorkloadBar(1.02, Window(60, 300, 150)),
    "toy": WorkloadBar(1.1, Window(2500, 8000, 200, warmup=20)),
}
CLAIM = (
    "one device: the engine's step costs at most 1.02 x a plain PyTorch loop (large and "
    "small step), 1.1 x on the toy"
)

if __name__ == "__main__":
    compare_steps("engine_overhead", CLAIM, Side("plain", plain_loop), Side("engine", ours), WORKLOADS)
