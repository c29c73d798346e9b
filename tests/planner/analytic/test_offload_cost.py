"""Offload from sizes alone: memory of both tiers and seconds of copies, against the program of a plan."""

from dataclasses import replace
from functools import cache

import pytest

from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.hardware.device_specs import DeviceSpec
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.analytic.closed_form_memory import (
    estimate_host_memory,
    estimate_memory,
    saved_layer_nbytes,
)
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.memory_coefficients import MESHWRIGHT_MEMORY
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.offload_cost import (
    SteppedElements,
    is_possible,
    needed_rates,
    priced_modes,
    tier_memory,
    update_seconds,
)
from meshwright.planner.analytic.parallel_config import OFFLOAD_MODES, OffloadMode, ParallelConfig
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.machine.machine_rates import MachineRates
from meshwright.planner.program_cost.prediction import predict_step
from meshwright.planner.program_cost.rank_memory import fullest_host, peak_nbytes, peak_nbytes_by_category
from tests.parallel.tensor.odd_llama import batches, llama, planned
from tests.planner.simple_machine import ground

LINK, HOST, DISK = 1e6, 3e6, 2e6  # bytes per second
SHAPE = ModelShape("llama", 6, 256, 4, 2, 704, 1000, 128, gated=True)
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 1000}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
NARROW = PrecisionConfig(
    "bfloat16", "bfloat16", "bfloat16", master="float32", gradients="bfloat16", optimizer_states="float32"
)
STATES, GRADIENTS = "optimizer_states", "gradients"
STRATEGIES = {
    "device_step": Offload(),
    "host_step": Offload(step_on="host"),
    "gradients": Offload((STATES, GRADIENTS), "host"),
    "everything": Offload((STATES, GRADIENTS, "weights"), "host"),
    "disk": DiskOffload("/scratch"),
}
CASES = [
    ("device_step", 1),
    ("device_step", 2),
    ("device_step", 3),
    ("host_step", 1),
    ("host_step", 3),
    ("gradients", 2),
    ("gradients", 3),
    ("everything", 3),
]


@cache
def analyzed() -> AnalyzedModel:
    return analyze(llama(**SIZES), batches(1, 8, 128)[0], loss=token_cross_entropy())


@cache
def plan_of(mode: OffloadMode, stage: int, ranks: int = 4, micro: int = 0) -> Plan:
    offload = () if mode == "none" else (STRATEGIES[mode],)
    strategies = [BatchSplit(axis="dp_shard"), ZeRO(axis="dp_shard", stage=stage), *offload]
    mesh = Mesh(dp_shard=ranks)
    return planned(analyzed(), mesh, strategies, micro, samples=8, length=128, precision=NARROW)[1]


def config_of(mode: OffloadMode, stage: int, ranks: int = 4, micro: int = 0) -> ParallelConfig:
    micro = micro or 8 // ranks
    return ParallelConfig(
        dp=ranks,
        zero_stage=stage,
        micro_batch=micro,
        num_microbatches=8 // ranks // micro,
        fused_norms=False,
        offload=mode,
    )


@pytest.mark.parametrize(("mode", "stage"), CASES)
def test_memory_of_both_tiers_is_that_of_a_plan(mode: OffloadMode, stage: int):
    """The host within 0.5 % (without norms and counters); what the device no longer keeps within 5 %."""
    for micro in (0, 1):
        plan, config = plan_of(mode, stage, micro=micro), config_of(mode, stage, micro=micro)
        found, plain = estimate_memory(SHAPE, config), estimate_memory(SHAPE, replace(config, offload="none"))
        assert found.host == pytest.approx(peak_nbytes(plan, 0, "host"), rel=0.005)
        freed = peak_nbytes(plan_of("none", stage, micro=micro), 0) - peak_nbytes(plan, 0)
        assert plain.allocated - found.allocated == pytest.approx(freed, rel=0.05)
        assert found.allocated == pytest.approx(peak_nbytes(plan, 0), rel=0.06)


@pytest.mark.parametrize("mode", ["gradients", "everything"])
def test_one_rank_alone_has_shards_on_its_host(mode: OffloadMode):
    plan, config = plan_of(mode, 3, 1, 2), config_of(mode, 3, 1, 2)
    found = estimate_memory(SHAPE, config)
    assert found.host == pytest.approx(peak_nbytes(plan, 0, "host"), rel=0.005)
    assert found.allocated == pytest.approx(peak_nbytes(plan, 0), rel=0.06)


