"""Step time of DDP against torch DDP: two processes each, the same gloo transport, model, samples and
optimizer.

Bars: 1.02 on the large step, where compute dominates; 1.0 on the small one, where communication and Python
dominate. Torch DDP runs as its documentation recommends for speed and memory, with
`gradient_as_bucket_view=True`.
"""

from benchmarks.harness.interleaved_timing import Window
from benchmarks.harness.side_by_side import Side, WorkloadBar, compare_steps
from benchmarks.models.llama_steps import ddp, ours

WORKLOADS = {
    "large": WorkloadBar(1.02, Window(24, 70, 700)),
    "small": WorkloadBar(1.0, Window(100, 360, 500, warmup=5)),
}
CLAIM = (
    "two processes over gloo: our DDP step costs at most 1.02 x torch DDP on the large step, 1.0 x on the "
    "small one"
)

if __name__ == "__main__":
    compare_steps("ddp_vs_torch", CLAIM, Side("torch", ddp), Side("ours", ours), WORKLOADS, num_ranks=2)
