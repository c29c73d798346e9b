"""`doctor`: checks this host, and the ranks of a job, before training."""

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.text import Text

from meshwright.comm.world import init_world
from meshwright.device.local_device import local_platform, num_accelerators, use_device
from meshwright.device.platforms import CPU
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.table import Table
from meshwright.run.doctor.collective_checks import collective_findings, failed_collective, gather_findings
from meshwright.run.doctor.gpu_checks import gpu_findings
from meshwright.run.doctor.host_checks import Finding, host_findings
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.join_world import join_world
from meshwright.run.launch.local_launcher import LocalLauncher
from meshwright.run.launch.network_interfaces import interface_to
from meshwright.run.launch.run_folder import claim_run_folder

JOIN_TIMEOUT_S = 10.0
LOCAL_MESH = Mesh(dp_replicate=2)
COLORS = {"ok": "green", "warning": "yellow", "failure": "bold red"}


@dataclass(frozen=True)
class HostReport:
    """The findings on this host and, by name, on others; `duration_s` is the time of the checks."""

    host: str
    findings: tuple[Finding, ...]
    other_hosts: dict[str, tuple[Finding, ...]]
    duration_s: float

    @property
    def failed(self) -> bool:
        """Whether training cannot work."""
        every = [*self.findings, *(finding for found in self.other_hosts.values() for finding in found)]
        return any(finding.level == "failure" for finding in every)

    def as_dict(self) -> dict[str, object]:
        """Returns the report as plain values."""
        return {**asdict(self), "failed": self.failed}


def examine_host(
    folder: Path, cache: Path, interface: str | None, rank_env: RankEnv | None, launcher: LocalLauncher
) -> HostReport:
    """Runs all checks of this host; two local processes, or all ranks of the job of `rank_env`, try a
    collective.
    """
    started, host = time.perf_counter(), socket.gethostname()
    place = None if rank_env is None else rank_env.launcher_env
    if interface is None and place is not None and place.master_addr is not None and not place.is_single_host:
        interface = interface_to(place.master_addr)
    findings = [*host_findings(folder, cache, interface), *gpu_findings()]
    others: dict[str, tuple[Finding, ...]] = {}
    if rank_env is None or rank_env.world == 1:
        findings += _try_here(launcher)
    else:
        backend = local_platform().backend or CPU.library
        findings.insert(0, Finding("launcher", "ok", str(place)))
        try:
            with join_world(
                rank_env, Mesh(dp_replicate=rank_env.world), WaitLimits.uniform(JOIN_TIMEOUT_S)
            ) as world:
                findings += collective_findings(world, backend)
                others = gather_findings(world, host, findings)
        except CollectiveError as error:
            findings.append(failed_collective(error, backend))
        others.pop(host, None)
    return HostReport(host, tuple(findings), others, time.perf_counter() - started)


def check_as_rank(rank_env: RankEnv, folder: Path) -> None:
    """Runs as one of the local processes that try a collective; rank 0 writes the findings into `folder`."""
    devices = {CPU.library: torch.device(CPU.type)}
    platform = local_platform()
    if platform.backend is not None and num_accelerators() >= rank_env.world:
        devices[platform.backend] = torch.device(platform.type, rank_env.local_rank)
    found: list[Finding] = []
    for backend, device in devices.items():
        use_device(device)
        store = f"{rank_env.store_path}.{backend}"
        try:
            with init_world(
                LOCAL_MESH,
                rank_env.rank,
                store_path=store,
                device=device,
                timeout_s=JOIN_TIMEOUT_S,
            ) as world:
                found += [
                    finding for finding in collective_findings(world, backend) if finding.name != "clocks"
                ]
        except CollectiveError as error:
            found.append(failed_collective(error, backend))
    if rank_env.rank == 0:
        (folder / "findings.json").write_text(json.dumps([asdict(finding) for finding in found]))


def report_view(report: HostReport) -> RenderableType:
    """Returns the report as lines: level, name, finding; below it the repair."""
    found = [(finding.name, finding) for finding in report.findings]
    found += [
        (f"{host}: {finding.name}", finding)
        for host, findings in report.other_hosts.items()
        for finding in findings
    ]
    rows: list[tuple[object, ...]] = []
    for name, finding in found:
        rows.append((Text(finding.level, COLORS[finding.level]), name, finding.text))
        if finding.fix:
            rows.append(("", Text("repair", "green"), finding.fix))
    bad = sum(finding.level != "ok" for _, finding in found)
    verdict = "cannot train as it is" if report.failed else "is fit to train"
    text = f"{report.host} {verdict}; {bad} of {len(found)} to look at; {report.duration_s:.1f} s"
    return Table(["", "", ""], [*rows, ("", "", text)])


def _try_here(launcher: LocalLauncher) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="meshwright-doctor-") as private:
        folder = Path(private)
        with claim_run_folder(folder) as attempt:
            result = launcher(["doctor", "--folder", str(folder)], LOCAL_MESH.world_size, attempt)
        answer = folder / "findings.json"
        if result.exit_code == 0 and answer.exists():
            yield from (Finding(**each) for each in json.loads(answer.read_text()))
            return
        text = (
            result.failure.text.strip().splitlines()[-1]
            if result.failure is not None
            else f"exit code {result.exit_code}"
        )
        yield Finding(
            "collective (gloo)",
            "failure",
            f"two local processes did not end well: {text}",
            "look at the line above",
        )
