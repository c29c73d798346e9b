"""The commands `bench network` and `bench device`: measure this machine, or the hosts of a job."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.error_output import console, exit_on_error
from meshwright.cli.launcher_env import current_rank, local_launcher
from meshwright.cli.lazy_import import import_command
from meshwright.plan.job.errors import PlanError

ResultFolder = Annotated[
    Path | None, typer.Option(hidden=True, help="Where local ranks write what they measured.")
]


def network(
    context: typer.Context,
    ranks: Annotated[str, typer.Option(help="Numbers of local ranks to measure (default: 2,3,4).")] = "",
    sizes: Annotated[
        str, typer.Option(help="Bytes of a message: 1KiB..64MiB (doubling), or 1KiB,64KiB,4MiB.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Write what was measured here.")] = Path("cluster.toml"),
    html: Annotated[Path | None, typer.Option(help="Write the plot here (default: next to --out).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few sizes and few samples: seconds, not a minute.")
    ] = False,
    show_formulas: Annotated[
        bool,
        typer.Option("--formulas", help="Show the formulas of all-reduce algorithms, with these times."),
    ] = False,
    result_folder: ResultFolder = None,
) -> None:
    """Measure the time of an all-reduce by every algorithm and write cluster.toml, from which algorithm =
    "auto" chooses.

    The command starts local ranks. Under torchrun, SLURM or MPI the ranks of the job measure, within and
    between hosts.
    """
    with exit_on_error():
        rank_env, command = current_rank(), import_command("bench_network")
        if rank_env is not None and ranks:
            text = f"--ranks {ranks}, and a launcher started {rank_env.world} ranks"
            raise PlanError(text, fix="leave --ranks out, or run it without the launcher", location="--ranks")
        request = command.parse_request(
            ranks or ("" if rank_env is None else str(max(rank_env.world, 2))), sizes, quick=quick
        )
        page = html or (out.with_suffix(".html") if out.name else out / "cluster.html")
        if rank_env is not None and result_folder is not None:
            command.bench_rank(rank_env, request, result_folder)
            return
        if rank_env is None or rank_env.rank == 0:
            command.check_writable((out, page))
        cluster = (
            command.bench_local_ranks(request, out, local_launcher(may_fork=bool(context.obj)), console)
            if rank_env is None
            else command.bench_job(rank_env, request, out)
        )
        if cluster is None:
            return
        command.print_cluster(cluster, console, show_formulas=show_formulas)
        command.write_page(cluster, page)
        console.print(f"\ncluster     {out}\nplot        {page}", soft_wrap=True)
        console.print(
            f'use it      in a config: cluster = "{out}", and algorithm = "auto" in its strategy',
            soft_wrap=True,
        )


def device(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Option(
            "--device", help="cpu, or the type of the GPU in torch (default: the GPU, where there is one)."
        ),
    ] = "",
    threads: Annotated[
        int, typer.Option(help="Threads of a process (default: its share of the cores).", min=0)
    ] = 0,
    ranks: Annotated[
        int, typer.Option(help="Processes that measure at the same time, like the ranks of a CPU.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Write what was measured here.")] = Path("device.toml"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and samples: seconds, not a minute.")
    ] = False,
    result_folder: ResultFolder = None,
) -> None:
    """Measure matrix products, attention and memory at many sizes and write device.toml.

    `plan` and `search` predict with it: --hardware device.toml.
    """
    with exit_on_error():
        rank_env, command = current_rank(), import_command("bench_device")
        if rank_env is not None and result_folder is None:
            text = f"a launcher started {rank_env.world} ranks; `bench device` starts its own processes"
            raise PlanError(
                text,
                fix="run it without the launcher; --ranks 2 measures two at once",
                location="bench device",
            )
        request = command.parse_request(kind, threads, ranks, quick=quick)
        if rank_env is not None and result_folder is not None:
            command.measure_rank(rank_env, request, result_folder)
            return
        command.check_writable((out,))
        profile = command.measure_device(request, out, local_launcher(may_fork=bool(context.obj)), console)
        command.print_profile(profile, console)
        console.print(f"\ndevice      {out}", soft_wrap=True)
        console.print(f"use it      meshwright search MODEL --hardware {out}", soft_wrap=True)


def register_bench(app: typer.Typer) -> None:
    """Adds the commands `bench network` and `bench device` to `app`."""
    bench = typer.Typer(no_args_is_help=True, help="Measure links and devices for the planner.")
    bench.command()(network)
    bench.command()(device)

    @bench.callback()
    def bench_options() -> None:
        """Measure links and devices for the planner."""

    app.add_typer(bench, name="bench")
