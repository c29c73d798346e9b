"""Memory of a rank from sizes: the tables of the papers, and what each strategy saves."""

from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.analytic.closed_form_memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.memory_coefficients import FrameworkMemory
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import DUALPIPE, GPIPE, ParallelConfig, ScheduleProfile
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from tests.parallel.tensor.odd_llama import llama, planned

# table 1 of arXiv 1910.02054: GB per device of 7.5 B weights at 1, 4, 16, 64, 256, 1024 copies
ZERO_TABLE = {
    1: (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    2: (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    3: (120, 30, 7.5, 1.88, 0.47, 0.12),
}
BLOCKS = ModelShape("7.5b", 36, 4096, 32, vocab=1)


def states(found: MemoryEstimate) -> float:
    return (found.weights + found.gradients + found.optimizer_states) / 1e9


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_states_are_those_of_the_table(shards: int):
    scale = 7.5e9 / BLOCKS.numel
    for copies, paper in zip((1, 4, 16, 64, 256, 1024), ZERO_TABLE[shards], strict=True):
        assert states(
            estimate_memory(BLOCKS, ParallelConfig(dp=copies, zero_stage=shards))
        ) * scale == pytest.approx(paper, rel=0.005, abs=0.006)


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_layer_are_those_of_the_table(tp: int):
    """34 s b h / t with tokens on tensor ranks (arXiv 2205.05198, table 2), less a byte each for the masks of
    two dropouts.
    """
    shape = ModelShape("gpt", 1, 1024, 16, vocab=1)
    found = estimate_memory(
        shape, ParallelConfig(tp=tp, sequence_parallel=tp > 1, micro_batch=4, recompute="attention")
    )
    unit = 4 * shape.sequence * shape.hidden / tp
    assert found.activations / unit == pytest.approx(34 - 2)


def test_attention_scores_are_saved_unless_a_kernel_is_fused_or_they_are_recomputed():
    shape = ModelShape("gpt", 10, 1024, 16, vocab=1)
    fused, one, torch, again = (
        estimate_memory(shape, ParallelConfig(attention_kernel=kernel, recompute=reruns))
        for kernel, reruns in (
            ("flash2", "none"),
            ("softmax", "none"),
            ("eager", "none"),
            ("softmax", "attention"),
        )
    )
    pairs = shape.heads * shape.sequence**2
    assert one.activations - fused.activations == pytest.approx(10 * 5 * pairs)
    assert torch.activations - fused.activations == pytest.approx(10 * 6 * pairs)
    assert again.activations == pytest.approx(fused.activations)
    assert again.block_backward - one.block_backward == pytest.approx(
        5 * pairs
    )  # those of the block that is rerun


def test_activation_checkpointing_keeps_the_inputs_of_layers():
    """2 s b h per layer, and one layer's inside."""
    shape = ModelShape("gpt", 24, 1024, 16, vocab=1)
    kept, again = (
        estimate_memory(shape, ParallelConfig()),
        estimate_memory(shape, ParallelConfig(recompute="layers")),
    )
    assert again.activations == pytest.approx(24 * 2 * shape.sequence * shape.hidden)
    assert again.block_backward - kept.block_backward == pytest.approx(kept.activations / 24)


def test_the_fullest_rank_along_pp_is_the_one_with_most():
    deep = ModelShape("deep", 32, 4096, 32, vocab=1000)
    words = replace(deep, vocab=500_000)
    assert (
        estimate_memory(deep, ParallelConfig(pp=4, num_microbatches=16)).logits == 0
    )  # the first, with four microbatches under way
    assert (
        estimate_memory(
            words, ParallelConfig(pp=4, num_microbatches=16, recompute="layers", micro_batch=4)
        ).logits
        == 4 * 2048 * 500_000 * 14
    )


def test_the_loss_and_a_blocks_backward_do_not_overlap():
    narrow, words = (
        estimate_memory(ModelShape("s", 2, 512, 8, vocab=vocab), ParallelConfig()) for vocab in (128, 100_000)
    )
    assert narrow.logits == 0 < narrow.block_backward
    assert words.block_backward == 0 < words.logits


def test_hsdp_divides_states_by_the_group_size():
    whole, groups = (
        estimate_memory(BLOCKS, ParallelConfig(dp=64, zero_stage=3, zero_group_size=within))
        for within in (0, 8)
    )
    assert states(groups) == pytest.approx(8 * states(whole))


def test_stages_on_two_ranks_are_held_twice_and_gpipe_holds_all_micro_batches():
    plain, both, whole = (
        estimate_memory(BLOCKS, ParallelConfig(pp=4, num_microbatches=12, schedule_profile=order))
        for order in (ScheduleProfile(), DUALPIPE, GPIPE)
    )
    assert states(both) == pytest.approx(2 * states(plain), rel=1e-3)
    assert both.activations == pytest.approx(plain.activations * 5 / 4)
    assert whole.activations == pytest.approx(plain.activations * 12 / 4)


def test_sharded_weights_need_memory_for_gathered_layers():
    third, second = (
        estimate_memory(BLOCKS, ParallelConfig(dp=64, zero_stage=shards)).gathered_params for shards in (3, 2)
    )
    assert third == pytest.approx(
        (2 + 2 + 2 + 2) * BLOCKS.layer_numel
    )  # two for their uses, two sums on their way
    assert second == pytest.approx((2 + 2) * BLOCKS.layer_numel)
    assert estimate_memory(BLOCKS, ParallelConfig(dp=64, zero_stage=1)).gathered_params == 0
    stays = FrameworkMemory(keeps_layers_gathered=True)
    piped = estimate_memory(BLOCKS, ParallelConfig(dp=8, pp=4, num_microbatches=8, zero_stage=3), stays)
    assert piped.gathered_params == pytest.approx((2 + 2) * 9 * BLOCKS.layer_numel, rel=1e-4)


def test_gathered_inputs_are_not_divided_by_tensor_parallel_ranks():
    shape = ModelShape("gpt", 1, 1024, 16, vocab=1)
    once, whole = (
        estimate_memory(shape, ParallelConfig(tp=4, sequence_parallel=True), framework).activations
        for framework in (FrameworkMemory(), FrameworkMemory(keeps_gathered_inputs=True))
    )
    assert whole - once == pytest.approx(4 * shape.sequence * shape.hidden * 3 / 4)


def test_allocator_segments_too_small_for_logits_are_reserved_and_more_with_saved_scores():
    shape, framework = (
        ModelShape("gpt", 2, 1024, 16, vocab=500_000),
        FrameworkMemory(logits_fragmentation=8, score_fragmentation=4, fragmentation=1.0),
    )
    logits = 4 * shape.sequence * shape.vocab
    for kernel, each in (("flash2", 8), ("softmax", 12), ("eager", 12)):
        found = estimate_memory(
            shape, ParallelConfig(attention_kernel=kernel, micro_batch=4, recompute="layers"), framework
        )
        assert found.fragmentation == pytest.approx(each * logits)
    narrow = replace(shape, vocab=100)
    assert (
        estimate_memory(
            narrow, ParallelConfig(attention_kernel="eager", micro_batch=4, recompute="layers"), framework
        ).fragmentation
        == 0.0
    )


def test_logits_without_vocab_parallel_are_not_divided():
    shape = ModelShape("words", 2, 512, 8, vocab=200_000)
    divided, whole = (
        estimate_memory(shape, ParallelConfig(tp=4), framework)
        for framework in (FrameworkMemory(), FrameworkMemory(shards_logits=False))
    )
    assert whole.logits == 4 * divided.logits


def test_device_memory_is_more_than_torch_counts():
    alone, found = (
        estimate_memory(BLOCKS, ParallelConfig()),
        estimate_memory(BLOCKS, ParallelConfig(tp=2, pp=2)),
    )
    assert found.allocated < found.reserved < found.total
    assert found.total - found.reserved == pytest.approx(found.driver_context)
    assert found.driver_context > alone.driver_context


@pytest.mark.parametrize("shards", [0, 1, 2, 3])
def test_it_equals_the_memory_of_a_plan_of_this_library(shards: int):
    """Sizes alone against the program of a small model on four ranks, whose every tensor is counted: within 5
    %.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 1000}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    narrow = PrecisionConfig(
        "bfloat16", "bfloat16", "bfloat16", master="float32", gradients="bfloat16", optimizer_states="float32"
    )
    strategies = [BatchSplit(axis="dp_shard"), ZeRO(axis="dp_shard", stage=shards)] if shards else None
    mesh, copies = (Mesh(dp_shard=4), 4) if shards else (Mesh(), 1)
    _, plan = planned(llama(**sizes), mesh, strategies, samples=8, length=128, precision=narrow)
    shape = ModelShape("llama", 6, 256, 4, 2, 704, 1000, 128, gated=True)
    layout = ParallelConfig(dp=copies, zero_stage=shards, micro_batch=8 / copies, fused_norms=False)
    assert estimate_memory(shape, layout).allocated == pytest.approx(peak_nbytes(plan, 0), rel=0.05)
    blind = estimate_memory(shape, layout, FrameworkMemory(residual=0, unfused_norm_extra=0))
    assert blind.allocated < 0.94 * peak_nbytes(plan, 0)
