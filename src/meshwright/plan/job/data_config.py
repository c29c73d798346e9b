"""Defines where the data of a job come from."""

from dataclasses import dataclass, field
from typing import Literal

from meshwright.plan.job.field_constraints import above, at_least, not_empty

DataFormat = Literal["auto", "text", "jsonl", "datasets"]
BYTES = "bytes"  # the name of the tokenizer whose tokens are bytes; a folder of that name is ./bytes


@dataclass(frozen=True)
class MixturePart:
    """One source of a mixture: `weight` is its fraction of the samples, relative to the other parts.

    `source`, `format`, `include`, `exclude`, `column`, `chat` and `split` are those of [data] for this part;
    tokenizer, sequence length and epochs are those of the mixture.
    """

    source: str
    weight: float = field(
        default=1.0,
        metadata=above(0, "write a number above 0; only the ratios of the weights count"),
    )
    format: DataFormat = "auto"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    column: str = field(default="text", metadata=not_empty())
    chat: str = ""
    split: str = field(default="train", metadata=not_empty())


@dataclass(frozen=True)
class DataConfig:
    """The training data: `source` is a file, a folder, or a Hugging Face dataset; "example" repeats a model
    factory's example batch.

    `format` "auto" reads *.jsonl (also .gz) as one JSON object per line; *.parquet, *.csv, *.json, *.arrow
    and the output of `save_to_disk` as "datasets"; anything else as plain text. A dataset of the hub needs
    format = "datasets", and its source may name a configuration: "name:configuration". `split` is the split
    that is read; `streaming` reads it in its own order without a copy on disk.

    `column` names the column with the text. `chat`, if set, names a column of conversations instead, lists of
    {role, content}, of which only the assistant's tokens are trained on.

    `tokenizer` is a folder, a hub id (perhaps with @REVISION), or "bytes". "" takes the one in the folder of
    the model; without one, a model of at most 256 tokens reads bytes. A plan contains what was taken.

    In a folder, files whose path matches a pattern of `include` (empty: those of the format) and none of
    `exclude` are read in sorted order. `sequence` is the number of tokens of a sample. `epochs` is how often
    the data are read; 0 repeats them until the last step. `mixture` lists several sources instead of one.
    """

    source: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sequence: int = field(default=256, metadata=at_least(1))
    epochs: int = field(
        default=0, metadata=at_least(0, "0 repeats without end; 1, 2... stop after that many")
    )
    format: DataFormat = "auto"
    tokenizer: str = ""
    column: str = field(default="text", metadata=not_empty())
    chat: str = ""
    split: str = field(default="train", metadata=not_empty())
    streaming: bool = False
    mixture: tuple[MixturePart, ...] = ()

    @property
    def is_named(self) -> bool:
        """Whether there is a source; a plan can be made before there is one."""
        return bool(self.source or self.mixture)

    @property
    def reads_bytes(self) -> bool:
        """Whether tokens are bytes; "" stands for them where no model has a tokenizer of its own."""
        return self.tokenizer in ("", BYTES)

    def part_configs(self) -> tuple["DataConfig", ...]:
        """Returns the parts of the mixture, each as a `DataConfig` of its own."""
        return tuple(
            DataConfig(
                source=mixture_part.source,
                include=mixture_part.include,
                exclude=mixture_part.exclude,
                sequence=self.sequence,
                epochs=self.epochs,
                format=mixture_part.format,
                tokenizer=self.tokenizer,
                column=mixture_part.column,
                chat=mixture_part.chat,
                split=mixture_part.split,
            )
            for mixture_part in self.mixture
        )
