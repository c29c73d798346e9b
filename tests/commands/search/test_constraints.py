"""Constraints of a search: each is obeyed, and contradictions are reported at once with what is needed."""

import pytest

from meshwright.commands.search.constraints import SCHEDULES, SEARCHED_SCHEDULES, SearchConstraints
from meshwright.commands.search.search import SearchOptions, run_search
from meshwright.plan.job.errors import PlanError
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.search.search import search

SMALL = "small: layers 24 hidden 2048 heads 16 gated vocab 32000"
LONG = f"{SMALL} sequence 16384"


def best(
    *words: str, model: str = SMALL, devices: int = 16, batch: int = 64
) -> list[tuple[ParallelConfig, str]]:
    found = run_search(SearchOptions(model, devices, "a100", batch, constraints=words)).result.best
    return [(each.config, each.schedule) for each in found]


def test_each_constraint_is_obeyed_by_every_layout_that_is_shown():
    assert {layout.zero_stage for layout, _ in best("zero=3", "dp_shard=4")} == {3}
    assert {layout.zero_group_size for layout, _ in best("zero=1", "dp_shard=4")} == {4}
    assert {layout.micro_batch for layout, _ in best("micro_batch=2")} == {2}
    assert {layout.recompute for layout, _ in best("activation_checkpointing=layers")} == {"layers"}
    assert {layout.recompute for layout, _ in best("activation_checkpointing=none")} == {"none"}
    assert {layout.virtual_stages for layout, _ in best("virtual_stages=4")} == {4}
    assert all(layout.tp_across_hosts for layout, _ in best("intra_host=dp", "tp=2"))
    assert {layout.offload for layout, _ in best("offload=device_step")} == {"device_step"}
    assert {layout.offload for layout, _ in best("offload=none")} == {"none"}
    for name in SCHEDULES:
        found = best(f"schedule={name}")
        assert {schedule for _, schedule in found} == {name}
        assert all(layout.pp > 1 for layout, _ in found)


@pytest.mark.parametrize(
    ("method", "swapping"), [("ring", {1}), ("ulysses", {2, 4, 8, 16}), ("hybrid", {2, 4, 8})]
)
def test_a_context_parallel_method_is_used_for_sharded_sequences(method: str, swapping: set[int]):
    found = best(f"context_parallel={method}", model=LONG, batch=8)
    assert all(layout.cp > 1 for layout, _ in found)
    assert {layout.ulysses_degree for layout, _ in found} <= swapping
    assert all((layout.ulysses_degree == layout.cp) == (method == "ulysses") for layout, _ in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("offload=host_step",), "offload over the host memory of A100, whose rate is not known"),
        (("offload=tape",), "offload is 'tape'"),
        (("tp=8", "pp=7"), "pp 7 does not divide 64 devices"),
        (("tp=8", "pp=16"), "tp 8 x pp 16 are 128 ranks, which does not match 64 devices"),
        (("dp=2", "tp=2", "pp=2", "cp=2"), "are 16 ranks, which does not match 64 devices"),
        (("tp=32",), "tp 32 does not divide 16 attention heads"),
        (("pp=32",), "pp 32 for 24 layers"),
        (("pp=16", "virtual_stages=2"), "pp 16 x 2 virtual stages for 24 layers"),
        (("micro_batch=3",), "a batch of 256 samples in microbatches of 3"),
        (("dp=8", "micro_batch=5"), "32 samples per replica in microbatches of 5"),
        (("zero=4",), "zero: ZeRO stage 4\n  repair: choose stage 0, 1, 2 or 3"),
        (("zero=0", "dp_shard=2"), "ZeRO groups of 2 replicas with ZeRO stage 0"),
        (("dp=8", "dp_shard=3"), "ZeRO groups of 3 replicas, of dp 8"),
        (("zero=1", "dp=1", "cp=1"), "ZeRO stage 1 on one data-parallel replica"),
        (("schedule=zb_v", "pp=1"), "pp 1, but another setting needs several ranks along pp"),
        (("schedule=zb_v", "virtual_stages=3"), "3 virtual stages per rank, but zb_v takes 2"),
        (("schedule=zbv",), "did you mean 'zb_v'?"),
        (("activation_checkpointing=all",), "choose one of: layers, none"),
        (("context_parallel=ulises",), "did you mean 'ulysses'?"),
        (("context_parallel=ulysses", "cp=32"), "cp 32 ranks exchange tokens for 16 attention heads"),
        (("tpp=8",), "did you mean 'tp'?"),
        (("tp=two",), "tp is 'two'"),
        (("tp=0",), "tp 0"),
        (("tp",), "write NAME=VALUE, for example tp=8"),
        (("zero=",), "write NAME=VALUE, for example zero=3"),
        (("tp=\u00b2",), "tp is '\u00b2'"),
        (("tp=2", "tp=4"), "tp is set to 2 and to 4"),
        (("schedule=1f1b", "schedule=zb_v"), "schedule is set to 1f1b and to zb_v"),
        (("dp_shard=3",), "ZeRO groups of 3 replicas on 64 devices"),
        (("zero=3", "dp=1"), "no mesh has the data-parallel replicas for ZeRO stage 3"),
    ],
)
def test_contradictions_are_reported_with_what_is_needed(options: tuple[str, ...], message: str):
    with pytest.raises(PlanError) as raised:
        run_search(SearchOptions(SMALL, 64, "a100", 256, constraints=options))
    assert message in str(raised.value)
    assert "repair: " in str(raised.value)


def test_all_contradictions_are_reported_at_once():
    with pytest.raises(PlanError) as raised:
        run_search(
            SearchOptions(
                SMALL,
                64,
                "a100",
                250,
                constraints=("tp=7", "pp=5", "dp=4", "micro_batch=3", "schedule=zb", "zero=9"),
            )
        )
    assert len(raised.value.diagnostics) == 6


def test_sequences_too_short_for_their_ranks_are_reported():
    with pytest.raises(PlanError, match="cp 64 splits sequences of 64 tokens into 128 chunks"):
        run_search(SearchOptions(f"{SMALL} sequence 64", 64, "a100", 256, constraints=("cp=64",)))


def test_schedules_that_are_not_searched_never_win():
    """GPipe waits as long as 1F1B and holds more; DualPipe waits longer than ZB-V and holds its weights
    twice.
    """
    assert set(SEARCHED_SCHEDULES) < set(SCHEDULES)
    for model, devices in ((SMALL, 8), ("13b: layers 40 hidden 5120 heads 40", 16)):
        asked = run_search(SearchOptions(model, devices, "a100", 48))
        every = SearchConstraints().apply(asked.request)
        assert (
            search(every, 1).best[0]
            == search(type(every)(**{**vars(every), "schedules": SCHEDULES}), 1).best[0]
        )
