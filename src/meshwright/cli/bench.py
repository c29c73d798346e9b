"""The words of `bench`: measuring this machine, or the hosts of a job."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.environment import current_rank, local_launcher
from meshwright.cli.error_output import console, exit_on_error, show_failure
from meshwright.cli.lazy_import import import_command
from meshwright.plan.job.errors import PlanError

ResultFolder = Annotated[
    Path | None, typer.Option(hidden=True, help="Where local ranks leave what they measured.")
]


def network(
    ranks: Annotated[
        str, typer.Option(help="Numbers of local ranks, one after the other (default: 2,3,4).")
    ] = "",
    sizes: Annotated[
        str, typer.Option(help="Bytes of a message: 1KiB..64MiB (doubling), or 1KiB,64KiB,4MiB.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Write what was measured here.")] = Path("cluster.toml"),
    html: Annotated[Path | None, typer.Option(help="Write the plot here (default: beside --out).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few sizes and few samples: seconds, not a minute.")
    ] = False,
    lesson: Annotated[
        bool, typer.Option("--lesson", help="Show the lecture's table of algorithms, with these times.")
    ] = False,
    result_folder: ResultFolder = None,
) -> None:
    """Measure what an all-reduce costs here by every algorithm, and write cluster.toml, from which algorithm = "auto" chooses.

    Local ranks are started; under torchrun, SLURM or MPI the ranks there are measure together, within and between hosts.
    """
    with exit_on_error():
        rank, verb = current_rank(), import_command("bench_network")
        if rank is not None and ranks:
            text = f"--ranks {ranks}, and a launcher has started {rank.world} ranks"
            raise PlanError(text, fix="leave --ranks out, or run it without the launcher", location="--ranks")
        wish = verb.wanted(ranks or ("" if rank is None else str(max(rank.world, 2))), sizes, quick=quick)
        page = html or out.with_suffix(".html")
        if rank is not None and result_folder is not None:
            verb.bench_rank(rank, wish, result_folder)
            return
        if rank is None or rank.rank == 0:
            verb.refuse_unwritable((out, page))
        try:
            cluster = (
                verb.bench(wish, out, local_launcher(), console)
                if rank is None
                else verb.bench_job(rank, wish, out)
            )
        except verb.RanksFailed as error:
            show_failure(error.result)
            raise typer.Exit(error.result.exit_code) from None
        if cluster is None:
            return
        verb.show(cluster, console, lesson=lesson)
        verb.write_page(cluster, page)
        console.print(f"\ncluster     {out}\nplot        {page}", markup=False, soft_wrap=True)
        console.print(
            f'use it      in a config: cluster = "{out}", and algorithm = "auto" in its strategy',
            markup=False,
            soft_wrap=True,
        )


def device(
    kind: Annotated[
        str, typer.Option("--device", help="cpu or cuda (default: cuda where there is one).")
    ] = "",
    threads: Annotated[
        int, typer.Option(help="Threads of a process (default: its share of the cores).", min=0)
    ] = 0,
    ranks: Annotated[
        int, typer.Option(help="Processes that measure at once, as the ranks of a CPU would.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Write what was measured here.")] = Path("device.toml"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and samples: seconds, not a minute.")
    ] = False,
    result_folder: ResultFolder = None,
) -> None:
    """Measure what this device does per second, by size of product, attention and memory, and write device.toml.

    Plans are priced by it: --hardware device.toml.
    """
    with exit_on_error():
        rank, verb = current_rank(), import_command("bench_device")
        if rank is not None and result_folder is None:
            text = f"a launcher has started {rank.world} ranks, and one device is measured by processes of its own"
            raise PlanError(
                text,
                fix="run it without the launcher; --ranks 2 measures two at once",
                location="bench device",
            )
        wish = verb.wanted(kind, threads, ranks, quick=quick)
        if rank is not None and result_folder is not None:
            verb.measure_rank(rank, wish, result_folder)
            return
        verb.refuse_unwritable((out,))
        try:
            profile = verb.measure(wish, out, local_launcher(), console)
        except verb.RanksFailed as error:
            show_failure(error.result)
            raise typer.Exit(error.result.exit_code) from None
        verb.show(profile, console)
        console.print(f"\ndevice      {out}", markup=False, soft_wrap=True)
        console.print(f"use it      meshwright plan MODEL --hardware {out}", markup=False, soft_wrap=True)


def register_bench(app: typer.Typer) -> None:
    """Give `app` the word `bench`, and what can be measured behind it."""
    bench = typer.Typer(no_args_is_help=True, help="Measure what the planner needs to know of a machine.")
    bench.command()(network)
    bench.command()(device)

    @bench.callback()
    def measured() -> None:
        """Measure what the planner needs to know of a machine."""

    app.add_typer(bench, name="bench")
