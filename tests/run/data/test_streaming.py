"""Streams: sample k is element k of the stream, on every rank, and after a resume at any step."""

from collections import Counter
from itertools import islice
from pathlib import Path

import datasets
import pytest
import tqdm

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import TrainConfig
from meshwright.run.data.data_loader import LocalBatches
from meshwright.run.data.streaming import TokenStream
from tests.run.data.corpora import MARKED, TALKS, local_batches_of, opened, samples, tokenizer

TEXTS = [f"line {n} of some" + " more" * (n % 5) for n in range(40)]
BATCH, SEQUENCE = 12, 7


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    datasets.disable_progress_bars()


def texts(folder: Path, *, streaming: bool = True, rows: list | None = None, **changes) -> DataConfig:
    if not (folder / "texts").exists():
        datasets.Dataset.from_list(rows or [{"text": text} for text in TEXTS]).save_to_disk(
            str(folder / "texts")
        )
    if not (folder / "t").exists():
        tokenizer(folder / "t")
    return DataConfig(
        str(folder / "texts"), tokenizer=str(folder / "t"), sequence=SEQUENCE, streaming=streaming, **changes
    )


def talks(folder: Path, *, streaming: bool = True, **changes) -> DataConfig:
    if not (folder / "talks").exists():
        datasets.Dataset.from_list([{"messages": talk} for talk in TALKS]).save_to_disk(str(folder / "talks"))
        tokenizer(folder / "c", MARKED)
    return DataConfig(
        str(folder / "talks"),
        tokenizer=str(folder / "c"),
        chat="messages",
        sequence=40,
        streaming=streaming,
        **changes,
    )


def batches_by_rank(data, ranks: int, source: DataConfig) -> list[LocalBatches]:
    return local_batches_of(data, ranks, source, TrainConfig(batch=BATCH))


def played(each: list[LocalBatches], steps: range) -> Counter:
    found: Counter = Counter()
    for step in steps:
        for batch in [local_batches.batch(step) for local_batches in each]:
            if batch is not None:
                rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
                found.update((tuple(x), tuple(y)) for x, y in rows if set(y) != {-100})
    return found


@pytest.mark.parametrize("kind", [texts, talks])
def test_a_stream_has_the_samples_of_the_same_data_on_disk_in_their_order(tmp_path, kind):
    stream = opened(kind(tmp_path, epochs=1), tmp_path)
    kept = opened(kind(tmp_path, streaming=False), tmp_path)
    assert isinstance(stream, TokenStream)
    assert samples(stream, range(len(kept))) == samples(kept, range(len(kept)))
    assert not stream.has_sample(len(kept))
    assert stream.has_sample(len(kept) - 1)


@pytest.mark.parametrize("kind", [texts, talks])
def test_earlier_samples_can_be_asked_for_again(tmp_path, kind):
    stream = opened(kind(tmp_path), tmp_path)
    first = samples(stream, range(6))
    assert samples(stream, [5, 6, 2])[0::2] == [first[5], first[2]]
    assert samples(stream.reopen(), range(6)) == first


@pytest.mark.parametrize("kind", [texts, talks])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_samples_are_the_same_on_any_number_of_ranks_and_after_going_on_with_another(
    tmp_path, kind, ranks: int
):
    source = kind(tmp_path)
    data = opened(source, tmp_path)
    whole = played(batches_by_rank(data, 1, source), range(6))
    assert whole.total() == 6 * BATCH
    assert played(batches_by_rank(data, ranks, source), range(6)) == whole
    assert (
        played(batches_by_rank(data, 1, source), range(2))
        + played(batches_by_rank(data, ranks, source), range(2, 6))
        == whole
    )


@pytest.mark.parametrize("kind", [texts, talks])
def test_a_stream_begins_again_and_ends_after_its_epochs_on_all_ranks_together(tmp_path, kind):
    source = kind(tmp_path, epochs=3)
    each = batches_by_rank(opened(source, tmp_path), 3, source)
    assert {local_batches.num_steps for local_batches in each} == {None}
    steps = next(step for step in range(1000) if each[0].has_ended(step))
    assert [local_batches.has_ended(steps) for local_batches in each] == [True] * 3
    assert [local_batches.has_ended(steps - 1) for local_batches in each] == [False] * 3
    assert [local_batches.batch(steps) for local_batches in each] != [], "asking behind the end is no error"
    if kind is talks:
        assert set(played(batches_by_rank(opened(source, tmp_path), 1, source), range(steps)).values()) == {3}


def test_packed_texts_run_on_over_the_end_of_the_stream(tmp_path):
    data = opened(texts(tmp_path, epochs=2), tmp_path)
    assert isinstance(data, TokenStream)
    count = next(i for i in range(10_000) if not data.has_sample(i))
    rows = samples(data.reopen(), range(count))
    tokens = [rows[0][0][0], *(label for _, labels in rows for label in labels if label >= 0)]
    assert data.tokenizer.decode(tokens) == "".join(f"{text}<|end|>" for text in TEXTS) * 2


def test_a_rank_tokenises_only_the_conversations_that_it_plays(tmp_path, monkeypatch):
    source = talks(tmp_path)
    data = opened(source, tmp_path)
    seen = []
    for local_batches in batches_by_rank(data, 3, source)[1:2]:
        inner = local_batches.dataset._encode
        monkeypatch.setattr(
            local_batches.dataset, "_encode", lambda rows, inner=inner: (seen.append(1), inner(rows))[1]
        )
        local_batches.batch(2)
    assert len(seen) == BATCH // 3


def test_what_is_wrong_with_a_row_is_said_with_its_number(tmp_path):
    rows = [{"text": "fine"}, {"text": "fine"}, {"text": None}]
    with pytest.raises(PlanError, match=r"texts\[2\]: the column 'text' holds nothing \(null\)"):
        samples(opened(texts(tmp_path, rows=rows), tmp_path), range(3))


def test_an_empty_stream_is_refused_and_not_read_for_ever(tmp_path):
    with pytest.raises(PlanError, match=r"the stream '.*texts' is empty"):
        opened(texts(tmp_path, rows=[{"text": ""}]), tmp_path)


def test_the_digest_and_the_notes_are_those_of_a_stream(tmp_path):
    source = texts(tmp_path)
    stream = opened(source, tmp_path)
    assert stream.digest == opened(source, tmp_path).digest
    assert len({stream.digest, opened(texts(tmp_path, column="text", epochs=0), tmp_path).digest}) == 1
    assert "every rank reads all of it" in stream.notes[0]
    with pytest.raises(TypeError, match="cannot be counted"):
        len(stream)
    assert list(islice(iter([stream.has_sample(0)]), 1)) == [True]
