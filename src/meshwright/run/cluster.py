"""cluster.toml: what `meshwright bench comm` found out about the links, written for people and read by the planner.

    version, date, machine, torch, transport     what was measured, when and where
    per_host                                     ranks on each host; 0: all on one
    [fit]                                        how well sizes are predicted that were not fitted
    [network]                                    the model: core/link.py says what its figures are
    [[measured]]                                 one table per algorithm and number of ranks: bytes, seconds, spread

Every fault of a file is reported at once. The same file always gives the same rule, so it may be kept beside the configs.
"""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from meshwright.comm.algorithms import named
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Fault, PlanError, raise_faults
from meshwright.core.hardware import cores
from meshwright.core.link import Link
from meshwright.run.about import processor
from meshwright.run.schema import Check
from meshwright.run.trace import replace_file

NAME = "cluster.toml"
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
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise PlanError("there is no such file", fix=fix, where=str(path)) from error
    except OSError as error:
        raise PlanError(f"the file cannot be read: {error.strerror}", fix="check its permissions", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"not TOML: {error}", fix=fix, where=str(path)) from error
    faults: list[Fault] = []
    cluster = Check(str(path), faults=faults).fit(document, Cluster, ())
    if cluster is not None and not faults:
        faults += [replace(fault, where=f"{path}: {fault.where}") for fault in (*cluster.faults(), *_names(cluster))]
    raise_faults(faults)
    return cluster


def write_cluster(cluster: Cluster, path: Path) -> Cluster:
    """Write `cluster` to `path`; returns it as a reader gets it, with figures of four digits.

    Raises PlanError when the file cannot be written.
    """
    try:
        replace_file(path, "\n".join([HEAD, *_lines(cluster), ""]))
    except OSError as error:
        fix = "name a file in a folder that can be written to: --out"
        raise PlanError(f"the file cannot be written: {error.strerror}", fix=fix, where=str(path)) from error
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
