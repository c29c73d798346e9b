"""The search: the best of all configurations, only those that fit, with fixed choices, in bounded time."""

from dataclasses import replace
from math import inf

import pytest

from meshwright.plan.hardware.device_specs import DeviceSpec
from meshwright.planner.analytic.closed_form_step_time import microbatch_time, step_time
from meshwright.planner.analytic.model_shape import ModelShape, parse_shape
from meshwright.planner.analytic.parallel_config import ZB_H1, ZB_V, ScheduleProfile
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.machine.machine_rates import MachineRates
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import TopCandidates, search

ORDERS = {
    "1f1b": (ScheduleProfile(), 1),
    "interleaved": (ScheduleProfile(), 0),
    "zb_h1": (ZB_H1, 1),
    "zb_v": (ZB_V, 2),
}
SMALL = ModelShape("small", 12, 1536, 12, vocab=32_000, sequence=8192)


def request(
    shape: ModelShape = SMALL, kind: str = "A100", devices: int = 8, batch: int = 16, **said: object
) -> SearchRequest:
    return SearchRequest(shape, make_machine(kind, devices), batch, ORDERS, **said)


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (1, {}),
        (6, {}),
        (8, {}),
        (8, {"hidden": 6144}),
        (12, {"hidden": 6144}),
        (12, {"sequence": 32_768}),
        (16, {"hidden": 3072, "sequence": 16_384}),
        (12, {"sequence": 131_072}),
    ],
)
def test_the_winner_of_a_search_is_that_of_all_layouts(devices: int, changes: dict[str, int]):
    small_hosts = make_machine(
        "A100", devices, host_size_override=2
    )  # so that groups of copies that share states are searched too
    for given in (make_machine("A100", devices), small_hosts):
        asked = replace(request(replace(SMALL, **changes), batch=24 if devices < 16 else 32), machine=given)
        short, whole = search(asked), search(asked, prune=False)
        assert [each.config for each in short.best] == [each.config for each in whole.best]
        assert short.num_estimated < whole.num_estimated
        assert short.best


@pytest.mark.parametrize(
    ("kind", "devices", "batch", "sequence"),
    [
        ("H100", 100_800, 100_800, 131_072),
        ("GB200", 4608, 46_080, 131_072),
        ("H100", 4096, 184_504_320, 1 << 20),
        ("GB200", 4320, 8_648_640, 1 << 20),
        ("H100", 110_880, 15_523_200, 131_072),
    ],
)
def test_sizes_with_many_divisors_and_long_sequences_estimate_few_configurations(
    kind: str, devices: int, batch: int, sequence: int
):
    """Of 70,000 configurations, and of millions, as many are estimated as of numbers with few divisors:
    also where memory is endless.
    """
    shape = parse_shape(f"8b: layers 32 hidden 4096 heads 32 gated ffn 14336 kv_heads 8 sequence {sequence}")
    asked = SearchRequest(shape, make_machine(kind, devices), batch, ORDERS)
    found = search(asked, 8)
    assert len(found.best) == 8
    assert found.num_estimated < 12_000
    endless = replace(asked, machine=replace(asked.machine, device=replace(asked.machine.device, memory=inf)))
    faster = search(endless, 1, max_seconds=0.999 * found.best[0].seconds)
    assert faster.num_estimated < 4000
    assert all(each.seconds < found.best[0].seconds for each in faster.best)


def test_a_search_below_a_given_time_finds_only_faster_layouts():
    best = search(request()).best
    middle = best[4].seconds
    assert search(request(), max_seconds=middle).best == tuple(
        each for each in best if each.seconds <= middle
    )
    assert not search(request(), max_seconds=0.999 * best[0].seconds).best


def test_indistinguishable_layouts_are_shown_once():
    """Shares of moments, or of gradients too, in as many seconds and as much memory: one of the two is told,
    the better one.
    """
    made = search(request()).best[0]
    moments, gradients = (replace(made, config=replace(made.config, zero_stage=stage)) for stage in (1, 2))
    slower = replace(gradients, step=replace(made.step, fixed=made.step.fixed + 1e-6 * made.seconds))
    smaller = replace(gradients, memory=replace(made.memory, gradients=made.memory.gradients - 2**28))
    for others, left in (((slower,), [moments]), ((smaller,), [smaller, moments])):
        best = TopCandidates(5)
        for each in (moments, *others, moments):
            best.add(each)
        assert best.candidates == left
    found = search(request()).best
    assert len({each.display_key for each in found}) == len(found) > 1


