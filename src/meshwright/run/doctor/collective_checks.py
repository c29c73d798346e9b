"""Checks whether the ranks of a job reach each other, and agree on the time.

A collective over a few mebibytes finds what all other checks miss: a firewall, a wrong interface, a name
that does not resolve, two versions of NCCL. Its time is one sample, with whatever else the host was doing.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from meshwright.comm.collectives.group import World
from meshwright.device.platforms import PLATFORMS
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.doctor.host_checks import Finding

OPERAND_NBYTES = 4 * 2**20


CLOCK_ROUNDS = 5


MAX_CLOCK_SKEW_S = 1.0


MAX_MESSAGE_NBYTES = 8192  # bytes that each rank may send of its findings


def collective_findings(world: World, backend: str) -> Iterator[Finding]:
    """Sums over all ranks of `world` and compares their clocks. Every rank calls it together."""
    group = world.group(AXES)
    tensor = torch.ones(OPERAND_NBYTES // 4, device=world.device)
    group.all_reduce(tensor).wait()
    right = bool((tensor == group.size).all())
    started = time.perf_counter()
    for _ in range(CLOCK_ROUNDS):
        group.all_reduce(tensor.fill_(1)).wait()
    tensor[0].item()
    seconds = (time.perf_counter() - started) / CLOCK_ROUNDS
    text = (
        f"{group.size} ranks over {backend}: an all-reduce of {OPERAND_NBYTES >> 20} MiB takes "
        f"{seconds * 1e3:.1f} ms"
    )
    if right:
        yield Finding(f"collective ({backend})", "ok", text)
    else:
        fix = "the sum is wrong: look for different versions of torch on the hosts"
        yield Finding(f"collective ({backend})", "failure", text, fix)
    yield _clocks(world)


def failed_collective(error: CollectiveError, backend: str) -> Finding:
    """Returns the finding for ranks that did not reach each other."""
    variable = next(platform.interface_variable for platform in PLATFORMS if platform.backend == backend)
    fix = f"look at the interfaces above; set {variable}, open the ports between the hosts"
    return Finding(f"collective ({backend})", "failure", str(error).split("\n", 1)[0], fix)


def gather_findings(world: World, host: str, findings: Sequence[Finding]) -> dict[str, tuple[Finding, ...]]:
    """Returns the findings of the ranks of `world` that are not ok, by host; the same on every rank."""
    bad = [asdict(finding) for finding in findings if finding.level != "ok"]
    while len(letter := json.dumps([host, bad]).encode()) > MAX_MESSAGE_NBYTES:
        bad.pop()
    mine = torch.frombuffer(bytearray(letter.ljust(MAX_MESSAGE_NBYTES)), dtype=torch.uint8).to(world.device)
    group = world.group(AXES)
    letters = mine.new_empty(group.size * MAX_MESSAGE_NBYTES)
    group.all_gather(letters, mine).wait()
    gathered = bytes(letters.tolist())
    read = (
        json.loads(gathered[start : start + MAX_MESSAGE_NBYTES])
        for start in range(0, len(gathered), MAX_MESSAGE_NBYTES)
    )
    return {name: tuple(Finding(**each) for each in found) for name, found in read}


def _clocks(world: World) -> Finding:
    """Measures the distance of the clocks: the smallest of several rounds, since waiting only adds to it."""
    group = world.group(AXES)
    times = torch.empty(group.size, dtype=torch.float64, device=world.device)
    apart = []
    for _ in range(CLOCK_ROUNDS):
        group.barrier()
        group.all_gather(times, torch.tensor([time.time()], dtype=torch.float64, device=world.device)).wait()
        apart.append((times.max() - times.min()).item())
    text = f"within {min(apart) * 1e3:.1f} ms of each other on {group.size} ranks"
    if min(apart) > MAX_CLOCK_SKEW_S:
        return Finding("clocks", "warning", text, "set them by NTP: records and logs are ordered by time")
    return Finding("clocks", "ok", text)
