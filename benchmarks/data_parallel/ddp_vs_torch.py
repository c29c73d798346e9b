"""Data parallelism beside torch DDP: two processes each, the same gloo transport, the same model, samples and
optimizer.

Bars: 1.02 on the large step, where compute decides; 1.0 on the small one, where communication and Python
show. Torch DDP runs as its users are told to run it for speed and memory, with
`gradient_as_bucket_view=True`.
"""

from benchmarks.harness.interleaved_timing import Window
from benchmarks.harness.side_by_side import Part, Side, contest
from benchmarks.models.llama_steps import ddp, ours

PARTS = {"large": Part(1.02, Window(24, 70, 700)), "small": Part(1.0, Window(100, 360, 500, warmup=5))}
CLAIM = (
    "two processes over gloo: our DDP step costs at most 1.02 x torch DDP on the large step, 1.0 x on the "
    "small one"
)

if __name__ == "__main__":
    contest("ddp_vs_torch", CLAIM, Side("torch", ddp), Side("ours", ours), PARTS, num_ranks=2)
