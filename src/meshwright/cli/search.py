"""The command `search`: chooses mesh, strategies and microbatch for a model and a machine."""

from math import inf
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.config import print_hardware_list
from meshwright.cli.error_output import console, exit_on_error, option_names
from meshwright.cli.lazy_import import import_command
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name

SEARCH_ONLY_OPTIONS = (
    *("--batch", "--sequence", "--set", "--tokens", "--price", "--fit", "--plot"),
    "--calibrate-from",
)


def search(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help='A transformers config, or sizes: "175b: layers 96 hidden 12288 heads 96".'),
    ],
    devices: Annotated[int, typer.Option(help="The number of devices.", min=0)] = 0,
    hardware: Annotated[
        str,
        typer.Option(
            help="The device: h100, a100, h100:32,a100:32, or a file: my.toml, device.toml; list: all known.",
            callback=print_hardware_list,
            is_eager=True,
        ),
    ] = "",
    batch: Annotated[int, typer.Option(help="Samples of a global step.", min=0)] = 0,
    sequence: Annotated[
        int, typer.Option(help="Tokens of a sample (default: the model's own length).", min=0)
    ] = 0,
    constraints: Annotated[
        list[str] | None,
        typer.Option("--set", help="Fix a choice: tp=8, zero=3, schedule=zb_v, context_parallel=ring ..."),
    ] = None,
    tokens: Annotated[float, typer.Option(help="Show the days that this many tokens take.", min=0)] = 0.0,
    price: Annotated[float, typer.Option(help="The price of one device for one hour.", min=0)] = 0.0,
    cluster: Annotated[str, typer.Option(help="Links measured by `bench network`: cluster.toml.")] = "",
    fit: Annotated[
        str,
        typer.Option(help="Find a limit: the largest batch, sequence, layers or model, the fewest devices."),
    ] = "",
    calibrate_from: Annotated[
        str, typer.Option("--calibrate-from", help="The folder of a run whose steps correct the estimate.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write the best plan here, as a config.")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write everything that was found here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw step time against memory, and the best schedule: FILE.html.")
    ] = None,
) -> None:
    """Choose the fastest plans that fit in memory, for MODEL on --devices of --hardware with --batch."""
    with exit_on_error(context):
        _refuse_extra_args(context)
        _check_required(devices, hardware, batch, fit)
        _check_price(tokens, price)
        command = import_command("search.search")
        options = command.SearchOptions(
            model,
            devices,
            hardware,
            batch,
            sequence,
            tuple(constraints or ()),
            budget=command.TrainingBudget(tokens, price),
            max_fit=fit,
            cluster=cluster,
            calibration_run=calibrate_from,
        )
        result = command.run_search(options)
        console.print(command.search_view(result))
        if out is not None:
            command.write_config(result, out)
            console.print(f"\nconfig written to {out}", soft_wrap=True)
        console.print(f"next: {command.next_command(out)}", soft_wrap=True)
        if plot is not None:
            import_command("search.plot").write_plot(result, plot)
            console.print(f"plot written to {plot}", soft_wrap=True)
        if as_json is not None:
            command.write_json(result, as_json)


def _refuse_extra_args(context: typer.Context) -> None:
    known = option_names(context)
    unknown = [arg for arg in context.args if arg.startswith("--")] or context.args
    fix = "leave it out: set keys of the config when you use the config that --out writes"
    raise_diagnostics(
        Diagnostic("`search` has no such option", f"{suggest_name(arg, known)} Or {fix}", arg)
        for arg in unknown
    )


def _check_required(devices: int, hardware: str, batch: int, fit: str) -> None:
    given = {
        "--devices": devices or ":" in hardware or fit == "devices",
        "--hardware": hardware,
        "--batch": batch or fit == "batch",
    }
    missing = [name for name, value in given.items() if not value]
    if missing:
        text = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        fix = "give all three: --devices 64 --hardware h100 --batch 1024"
        raise PlanError(text, fix=fix, location="search")


def _check_price(tokens: float, price: float) -> None:
    if inf in (tokens, price):
        text = f"--tokens {tokens:g} and --price {price:g}; needed are finite numbers"
        raise PlanError(text, fix="write for example --tokens 1e12 --price 2.5", location="search")
    if price and not tokens:
        text = f"--price {price:g} without --tokens: there is no training time to price"
        raise PlanError(text, fix="add the number of tokens: --tokens 1e12", location="--price")


def register_search(app: typer.Typer) -> None:
    """Adds the command `search` to `app`."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(search)
