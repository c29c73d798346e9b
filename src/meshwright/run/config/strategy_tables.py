"""Makes strategies of the tables of a config.

    [[strategies]]
    name = "compress"                    the name of a technique, as its class says it
    mode = "int8"                        chooses among those of one name; by default the first
    min_numel = 65536                    the fields of the class

    [[strategies]]
    name = "compress"
    source = "ternary.py:Ternary"        the class of a technique of your own, in a file of your own; `mode`
                                         is what it says itself, and need not be written

Whatever is wrong with a class of your own is reported here, before a process starts. Each rank imports the
file by its path; the digest of its contents is part of the hash of the plan.
"""

import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from inspect import isclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name
from meshwright.plan.job.field_constraints import without_wrong_values
from meshwright.plan.job.python_file import import_file, module_name, source_of
from meshwright.plan.strategy_compatibility import suggest_strategy
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.config.source_paths import resolve_source, search_folders
from meshwright.run.config.toml_validation import KeyPath, SchemaCheck

StrategyTable = Mapping[str, Mapping[str, type[Strategy]]]  # by name, then by mode; the first is the default
FILE_PATTERN = re.compile(r"\.(csv|py)(:\w+)?$")  # a string of a strategy that names a file
KEY, SOURCE, FORM = "strategies", "source", "file.py:Class"
EXTEND = "extend meshwright.Strategy, or for a codec of gradients BlockCodec (docs/howto/write_a_strategy.md)"


def strategies_from_tables(
    tables: Sequence[Mapping[str, Any]], strategies: StrategyTable
) -> tuple[Strategy, ...]:
    """Returns the strategies that tables of a config describe. Raises PlanError with all diagnostics."""
    diagnostics: list[Diagnostic] = []
    chosen, wrong = read_strategies(tables, strategies, SchemaCheck("", diagnostics=diagnostics), Path())
    raise_diagnostics([*diagnostics, *wrong])
    return chosen or ()


def read_strategies(
    listed: Any, known: StrategyTable, check: SchemaCheck, folder: Path
) -> tuple[tuple[Strategy, ...] | None, list[Diagnostic]]:
    """Returns the strategies of the tables in a config in `folder`, with defaults in place of wrong values,
    and the diagnostics of these; None if nothing is `listed`. Other diagnostics are added to those of
    `check`.
    """
    if listed is None:
        return None, []
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        fix = '[[strategies]] in double brackets, then name = "ddp"; one such table for each technique'
        where = check.describe_path((KEY,))
        check.diagnostics.append(Diagnostic("strategies is not a list of tables", fix, where))
        return None, []
    chosen, wrong = [], list[Diagnostic]()
    for i, table in enumerate(listed):
        keys = {(KEY, str(table.get("name")), key) for key in table}
        places = search_folders(folder, is_override=not check.overridden.isdisjoint(keys))
        values = {key: _file(value, places) for key, value in table.items()}
        try:
            strategy_class = _strategy_class(values, str(i), known, check)
        except PlanError as error:
            check.diagnostics += error.diagnostics
            continue
        name = strategy_class.name
        chooses = {"name", "mode" if strategy_class.mode else "", SOURCE if source_of(strategy_class) else ""}
        values = {key: value for key, value in values.items() if key not in chooses}
        values, found = without_wrong_values(strategy_class, values, f"{KEY}.{name}")
        wrong += found
        for key, fix in strategy_class.removed_keys.items():
            if values.pop(key, None) is not None:
                where = check.describe_path((KEY, name, key))
                check.diagnostics.append(Diagnostic(f"'{name}' has no key '{key}' any more", fix, where))
        chosen.append(check.convert(values, strategy_class, (KEY, name)))
    return tuple(chosen), wrong


def _strategy_class(
    table: Mapping[str, Any], place: str, known: StrategyTable, check: SchemaCheck
) -> type[Strategy]:
    """Returns the class that a table chooses. Raises PlanError."""
    name, at_name = table.get("name"), check.describe_path((KEY, place, "name"))
    if not isinstance(name, str):
        text = "the strategy has no name" if name is None else f"{name!r} is not the name of a strategy"
        raise PlanError(text, fix=f'write name = "...": {suggest_name("", known)}', location=at_name)
    if SOURCE in table:
        found = _own_class(table[SOURCE], check.describe_path((KEY, name, SOURCE)))
        raise_diagnostics(_choice_diagnostics(found, table, known, check))
        return found
    if name not in known:
        raise PlanError(f"there is no strategy '{name}'", fix=suggest_strategy(name, known), location=at_name)
    modes = known[name]
    mode = table.get("mode", next(iter(modes))) if len(modes) > 1 else next(iter(modes))
    if not isinstance(mode, str) or mode not in modes:
        text = f"mode = {mode!r}; '{name}' has the modes {', '.join(modes)}"
        where = check.describe_path((KEY, name, "mode"))
        raise PlanError(text, fix=suggest_name(str(mode), modes), location=where)
    return modes[mode]