def test_ranks_of_a_host_share_its_memory():
    plan, config = plan_of("host_step", 2), config_of("host_step", 2)
    for ranks in (1, 2, 4, 8):
        known = fullest_host(plan, ranks)[1]
        assert estimate_host_memory(SHAPE, config, ranks) == pytest.approx(known, rel=0.005)
    stages = ParallelConfig(dp=2, pp=4, num_microbatches=8, offload="device_step")
    each = estimate_host_memory(SHAPE, stages, 2)  # one stage with a table on each host
    assert estimate_host_memory(SHAPE, stages, 8) < 4 * each
    assert each < estimate_host_memory(SHAPE, stages, 4) < 2 * each
    assert estimate_host_memory(SHAPE, replace(stages, offload="none"), 8) == 0


def machine(link: float = LINK, host: float = HOST, disk: float = DISK) -> Machine:
    device = DeviceSpec("x", "x", {"bfloat16": 1e18}, 1e18, 1e18, 1e18, 1e18, 8, 1, "made up")
    return Machine(
        replace(device, host_link_rate=link, host_memory_rate=host, disk_rate=disk), 8, MachineRates()
    )


def copies_of_the_program(plan: Plan) -> float:
    """Seconds of a step in which nothing takes time but copies and work on the host."""
    target = replace(ground(), copy_rates={"host link": LINK, "host memory": HOST})
    return predict_step(plan, target).step_s


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize(("mode", "stage"), CASES)
def test_seconds_of_copies_are_those_of_the_program(mode: OffloadMode, stage: int, micro: int):
    plan, config = plan_of(mode, stage, micro=micro), config_of(mode, stage, micro=micro)
    numel = SHAPE.numel / 4
    stepped = SteppedElements(numel, SHAPE.embedding_numel / 4, SHAPE.layer_numel / 4)
    fetch_s = 2 * SHAPE.layers * SHAPE.layer_numel / 4 / LINK if mode == "everything" else 0.0
    # each use of a layer waits for its shard, and gradients leave meanwhile: nothing is computed beside them
    expected = sum(update_seconds(stepped, config, machine(), 0.0, fetch_s))
    expected += 2 * config.num_microbatches * fetch_s
    allowed = 0.1 if mode == "everything" else 0.001  # copies in and out wait for the same buffers
    assert expected == pytest.approx(copies_of_the_program(plan), rel=allowed)


def test_bytes_that_are_copied_are_those_of_the_formula():
    """12 N each way for the device step, 2 N out and 2 N in for the host step (ZeRO-Offload)."""
    stepped = SteppedElements(1e6, 0.0, 0.0)
    device, host = (
        update_seconds(stepped, ParallelConfig(offload=mode), machine(), 0.0, 0.0)
        for mode in ("device_step", "host_step")
    )
    assert device == (0.0, 12e6 / LINK)
    assert host[0] == pytest.approx(28e6 / HOST)
    assert host[1] == pytest.approx(2e6 / LINK)  # out; what comes in hides behind the steps of other groups


def test_copies_hide_behind_the_backward_and_behind_the_optimizer():
    stepped, config = SteppedElements(1e6, 0.0, 0.0), ParallelConfig(offload="gradients", num_microbatches=3)
    shown = [update_seconds(stepped, config, machine(), 0.0, seconds)[1] for seconds in (0.0, 1.0, 2.0, 9.0)]
    assert shown == pytest.approx([6.0, 3.0, 0.0, 0.0])
    slow = update_seconds(stepped, ParallelConfig(offload="device_step"), machine(), 100.0, 0.0)
    assert slow == (100.0, 0.0)


def test_offload_takes_time_and_a_fast_link_takes_less():
    plain, slow, fast = (
        step_time(SHAPE, ParallelConfig(zero_stage=0, offload=mode), machine(link))
        for mode, link in (("none", LINK), ("device_step", LINK), ("device_step", 10 * LINK))
    )
    assert plain.host_copies == 0
    assert plain.seconds < fast.seconds < slow.seconds
    assert slow.seconds == pytest.approx(sum(vars(slow).values()))


def test_shards_on_the_host_need_zero_and_gradients_that_are_summed_once():
    config = ParallelConfig(dp=4, zero_stage=3)
    assert all(is_possible(SHAPE, config, mode) for mode in OFFLOAD_MODES)
    tied = replace(SHAPE, tied=True)
    for other, shape in (
        (replace(config, zero_stage=1), SHAPE),
        (replace(config, zero_group_size=2), SHAPE),
        (replace(config, pp=2), tied),
    ):
        possible = [mode for mode in OFFLOAD_MODES if is_possible(shape, other, mode)]
        assert possible == ["none", "device_step", "host_step", "disk"]
    assert not is_possible(SHAPE, replace(config, zero_stage=2), "everything")