def test_equivalent_splits_of_replicas_and_sequences_are_shown_once():
    """4 copies x 16 ranks of a row and 2 x 32 with 2 rows at once: the same tokens on a rank, in the same
    seconds.
    """
    shape = parse_shape(
        "8b: layers 32 hidden 4096 heads 32 gated ffn 14336 kv_heads 8 vocab 128256 sequence 131072"
    )
    best = search(SearchRequest(shape, make_machine("GB200", 4608), 46_080, ORDERS), 8).best
    ranks = [
        (each.config.tp, each.config.pp, each.config.ulysses_degree, each.schedule, each.config.recompute)
        for each in best
    ]
    tokens = [each.config.local_tokens(shape) for each in best]
    told = [(f"{each.seconds:.3g}", f"{each.memory.total / 2**30:.1f}") for each in best]
    assert len(set(zip(ranks, tokens, told, strict=True))) == len(best) == 8
    assert best[0].config.micro_batch == 1


def test_a_cache_key_without_the_micro_batch_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """What a layer takes is counted once for all that lies over it: a key that forgets something gives other
    winners.
    """
    asked = request(replace(SMALL, hidden=6144), devices=12, batch=24)
    right = [each.seconds for each in search(asked).best]
    for each in search(asked).best:
        assert each.step == step_time(asked.shape, each.config, asked.machine)
    known = microbatch_time(asked.shape, search(asked).best[0].config, asked.machine)
    monkeypatch.setattr("meshwright.planner.search.search.microbatch_time", lambda *_: known)
    assert [each.seconds for each in search(asked).best] != right


def test_layouts_that_do_not_fit_are_excluded_and_the_nearest_is_reported():
    found = search(request(parse_shape("175b: layers 96 hidden 12288 heads 96"), "V100", 8, 8))
    assert not found.best
    assert found.nearest_miss is not None
    layout, held = found.nearest_miss
    assert layout.num_ranks == 8
    assert held.total > 32 * 2**30


def test_all_that_is_found_fits_and_uses_every_device():
    asked = request(parse_shape("13b: layers 40 hidden 5120 heads 40 gated ffn 13824"), devices=32, batch=64)
    found = search(asked)
    assert len(found.best) == 10
    for each in found.best:
        assert each.memory.total <= asked.usable_memory
        assert each.config.num_ranks == 32
        assert each.config.dp * each.config.micro_batch * each.config.num_microbatches == 64
        assert not list(each.config.diagnostics(asked.shape))
    seconds = [each.seconds for each in found.best]
    assert seconds == sorted(seconds)


def test_an_axis_that_is_fixed_stays():
    assert all(each.config.tp == 2 for each in search(request(fixed={"tp": 2})).best)


def test_contradicting_constraints_are_reported():
    said = [str(fault) for fault in request(fixed={"tp": 3, "xp": 2}, batch=0).diagnostics()]
    assert "a batch of 0 samples" in said[0]
    assert "'xp' is not a setting of the search\n  repair: did you mean 'tp'?" in said[1]
    assert "tp 3 does not divide 8 devices" in said[2]


def test_devices_with_little_memory_make_the_search_shard():
    """The same cluster with a sixth of the memory: states lie in shards."""
    shape = parse_shape("7b: layers 32 hidden 4096 heads 32")
    large = make_machine("A100", 64)
    little = Machine(replace(large.device, memory=large.device.memory / 6), 64, large.rates)
    roomy, tight = (search(SearchRequest(shape, each, 512, ORDERS)).best[0] for each in (large, little))
    assert tight.memory.total < little.device.memory < roomy.memory.total
    assert tight.seconds > roomy.seconds


def test_slow_links_make_the_search_send_less():
    """Where nothing but a thin wire joins hosts, no microbatch gathers weights over it."""
    slow = DeviceSpec(
        "slow", "slow", {"bfloat16": 300e12}, 80 * 2**30, 2e12, 300e9, 0.05e9, 8, 108, "made up"
    )
    shape = parse_shape("7b: layers 32 hidden 4096 heads 32")
    best = search(SearchRequest(shape, Machine(slow, 32, MachineRates()), 256, ORDERS)).best[0].config
    assert best.zero_stage < 3