def _choice_diagnostics(
    found: type[Strategy], table: Mapping[str, Any], known: StrategyTable, check: SchemaCheck
) -> Iterator[Diagnostic]:
    """Yields what in `table` is not what the class says, and whether one of the library says the same."""
    path: KeyPath = (KEY, table["name"])
    for key, said in (("name", found.name), ("mode", found.mode)):
        if table.get(key, said) != said:
            text = f"{key} = {table[key]!r}, and {found.__name__} has {key} = {said!r}"
            yield Diagnostic(text, f'write {key} = "{said}"', check.describe_path((*path, key)))
    modes = known.get(found.name, {})
    if found.mode in modes or (len(modes) > 1 and not found.mode):
        text = f"{found.__name__} has name = '{found.name}' and mode = '{found.mode}'"
        text += (
            ", as one of the library" if found.mode in modes else ", and a technique of this name needs one"
        )
        fix = f"give it a mode that is none of: {', '.join(filter(None, modes))}"
        fix = fix if len(modes) > 1 else "give it another name, or a mode"
        yield Diagnostic(text, fix, check.describe_path((*path, SOURCE)))


def _own_class(source: object, location: str) -> type[Strategy]:
    """Returns the class `source`, file.py:Class. Raises PlanError, with all that is wrong with it."""
    path, _, name = source.rpartition(":") if isinstance(source, str) else ("", "", "")
    if not path.endswith(".py") or not name:
        text = f"source = {source!r}; needed is a Python file and a class in it"
        raise PlanError(text, fix=f'write source = "{FORM}"', location=location)
    if not Path(path).is_file():
        fix = f"give the path of a Python file: {FORM}, beside the config or in the current folder"
        raise PlanError(f"there is no file {path}", fix=fix, location=location)
    module = _module(Path(path), location)
    found = vars(module).get(name)
    classes = {key: each for key, each in vars(module).items() if _is_strategy(each)}
    own = [key for key, each in classes.items() if each.__module__ == module.__name__]
    if found is None:
        fix = suggest_name(name, own) if own else f"define it: {EXTEND}"
        raise PlanError(f"{path} has no class '{name}'", fix=fix, location=location)
    if not _is_strategy(found):
        kind = "a class that is no Strategy" if isclass(found) else f"a {type(found).__name__}, no class"
        raise PlanError(f"{name} in {path} is {kind}", fix=EXTEND, location=location)
    raise_diagnostics(_class_diagnostics(found, module, location))
    return found


def _module(path: Path, location: str) -> ModuleType:
    """Returns the module in the file at `path`; one of the same contents is imported once."""
    found = sys.modules.get(module_name(path, KEY))
    if found is not None:
        return found
    try:
        return import_file(path, KEY)
    except (Exception, SystemExit) as error:  # one that leaves would end the command without a word
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
        text = f"importing {path} raised {type(error).__name__}: {error}"
        text += f" (line {lines[-1]})" if lines else ""
        fix = "correct the file; it must import without side effects"
        raise PlanError(text, fix=fix, location=location) from error


def _is_strategy(value: object) -> TypeGuard[type[Strategy]]:
    return isclass(value) and issubclass(value, Strategy)


def _class_diagnostics(found: type[Strategy], module: ModuleType, location: str) -> Iterator[Diagnostic]:
    """Yields what a class of a user's own lacks, by which it cannot be a technique of a plan."""
    name = found.__name__
    if found.__module__ != module.__name__:
        text = f"{module.__file__} imports {name} from {found.__module__}"
        yield Diagnostic(text, f"name the file that defines it: {FORM}", location)
        return
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        text = f"{name} lacks what each {found.__mro__[1].__name__} defines: {missing}"
        yield Diagnostic(text, f"define in {name}: {missing}", location)
    said = {key for each in found.__mro__ for key in vars(each)}
    for line in ('name: ClassVar[str] = "my_technique"', 'phase: ClassVar[StrategyPhase] = "comm"'):
        key = line.partition(":")[0]
        if key not in said:
            yield Diagnostic(f"{name} has no {key}", f"write in it {line}", location)
    if SOURCE in found.__dataclass_fields__:
        text = f"{name} has a field '{SOURCE}', the key that names its file"
        yield Diagnostic(text, "give the field another name", location)
    if "__dataclass_params__" not in vars(found):
        text = f"{name} is no dataclass: fields of its own would be no keys"
        yield Diagnostic(text, f"write @dataclass(frozen=True) above class {name}", location)


def _file(value: Any, folders: Sequence[Path]) -> Any:
    return resolve_source(value, folders) if isinstance(value, str) and FILE_PATTERN.search(value) else value
