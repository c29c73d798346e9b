"""The commands that work on a config or plan file: plan, inspect, verify, train, evaluate."""

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.config import print_hardware_list
from meshwright.cli.error_output import console, exit_on_error, show_failure
from meshwright.cli.launcher_env import current_rank, local_launcher
from meshwright.cli.lazy_import import import_command
from meshwright.cli.search import SEARCH_ONLY_OPTIONS
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from meshwright.run.launch.signals import stop_flag

EXTRA_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True}

WorldOption = Annotated[
    int | None,
    typer.Option("--world", "--devices", help="The number of ranks, for a mesh axis of -1.", min=1),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices",
        "--world",
        help="The number of devices (ranks): infers a mesh axis of -1, or chooses a mesh if there is none.",
        min=1,
    ),
]
ConfigArgument = Annotated[
    Path,
    typer.Argument(help="A config or plan file (TOML). Keys after it (--train.steps 100) replace its own."),
]


def plan(
    context: typer.Context,
    config: ConfigArgument,
    out: Annotated[Path | None, typer.Option(help="Write the resolved plan here.")] = None,
    devices: DevicesOption = None,
    actions: Annotated[
        bool, typer.Option("--actions", help="Show every action, and all of dtypes, memory, stages.")
    ] = False,
    explain_model: Annotated[
        bool,
        typer.Option(
            "--explain-model",
            help="Count the graphs of blocks under torch.compile, with the lines where they end.",
        ),
    ] = False,
    compile_ahead: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the graphs of blocks into torch's cache folder, from which a run loads them.",
        ),
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the predicted time, memory and bytes here.")
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(
            help="Predict the step time on h100, a100, or a file: my.toml, device.toml; list: all known.",
            callback=print_hardware_list,
            is_eager=True,
        ),
    ] = "",
    cluster: Annotated[str, typer.Option(help="Links measured by `bench network`: cluster.toml.")] = "",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Show the memory, bytes and seconds of so many sequences that a rank generates."),
    ] = None,
    decode_context_parallel: Annotated[
        bool, typer.Option("--decode-context-parallel", help="Of keys and values that ranks along cp divide.")
    ] = False,
) -> None:
    """Resolve a config into a plan, check it, and show what a step does, sends and keeps in memory."""
    with exit_on_error(context):
        _refuse_search_args(config, context.args)
        command = import_command("plan")
        request = command.read_config(config, context.args, hardware, cluster)
        if devices is None:
            resolved = command.resolve(request, None, needs_data=False)
        else:
            resolved = import_command("search.plan_for_devices").resolve_for_devices(request, devices)
        prediction = command.predict_step(resolved)
        console.print(command.resolved_view(resolved, prediction, actions=actions))
        if explain_model:
            console.print(command.explanation_view(resolved))
        if compile_ahead:
            console.print(command.compile_ahead_view(resolved))
        if max_num_seqs is not None or decode_context_parallel:
            how = {"decode_context_parallel": decode_context_parallel, "actions": actions}
            view = command.generation_view(resolved, max_num_seqs, **how)
            console.print(view)
        if as_json is not None:
            command.write_prediction(resolved, prediction, as_json)
        if out is not None:
            command.write_plan(resolved, out)
            console.print(f"plan written to {out}", soft_wrap=True)


def _refuse_search_args(config: Path, args: Sequence[str]) -> None:
    given = [arg for arg in args if arg.partition("=")[0] in SEARCH_ONLY_OPTIONS]
    if given:
        text = f"{', '.join(given)}: `plan` checks the plan of a config and does not choose one"
        raise PlanError(
            text, fix="choose a plan with `meshwright search MODEL`, or leave it out", location="plan"
        )
    if config.suffix != ".toml" and not config.is_file():
        text = f"'{config}' is not a config file; needed is a TOML file"
        raise PlanError(
            text, fix="write CONFIG.toml, or choose a plan with `meshwright search MODEL`", location="plan"
        )


def inspect(
    context: typer.Context,
    config: ConfigArgument,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the description here too.")] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write the recording of a forward here (FILE.json or FILE.json.gz)."),
    ] = None,
) -> None:
    """Show what the model of a config is made of: blocks, parameters, tensor-parallel layers."""
    with exit_on_error(context):
        command = import_command("inspect_model")
        explanation = command.explain_model(config, context.args)
        console.print(command.explanation_view(explanation))
        if as_json is not None:
            command.write_explanation(explanation, as_json)
        if record is not None:
            command.write_recording(explanation, record)
        raise_diagnostics(explanation.diagnostics)


