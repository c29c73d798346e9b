"""The words of the verbs that a plan goes through: plan, verify, train."""

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.environment import current_rank, local_launcher, stop_flag
from meshwright.cli.error_output import console, exit_on_error, show_failure
from meshwright.cli.lazy_import import import_command
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name

EXTRA_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True}
OWN_OPTIONS = (
    "--out",
    "--world",
    "--all",
    "--steps",
    "--on",
    "--rank",
    "--shrink",
    "--json",
    "--from-step",
    "--explain-model",
)
SEARCH_OPTIONS = (
    "--out",
    "--json",
    "--devices",
    "--hardware",
    "--batch",
    "--sequence",
    "--fix",
    "--tokens",
    "--price",
    "--cluster",
    "--calibrate-from",
    "--fit",
    "--plot",
)
OWN_OPTIONS += SEARCH_OPTIONS[2:]

WorldOption = Annotated[int | None, typer.Option(help="The number of ranks, for a mesh axis of -1.", min=1)]
ConfigArgument = Annotated[
    Path,
    typer.Argument(help="A config or plan file (TOML); keys behind it (--train.steps 100) replace its own."),
]


def plan(
    context: typer.Context,
    config: ConfigArgument,
    out: Annotated[Path | None, typer.Option(help="Write the resolved plan here.")] = None,
    world: WorldOption = None,
    every: Annotated[bool, typer.Option("--all", help="One row per action.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain-model", help="Show what the model is made of; no plan.")
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the explanation here too, or what is predicted.")
    ] = None,
    devices: Annotated[
        int, typer.Option(help="Choose a plan: CONFIG is then a model, for so many devices.", min=0)
    ] = 0,
    hardware: Annotated[
        str, typer.Option(help="Of what kind: h100, a100, or a file: my.toml, device.toml.")
    ] = "",
    batch: Annotated[int, typer.Option(help="Rows of a step.", min=0)] = 0,
    sequence: Annotated[int, typer.Option(help="Tokens of a row (default: as the model says).", min=0)] = 0,
    fix: Annotated[
        list[str] | None, typer.Option(help="What is given: tp=8, zero=3, schedule=zb_v, method=ring ...")
    ] = None,
    tokens: Annotated[float, typer.Option(help="Days for so many tokens.", min=0)] = 0.0,
    price: Annotated[float, typer.Option(help="Of a device and hour.", min=0)] = 0.0,
    cluster: Annotated[str, typer.Option(help="What `bench comm` measured of the links: cluster.toml.")] = "",
    fit: Annotated[
        str, typer.Option(help="Find a limit: the largest batch, sequence or layers, the fewest devices.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Draw step time against memory, and the winner's turns: FILE.html.")
    ] = None,
    learn: Annotated[
        str, typer.Option("--calibrate-from", help="The folder of a run, to learn from its steps.")
    ] = "",
) -> None:
    """Resolve a config into a plan, refuse what cannot work, and show what will happen.

    With --devices, --hardware and --batch: choose one, for a model that is a transformers config or sizes in words
    ("175b: layers 96 hidden 12288 heads 96").
    """
    with exit_on_error(OWN_OPTIONS):
        plan = config.suffix == ".toml"  # a config is a plan that exists: it is priced
        if devices or (not plan and (hardware or import_command("search.model_size").is_shape(str(config)))):
            _refuse_idle(context.args, {"--world": world, "--all": every, "--explain-model": explain})
            told = partial(import_command("search.search").Asked, cluster=cluster, run=learn, fit=fit)
            files = {"out": out, "as_json": as_json, "plot": plot}
            _choose(
                told,
                str(config),
                devices,
                hardware,
                batch,
                sequence,
                fix or (),
                tokens,
                price,
                fit=fit,
                **files,
            )
            return
        searching = {
            "--batch": batch,
            "--sequence": sequence,
            "--fix": fix,
            "--tokens": tokens,
            "--price": price,
        }
        _refuse_unheard({**searching, "--fit": fit, "--plot": plot, "--calibrate-from": learn})
        verb = import_command("plan")
        if explain:
            _explain(verb, config, context.args, out, as_json)
            return
        resolved = verb.on_hardware(verb.resolve(config, context.args, world), hardware, cluster)
        prediction = verb.priced(resolved)
        console.print(verb.view(resolved, prediction, every=every))
        if as_json is not None:
            verb.write_prediction(resolved, prediction, as_json)
        if out is not None:
            verb.write_plan(resolved, out)
            console.print(f"plan written to {out}", soft_wrap=True)


def _refuse_unheard(words: Mapping[str, object]) -> None:
    """Raise PlanError for words that say how a plan is to be chosen, where one is there already."""
    given = [word for word, value in words.items() if value]
    if given:
        text = f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for a plan that is to be chosen, and this one is there"
        raise PlanError(
            text, fix="say also --devices and --hardware, for a MODEL; or leave it out", location="plan"
        )


def _refuse_idle(words: Sequence[str], flags: Mapping[str, object]) -> None:
    """Raise PlanError for words that a plan that is to be chosen does not hear: options misspelt, keys of a config."""
    unknown = [word for word in words if word.startswith("--")] or list(words)
    unknown += [flag for flag, value in flags.items() if value]
    fix = "leave it out: keys of a config are said when the plan that --out writes is used"
    raise_diagnostics(
        Diagnostic(
            "a plan that is to be chosen does not hear this",
            f"{suggest_name(word, SEARCH_OPTIONS)} Or {fix}",
            word,
        )
        for word in unknown
    )


