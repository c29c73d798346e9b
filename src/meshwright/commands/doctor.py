"""`doctor`: checks this host, and the ranks of a job, before training; counts the start of a large job."""

import json
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from rich.console import RenderableType
from rich.text import Text
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.api import analyze, make_plan
from meshwright.comm.world import init_world
from meshwright.commands.plan import resolve_config
from meshwright.device.local_device import local_platform, num_accelerators, use_device
from meshwright.device.platforms import CPU
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import CollectiveError, format_nbytes
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.table import Column, Table
from meshwright.run.doctor.collective_checks import collective_findings, failed_collective, gather_findings
from meshwright.run.doctor.gpu_checks import gpu_findings
from meshwright.run.doctor.host_checks import Finding, host_findings
from meshwright.run.doctor.start_up import SPLIT_S, SPLIT_SOURCE, StartUpCost, count_start_up
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.join_world import join_world
from meshwright.run.launch.local_launcher import LocalLauncher
from meshwright.run.launch.network_interfaces import interface_to
from meshwright.run.launch.run_folder import claim_run_folder

JOIN_TIMEOUT_S = 10.0
LOCAL_MESH = Mesh(dp_replicate=2)
COLORS = {"ok": "green", "warning": "yellow", "failure": "bold red"}
REPLICATE, SHARD = BatchSplit(), BatchSplit("dp_shard")
# of a Llama with 7 B parameters, where `--at` names no config; -1: what is left of the ranks
LAYOUTS = MappingProxyType(
    {
        "DDP": ({"dp_replicate": -1}, (REPLICATE, DDP())),
        "ZeRO-3": ({"dp_shard": -1}, (SHARD, ZeRO())),
        "HSDP": (
            {"dp_replicate": -1, "dp_shard": 8},
            (REPLICATE, SHARD, ZeRO(replicate_axis="dp_replicate")),
        ),
        "TP x DDP": ({"dp_replicate": -1, "tp": 8}, (REPLICATE, TensorParallel(), DDP())),
        "PP (1f1b) x DDP": (
            {"pp": 16, "dp_replicate": -1},
            (REPLICATE, Pipeline(schedule="1f1b"), DDP()),
        ),
        "PP (interleaved) x DDP": (
            {"pp": 16, "dp_replicate": -1},
            (REPLICATE, Pipeline(schedule="interleaved", virtual_stages=2), DDP()),
        ),
        "PP x TP x ZeRO-3": (
            {"pp": 16, "dp_shard": -1, "tp": 8},
            (SHARD, TensorParallel(), Pipeline(schedule="1f1b"), ZeRO()),
        ),
        "CP x ZeRO-3": ({"dp_shard": -1, "cp": 8}, (SHARD, RingAttention(), ZeRO())),
        "CP x TP x ZeRO-3": (
            {"dp_shard": -1, "cp": 4, "tp": 8},
            (SHARD, TensorParallel(), RingAttention(), ZeRO()),
        ),
    }
)

START_UP_NOTE = f"Seconds are an estimate, {SPLIT_S:g} s per communicator: {SPLIT_SOURCE}"


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
    folder: Path,
    cache: Path,
    interface: str | None,
    rank_env: RankEnv | None,
    launcher: LocalLauncher,
    variables: Mapping[str, str],
) -> HostReport:
    """Runs all checks of this host, with the environment `variables`; two local processes, or all ranks of
    the job of `rank_env`, try a collective.
    """
    started, host = time.perf_counter(), socket.gethostname()
    place = None if rank_env is None else rank_env.launcher_env
    if interface is None and place is not None and place.master_addr is not None and not place.is_single_host:
        interface = interface_to(place.master_addr)
    findings = [*host_findings(folder, cache, interface), *gpu_findings(variables)]
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


def example_plans(world: int) -> Iterator[tuple[str, Plan]]:
    """Yields the plans of `LAYOUTS` on `world` ranks. Raises PlanError if their axes do not divide it."""
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(2, 64, dtype=torch.long))
    config = LlamaConfig(use_cache=False)
    analyzed = analyze(lambda: LlamaForCausalLM(config), batch, loss=token_cross_entropy())
    job = Job(train=TrainConfig(batch=world))
    for name, (sizes, strategies) in LAYOUTS.items():
        yield name, make_plan(analyzed, job, Mesh.infer(sizes, world), strategies, 1)


def start_up_costs(config: Path | None, world: int) -> Iterator[tuple[str, StartUpCost]]:
    """Yields what the plan of `config`, or each of some usual plans, costs to start on `world` ranks."""
    if config is None:
        yield from ((name, count_start_up(plan)) for name, plan in example_plans(world))
    else:
        yield "plan", count_start_up(resolve_config(config, (), world, needs_data=False)[1].plan)


def start_up_view(name: str, cost: StartUpCost) -> RenderableType:
    """Returns the cost of the plan `name` as a table."""
    size = format_nbytes
    splits = f"{cost.axis_splits} for {cost.axis_sets} sets of axes"
    splits += f", {cost.pair_splits} for {cost.pairs} pairs of stages" if cost.pairs else ""
    store = f"{cost.store_requests:,} requests to start, {cost.store_requests_rank_0:,} of them by rank 0"
    save = f"lists of shards {size(cost.shard_lists_nbytes)}, manifest {size(cost.manifest_nbytes)}"
    read = f"{size(cost.kept_nbytes)} kept, {size(cost.checksum_nbytes)} for checksums"
    rows = [
        ("mesh", cost.mesh),
        ("splits", f"{splits}; {cost.groups:,} groups; about {cost.split_s:.0f} s (estimate)"),
        ("store", store),
        ("agreement", f"{size(cost.agreement_nbytes)} per rank in the first step"),
        ("save", f"{save} of {cost.num_slices:,} slices"),
        ("resume", f"each rank reads {size(cost.read_nbytes)}: {read}, the manifest"),
    ]
    return Table([Column(), Column()], rows, title=name)


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
