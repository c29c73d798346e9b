"""Errors of a data source: each with its key."""

import pytest

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig, MixturePart
from meshwright.plan.job.errors import Diagnostic, diagnostics_in
from meshwright.plan.job.job import Job

TWO = (MixturePart("a.jsonl", weight=3.0), MixturePart("b.jsonl", column="body", split="test", chat=""))


def of_source(source: DataConfig) -> list[Diagnostic]:
    return diagnostics_in("data", Job(data=source).diagnostics(RunConfig()))


@pytest.mark.parametrize(
    ("source", "where", "what"),
    [
        (DataConfig(), "data.source", "no data is named"),
        (DataConfig("a", sequence=0), "data.sequence", "sequence = 0"),
        (DataConfig("a", epochs=-1), "data.epochs", "epochs = -1"),
        (
            DataConfig("a", chat="messages", tokenizer="bytes"),
            "data.tokenizer",
            "conversations (chat = 'messages') with bytes as tokens, which have no chat template",
        ),
        (DataConfig("a", column=""), "data.column", "column = ''"),
        (DataConfig("a", split=""), "data.split", "split = ''"),
        (DataConfig("a", mixture=TWO), "data.source", "source = 'a' together with a mixture"),
        (DataConfig(mixture=TWO, column="body"), "data.column", "column = 'body' together with a mixture"),
        (
            DataConfig(mixture=TWO, streaming=True),
            "data.streaming",
            "streaming = True together with a mixture",
        ),
        (DataConfig(mixture=(MixturePart("a", weight=0.0),)), "data.mixture.0.weight", "weight = 0.0"),
        (
            DataConfig(mixture=(MixturePart("a", weight=float("nan")),)),
            "data.mixture.0.weight",
            "weight = nan",
        ),
        (
            DataConfig(mixture=(*TWO, MixturePart("a", weight=float("inf")))),
            "data.mixture.2.weight",
            "weight = inf",
        ),
        (
            DataConfig(mixture=(MixturePart("example"),)),
            "data.mixture.0.source",
            "the example batch in a mixture",
        ),
        (DataConfig(mixture=(TWO[0], MixturePart(""))), "data.mixture.1.source", "no data is named"),
        (
            DataConfig(mixture=(TWO[0], MixturePart("a", column=""))),
            "data.mixture.1.column",
            "column = ''",
        ),
        (
            DataConfig(mixture=(MixturePart("a", chat="talk"),), tokenizer="bytes"),
            "data.tokenizer",
            "conversations (chat = 'talk') with bytes as tokens, which have no chat template",
        ),
    ],
)
def test_a_source_that_cannot_work_is_refused(source: DataConfig, where: str, what: str):
    (diagnostic,) = of_source(source)
    assert (diagnostic.location, diagnostic.problem.split(";")[0]) == (where, what)
    assert diagnostic.fix


def test_a_mixture_reports_each_error_once():
    found = of_source(DataConfig(mixture=(MixturePart("", weight=-1.0),), sequence=0, epochs=-2))
    assert [diagnostic.location for diagnostic in found] == [
        "data.sequence",
        "data.epochs",
        "data.mixture.0.weight",
        "data.mixture.0.source",
    ]


def test_the_sources_of_a_mixture_share_common_settings():
    source = DataConfig(mixture=TWO, tokenizer="t", sequence=7, epochs=2)
    assert not of_source(source)
    assert source.part_configs() == (
        DataConfig("a.jsonl", tokenizer="t", sequence=7, epochs=2),
        DataConfig("b.jsonl", tokenizer="t", sequence=7, epochs=2, column="body", split="test"),
    )
