"""The command line: parses arguments, calls `meshwright.commands`, and prints what comes back.

    meshwright init    MODEL --data PATH          (and config, import-config)
    meshwright plan    CONFIG.toml [--out PLAN.toml] [--train.steps 100]
    meshwright inspect CONFIG.toml
    meshwright search  MODEL --devices 64 --hardware h100 --batch 1024 [--set tp=8]
    meshwright verify  PLAN.toml
    meshwright train   PLAN.toml
    meshwright evaluate PLAN.toml       (a checkpoint of its run)
    meshwright serve   RUN
    meshwright report  RUN [RUN2 ...]
    meshwright board   RUNS             (the report while it trains)
    meshwright launch  PLAN.toml --print slurm | k8s | torchrun
    meshwright doctor
    meshwright bench   network | device
    meshwright export  RUN OUT          (and import, convert)

Any key of the config can be set after it: `--optimizer.lr 1e-3`. If a launcher (torchrun, SLURM, MPI ...)
starts the command as one rank, it is that rank; otherwise it starts the local ranks itself. No other package
reads the environment. torch is imported when a command runs, not for `--help`.

Exit codes: 0 done; 1 a verdict is negative, or a rank of `train` failed; 2 the request is refused; 3 the
command, or a rank that it started to verify or to measure, crashed; 130 after Ctrl-C; 143 after SIGTERM.

    report_export_import       report, export, import, convert
    bench                      bench network, bench device
    config                     config, init, import-config
    launcher_env               the launcher's variables, signals, the local launcher
    error_output               errors and failures as a user sees them
    launch_and_doctor          launch, doctor
    lazy_import                imports a command when it is called
    plan_inspect_verify_train  plan, inspect, verify, train, evaluate
    search                     search
    serve                      serve, board
"""

import signal
import sys
from typing import Annotated

import typer

from meshwright import __version__
from meshwright.cli import bench, config, launch_and_doctor, plan_inspect_verify_train, report_export_import
from meshwright.cli.error_output import CRASH_EXIT_CODE, show_crash
from meshwright.cli.search import register_search
from meshwright.cli.serve import register_serve

HELP = """Train any PyTorch model on any number of devices, and verify that it computes what one device would.

Any key of the config can be set after it: meshwright train CONFIG.toml --train.steps 100"""
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of the command itself."""


plan_inspect_verify_train.register_plan_verify_train(app)
register_search(app)
config.register_config(app)
register_serve(app)
report_export_import.register_report(app)
launch_and_doctor.register_launch_doctor(app)
bench.register_bench(app)
report_export_import.register_weights(app)


def main() -> None:
    """Runs the console script."""
    try:
        app(standalone_mode=True, obj=True)  # this process runs one command: it may fork its ranks
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # Python's own exit code 1 would read as a negative verdict
        show_crash(error)
        sys.exit(CRASH_EXIT_CODE)
