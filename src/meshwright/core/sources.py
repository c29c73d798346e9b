"""Where a job's model and data come from."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.core.errors import Fault


@dataclass(frozen=True)
class ModelSource:
    """The model: a transformers config (a folder or a .json file), or `file.py:factory` that returns an `nn.Module`.

    `overrides` replaces fields of a transformers config, for example {num_hidden_layers = 2}.
    """

    source: str = ""
    overrides: dict[str, int | float | bool | str | None] = field(default_factory=dict, hash=False)

    def faults(self) -> Iterator[Fault]:
        if not self.source:
            fix = "set model.source to a transformers config (folder or .json file) or to file.py:factory"
            yield Fault("no model is named", fix, "model.source")


@dataclass(frozen=True)
class DataSource:
    """The text to train on: a file or a folder; "example" repeats the example batch that a model factory returns.

    Files whose path matches a pattern of `include` and none of `exclude` are read in sorted order, as bytes.
    A sample is `sequence` tokens; `epochs` = 0 repeats the data for as long as the steps last.
    """

    source: str = ""
    include: tuple[str, ...] = ("*.txt", "*.md", "*.py")
    exclude: tuple[str, ...] = ()
    sequence: int = 256
    epochs: int = 0

    def faults(self) -> Iterator[Fault]:
        if not self.source:
            yield Fault("no data is named", "set data.source to a text file or a folder", "data.source")
        if self.sequence < 1:
            yield Fault(f"a sample of {self.sequence} tokens; needed is at least 1", "set data.sequence", "data.sequence")
        if self.epochs < 0:
            yield Fault(f"{self.epochs} epochs", "0 repeats without end; 1, 2, 3... stop after that many", "data.epochs")
