"""Reads and writes cluster.toml: the links as `meshwright bench network` measured them.

    format, version                              of the file: plan/job/file_format.py
    date, machine, torch, transport              what was measured, when and where
    ranks_per_host                               ranks on each host; 0: all on one
    [fit_error]                                  the prediction error at sizes that were not fitted
    [network]                                    the model of the links: plan/hardware/network_model.py
    [[measurements]]                             one table per algorithm and number of ranks: bytes, seconds,
                                                 spread

All diagnostics of a file are reported at once. The same file always gives the same rule, so keep it with the
configs.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from meshwright.comm.allreduce import get_algorithm
from meshwright.device.local_device import device_name, num_accelerators, own_device
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.hardware.network_model import LinkCost
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.file_format import CLUSTER
from meshwright.run.measure.profile_files import parse_measurements, read_toml, write_lines
from meshwright.run.telemetry.run_info import processor_name

CLUSTER_HEADER = """\
# The links of a cluster, measured by `meshwright bench network`. Named by the key cluster of a config, it
# makes a rule by message size of algorithm = "auto". Measure again when machine, transport or number of
# ranks change.
"""


def describe_machine() -> str:
    """Returns the machine as text: its GPU, or its processor and cores. The text contains no host name."""
    if num_accelerators():
        return f"{device_name(own_device())} x {num_accelerators()}"
    return f"{processor_name()}, {available_cores()} cores"


def read_cluster(path: Path) -> Cluster:
    """Returns the cluster in the file at `path`. Raises PlanError with every diagnostic."""
    fix = "measure the links first: meshwright bench network --out cluster.toml"
    document = read_toml(path, fix)
    if "device" in document:
        raise PlanError(
            "this file describes a device, not links",
            fix="pass it with --hardware; " + fix,
            location=str(path),
        )
    return parse_measurements(document, Cluster, CLUSTER, path, _names)


def write_cluster(cluster: Cluster, path: Path) -> Cluster:
    """Writes `cluster` to `path` with four significant digits, and returns what a reader gets.

    Raises PlanError when the file cannot be written.
    """
    write_lines(path, [CLUSTER_HEADER, *_lines(cluster)])
    return read_cluster(path)


def _names(cluster: Cluster) -> Iterator[Diagnostic]:
    for number, series in enumerate(cluster.measurements):
        try:
            get_algorithm(series.algorithm, f"measurements.{number}.algorithm")
        except PlanError as error:
            yield from error.diagnostics


def _lines(cluster: Cluster) -> Iterator[str]:
    for key in (*CLUSTER.header, "date", "machine", "torch", "transport", "ranks_per_host"):
        yield f"{key} = {json.dumps((CLUSTER.header | vars(cluster))[key], ensure_ascii=False)}"
    yield (
        "\n[fit_error]  # median relative error at sizes that were not fitted: of the model, "
        "and with what was measured nearby"
    )
    yield f"model = {cluster.fit_error.model:.4g}\ncorrected = {cluster.fit_error.corrected:.4g}"
    yield "\n[network]"
    crowds = [
        f"    {{num_receivers = {overhead.num_receivers}, seconds = {overhead.seconds:.4g}}},"
        for overhead in cluster.network.round_overheads
    ]
    yield "\n".join(["round_overheads = [", *crowds, "]"])
    network = cluster.network
    for name, link in (
        ("intra_host", network.intra_host),
        ("busiest_rank", network.busiest_rank),
        ("local_sum", network.local_sum),
        ("inter_host", network.inter_host),
    ):
        if link is not None:
            yield f"\n[network.{name}]\n{_bands(link)}"
    for series in cluster.measurements:
        yield f'\n[[measurements]]\nalgorithm = "{series.algorithm}"\nranks = {series.ranks}'
        yield f"nbytes = {list(series.nbytes)}"
        yield f"seconds = [{', '.join(f'{took:.4g}' for took in series.seconds)}]"
        yield f"spread = [{', '.join(f'{spread:.3g}' for spread in series.spread)}]"


def _bands(link: LinkCost) -> str:
    lines = [
        (
            f"    {{max_nbytes = {band.max_nbytes}, latency_s = {band.latency_s:.4g}, "
            f"bytes_per_s = {band.bytes_per_s:.4g}}},"
        )
        for band in link.bands
    ]
    return "\n".join(["bands = [", *lines, "]"])
