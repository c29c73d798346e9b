"""Renders the data of a run as one line, for `plan` and `train`.

    data  tokenizer llama, 1,105 samples, 70,720 tokens, 0.036 epochs, 0.1 % padding, 0.1 % of labels ignored

A wrong tokenizer, data that is too short and labels that are all masked train without an error; each can be
seen here before the first step. One sample that occurs several times within one batch is a warning: its
gradient counts several times, and the batch has fewer samples than it says.
"""

from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True)
class DataSummary:
    """The data of a run.

    `tokenizer` is "" for data without one; `num_samples` is None for a stream and `num_tokens`, without
    padding, where it is not known. `padding` and `ignored` are fractions of the places for tokens and labels.
    `epochs` has one number per source of a mixture, and none for a stream. The most frequent sample occurs
    `num_repeats` times in the first batch of `batch`, and is one of `num_candidates` (its part of a mixture).
    `is_absent`: the config names no data yet.
    """

    tokenizer: str
    batch: int
    num_samples: int | None = None
    num_held_out: int = 0
    num_tokens: int | None = None
    padding: float = 0.0
    ignored: float = 0.0
    epochs: tuple[float, ...] = ()
    num_repeats: int = 1
    num_candidates: int = 0
    is_absent: bool = False


def data_view(summary: DataSummary) -> Text:
    """Returns the data line, and below it a warning if a batch contains a sample several times."""
    view = Text(f"data  {data_text(summary)}")
    for warning in data_warnings(summary):
        view.append(f"\nwarning: {warning}", style="yellow")
    return view


def data_text(summary: DataSummary) -> str:
    """Returns the facts of the data in one line."""
    if summary.is_absent:
        return "none yet: `verify` and `train` need data.source, a text file, a folder or a dataset"
    return ", ".join(_facts(summary))


def data_warnings(summary: DataSummary) -> tuple[str, ...]:
    """Returns a warning if a batch contains a sample several times."""
    return (_repeat_warning(summary),) if summary.num_repeats > 1 else ()


def _facts(summary: DataSummary) -> list[str]:
    facts = [f"tokenizer {summary.tokenizer}"] if summary.tokenizer else []
    if summary.num_samples is None:
        return [*facts, "a stream: its samples are not counted"]
    held_out = f" ({summary.num_held_out:,} more held out)" if summary.num_held_out else ""
    facts.append(f"{_count_samples(summary.num_samples)}{held_out}")
    if summary.num_tokens is not None:
        facts.append(f"{summary.num_tokens:,} tokens")
    least, most = f"{min(summary.epochs):.3g}", f"{max(summary.epochs):.3g}"
    facts.append(f"{least} epochs" if least == most else f"{least} to {most} epochs by source")
    if summary.num_tokens is not None:
        facts.append(f"{_percent(summary.padding)} padding")
        facts.append(f"{_percent(summary.ignored)} of labels ignored")
    return facts


def _count_samples(num: int) -> str:
    return "1 sample" if num == 1 else f"{num:,} samples"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"


def _repeat_warning(summary: DataSummary) -> str:
    source = "data" if len(summary.epochs) == 1 else "source of the mixture"
    return (
        f"one sample occurs {summary.num_repeats} times in a batch of {summary.batch}, because its {source} "
        f"has {_count_samples(summary.num_candidates)}; use more data, or a smaller train.batch"
    )
