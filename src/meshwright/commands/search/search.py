"""`plan MODEL --devices N --hardware KIND --batch B`: the best layouts of a model that nobody has rented a device for.

MODEL is a shape in words ("175b: layers 96 hidden 12288 heads 96"), or a transformers config, whose sizes are read and whose
model is made without weights to count them. Devices may be of several kinds (h100:32,a100:32). With `--fit` a limit is looked
for: the largest batch, sequence or model, or the fewest devices. The winner is written as a config: mesh and strategies, for
`verify` and `train` (verbs/winner.py).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn

from meshwright.commands.search.constraints import base_of, fixed
from meshwright.commands.search.machine import machine_for
from meshwright.commands.search.model_size import is_shape, shape_of, sized, unlike
from meshwright.commands.search.no_result import nothing
from meshwright.commands.search.to_config import config_tables, unwritten
from meshwright.model.loading.loader import load_model
from meshwright.plan.job.data_source import ModelSource
from meshwright.plan.job.errors import Fault, PlanError, gathered, nearest, raise_faults
from meshwright.planner.analytic.step_time import step
from meshwright.planner.machine.machine import Machine
from meshwright.planner.search.heterogeneous import alone, search_unlike, weakest
from meshwright.planner.search.max_fit import LIMITS, Limit, limit
from meshwright.planner.search.request import Wish
from meshwright.planner.search.search import Found, search
from meshwright.report.search.max_fit import limit_dict, limit_view
from meshwright.report.search.search_result import Beside, Budget, choice_dict, choice_view


@dataclass(frozen=True)
class Asked:
    """What the command was told: a model, devices, the rows of a step, what is fixed, and the limit that is looked for."""

    model: str
    devices: int
    hardware: str
    batch: int
    sequence: int = 0
    fixed: tuple[str, ...] = ()
    keep: int = 8
    budget: Budget = field(default_factory=Budget)
    fit: str = ""
    cluster: str = ""
    run: str = ""


@dataclass(frozen=True)
class Chosen:
    """What a search was asked, and what it found: of a limit, at it. `beside` is what the winner is compared with.

    `notes` say what of the machine was measured, and learnt.
    """

    asked: Asked
    wish: Wish
    found: Found
    beside: Beside
    limit: Limit | None = None
    notes: tuple[str, ...] = ()


def choose(asked: Asked) -> Chosen:
    """The layouts that are best for what was `asked`, or the limit.

    Raises PlanError for a model, a device or an axis that is not understood, and where nothing fits: what is missing, and what
    comes nearest.
    """
    faults: list[Fault] = []
    model = gathered(faults, sized, asked.model, asked.sequence)
    kinds, notes = machines(asked, faults)
    known = not faults
    given = fixed(asked.fixed, faults)
    if asked.fit and asked.fit not in LIMITS:
        faults.append(Fault(f"no limit is called '{asked.fit}'", nearest(asked.fit, LIMITS), "--fit"))
    if model is None or not known:  # without a model and devices nothing can contradict itself
        raise PlanError.of(faults)
    notes = (*notes, *unlike(model))
    one = kinds[0] if len(kinds) == 1 else weakest(kinds)
    wish = given.of(Wish(model.shape, one, asked.batch, longest=model.positions, base=base_of(one.device.flops)))
    raise_faults([*faults, *_free(wish, asked.fit).faults()])
    if asked.fit:
        return replace(_limited(asked, wish, kinds), notes=notes)
    found = search_unlike(wish, kinds, asked.keep) if len(kinds) > 1 else search(wish, asked.keep)
    if not found.best:
        raise nothing(wish, found)
    return Chosen(asked, wish, found, _beside(wish, kinds, found), notes=notes)


def machines(asked: Asked, faults: list[Fault]) -> tuple[list[Machine], tuple[str, ...]]:
    """The devices of each kind, "h100" or "h100:32,a100:32", and what was measured or learnt of them, in words.

    `faults` learns of all that is not known, and of numbers that contradict each other.
    """
    words = [word.strip().partition(":") for word in asked.hardware.split(",")]
    if len(words) == 1 and not words[0][1]:
        make = partial(machine_for, more=asked.fit == "devices")
        one = gathered(faults, make, words[0][0], asked.devices or 1, asked.cluster, asked.run, shape_of)
        return ([one[0]], tuple(one[1])) if one else ([], ())
    lacking = [kind for kind, _, count in words if not count.isdecimal() or int(count) < 1]
    if lacking:
        text = f"how many devices are {' and '.join(lacking)}? '{asked.hardware}' does not say"
        faults.append(Fault(text, "say it of each kind: --hardware h100:32,a100:32", "--hardware"))
        words = [(kind, "", "1") for kind, _, _ in words]
    total = sum(int(count) for _, _, count in words)
    if not lacking and asked.devices not in (0, total):
        text = f"--devices {asked.devices}, and {asked.hardware} are {total}"
        faults.append(Fault(text, "leave --devices away, or make the two equal", "--devices"))
    if asked.fit and len(words) > 1:
        faults.append(Fault(f"--fit {asked.fit} on several kinds of devices", "look for the limit of one kind", "--fit"))
    for flag, file in (("--cluster", asked.cluster), ("--calibrate-from", asked.run)):
        if file and len(words) > 1:
            faults.append(
                Fault(f"{flag} {file} on several kinds of devices", "leave it away: it says one machine's figures", flag)
            )
    single = len(words) == 1
    files = (asked.cluster, asked.run) if single else ("", "")
    make = partial(machine_for, more=single and asked.fit == "devices")
    made = [gathered(faults, make, kind, int(count), *files, shape_of) for kind, _, count in words]
    found = [each for each in made if each is not None]
    return [each for each, _ in found], tuple(note for _, notes in found for note in notes)


def view(chosen: Chosen) -> RenderableType:
    """The scenario in words, the ranked layouts, why the first one wins, and what stops the others."""
    shown = choice_view(chosen.wish, chosen.found, chosen.asked.budget, chosen.beside)
    notes = [Text(line) for line in chosen.notes]
    notes += [Text(line, style="yellow") for line in unwritten(chosen.found.best[0], _blocks(chosen))]
    return Group(*([limit_view(chosen.limit), ""] if chosen.limit else []), shown, *notes)


def as_dict(chosen: Chosen) -> dict[str, Any]:
    """The same as plain values."""
    said = choice_dict(chosen.wish, chosen.found, chosen.asked.budget, chosen.beside)
    return said | {"notes": list(chosen.notes)} | ({"limit": limit_dict(chosen.limit)} if chosen.limit else {})


def write_config(chosen: Chosen, path: Path) -> None:
    """Write the winner as a config. Raises PlanError when the file cannot be written."""
    _write(path, tomli_w.dumps(config_of_choice(chosen)), "--out")


def write_dict(chosen: Chosen, path: Path) -> None:
    """Write all that is known of the choice as JSON. Raises PlanError when the file cannot be written."""
    _write(path, json.dumps(as_dict(chosen), indent=1) + "\n", "--json")


def _write(path: Path, text: str, flag: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = f"name a file in a folder that can be written to: {flag}"
        raise PlanError(f"it cannot be written: {error.strerror}", fix=fix, where=str(path)) from error


def config_of_choice(chosen: Chosen) -> dict[str, Any]:
    """The winner as the tables of a config: [model] where it is one that can be built, [mesh], [[strategies]], [train]."""
    model = "" if is_shape(chosen.asked.model) else _wherever(chosen.asked.model)
    best, wish = chosen.found.best[0], chosen.wish
    return config_tables(model, wish.batch, wish.shape.sequence, best, _blocks(chosen))


def _wherever(source: str) -> str:
    """`source` as a config in any folder may say it: the whole path of a file, the name of a repository as it is."""
    path, colon, name = source.partition(":")
    return f"{Path(path).resolve()}{colon}{name}" if Path(path).exists() else source


def _free(wish: Wish, fit: str) -> Wish:
    """`wish` without what a limit will say."""
    if fit == "batch":
        return replace(wish, batch=wish.machine.count * wish.fixed.get("micro", 1))
    if fit == "devices":
        return replace(wish, fixed={word: size for word, size in wish.fixed.items() if word not in ("tp", "pp", "cp", "dp")})
    return wish


def _limited(asked: Asked, wish: Wish, kinds: Sequence[Machine]) -> Chosen:
    found = limit(wish, asked.fit, asked.keep)
    if found is None or not found.found.best:
        least = {"batch": "one row", "sequence": "a row of 64 tokens", "layers": "one layer", "devices": "131,072 devices"}
        text = f"{wish.shape.name}: not even {least[asked.fit]} is enough of {wish.machine.device.name} as it is fixed"
        raise PlanError(text, fix="fix less, or take devices with more memory", where="--fit")
    one = [replace(kinds[0], count=found.wish.machine.count)]
    return Chosen(asked, found.wish, found.found, _beside(found.wish, one, found.found), found)


def _beside(wish: Wish, kinds: Sequence[Machine], found: Found) -> Beside:
    """What the winner is compared with: the fastest if memory were no limit, copies inside hosts, each kind of device alone."""
    best = found.best[0]
    endless = replace(wish.machine, device=replace(wish.machine.device, memory=inf))
    faster = 0.999 * best.seconds
    roomy = next(iter(search(replace(wish, machine=endless), 1, below=faster).best), None) if len(kinds) == 1 else None
    turned: float | None = None
    if best.layout.tp > 1 and best.layout.sharers > 1 and wish.machine.count > wish.machine.host and not best.dealt:
        other = replace(best.layout, outside=not best.layout.outside)
        turned = step(wish.shape, other, wish.machine).seconds
    each = tuple(alone(wish, kinds)) if len(kinds) > 1 else ()
    return Beside(tuple(kinds), roomy, turned, each)


def _blocks(chosen: Chosen) -> list[str]:
    """The names of the model's layers, in order, where they are asked for: by cuts of unequal parts."""
    if not chosen.found.best[0].dealt or is_shape(chosen.asked.model):
        return []
    model = load_model(ModelSource(chosen.asked.model), seed=0).blueprint.instance()
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [name for name in lists if len(list(model.get_submodule(name).children())) == chosen.wish.shape.layers]
    return [f"{fitting[0]}.{number}" for number in range(chosen.wish.shape.layers)] if fitting else []