def _choose(
    run: Callable[..., Any],
    model: str,
    devices: int,
    hardware: str,
    batch: int,
    sequence: int,
    fix: Sequence[str],
    tokens: float,
    price: float,
    *,
    fit: str,
    out: Path | None,
    as_json: Path | None,
    plot: Path | None,
) -> None:
    """Choose a layout for `model`, show it, and write what is asked for."""
    counted = devices or ":" in hardware or fit == "devices"
    said_of = {"--devices": counted, "--hardware": hardware, "--batch": batch or fit == "batch"}
    lacking = [name for name, value in said_of.items() if not value]
    if lacking:
        text = f"a plan is to be chosen, and {' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not said"
        raise PlanError(text, fix="say all three: --devices 64 --hardware h100 --batch 1024", location="plan")
    if inf in (tokens, price):
        raise PlanError(
            "no end of tokens, or of their price",
            fix="say how many: --tokens 1e12 --price 2.5",
            location="plan",
        )
    if price and not tokens:
        raise PlanError(
            f"--price {price:g}, and no tokens to pay for",
            fix="say how many: --tokens 1e12",
            location="--price",
        )
    verb = import_command("search.search")
    budget = verb.Budget(tokens, price)
    chosen = verb.choose(run(model, devices, hardware, batch, sequence, tuple(fix), budget=budget))
    console.print(verb.view(chosen))
    if out is not None:
        verb.write_config(chosen, out)
        console.print(f"config written to {out}", soft_wrap=True)
    if plot is not None:
        import_command("search.plot").write_plot(chosen, plot)
        console.print(f"plot written to {plot}", soft_wrap=True)
    if as_json is not None:
        verb.write_dict(chosen, as_json)


def verify(
    context: typer.Context,
    config: ConfigArgument,
    steps: Annotated[int, typer.Option(help="Global steps to compare.", min=1)] = 3,
    on: Annotated[
        str, typer.Option(help="Where ranks live: threads, processes; or trace: single ranks, alone.")
    ] = "threads",
    rank: Annotated[
        int | None, typer.Option(help="The rank to trace (default: first, last, one between).", min=0)
    ] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Compare a scaled-down copy of the model.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write the verdict here (default: in run.folder).")
    ] = None,
    world: WorldOption = None,
) -> None:
    """Prove that a plan computes what one device computes: loss, gradients, norm and parameters.

    With --on trace: that single ranks send what the plan says, on a mesh of any size.
    """
    with exit_on_error(OWN_OPTIONS):
        ranked, verb = current_rank(), import_command("verify")
        if ranked is not None:
            verb.verify_rank(ranked, config, context.args, steps, shrink=shrink)
            return
        if on not in ("threads", "processes", "trace"):
            raise PlanError(
                f"ranks cannot live on '{on}'",
                fix="--on threads, --on processes, or --on trace",
                location="--on",
            )
        if rank is not None and on != "trace":
            raise PlanError(
                f"{on} compare all ranks, and --rank {rank} names one",
                fix="add --on trace",
                location="--rank",
            )
        starter = local_launcher() if on == "processes" else None
        judge = partial(verb.trace, rank=rank) if on == "trace" else partial(verb.verify, launcher=starter)
        try:
            verdict, path = judge(config, context.args, steps, world, out, shrink=shrink)
        except verb.RanksFailed as error:
            show_failure(error.result)
            raise typer.Exit(error.result.exit_code) from None
        console.print(verb.view_verdict(verdict))
        console.print(f"verdict     {path}", soft_wrap=True)
        raise typer.Exit(0 if verdict.passed else 1)


def train(
    context: typer.Context,
    config: ConfigArgument,
    from_step: Annotated[
        int | None, typer.Option(help="Go on from the checkpoint of this step, not from the newest.")
    ] = None,
    world: WorldOption = None,
) -> None:
    """Train, saving checkpoints; the same command goes on from the newest good one."""
    with exit_on_error(OWN_OPTIONS):
        rank, verb = current_rank(), import_command("train")
        if rank is not None:
            received: list[int] = []
            ended = verb.train_rank(
                rank, config, context.args, from_step, partial(stop_flag, received), console
            )
            raise typer.Exit(128 + (received[0] if received else signal.SIGTERM) if ended.stopped else 0)
        outcome = verb.train(config, context.args, world, from_step, local_launcher(), console)
        show_failure(outcome)
        raise typer.Exit(outcome.exit_code)


def _explain(verb: Any, config: Path, overrides: list[str], out: Path | None, as_json: Path | None) -> None:
    """Show what the model is made of; a forward that cannot be driven is told after what could be found out."""
    if out is not None:
        fix = "run `plan` once more without --explain-model"
        raise PlanError("--explain-model makes no plan, so there is none to write", fix=fix, location="--out")
    found = verb.explain(config, overrides)
    console.print(verb.explained(found))
    if as_json is not None:
        verb.write_explanation(found, as_json)
    raise_diagnostics(found.faults)


def register_plan_verify_train(app: typer.Typer) -> None:
    """Give `app` the commands of this file."""
    for command in (plan, verify, train):
        app.command(context_settings=EXTRA_ARGS)(command)
