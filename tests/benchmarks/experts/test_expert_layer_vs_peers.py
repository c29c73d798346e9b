"""expert_layer_vs_peers: both layers of one process compute the same, and ours runs on two processes."""

import torch

from benchmarks.experts.expert_layer_vs_peers import WORKLOADS
from benchmarks.experts.layer_steps import WIDTH, LayerSize, our_module, their_module
from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store


def test_the_layers_of_one_process_compute_the_same():
    size = LayerSize(num_experts=4, k=2, intermediate=16)
    ours, theirs = our_module(size), their_module(size)
    for mine, other in (
        (ours.router.weight, theirs.gate.weight),
        (ours.experts.gate_up_proj, theirs.experts.gate_up_proj),
        (ours.experts.down_proj, theirs.experts.down_proj),
    ):
        other.data.copy_(mine.data)
    hidden = torch.randn(1, 5, WIDTH)
    torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=1e-4, atol=1e-6)


def test_ours_trains_on_two_processes():
    build, store = WORKLOADS["DeepSpeed"].ours.build, fresh_store()
    with Ranks("ours", build, 2, store=store, layer_size=(4, 2, 16)) as group:
        first, *_, last = [group.step().notes for _ in range(3)]
    assert first[0] == first[1] > last[0] > 0
