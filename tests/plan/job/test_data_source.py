"""What is wrong with a data source by itself: every fault with its key."""

import pytest

from meshwright.plan.job.data_source import DataSource, Part

TWO = (Part("a.jsonl", weight=3.0), Part("b.jsonl", column="body", split="test", chat=""))


@pytest.mark.parametrize(
    ("source", "where", "what"),
    [
        (DataSource(), "data.source", "no data is named"),
        (DataSource("a", sequence=0), "data.sequence", "a sample of 0 tokens"),
        (DataSource("a", epochs=-1), "data.epochs", "-1 epochs"),
        (DataSource("a", chat="messages"), "data.tokenizer", "conversations (chat = 'messages') without a tokenizer"),
        (DataSource("a", column=""), "data.column", "no column is named"),
        (DataSource("a", split=""), "data.split", "no split is named"),
        (DataSource("a", mixture=TWO), "data.source", "source = 'a' beside a mixture"),
        (DataSource(mixture=TWO, column="body"), "data.column", "column = 'body' beside a mixture"),
        (DataSource(mixture=TWO, streaming=True), "data.streaming", "streaming = True beside a mixture"),
        (DataSource(mixture=(Part("a", weight=0.0),)), "data.mixture.0.weight", "a weight of 0.0"),
        (DataSource(mixture=(Part("a", weight=float("nan")),)), "data.mixture.0.weight", "a weight of nan"),
        (DataSource(mixture=(*TWO, Part("a", weight=float("inf")))), "data.mixture.2.weight", "a weight of inf"),
        (DataSource(mixture=(Part("example"),)), "data.mixture.0.source", "the example batch in a mixture"),
        (DataSource(mixture=(TWO[0], Part(""))), "data.mixture.1.source", "no data is named"),
        (DataSource(mixture=(TWO[0], Part("a", column=""))), "data.mixture.1.column", "no column is named"),
        (DataSource(mixture=(Part("a", chat="talk"),)), "data.tokenizer", "conversations (chat = 'talk') without a tokenizer"),
    ],
)
def test_a_source_that_cannot_work_is_refused(source: DataSource, where: str, what: str):
    (fault,) = source.faults()
    assert (fault.where, fault.what.split(";")[0]) == (where, what)
    assert fault.fix


def test_a_mixture_says_each_of_its_faults_once():
    found = list(DataSource(mixture=(Part("", weight=-1.0),), sequence=0, epochs=-2).faults())
    assert [fault.where for fault in found] == [
        "data.sequence",
        "data.epochs",
        "data.mixture.0.weight",
        "data.mixture.0.source",
    ]


def test_the_parts_of_a_mixture_are_sources_that_share_what_is_common():
    source = DataSource(mixture=TWO, tokenizer="t", sequence=7, epochs=2)
    assert not list(source.faults())
    assert source.parts() == (
        DataSource("a.jsonl", tokenizer="t", sequence=7, epochs=2),
        DataSource("b.jsonl", tokenizer="t", sequence=7, epochs=2, column="body", split="test"),
    )
