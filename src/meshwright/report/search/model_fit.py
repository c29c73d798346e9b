"""The largest models that a machine trains, one row for each mode of offload, with days and cost."""

from collections.abc import Sequence
from typing import Any

from meshwright.plan.job.errors import format_nbytes
from meshwright.planner.search.model_fit import ModeFit
from meshwright.planner.search.offload_when_needed import unknown_rate_keys
from meshwright.report.search.assumptions_and_cost import TrainingBudget
from meshwright.report.search.search_result import result_row, to_gib
from meshwright.report.table import Table

UNKNOWN = "unknown"


def model_fit_rows(fits: Sequence[ModeFit], budget: TrainingBudget) -> list[dict[str, Any]]:
    """Returns the largest model of each mode as plain values; seconds and cost where rates are known."""
    rows = []
    for each in fits:
        row: dict[str, Any] = {"mode": each.mode, "fits": each.shape is not None}
        row["activation_offload"] = each.config is not None and each.config.activation_offload
        if each.shape is not None and each.config is not None:
            shape = each.shape
            row |= {"parameters": shape.numel, "layers": shape.layers, "hidden": shape.hidden}
            row |= {"heads": shape.heads, "host_bytes": each.host_nbytes}
            row["disk_bytes"] = 0.0 if each.best is None else each.best.memory.disk
            row["host_memory"] = each.request.machine.device.host_memory or None
        if each.best is not None:
            found = result_row(each.request, each.best, budget)
            kept = ("name", "step_s", "tokens_per_s", "peak_bytes", "days", "cost", "energy_kwh")
            row |= {name: found[name] for name in kept if name in found}
        rows.append(row)
    return rows


def model_fit_table(fits: Sequence[ModeFit], budget: TrainingBudget) -> Table:
    """Returns the rows as a table."""
    columns = {"parameters": "{:.3g} B", "layers": "{:,}", "hidden": "{:,}", "host": "{:,.0f} GiB"}
    columns |= {"step_s": "{:.3g}", "tokens_per_s": "{:,.0f}"}
    columns |= {"days": "{:,.3g}"} if budget.num_tokens else {}
    columns |= {"cost": "{:,.3g}"} if budget.num_tokens and budget.price_per_device_hour else {}
    heads = {"host": "each host keeps", "step_s": "s", "tokens_per_s": "tokens/s"}
    cells = []
    for row in model_fit_rows(fits, budget):
        sizes = {"parameters": row.get("parameters", 0.0) / 1e9, "host": to_gib(row.get("host_bytes", 0.0))}
        values = {**row, **sizes}
        shown = [_cell(name, form, row, values) for name, form in columns.items()]
        cells.append((row["mode"] + (" + activations" if row["activation_offload"] else ""), *shown))
    count, device = fits[0].request.machine.num_devices, fits[0].request.machine.device
    notes = (
        [] if device.host_memory else ["the memory of the host is not known (host_gb in a [device] table)"]
    )
    lacking = " and ".join(unknown_rate_keys(fits[0].request))
    notes += [f"no price without {lacking} in a [device] table"] if lacking else []
    largest = max((row.get("disk_bytes", 0.0) for row in model_fit_rows(fits, budget)), default=0.0)
    notes += [f"states on disk take {format_nbytes(largest)} of each rank there"] if largest else []
    return Table(
        ["offload", *(heads.get(name, name) for name in columns)],
        cells,
        title=f"the largest model of these proportions, on {count} {device.name}",
        note="; ".join(notes),
    )


def _cell(name: str, form: str, row: dict[str, Any], values: dict[str, Any]) -> str:
    if not row["fits"]:
        return "does not fit" if name == "parameters" else ""
    if name not in values or (name in ("step_s", "tokens_per_s") and name not in row):
        return UNKNOWN
    return form.format(values[name])
