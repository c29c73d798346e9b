"""What the block-grain engine costs on one device: its step beside an ordinary PyTorch loop.

The engine plays a list of actions and cuts the autograd graph at every block. If that cost anything to speak
of, the design would be wrong. Bars: 1.02 on the large and the small step, 1.1 on the toy, which is Python and
nothing else.
"""

from benchmarks.harness.interleaved_timing import Window
from benchmarks.harness.side_by_side import Part, Side, contest
from benchmarks.models.llama_steps import ordinary, ours

PARTS = {
    "large": Part(1.02, Window(24, 60, 300)),
    "small": Part(1.02, Window(60, 300, 150)),
    "toy": Part(1.1, Window(2500, 8000, 200, warmup=20)),
}
CLAIM = (
    "one device: the engine's step costs at most 1.02 x an ordinary PyTorch loop (large and "
    "small step), 1.1 x on the toy"
)

if __name__ == "__main__":
    contest("engine_overhead", CLAIM, Side("plain", ordinary), Side("engine", ours), PARTS)
