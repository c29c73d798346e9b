"""What a search assumes, and what training costs by its result: days, money, energy.

    days      tokens / (tokens per second)                    kWh    days x 24 x devices x watts / 1000
    cost      days x 24 x devices x price of a device hour

Watts are the most that a device takes, by its maker's data sheet: devices that wait take less, and hosts,
network and cooling come on top. Of a device without a known power no energy is shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.machine.machine import Machine
from meshwright.planner.search.data_parallel_first import ESTIMATE_ERROR
from meshwright.planner.search.request import USABLE_MEMORY_FRACTION, SearchRequest
from meshwright.report.table import Column, Table

KERNEL_TEXTS = {"eager": "unfused attention", "softmax": "attention with a fused softmax"}
OFFLOAD_TEXTS = {  # of a configuration; empty: nothing rests on the host
    "none": "",
    "device_step": "optimizer states on the host",
    "host_step": "optimizer states on the host and stepped there",
    "gradients": "optimizer states and gradients on the host",
    "everything": "all model states on the host",
    "disk": "optimizer states on disk, stepped on the host",
}
ACTIVATIONS_TEXT = "activations on the host"


@dataclass(frozen=True)
class TrainingBudget:
    """The cost of training on `num_tokens`, at `price_per_device_hour`; 0: not asked for."""

    num_tokens: float = 0.0
    price_per_device_hour: float = 0.0


def assumptions(
    request: SearchRequest, machines: Sequence[Machine], budget: TrainingBudget
) -> Iterator[tuple[str, str]]:
    """Yields what the estimates assume: a subject, and a text of one or two lines."""
    config, shape = request.base_config, request.shape
    attention = KERNEL_TEXTS.get(config.attention_kernel, "fused causal attention")
    yield "sequences", f"{request.batch:,} of {shape.sequence:,} tokens in a step"
    yield (
        "precision",
        f"parameters and gradients in {config.dtype}, float32 master weights and AdamW states; {attention}",
    )
    if shape.experts:
        yield (
            "experts",
            f"{shape.top_k} of {shape.experts} for a token; the busiest rank along ep has "
            f"{config.expert_load:g} times the mean of the tokens. At most: the memory if all tokens choose "
            f"the experts of one rank",
        )
    for machine in machines:
        yield machine.device.name, _device_text(machine, config.dtype)
    if request.offload_modes != ("none",) or any(request.activation_offload):
        yield "offload", _host_text(request.machine)
    yield (
        "accuracy",
        f"estimated in closed form; the mean error on published runs is about "
        f"{100 * ESTIMATE_ERROR:.0f} % of the step time (docs/concepts/cost_model.md)",
    )
    powers = [f"{machine.device.watts:g} W for each {machine.device.name}" for machine in machines]
    if budget.num_tokens and all(machine.device.watts for machine in machines):
        yield "energy", f"{', '.join(powers)}, all the time; without hosts, network and cooling"
    elif budget.num_tokens:
        yield "energy", "not shown: the power of the device is not known (`watts` in its [device] table)"


def _device_text(machine: Machine, dtype: str) -> str:
    rates, device = machine.rates, machine.device
    memory = f"{USABLE_MEMORY_FRACTION * device.memory / 2**30:.1f} GiB usable"
    compute = (
        f"{100 * rates.matmul:.0f} % of {machine.peak_flops(dtype) / 1e12:,.0f} TFLOP/s in large matmuls"
    )
    if machine.num_devices == 1:
        return f"{memory}, {compute}"
    links = f"{machine.devices_per_host} on a host, {machine.link_rate / 1e9:.0f} GB/s to each other"
    if machine.num_devices > machine.devices_per_host:
        links += f", {machine.nic_rate(1) / 1e9:.3g} GB/s out of it"
    return f"{memory}, {compute}, {links}"


def _host_text(machine: Machine) -> str:
    device = machine.device
    rates = {
        "to and from its host": device.host_link_rate,
        "in the memory of the host": device.host_memory_rate,
        "to and from its disk": device.disk_rate,
    }
    known = [f"{rate / 1e9:.3g} GB/s {where}" for where, rate in rates.items() if rate]
    memory = f"{device.host_memory / 2**30:,.0f} GiB" if device.host_memory else "of unknown memory"
    return f"each {device.name} has {', '.join(known)}; hosts {memory}"


def cost_values(
    tokens_per_s: float, idle_share: float, machines: Sequence[Machine], budget: TrainingBudget
) -> dict[str, float]:
    """Returns the days, the cost and the energy of a training, in all and of the `idle_share` of its time."""
    hours = budget.num_tokens / tokens_per_s / 3600
    cost = hours * sum(machine.num_devices for machine in machines) * budget.price_per_device_hour
    values = {
        "days": hours / 24,
        "hours_waiting": hours * idle_share,
        "cost": cost,
        "cost_of_waiting": cost * idle_share,
    }
    if all(machine.device.watts for machine in machines):
        watts = sum(machine.num_devices * machine.device.watts for machine in machines)
        values["energy_kwh"] = hours * watts / 1000
    return values


def cost_text(row: Mapping[str, Any], budget: TrainingBudget) -> str:
    """Returns what the first configuration takes and costs."""
    text = f"{budget.num_tokens:.3g} tokens take {_days(row['days'])}"
    waiting = _hours(row["hours_waiting"])
    if budget.price_per_device_hour:
        text += f", cost {_number(row['cost'])}"
        waiting += f" and {_number(row['cost_of_waiting'])} of the cost"
    text += f" and need {_number(row['energy_kwh'])} kWh" if "energy_kwh" in row else ""
    return f"{text}; waiting ({waiting}) is the pipeline bubble and exposed communication."


def cost_table(rows: Sequence[Mapping[str, Any]], budget: TrainingBudget) -> Table:
    """Returns days, cost and energy of every configuration."""
    columns = {"days": Column("days", _number), "hours_waiting": Column("hours waiting", _number)}
    if budget.price_per_device_hour:
        columns |= {
            "cost": Column("cost", _number),
            "cost_of_waiting": Column("cost of waiting", _number),
        }
    if "energy_kwh" in rows[0]:
        columns["energy_kwh"] = Column("energy, kWh", _number)
    cells = [(number, *(row[key] for key in columns)) for number, row in enumerate(rows, start=1)]
    return Table([Column("", "{}"), *columns.values()], cells)


def _days(days: float) -> str:
    return f"{_number(days)} days" if days >= 2 else _hours(24 * days)


def _hours(hours: float) -> str:
    return f"{_number(hours)} hours"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:.2g}"
