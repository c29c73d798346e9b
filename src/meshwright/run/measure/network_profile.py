"""cluster.toml: what `meshwright bench comm` found out about the links, written for people and read by the planner.

    version, date, machine, torch, transport     what was measured, when and where
    per_host                                     ranks on each host; 0: all on one
    [fit]                                        how well sizes are predicted that were not fitted
    [network]                                    the model: core/link.py says what its figures are
    [[measured]]                                 one table per algorithm and number of ranks: bytes, seconds, spread

Every fault of a file is reported at once. The same file always gives the same rule, so it may be kept beside the configs.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.comm.algorithms import named
from meshwright.plan.hardware.device_specs import cores
from meshwright.plan.hardware.network_model import Cluster, Link
from meshwright.plan.job.errors import Fault, PlanError
from meshwright.run.measure.measured_files import fitted, parsed, write_lines
from meshwright.run.telemetry.run_info import processor

HEAD = """\
# The links of a cluster, measured by `meshwright bench comm`. Named by the key cluster of a config, it makes a rule by
# message size of algorithm = "auto". Measure again when machine, transport or number of ranks change.
"""


def this_machine() -> str:
    """The machine in words: its GPU, or its processor and cores. No name by which it could be found."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)} x {torch.cuda.device_count()}"
    return f"{processor()}, {cores()} cores"


def read_cluster(path: Path) -> Cluster:
    """The cluster in the file at `path`. Raises PlanError with every fault of it."""
    fix = "measure the links first: meshwright bench comm --out cluster.toml"
    document = parsed(path, fix)
    if "device" in document:
        raise PlanError("this file describes a device, not links", fix="name it behind --hardware; " + fix, where=str(path))
    return fitted(document, Cluster, path, _names)


def write_cluster(cluster: Cluster, path: Path) -> Cluster:
    """Write `cluster` to `path`; returns it as a reader gets it, with figures of four digits.

    Raises PlanError when the file cannot be written.
    """
    write_lines(path, [HEAD, *_lines(cluster)])
    return read_cluster(path)


def _names(cluster: Cluster) -> Iterator[Fault]:
    for number, series in enumerate(cluster.measured):
        try:
            named(series.algorithm, f"measured.{number}.algorithm")
        except PlanError as error:
            yield from error.faults


def _lines(cluster: Cluster) -> Iterator[str]:
    for key in ("version", "date", "machine", "torch", "transport", "per_host"):
        yield f"{key} = {json.dumps(vars(cluster)[key], ensure_ascii=False)}"
    yield "\n[fit]  # median relative error at sizes that were not fitted: of the model, and with what was measured nearby"
    yield f"model = {cluster.fit.model:.4g}\ncorrected = {cluster.fit.corrected:.4g}"
    yield "\n[network]"
    crowds = [f"    {{receiving = {crowd.receiving}, seconds = {crowd.seconds:.4g}}}," for crowd in cluster.network.crowds]
    yield "\n".join(["crowds = [", *crowds, "]"])
    network = cluster.network
    for name, link in (("host", network.host), ("rank", network.rank), ("added", network.added), ("between", network.between)):
        if link is not None:
            yield f"\n[network.{name}]\n{_bands(link)}"
    for series in cluster.measured:
        yield f'\n[[measured]]\nalgorithm = "{series.algorithm}"\nranks = {series.ranks}'
        yield f"nbytes = {list(series.nbytes)}"
        yield f"seconds = [{', '.join(f'{took:.4g}' for took in series.seconds)}]"
        yield f"spread = [{', '.join(f'{spread:.3g}' for spread in series.spread)}]"


def _bands(link: Link) -> str:
    said = [
        f"    {{upto = {band.upto}, latency_s = {band.latency_s:.4g}, bytes_per_s = {band.bytes_per_s:.4g}}},"
        for band in link.bands
    ]
    return "\n".join(["bands = [", *said, "]"])
