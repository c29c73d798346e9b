"""Offload to host and disk in closed form: what leaves the device, what a host keeps, what the copies take.

Why it works: model states are read and written once per step, in a known order, so what they take is bytes
over rates. A mode says what rests on the host and who steps it (parallel/memory/tiers/offload.py):

    mode           rests on the host           steps     on the device      copied per step, m microbatches
    none           --                          device    w + g + o
    device_step    o                           device    w + g + buffers    o in, o out
    host_step      o                           host      w + g              g out, w in
    gradients      o and shards of g           host      w                  m g out, w in
    everything     o, shards of g and of w     host      blocks             m g out, w in for each use
    disk           o (on disk)                 host      w + g              g out, w in; o read, o written

    w, g, o        bytes of what a rank steps: weights, gradients, masters and optimizer states
    buffers        three of the largest group
    host           o; for the host step also g, w (what is rounded, or the shards), and a cast of one group;
                   with shards of g and several microbatches two staging buffers. With o on disk three
                   buffers of the largest group for o, g and w, the cast, and moments of one group

    R the rate of the host link one way, H that of host memory; l the largest group, e the first and the last
    one (a table)

    device step    max(o / R + o_l / R + step_l,  step + 2 o_e / R)
    host step      g / R  +  max((g + 2 o + w) / H + w_e / R,  w / R)
    gradients      (m - 1) x + max(x, g_e / R)  +  the second term of the host step,
                   where x = max(0, g / R - backward)
    everything     as gradients, without w / R; each gather of a layer waits for the copy of its shard
    disk           the longest of what the disk, the host and the link take, D the rate of the disk:
                   max(o_3 / D - backward, (g_e + step) of the first group) + (2 o - o_3) / D
                   g_e / R + (g + 2 o + w) / H + o_e / D,     g / R + step of the last + (w_e / R + o_e / D)
                   where o_3 is what the first three buffers take, read beside the backward

    activations    what a layer and microbatch keep for the backward, a: max(0, a / R - forward) and
                   max(0, a / R - backward) are seen, for each. On the device are those of three layers

In and out run at once, each at R; a disk reads and writes one after the other. The ranks of a host share its
memory: what they keep is added up (`estimate_host_memory` of closed_form_memory.py).

Limits: AdamW with 16-bit weights and gradients and float32 masters. Gradients of tied embeddings on several
pipeline ranks, and of replicas of shards, are summed once more on the device: no shards of gradients rest
on the host then. Activations leave beside the modes whose own copies come at the end of a step.
Paper: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840; Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv
2104.07857.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.plan.hardware.streams import Resource
from meshwright.planner.analytic.memory_coefficients import FrameworkMemory
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import OFFLOAD_MODES, OffloadMode, ParallelConfig
from meshwright.planner.machine.machine import Machine

NUM_STATE_BUFFERS = 3  # of the device step: one is fetched ahead, one stepped, one copied back
NUM_STAGING_BUFFERS = 2
NUM_DISK_BUFFERS = 3  # the default of disk_offload: one is read, one stepped, one written
NUM_LAYERS_STAYING = 3  # on the device: of one that runs, one that leaves or comes back, and an input
MODES_WITH_ACTIVATIONS: tuple[OffloadMode, ...] = ("none", "device_step", "host_step", "disk")
MASTER_NBYTES, STATES_NBYTES = 4, 12  # of an element: the master; it and two moments
LEAST_ZERO_STAGE = {"gradients": 2, "everything": 3}


@dataclass(frozen=True)
class TierMemory:
    """The model states of a rank: bytes on the device, with the buffers there, on the host, and on disk."""

    weights: float
    gradients: float
    optimizer_states: float
    buffers: float = 0.0
    host: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True)
class SteppedElements:
    """The elements that a rank steps: all, those of an embedding, those of its largest parameter group."""

    numel: float
    table_numel: float
    largest_numel: float


def tier_memory(
    states: tuple[float, float, float], config: ParallelConfig, framework: FrameworkMemory, group_numel: float
) -> TierMemory:
    """Returns where the `states` of a rank rest: bytes of weights, gradients and optimizer states.

    `group_numel` are the elements that it steps of its largest parameter group.
    """
    weights, gradients, optimizer_states = states
    if config.offload == "none":
        return TierMemory(*states)
    numel = optimizer_states / framework.optimizer_states
    if config.offload == "device_step":
        buffers = NUM_STATE_BUFFERS * framework.optimizer_states * group_numel
        return TierMemory(weights, gradients, 0.0, min(buffers, optimizer_states), optimizer_states)
    grad_itemsize = config.grad_reduce_itemsize
    if config.offload == "disk":
        each = framework.optimizer_states + grad_itemsize + framework.weights
        host = each * min(NUM_DISK_BUFFERS * group_numel, numel)
        host += MASTER_NBYTES * group_numel if grad_itemsize != MASTER_NBYTES else 0.0
        host += (framework.optimizer_states - MASTER_NBYTES) * group_numel
        return TierMemory(weights, gradients, 0.0, 0.0, host, optimizer_states)
    host = optimizer_states + grad_itemsize * numel
    host += MASTER_NBYTES * group_numel if grad_itemsize != MASTER_NBYTES else 0.0
    if config.shards_on_host and config.num_microbatches > 1:
        host += NUM_STAGING_BUFFERS * grad_itemsize * group_numel
    if config.offload == "everything":
        return TierMemory(0.0, 0.0, 0.0, 0.0, host + weights)
    host += framework.weights * numel
    return TierMemory(weights, 0.0 if config.shards_on_host else gradients, 0.0, 0.0, host)


def update_seconds(
    stepped: SteppedElements,
    config: ParallelConfig,
    machine: Machine,
    device_step_s: float,
    backward_s: float,
) -> tuple[float, float]:
    """Returns the seconds of the optimizer, and those of copies that nothing hides.

    `device_step_s` is what the optimizer takes on the device, `backward_s` the backward of a microbatch,
    beside which gradients leave it.
    """
    if config.offload == "none":
        return device_step_s, 0.0
    link, table_share = machine.device.host_link_rate, stepped.table_numel / stepped.numel
    if config.offload == "device_step":
        copy_s = STATES_NBYTES * stepped.numel / link
        # the largest group goes out while all later ones wait; the first comes in and the last goes out alone
        largest_s = stepped.largest_numel / stepped.numel * (copy_s + device_step_s)
        total = max(copy_s + largest_s, device_step_s + 2 * table_share * copy_s)
        return device_step_s, total - device_step_s
    itemsize = config.grad_reduce_itemsize
    grads_s, weights_s = itemsize * stepped.numel / link, config.param_gather_itemsize * stepped.numel / link
    nbytes = (
        itemsize + 2 * STATES_NBYTES + (0 if config.offload == "everything" else config.param_gather_itemsize)
    )
    step_s = nbytes * stepped.numel / machine.device.host_memory_rate
    if config.offload == "disk":
        backward_s *= config.num_microbatches
        total = _disk_seconds(stepped, machine, (grads_s, step_s, weights_s), backward_s)
        return step_s, total - step_s
    if config.shards_on_host:
        exposed_s = max(0.0, grads_s - backward_s)
        out_s = (config.num_microbatches - 1) * exposed_s + max(exposed_s, table_share * grads_s)
    else:
        out_s = grads_s
    if config.offload == "everything":
        return step_s, out_s + table_share * weights_s  # the first fetch of a step hides behind nothing
    return step_s, out_s + max(table_share * weights_s, weights_s - (1 - table_share) * step_s)


def _disk_seconds(
    stepped: SteppedElements, machine: Machine, of_all: tuple[float, float, float], backward_s: float
) -> float:
    """Returns the seconds from the last backward to the last write of a step with states on disk.

    `of_all` are those of all gradients out, of the steps of the host and of all weights in; `backward_s` is
    the time in which the first reads run.
    """
    grads_s, step_s, weights_s = of_all
    per_element_s, share = STATES_NBYTES / machine.device.disk_rate, stepped.table_numel / stepped.numel
    one_way_s, end_s = per_element_s * stepped.numel, per_element_s * stepped.table_numel
    first_numel = stepped.table_numel + (NUM_DISK_BUFFERS - 1) * stepped.largest_numel
    first_s = per_element_s * min(first_numel, stepped.numel)
    begin_s = share * (grads_s + step_s)
    disk_s = max(begin_s, first_s - backward_s) + 2 * one_way_s - first_s
    host_s = max(share * grads_s, end_s - backward_s) + step_s + max(end_s, share * weights_s)
    # the weights of the last layer come in before those of the table
    waiting_s = max(0.0, stepped.largest_numel - stepped.table_numel) / stepped.numel * weights_s
    link_s = max(grads_s + waiting_s + share * (step_s + weights_s), begin_s + weights_s) + end_s
    return max(disk_s, host_s, link_s)


def activation_copy_seconds(
    nbytes: float, passes_s: tuple[float, float], num_layers: float, machine: Machine
) -> float:
    """Returns the seconds of a microbatch that copies of activations add: out beside the forward, in beside
    the backward.

    `nbytes` are those that a layer keeps, `passes_s` the seconds of its forward and of its backward.
    """
    copy_s = nbytes / machine.device.host_link_rate
    return num_layers * sum(max(0.0, copy_s - each) for each in passes_s)


def fetch_seconds(shape: ModelShape, config: ParallelConfig, machine: Machine, expert_numel: float) -> float:
    """Returns the seconds in which the shard of a layer's weights comes from the host, before its gather.

    `expert_numel` are the elements of the layer's experts on a rank.
    """
    if config.offload != "everything":
        return 0.0
    numel = (
        shape.layer_dense_numel / config.tp / config.zero_shard_size + expert_numel / config.expert_shard_size
    )
    return config.param_gather_itemsize * numel / machine.device.host_link_rate


def is_possible(shape: ModelShape, config: ParallelConfig, mode: OffloadMode) -> bool:
    """Returns whether `mode` goes with `config`: shards on the host need ZeRO, and gradients that nobody sums
    once more on the device.
    """
    if config.activation_offload and (
        mode not in MODES_WITH_ACTIVATIONS or config.max_layers_per_rank(shape) <= NUM_LAYERS_STAYING
    ):
        return False
    if mode not in LEAST_ZERO_STAGE:
        return True
    return (
        config.zero_stage >= LEAST_ZERO_STAGE[mode]
        and not config.zero_group_size
        and not (shape.tied and config.pp > 1)
    )


def needed_rates(mode: OffloadMode) -> tuple[Resource, ...]:
    """Returns what has to be known of a host to price `mode`."""
    if mode == "none":
        return ()
    if mode == "disk":
        return "disk", "host link", "host memory"
    return ("host link",) if mode == "device_step" else ("host link", "host memory")


def unknown_rates(machine: Machine, modes: Iterable[OffloadMode]) -> list[Resource]:
    """Returns what has to be known of the host of `machine` to price all `modes`, and is not."""
    device = machine.device
    known: dict[Resource, float] = {
        "host link": device.host_link_rate,
        "host memory": device.host_memory_rate,
        "disk": device.disk_rate,
    }
    return sorted({each for mode in modes for each in needed_rates(mode) if not known[each]})


def rate_key(resource: Resource) -> str:
    """Returns the key of a [device] table that gives the rate of `resource`."""
    return f"{resource.replace(' ', '_')}_gb_s"


def priced_modes(machine: Machine) -> tuple[OffloadMode, ...]:
    """Returns the modes of which all rates are known."""
    return tuple(mode for mode in OFFLOAD_MODES if not unknown_rates(machine, (mode,)))
