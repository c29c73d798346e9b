"""The commands `launch` (writes a job file for a scheduler) and `doctor` (checks whether this host can
train).
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.error_output import console, exit_on_error
from meshwright.cli.launcher_env import cache_folder, current_rank, gloo_interface, local_launcher
from meshwright.cli.lazy_import import import_command
from meshwright.cli.plan_inspect_verify_train import EXTRA_ARGS, ConfigArgument
from meshwright.plan.job.errors import PlanError


def launch(
    context: typer.Context,
    config: ConfigArgument,
    kind: Annotated[str, typer.Option("--print", help="slurm, k8s or torchrun.")],
    hosts: Annotated[int | None, typer.Option(help="Number of hosts.", min=1)] = None,
    per_host: Annotated[int | None, typer.Option(help="Ranks on each host.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the job file here, not to the terminal.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Ask for no GPUs.")] = False,
    name: Annotated[str, typer.Option(help="The name of the job (default: meshwright-CONFIG).")] = "",
    image: Annotated[str, typer.Option(help="k8s: the container image.")] = "",
    volume: Annotated[
        str, typer.Option(help="k8s: CLAIM:PATH, mounted by every pod; the command runs in PATH.")
    ] = "",
    time: Annotated[str, typer.Option(help="slurm: the time limit.")] = "24:00:00",
) -> None:
    """Print the job file that trains a plan under SLURM, Kubernetes or torchrun."""
    with exit_on_error(context):
        command = import_command("scheduler_script")
        options = command.JobFileOptions(hosts, per_host, not cpu, name, image, volume, time)
        text = command.make_job_file(config, context.args, kind, options)
        if out is None:
            typer.echo(text, nl=False)
            return
        command.write_job_file(text, out)
        console.print(f"job file written to {out}", soft_wrap=True)


def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="With --at: a config or plan file (TOML); else some usual plans.")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            help="Count what starting, saving and resuming would cost on so many ranks, and check nothing.",
            min=2,
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="The folder of runs; its disk is checked.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check whether this host can train, in under 20 s; under a launcher, all ranks try a collective."""
    with exit_on_error():
        if at is not None:
            _print_start_up(config, at, as_json=as_json)
            return
        if config is not None:
            text = f"'{config}' is a config, and `doctor` checks the host"
            raise PlanError(
                text, fix="name a number of ranks too: --at 1024, or leave it out", location="doctor"
            )
        interface = gloo_interface()  # before current_rank chooses one
        rank_env, command = current_rank(), import_command("doctor")
        if rank_env is not None and rank_env.store_path is not None:
            command.check_as_rank(rank_env, folder)
            return
        launcher = local_launcher(may_fork=bool(context.obj))
        report = command.examine_host(folder, cache_folder(), interface, rank_env, launcher, os.environ)
        if rank_env is None or rank_env.rank == 0:
            if as_json:
                typer.echo(json.dumps(report.as_dict(), indent=1))
            else:
                console.print(command.report_view(report))
        raise typer.Exit(1 if report.failed else 0)


def _print_start_up(config: Path | None, world: int, *, as_json: bool) -> None:
    """Prints the cost of each plan as soon as it is counted; as JSON, all at the end."""
    command = import_command("doctor")
    costs = command.start_up_costs(config, world)
    if as_json:
        typer.echo(json.dumps([{"plan": name, **cost.as_dict()} for name, cost in costs], indent=1))
        return
    for name, cost in costs:
        console.print(command.start_up_view(name, cost))
    console.print(command.START_UP_NOTE)


def register_launch_doctor(app: typer.Typer) -> None:
    """Adds the commands `launch` and `doctor` to `app`."""
    app.command(context_settings=EXTRA_ARGS)(launch)
    app.command()(doctor)
