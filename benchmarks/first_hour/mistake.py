"""A mistake as data: what is done, what the product must say, and what is changed as the message says.

    ["a misspelt key"]
    run = "plan config.toml --optimizer.lrr 1e-3"     a command of meshwright, or `script`: lines of Python
    says = ["there is no key"]                        words of the diagnosis
    repair = "did you mean 'lr'?"                     words of the printed repair
    change = [["lrr", "lr"]]                          what the user changes: in the command or the script

Optional: `verdict = "warned"` where the command does what was meant and says so; `write` and `write_after`,
files by name that are made before the first attempt and before the second; `before`, a command that is run
first; `prepare`, Python that is run then; `beside`, a command that trains meanwhile; `ranks`, processes that
are started as torchrun does; `replace` and `replace_after`, as `change`, in files by name.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
FIRST_FOLDER = HERE / "first_folder.toml"

Change = tuple[str, str]  # the words that are there, and those in their place


@dataclass(frozen=True)
class Mistake:
    """One mistake; see the module."""

    name: str
    group: str
    says: Sequence[str]
    repair: str
    run: str = ""
    script: str = ""
    verdict: Literal["refused", "warned"] = "refused"
    change: Sequence[Change] = ()
    write: Mapping[str, str] = field(default_factory=dict)
    write_after: Mapping[str, str] = field(default_factory=dict)
    replace: Mapping[str, Sequence[Change]] = field(default_factory=dict)
    replace_after: Mapping[str, Sequence[Change]] = field(default_factory=dict)
    before: Sequence[str] = ()
    prepare: str = ""
    beside: str = ""
    ranks: int = 0

    def __post_init__(self) -> None:
        if bool(self.run) == bool(self.script):
            raise ValueError(f"'{self.name}' has run = {self.run!r} and a script; needed is one of them")
        if not self.says or not self.repair:
            raise ValueError(f"'{self.name}' does not say which diagnosis and which repair are expected")

    def repaired(self) -> str:
        """Returns the command or the script after the change."""
        return with_changes(self.run or self.script, self.change)


def read_mistakes(folder: Path = HERE) -> tuple[Mistake, ...]:
    """Returns the mistakes of all files `*_mistakes.toml` in `folder`."""
    found: list[Mistake] = []
    for path in sorted(folder.glob("*_mistakes.toml")):
        group = path.stem.removesuffix("_mistakes")
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        found += [Mistake(name, group, **table) for name, table in tables.items()]
    return tuple(found)


def with_changes(text: str, changes: Sequence[Change]) -> str:
    """Returns `text` with the changes. Raises ValueError if the words of one are not there."""
    for before, after in changes:
        if before not in text:
            raise ValueError(f"'{before}' is not in:\n{text}")
        text = text.replace(before, after)
    return text
