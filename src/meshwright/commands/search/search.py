"""`search MODEL --devices N --hardware KIND --batch B`: the best plans of a model for a machine that need
not exist here.

MODEL is sizes as text ("175b: layers 96 hidden 12288 heads 96") or a transformers config, whose model is
made without weights to count its parameters. Devices may be of several kinds (h100:32,a100:32). `--fit`
searches a limit: the largest batch, sequence or model, or the fewest devices. The best plan is written as a
commented config for `plan`, `verify` and `train` (`write_config`).
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn

from meshwright.commands.search.best_plan_to_config import config_tables, unwritten_notes
from meshwright.commands.search.commented_config import commented_config, sizes_to_model_config
from meshwright.commands.search.constraints import SearchConstraints, base_config, parse_constraints
from meshwright.commands.search.machine import search_machine
from meshwright.commands.search.no_result import no_result_error
from meshwright.commands.search.resolve_model_sizes import (
    is_shape_text,
    model_shape,
    model_size,
    size_warnings,
)
from meshwright.model.loading.loader import load_model
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    collect_diagnostics,
    raise_diagnostics,
    refuse_write_errors,
    suggest_name,
)
from meshwright.plan.job.job import TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.machine.machine import Machine
from meshwright.planner.search.data_parallel_first import compare_data_parallel, put_first
from meshwright.planner.search.heterogeneous import (
    search_each_kind,
    search_heterogeneous,
    slowest_rates_machine,
)
from meshwright.planner.search.lossy_when_allowed import lossy_notes
from meshwright.planner.search.max_fit import FIT_QUANTITIES, MaxFit, find_max_fit
from meshwright.planner.search.model_fit import ModeFit, find_model_fits
from meshwright.planner.search.offload_when_needed import offload_notes, search_or_offload
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import SearchResult, search
from meshwright.report.search.assumptions_and_cost import TrainingBudget
from meshwright.report.search.max_fit import max_fit_dict, max_fit_view
from meshwright.report.search.model_fit import model_fit_rows, model_fit_table
from meshwright.report.search.search_result import SearchAlternatives, result_row, search_dict
from meshwright.report.search.search_result import search_view as result_view
from meshwright.run.config.source_paths import absolute_source

FIT_NAMES = (*FIT_QUANTITIES, "model")


@dataclass(frozen=True)
class SearchOptions:
    """The options of the command: model, devices, samples of a step, given choices, and
    the limit to search.
    """

    model: str
    devices: int
    hardware: str
    batch: int
    sequence: int = 0
    constraints: tuple[str, ...] = ()
    num_kept: int = 8
    budget: TrainingBudget = field(default_factory=TrainingBudget)
    max_fit: str = ""
    cluster: str = ""
    calibration_run: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """The request of a search and its result (of a limit: at the limit). `comparison` has the
    alternatives to the best plan.

    `model_fits`: the largest models for each mode of offload. `notes` are the sources of the machine's data,
    and warnings.
    """

    options: SearchOptions
    request: SearchRequest
    result: SearchResult
    comparison: SearchAlternatives
    max_fit: MaxFit | None = None
    model_fits: tuple[ModeFit, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def block_names(self) -> list[str]:
        """The equal layers of the model by name, where the best plan assigns them to kinds of devices."""
        return _block_names(self)


def run_search(options: SearchOptions) -> SearchOutcome:
    """Returns the best plans for `options`, or the limit.

    Raises PlanError for a model, a device or an axis that is not understood, and where nothing fits: what is
    missing, and what comes closest.
    """
    diagnostics: list[Diagnostic] = []
    model = collect_diagnostics(diagnostics, model_size, options.model, options.sequence)
    kinds, notes = find_machines(options, diagnostics)
    known = not diagnostics
    given = parse_constraints(options.constraints, diagnostics)
    if options.max_fit and options.max_fit not in FIT_NAMES:
        diagnostics.append(
            Diagnostic(
                f"no limit is called '{options.max_fit}'",
                suggest_name(options.max_fit, FIT_NAMES),
                "--fit",
            )
        )
    if model is None or not known:  # without a model and devices nothing can contradict itself
        raise PlanError.from_diagnostics(diagnostics)
    notes = (*notes, *size_warnings(model))
    one = kinds[0] if len(kinds) == 1 else slowest_rates_machine(kinds)
    request = given.apply(
        SearchRequest(
            model.shape,
            one,
            options.batch,
            max_positions=model.max_positions,
            base_config=base_config(one.device.flops),
        )
    )
    if len(kinds) > 1 and (request.offload_modes != ("none",) or any(request.activation_offload)):
        diagnostics.append(Diagnostic("offload on several kinds of devices", "search for one kind", "--set"))
    if len(kinds) > 1 and len(request.codecs) > 1:
        text = "lossy = true on several kinds of devices"
        diagnostics.append(Diagnostic(text, "search for one kind, or leave lossy out", "--set"))
    raise_diagnostics([*diagnostics, *_without_limit(request, options.max_fit).diagnostics()])
    if options.max_fit:
        limit = _search_model_fits if options.max_fit == "model" else _search_max_fit
        return replace(limit(options, request, kinds), notes=notes)
    request, found = _search(options, request, kinds, given)
    if not found.best:
        raise no_result_error(request, found)
    notes = (*notes, *offload_notes(request, found))
    choice = compare_data_parallel(request, found) if len(kinds) == 1 else None
    if choice is not None and choice.candidate is not None and choice.is_first:
        found = put_first(found, choice.candidate, options.num_kept)
    notes = (*notes, *lossy_notes(request, found))
    comparison = replace(_find_alternatives(request, kinds, found), data_parallel=choice)
    return SearchOutcome(options, request, found, comparison, notes=notes)


def _search(
    options: SearchOptions, request: SearchRequest, kinds: Sequence[Machine], given: SearchConstraints
) -> tuple[SearchRequest, SearchResult]:
    """Searches on one kind of device or on several; on one, offload is proposed unless it is given."""
    if len(kinds) > 1:
        return request, search_heterogeneous(request, kinds, options.num_kept)
    if given.fixes_offload:
        return request, search(request, options.num_kept)
    choices = (request.activation_offload,) if given.fixes_activation_offload else ()
    return search_or_offload(request, options.num_kept, *choices)


def find_machines(
    options: SearchOptions, diagnostics: list[Diagnostic]
) -> tuple[list[Machine], tuple[str, ...]]:
    """Returns the devices of each kind ("h100" or "h100:32,a100:32"), and notes on their data.

    Appends to `diagnostics` everything unknown, and numbers that contradict each other.
    """
    entries = [word.strip().partition(":") for word in options.hardware.split(",")]
    if len(entries) == 1 and not entries[0][1]:
        make = partial(search_machine, for_max_fit=options.max_fit == "devices")
        one = collect_diagnostics(
            diagnostics,
            make,
            entries[0][0],
            options.devices or 1,
            options.cluster,
            options.calibration_run,
            model_shape,
        )
        return ([one[0]], tuple(one[1])) if one else ([], ())
    lacking = [kind for kind, _, count in entries if not count.isdecimal() or int(count) < 1]
    if lacking:
        text = f"how many devices are {' and '.join(lacking)}? '{options.hardware}' does not say"
        diagnostics.append(Diagnostic(text, "say it of each kind: --hardware h100:32,a100:32", "--hardware"))
        entries = [(kind, "", "1") for kind, _, _ in entries]
    total = sum(int(count) for _, _, count in entries)
    if not lacking and options.devices not in (0, total):
        text = f"--devices {options.devices}, and {options.hardware} are {total}"
        diagnostics.append(Diagnostic(text, "leave --devices out, or make the two equal", "--devices"))
    if options.max_fit and len(entries) > 1:
        diagnostics.append(
            Diagnostic(
                f"--fit {options.max_fit} on several kinds of devices",
                "look for the limit of one kind",
                "--fit",
            )
        )
    for flag, file in (("--cluster", options.cluster), ("--calibrate-from", options.calibration_run)):
        if file and len(entries) > 1:
            diagnostics.append(
                Diagnostic(
                    f"{flag} {file} on several kinds of devices",
                    "leave it out: it describes one machine",
                    flag,
                )
            )
    single = len(entries) == 1
    files = (options.cluster, options.calibration_run) if single else ("", "")
    make = partial(search_machine, for_max_fit=single and options.max_fit == "devices")
    made = [
        collect_diagnostics(diagnostics, make, kind, int(count), *files, model_shape)
        for kind, _, count in entries
    ]
    found = [each for each in made if each is not None]
    return [each for each, _ in found], tuple(note for _, notes in found for note in notes)


def search_view(outcome: SearchOutcome) -> RenderableType:
    """Returns the scenario, the ranked plans, why the first one is best, and what limits the others."""
    shown = result_view(outcome.request, outcome.result, outcome.options.budget, outcome.comparison)
    notes = [Text(line) for line in outcome.notes]
    notes += [
        Text(line, style="yellow") for line in unwritten_notes(outcome.result.best[0], outcome.block_names)
    ]
    limit: list[RenderableType] = [max_fit_view(outcome.max_fit), ""] if outcome.max_fit else []
    if outcome.model_fits:
        limit = [model_fit_table(outcome.model_fits, outcome.options.budget), ""]
    return Group(*limit, shown, *notes)


def outcome_as_dict(outcome: SearchOutcome) -> dict[str, Any]:
    """Returns the same as plain values."""
    values = search_dict(outcome.request, outcome.result, outcome.options.budget, outcome.comparison)
    if outcome.max_fit:
        values["limit"] = max_fit_dict(outcome.max_fit)
    if outcome.model_fits:
        values["models"] = model_fit_rows(outcome.model_fits, outcome.options.budget)
    return values | {"notes": list(outcome.notes)}


def write_config(outcome: SearchOutcome, path: Path) -> None:
    """Writes the best plan as a commented config, and beside it the model of one that is given by its sizes.

    Raises PlanError when a file cannot be written.
    """
    options, best = outcome.options, outcome.result.best[0]
    source = absolute_source(options.model)
    if is_shape_text(options.model) or outcome.model_fits:
        file = path.with_name(f"{path.stem}-model.json")
        text = json.dumps(sizes_to_model_config(outcome.request.shape), indent=1) + "\n"
        _write(file, text, "--out")
        source = file.name
    tables = {**winner_config(outcome, source), "run": _run_table(options, path)}
    shown = result_row(outcome.request, best, options.budget, outcome.comparison.machines)
    head = [
        f"Chosen by `{search_command(options)}`",
        f"{shown['name']}: {shown['step_s']:.3g} s a step, {shown['tokens_per_s']:,.0f} tokens/s, "
        f"{shown['peak_bytes'] / 2**30:.1f} GiB on the fullest device (estimates)",
        *unwritten_notes(best, outcome.block_names),
        f"Next: {next_command(path)}",
    ]
    _write(path, commented_config(tables, head), "--out")


def search_command(options: SearchOptions) -> str:
    """Returns the command line of `options`."""
    words: list[object] = ["meshwright", "search", options.model]
    for flag, value in {
        "--devices": options.devices,
        "--hardware": options.hardware,
        "--batch": options.batch,
        "--sequence": options.sequence,
        "--cluster": options.cluster,
        "--calibrate-from": options.calibration_run,
        "--fit": options.max_fit,
    }.items():
        words += [flag, value] if value else []
    for constraint in options.constraints:
        words += ["--set", constraint]
    return shlex.join(map(str, words))


def next_command(config: Path | None) -> str:
    """Returns what to do after a search: with its config, or how to get one."""
    if config is None:
        return "add --out job.toml to write the first configuration as a config"
    return f"meshwright plan {shlex.quote(str(config))}"


def _run_table(options: SearchOptions, path: Path) -> dict[str, Any]:
    """The folder of the run; of one kind of device also the hardware, for predictions."""
    known = "," not in options.hardware
    hardware = options.hardware.partition(":")[0] if known else ""
    files = {"hardware": hardware, "cluster": options.cluster}
    values = {key: absolute_source(value) for key, value in files.items() if value}
    return {"folder": f"runs/{path.stem}", "save_every": RunConfig().save_every, **values}


def write_json(outcome: SearchOutcome, path: Path) -> None:
    """Writes everything that was found as JSON. Raises PlanError when the file cannot be written."""
    _write(path, json.dumps(outcome_as_dict(outcome), indent=1) + "\n", "--json")


def _write(path: Path, text: str, flag: str) -> None:
    with refuse_write_errors("it", path, f"name a file in a folder that can be written to: {flag}"):
        path.write_text(text, encoding="utf-8")


def winner_config(outcome: SearchOutcome, source: str) -> dict[str, Any]:
    """Returns the best plan as the tables of a config, for the model that `source` names."""
    best, request = outcome.result.best[0], outcome.request
    tokens = request.batch * request.shape.sequence
    steps = ceil(outcome.options.budget.num_tokens / tokens) or TrainConfig().steps
    return config_tables(source, request.batch, request.shape.sequence, steps, best, outcome.block_names)


def _without_limit(request: SearchRequest, fit: str) -> SearchRequest:
    if fit == "batch":
        return replace(request, batch=request.machine.num_devices * request.fixed.get("micro_batch", 1))
    if fit == "devices":
        return replace(
            request,
            fixed={
                name: size for name, size in request.fixed.items() if name not in ("tp", "pp", "cp", "dp")
            },
        )
    return request


def _search_max_fit(
    options: SearchOptions, request: SearchRequest, kinds: Sequence[Machine]
) -> SearchOutcome:
    found = find_max_fit(request, options.max_fit, options.num_kept)
    if found is None or not found.result.best:
        least = {
            "batch": "one sample",
            "sequence": "a sample of 64 tokens",
            "layers": "one layer",
            "devices": "131,072 devices",
        }
        text = (
            f"{request.shape.name}: not even {least[options.max_fit]} is enough of "
            f"{request.machine.device.name} as it is fixed"
        )
        raise PlanError(text, fix="fix less, or take devices with more memory", location="--fit")
    one = [replace(kinds[0], num_devices=found.request.machine.num_devices)]
    return SearchOutcome(
        options, found.request, found.result, _find_alternatives(found.request, one, found.result), found
    )


def _search_model_fits(
    options: SearchOptions, request: SearchRequest, kinds: Sequence[Machine]
) -> SearchOutcome:
    """The largest models, and the plans of the largest whose steps can be priced."""
    models = find_model_fits(request)
    priced = [each for each in models if each.best is not None and each.shape is not None]
    if not priced:
        text = f"{request.shape.name}: not even the smallest model of its proportions fits, or has a price"
        raise PlanError(text, fix="fix less, or take devices with more memory", location="--fit")
    largest = max(priced, key=lambda each: each.request.shape.numel)
    found = search(largest.request, options.num_kept)
    alternatives = SearchAlternatives(tuple(kinds))
    return SearchOutcome(options, largest.request, found, alternatives, model_fits=models)


def _find_alternatives(
    request: SearchRequest, kinds: Sequence[Machine], found: SearchResult
) -> SearchAlternatives:
    """Finds the alternatives: the fastest if memory were no limit, data parallelism inside hosts, each kind
    of device alone.
    """
    best = found.best[0]
    endless = replace(request.machine, device=replace(request.machine.device, memory=inf))
    unlimited = replace(request, machine=endless, offload_modes=("none",), activation_offload=(False,))
    faster = 0.999 * min(each.seconds for each in found.best)
    roomy = next(iter(search(unlimited, 1, max_seconds=faster).best), None) if len(kinds) == 1 else None
    turned: float | None = None
    if (
        best.config.tp > 1
        and best.config.data_parallel_size > 1
        and request.machine.num_devices > request.machine.devices_per_host
        and not best.layer_assignment
    ):
        other = replace(best.config, tp_across_hosts=not best.config.tp_across_hosts)
        turned = step_time(request.shape, other, request.machine).seconds
    each = tuple(search_each_kind(request, kinds)) if len(kinds) > 1 else ()
    return SearchAlternatives(tuple(kinds), roomy, turned, each)


def _block_names(result: SearchOutcome) -> list[str]:
    if not result.result.best[0].layer_assignment or is_shape_text(result.options.model):
        return []
    model = load_model(ModelConfig(result.options.model), seed=0).deferred_init.instantiate()
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [
        name
        for name in lists
        if len(list(model.get_submodule(name).children())) == result.request.shape.layers
    ]
    return [f"{fitting[0]}.{number}" for number in range(result.request.shape.layers)] if fitting else []
