"""The commands `serve` and `board`: a model answers over HTTP, and runs are shown on a page."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.error_output import console, exit_on_error, show_failure
from meshwright.cli.launcher_env import current_rank, local_launcher
from meshwright.cli.lazy_import import import_command
from meshwright.cli.plan_inspect_verify_train import EXTRA_ARGS, WorldOption
from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.signals import stop_flag

API_KEY = "MESHWRIGHT_API_KEY"


def serve(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="A run's folder (its newest checkpoint), the folder of one step, a model (a folder or a hub "
            "id), or a config. Keys after it (--mesh.tp 2) replace those of its plan."
        ),
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Serve the weights of this run or step, under the plan of SOURCE.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; others than loopback need a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0: any that is free.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"A file with the key that requests state (default: {API_KEY}).")
    ] = None,
    served_model_name: Annotated[
        str, typer.Option(help="The name of the model (default: that of SOURCE).")
    ] = "",
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences that a rank continues at once (default: 8).", min=1)
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="The most tokens of prompt and answer (default: the model's positions).", min=2),
    ] = None,
    decode_context_parallel: Annotated[
        bool,
        typer.Option(
            "--decode-context-parallel",
            help="Ranks along cp continue the same prompts, and divide the keys and values of each.",
        ),
    ] = False,
    world: WorldOption = None,
) -> None:
    """Answer requests over the OpenAI HTTP API with a model, under any plan, until Ctrl-C."""
    with exit_on_error(context):
        rank_env, command = current_rank(), import_command("serving.serve")
        api_key = os.environ.get(API_KEY) or None if api_key_file is None else _read_key(api_key_file)
        limits = max_num_seqs, max_model_len, decode_context_parallel
        options = command.ServeOptions(host, port, api_key, served_model_name, *limits)
        if rank_env is not None:
            received: list[int] = []
            stop = partial(stop_flag, received)
            command.serve_rank(rank_env, source, checkpoint, context.args, options, stop, console)
            raise typer.Exit(128 + (received[0] if received else signal.SIGTERM))
        key_args = [] if api_key_file is None else ["--api-key-file", str(api_key_file.absolute())]
        launcher = local_launcher(may_fork=bool(context.obj))
        result = command.serve(source, checkpoint, context.args, world, options, key_args, launcher)
        show_failure(result)
        raise typer.Exit(result.exit_code)


def board(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders in which there are some.")],
    port: Annotated[int, typer.Option(help="The port; 0: any that is free.", min=0, max=65535)] = 8080,
    api: Annotated[
        str, typer.Option(help="The API that answers prompts: the url of `meshwright serve`.")
    ] = "http://127.0.0.1:8000/v1",
) -> None:
    """Show runs on a page of this host that renews itself while they train, until Ctrl-C."""
    with exit_on_error():
        command = import_command("serving.board")
        received: list[int] = []
        with stop_flag(received) as should_stop:
            command.show_board(runs, api, port, should_stop, console)
        raise typer.Exit(128 + (received[0] if received else signal.SIGTERM))


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        text = f"{path} cannot be read: {error}"
        raise PlanError(text, fix="name a file with one line, the key", location="--api-key-file") from error
    if not key.isascii() or len(key.split()) != 1:
        text = f"{path} contains {len(key.split())} words; needed is one, of ASCII letters"
        raise PlanError(text, fix="write the key into it", location="--api-key-file")
    return key


def register_serve(app: typer.Typer) -> None:
    """Adds the commands `serve` and `board` to `app`."""
    app.command(context_settings=EXTRA_ARGS)(serve)
    app.command()(board)