def verify(
    context: typer.Context,
    config: ConfigArgument,
    steps: Annotated[
        int | None, typer.Option(help="Global steps to compare (default: 3; with --curve 100).", min=1)
    ] = None,
    on: Annotated[
        str,
        typer.Option(help="Run the ranks as threads or processes; trace: run single ranks on fake tensors."),
    ] = "threads",
    rank: Annotated[
        int | None,
        typer.Option(help="The rank to trace (default: the first, the last and one between).", min=0),
    ] = None,
    curve: Annotated[
        bool,
        typer.Option("--curve", help="Train a lossy plan and its exact counterpart, with three seeds each."),
    ] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Compare a scaled-down copy of the model.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the verdict here (default: run.folder/verify/PLAN_HASH)."),
    ] = None,
    world: WorldOption = None,
    result_folder: Annotated[
        Path | None, typer.Option(hidden=True, help="Where local ranks write what they found.")
    ] = None,
) -> None:
    """Compare a plan with one device: loss, gradients, gradient norm and parameters.

    With --on trace: compare the collectives that single ranks issue with the plan, on a mesh of any size.
    With --curve: say whether a lossy plan learns as well as its exact counterpart, on your model and data.
    """
    with exit_on_error(context):
        rank_env, command = current_rank(), import_command("verify")
        show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        if rank_env is not None:
            work = partial(command.curve_rank, show=show) if curve else command.verify_rank
            work(rank_env, config, steps, result_folder, shrink=shrink)
            return
        if on not in ("threads", "processes", "trace"):
            raise PlanError(
                f"ranks cannot run on '{on}'",
                fix="--on threads, --on processes, or --on trace",
                location="--on",
            )
        if curve and on == "trace":
            text = "--curve trains all ranks, and --on trace runs single ones without numbers"
            raise PlanError(text, fix="leave out one of them", location="--curve")
        if rank is not None and on != "trace":
            raise PlanError(
                f"--on {on} compares all ranks, and --rank {rank} names one",
                fix="add --on trace",
                location="--rank",
            )
        launcher = local_launcher(may_fork=bool(context.obj)) if on == "processes" else None
        compare = (
            partial(command.trace, rank=rank) if on == "trace" else partial(command.verify, launcher=launcher)
        )
        if curve:
            compare = partial(command.compare_curves, launcher=launcher, show=show)
        verdict, path = compare(config, context.args, steps, world, out, shrink=shrink)
        console.print(command.verdict_table(verdict))
        console.print(f"verdict     {path}", soft_wrap=True)
        raise typer.Exit(0 if verdict.passed else 1)


def train(
    context: typer.Context,
    config: ConfigArgument,
    from_step: Annotated[
        int | None, typer.Option(help="Resume from the checkpoint of this step, not from the newest.")
    ] = None,
    world: WorldOption = None,
) -> None:
    """Train and save checkpoints. The same command resumes from the newest valid checkpoint."""
    _run(context, config, from_step, world, only_evaluate=False)


def evaluate(
    context: typer.Context,
    config: ConfigArgument,
    from_step: Annotated[
        int | None, typer.Option(help="Evaluate the checkpoint of this step, not the newest.")
    ] = None,
    world: WorldOption = None,
) -> None:
    """Evaluate a checkpoint of a run: the loss on held-out samples, and tasks. Nothing is trained."""
    _run(context, config, from_step, world, only_evaluate=True)


def _run(
    context: typer.Context, config: Path, from_step: int | None, world: int | None, *, only_evaluate: bool
) -> None:
    """Trains or evaluates as one rank if a launcher says so, else as all ranks of this host."""
    with exit_on_error(context):
        rank_env, command = current_rank(), import_command("train")
        if rank_env is not None:
            received: list[int] = []
            given = rank_env, config, context.args, from_step, partial(stop_flag, received), console
            result = command.train_rank(*given, os.environ, only_evaluate=only_evaluate)
            is_stopped = bool(received) if only_evaluate else result.stopped
            raise typer.Exit(128 + (received[0] if received else signal.SIGTERM) if is_stopped else 0)
        launcher = local_launcher(may_fork=bool(context.obj))
        given = config, context.args, world, from_step, launcher, console
        result = command.train(*given, only_evaluate=only_evaluate)
        show_failure(result)
        raise typer.Exit(result.exit_code)


def register_plan_verify_train(app: typer.Typer) -> None:
    """Adds the commands of this file to `app`."""
    for command in (plan, inspect, verify, train, evaluate):
        app.command(context_settings=EXTRA_ARGS)(command)
