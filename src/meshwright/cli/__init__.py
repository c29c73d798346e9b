"""The command line. Thin: it reads words, calls the verbs, and shows what comes back.

    meshwright plan   CONFIG.toml [--out PLAN.toml] [--train.steps 100]
    meshwright verify PLAN.toml
    meshwright train  PLAN.toml
    meshwright report RUN [RUN2]
    meshwright launch PLAN.toml --print slurm | k8s | torchrun
    meshwright doctor
    meshwright bench comm
    meshwright export RUN OUT          (and import, convert)

Any key of the file can be set behind it: `--optimizer.lr 1e-3`. Started as one rank (by torchrun, SLURM, MPI...) the
command is that rank; otherwise it starts the local ranks itself. The only package that reads the environment. torch is
imported when a verb runs, not for `--help`.

Exit codes: 0 done, 1 a rank failed or a verdict is negative, 2 the request cannot work, 130 after Ctrl-C, 143 after SIGTERM.
"""

import signal
import sys

import typer

from meshwright.cli import artifacts, bench, launch_doctor, plan_verify_train

HELP = """Train any PyTorch model on any number of devices, and prove that it trains what one device would.

Any key of the config can be set behind it: meshwright train CONFIG.toml --train.steps 100 --optimizer.lr 1e-3"""
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
plan_verify_train.register_plan_verify_train(app)
artifacts.register_weights(app)
launch_doctor.register_launch_doctor(app)
bench.register_bench(app)
artifacts.register_weights(app)


def main() -> None:
    """The console script."""
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
