"""Bytes of a rank from sizes: the papers' tables, and what each technique saves."""

from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.analytic.framework_memory import Habits
from meshwright.planner.analytic.memory import Footprint, footprint
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import ALL, BOTH, Layout, Order
from meshwright.planner.program_cost.memory import peak_bytes
from tests.parallel.tensor.odd_llama import llama, planned

# table 1 of arXiv 1910.02054: GB per device of 7.5 B weights at 1, 4, 16, 64, 256, 1024 copies
ZERO_TABLE = {
    1: (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    2: (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    3: (120, 30, 7.5, 1.88, 0.47, 0.12),
}
BLOCKS = Shape("7.5b", 36, 4096, 32, vocab=1)


def states(found: Footprint) -> float:
    return (found.weights + found.gradients + found.moments) / 1e9


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_states_are_those_of_the_table(shards: int):
    scale = 7.5e9 / BLOCKS.numel
    for copies, paper in zip((1, 4, 16, 64, 256, 1024), ZERO_TABLE[shards], strict=True):
        assert states(footprint(BLOCKS, Layout(dp=copies, shards=shards))) * scale == pytest.approx(
            paper, rel=0.005, abs=0.006
        )


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_layer_are_those_of_the_table(tp: int):
    """34 s b h / t with tokens on tensor ranks (arXiv 2205.05198, table 2), less a byte each for the masks of two dropouts."""
    shape = Shape("gpt", 1, 1024, 16, vocab=1)
    found = footprint(shape, Layout(tp=tp, sequence=tp > 1, micro_batch=4, reruns="attention"))
    unit = 4 * shape.sequence * shape.hidden / tp
    assert found.activations / unit == pytest.approx(34 - 2)


def test_scores_are_kept_unless_a_kernel_is_fused_or_they_are_rerun():
    shape = Shape("gpt", 10, 1024, 16, vocab=1)
    fused, one, torch, again = (
        footprint(shape, Layout(kernel=kernel, reruns=reruns))
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
    assert again.inside - one.inside == pytest.approx(5 * pairs)  # those of the block that is rerun


def test_what_is_rerun_keeps_the_inputs_of_layers():
    """2 s b h per layer, and one layer's inside."""
    shape = Shape("gpt", 24, 1024, 16, vocab=1)
    kept, again = footprint(shape, Layout()), footprint(shape, Layout(reruns="layers"))
    assert again.activations == pytest.approx(24 * 2 * shape.sequence * shape.hidden)
    assert again.inside - kept.inside == pytest.approx(kept.activations / 24)


def test_the_fullest_rank_along_pp_is_the_one_with_most():
    deep = Shape("deep", 32, 4096, 32, vocab=1000)
    words = replace(deep, vocab=500_000)
    assert (
        footprint(deep, Layout(pp=4, micros=16)).logits == 0
    )  # the first, with four micro-batches under way
    assert (
        footprint(words, Layout(pp=4, micros=16, reruns="layers", micro_batch=4)).logits
        == 4 * 2048 * 500_000 * 14
    )


def test_the_loss_and_a_blocks_backward_are_not_there_at_once():
    narrow, words = (footprint(Shape("s", 2, 512, 8, vocab=vocab), Layout()) for vocab in (128, 100_000))
    assert narrow.logits == 0 < narrow.inside
    assert words.inside == 0 < words.logits


def test_copies_in_groups_divide_states_by_the_group():
    whole, groups = (footprint(BLOCKS, Layout(dp=64, shards=3, within=within)) for within in (0, 8))
    assert states(groups) == pytest.approx(8 * states(whole))


def test_parts_that_lie_on_two_ranks_are_held_twice_and_one_order_holds_all_micro_batches():
    plain, both, whole = (
        footprint(BLOCKS, Layout(pp=4, micros=12, order=order)) for order in (Order(), BOTH, ALL)
    )
    assert states(both) == pytest.approx(2 * states(plain), rel=1e-3)
    assert both.activations == pytest.approx(plain.activations * 5 / 4)
    assert whole.activations == pytest.approx(plain.activations * 12 / 4)


def test_weights_in_shards_need_room_for_layers_that_are_gathered():
    third, second = (footprint(BLOCKS, Layout(dp=64, shards=shards)).gathered for shards in (3, 2))
    assert third == pytest.approx(
        (2 + 2 + 2 + 2) * BLOCKS.layer_numel
    )  # two for their uses, two sums on their way
    assert second == pytest.approx((2 + 2) * BLOCKS.layer_numel)
    assert footprint(BLOCKS, Layout(dp=64, shards=1)).gathered == 0
    stays = Habits(stays=True)
    piped = footprint(BLOCKS, Layout(dp=8, pp=4, micros=8, shards=3), stays)
    assert piped.gathered == pytest.approx((2 + 2) * 9 * BLOCKS.layer_numel, rel=1e-4)


def test_inputs_that_are_gathered_are_not_divided_by_tensor_ranks():
    shape = Shape("gpt", 1, 1024, 16, vocab=1)
    once, whole = (
        footprint(shape, Layout(tp=4, sequence=True), habits).activations
        for habits in (Habits(), Habits(gathered=True))
    )
    assert whole - once == pytest.approx(4 * shape.sequence * shape.hidden * 3 / 4)


def test_pieces_that_logits_do_not_fit_into_are_reserved_beside_them_and_more_of_them_where_scores_are_kept_apart():
    shape, habits = Shape("gpt", 2, 1024, 16, vocab=500_000), Habits(pinned=8, split=4, gaps=1.0)
    logits = 4 * shape.sequence * shape.vocab
    for kernel, each in (("flash2", 8), ("softmax", 12), ("eager", 12)):
        found = footprint(shape, Layout(kernel=kernel, micro_batch=4, reruns="layers"), habits)
        assert found.gaps == pytest.approx(each * logits)
    narrow = replace(shape, vocab=100)
    assert footprint(narrow, Layout(kernel="eager", micro_batch=4, reruns="layers"), habits).gaps == 0.0


def test_logits_that_every_tensor_rank_has_whole_are_not_divided():
    shape = Shape("words", 2, 512, 8, vocab=200_000)
    divided, whole = (footprint(shape, Layout(tp=4), habits) for habits in (Habits(), Habits(divided=False)))
    assert whole.logits == 4 * divided.logits


def test_what_a_device_shows_is_more_than_torch_counts():
    alone, found = footprint(BLOCKS, Layout()), footprint(BLOCKS, Layout(tp=2, pp=2))
    assert found.alive < found.reserved < found.total
    assert found.total - found.reserved == pytest.approx(found.context)
    assert found.context > alone.context


@pytest.mark.parametrize("shards", [0, 1, 2, 3])
def test_it_is_what_a_plan_of_this_library_holds(shards: int):
    """Sizes alone against the program of a small model on four ranks, whose every tensor is counted: within 5 %."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 1000}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    narrow = PrecisionConfig(
        "bfloat16", "bfloat16", "bfloat16", master="float32", gradients="bfloat16", optimizer_states="float32"
    )
    strategies = [BatchSplit(axis="dp_shard"), ZeRO(axis="dp_shard", stage=shards)] if shards else None
    mesh, copies = (Mesh(dp_shard=4), 4) if shards else (Mesh(), 1)
    _, plan = planned(llama(**sizes), mesh, strategies, rows=8, length=128, precision=narrow)
    shape = Shape("llama", 6, 256, 4, 2, 704, 1000, 128, gated=True)
    layout = Layout(dp=copies, shards=shards, micro_batch=8 / copies, fused=False)
    assert footprint(shape, layout).alive == pytest.approx(peak_bytes(plan, 0), rel=0.05)
    blind = footprint(shape, layout, Habits(stream=0, unfused=0))
    assert blind.alive < 0.94 * peak_bytes(plan, 0)