def test_a_mode_has_a_price_where_its_rates_are_known():
    assert priced_modes(machine(0.0, 0.0)) == ("none",)
    assert (
        priced_modes(machine(LINK, 0.0)) == ("none", "device_step") == priced_modes(make_machine("h100", 8))
    )
    assert priced_modes(machine()) == OFFLOAD_MODES
    assert priced_modes(machine(disk=0.0)) == OFFLOAD_MODES[:-1]
    assert needed_rates("everything") == ("host link", "host memory")
    assert needed_rates("disk") == ("disk", "host link", "host memory")


def test_nothing_moves_without_offload():
    kept = tier_memory((2.0, 3.0, 12.0), ParallelConfig(), MESHWRIGHT_MEMORY, 7.0)
    assert (kept.weights, kept.gradients, kept.optimizer_states, kept.buffers, kept.host) == (2, 3, 12, 0, 0)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_on_disk_leave_a_few_buffers_on_the_host(stage: int):
    """Within 2 %: a record is rounded up to blocks of the file."""
    plan, config = plan_of("disk", stage), config_of("disk", stage)
    found = estimate_memory(SHAPE, config)
    assert found.host == pytest.approx(peak_nbytes(plan, 0, "host"), rel=0.02)
    assert found.disk == pytest.approx(peak_nbytes(plan, 0, "disk"), rel=0.02)
    assert found.allocated == pytest.approx(peak_nbytes(plan, 0), rel=0.06)


@pytest.mark.parametrize(
    ("link", "host", "disk"), [(1e6, 3e6, 2e5), (1e6, 3e6, 2e6), (1e6, 3e5, 2e7), (1e5, 3e6, 2e7)]
)
def test_a_step_on_disk_takes_the_longest_of_disk_host_and_link(link: float, host: float, disk: float):
    plan, config = plan_of("disk", 1), config_of("disk", 1)
    stepped = SteppedElements(SHAPE.numel / 4, SHAPE.embedding_numel / 4, SHAPE.layer_numel / 4)
    expected = sum(update_seconds(stepped, config, machine(link, host, disk), 0.0, 0.0))
    rates = {"host link": link, "host memory": host, "disk": disk}
    found = predict_step(plan, replace(ground(), copy_rates=rates)).step_s
    assert expected == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_activations_on_the_host_leave_those_of_three_layers_at_most(recompute: str):
    """The host within one layer's; the device no more than is said."""
    more = (ActivationCheckpointing(),) if recompute == "layers" else ()
    strategies = [BatchSplit(axis="dp_shard"), ZeRO(axis="dp_shard", stage=1), *more, ActivationOffload()]
    given = {"samples": 8, "length": 128, "precision": NARROW}
    plan = planned(analyzed(), Mesh(dp_shard=4), strategies, **given)[1]
    config = replace(config_of("none", 1), recompute=recompute, activation_offload=True)
    found, layer = estimate_memory(SHAPE, config), saved_layer_nbytes(SHAPE, config)
    assert found.host == pytest.approx(peak_nbytes(plan, 0, "host"), abs=1.02 * layer)
    on_device = peak_nbytes_by_category(plan, 0)["activations"]
    assert on_device <= found.activations + found.block_backward + found.logits
    left = estimate_memory(SHAPE, replace(config, activation_offload=False))
    assert left.activations - found.activations == 3 * layer


def test_copies_of_activations_cost_what_their_layers_do_not_hide():
    config = ParallelConfig(recompute="layers", activation_offload=True, num_microbatches=2)
    nbytes = saved_layer_nbytes(SHAPE, config)
    assert nbytes == 2 * 128 * 256
    fast, slow = (step_time(SHAPE, config, machine(link)) for link in (1e18, LINK))
    plain = step_time(SHAPE, replace(config, activation_offload=False), machine())
    assert fast.seconds == plain.seconds
    copies_s = 2 * 6 * 2 * nbytes / LINK  # of which kernel launches hide a little
    assert slow.host_copies == pytest.approx(copies_s, rel=0.03)
    assert slow.host_copies < copies_s
    assert not is_possible(replace(SHAPE, layers=3), config, "none")
    assert not is_possible(SHAPE, replace(config, zero_stage=3), "everything")
