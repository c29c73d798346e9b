"""Documents become samples: every token of every text, one sample per conversation, and errors with their
location.
"""

from pathlib import Path

import pytest

from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.run.data.byte_text import TextDataset
from meshwright.run.data.documents_to_samples import MAX_DIAGNOSTICS, TEXTS_PER_CALL
from meshwright.run.data.token_dataset import TokenCount
from tests.run.data.corpora import MARKED, PLAIN, TALKS, jsonl, opened, samples, tokenizer

TEXTS = ["one line", "", "two", "a third, longer line"]


def talks(folder: Path, sequence: int = 40, rows: list | None = None) -> DataConfig:
    path = jsonl(folder / "talks.jsonl", rows or [{"messages": talk} for talk in TALKS])
    return DataConfig(path, chat="messages", tokenizer=tokenizer(folder / "chat", PLAIN), sequence=sequence)


def all_tokens(data) -> list[int]:
    """The tokens that the samples hold, in order: the first input, and every label."""
    rows = samples(data, range(len(data)))
    return [rows[0][0][0], *(label for _, labels in rows for label in labels if label != IGNORE_INDEX)]


@pytest.mark.parametrize("sequence", [1, 5, 100])
def test_texts_are_joined_in_order_each_with_its_end(tmp_path, sequence: int):
    path = jsonl(tmp_path / "a.jsonl", [{"body": text} for text in TEXTS])
    data = opened(
        DataConfig(path, column="body", sequence=sequence, tokenizer=tokenizer(tmp_path / "t")), tmp_path
    )
    assert data.tokenizer.decode(all_tokens(data)) == "one line<|end|>two<|end|>a third, longer line<|end|>"
    plain = opened(DataConfig(path, column="body", sequence=sequence), tmp_path)
    assert bytes(all_tokens(plain)) == b"one line\0two\0a third, longer line\0"


def test_many_texts_keep_their_order(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"{n} " * (n % 3)} for n in range(2 * TEXTS_PER_CALL + 5)])
    data = opened(DataConfig(path, tokenizer=tokenizer(tmp_path / "t"), sequence=64), tmp_path)
    written = "".join(f"{n} " * (n % 3) + "<|end|>" for n in range(2 * TEXTS_PER_CALL + 5) if n % 3)
    assert data.tokenizer.decode(all_tokens(data)) == written


def test_text_files_can_be_tokenised_too(tmp_path):
    for name, text in {"b.txt": "second", "a.txt": "first"}.items():
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    source = DataConfig(str(tmp_path / "in"), tokenizer=tokenizer(tmp_path / "t"), sequence=4)
    data = opened(source, tmp_path)
    assert data.tokenizer.decode(all_tokens(data)) == "first<|end|>second<|end|>"
    assert isinstance(opened(DataConfig(source.source), tmp_path), TextDataset)


def test_a_conversation_is_one_sample_with_labels_on_its_answer(tmp_path):
    data = opened(talks(tmp_path), tmp_path)
    assert len(data) == len(TALKS)
    for i, (inputs, labels) in enumerate(samples(data, range(len(data)))):
        answer = [label for label in labels if label != IGNORE_INDEX]
        assert data.tokenizer.decode(answer) == f"It is {2 * i}.<|end|>"
        first = labels.index(answer[0])
        assert data.tokenizer.decode(inputs[: first + 1]) == f"<|user|>What is {i} + {i}?<|end|><|assistant|>"
        assert list(inputs[first + 1 : first + len(answer)]) == answer[:-1], (
            "label t is the token after input t"
        )
        assert set(inputs[first + len(answer) + 1 :]) <= {data.tokenizer.eos_token_id}
    assert data.notes == ()


def test_conversations_that_are_too_long_are_cut_and_counted(tmp_path):
    whole = opened(talks(tmp_path), tmp_path)
    tail = [{"messages": [{"role": "user", "content": "long " * 30}, TALKS[0][1]]}]
    rows = [{"messages": talk} for talk in TALKS] + tail
    lengths = [
        max(t for t, label in enumerate(labels) if label != IGNORE_INDEX) + 1
        for _, labels in samples(whole, range(9))
    ]
    shortest = min(lengths)
    data = opened(talks(tmp_path, shortest - 1, rows), tmp_path)
    assert data.notes == (
        f"10 of 10 conversations are longer than data.sequence = {shortest - 1} and are cut; "
        "1 of them have no label: no answer is left",
    )
    for (_, cut), (_, full) in zip(samples(data, range(9)), samples(whole, range(9)), strict=True):
        assert cut == full[: shortest - 1]
    with pytest.raises(
        PlanError,
        match=r"no answer begins within the first 2 tokens of any of the 10(.|\n)*raise data.sequence",
    ):
        opened(talks(tmp_path, 2, rows), tmp_path)


@pytest.mark.parametrize("sequence", [1, 5, 100])
def test_tokens_and_labels_of_packed_texts_are_counted(tmp_path, sequence: int):
    path = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    data = opened(DataConfig(path, sequence=sequence), tmp_path)
    total = len(all_tokens(data))
    num_positions = len(data) * sequence
    assert data.count_tokens() == TokenCount(num_positions, min(total, num_positions), total - 1)


@pytest.mark.parametrize("sequence", [20, 30, 100])
def test_tokens_and_labels_of_conversations_are_counted(tmp_path, sequence: int):
    whole = samples(opened(talks(tmp_path, 100), tmp_path), range(9))
    # the last label is the last token, and it follows input len - 2
    lengths = [max(t for t, label in enumerate(labels) if label != IGNORE_INDEX) + 2 for _, labels in whole]
    data = opened(talks(tmp_path, sequence), tmp_path)
    num_labels = sum(label != IGNORE_INDEX for _, labels in samples(data, range(9)) for label in labels)
    num_tokens = sum(min(length, sequence) for length in lengths)
    assert data.count_tokens() == TokenCount(9 * sequence, num_tokens, num_labels)


def test_an_absent_sample_has_no_label(tmp_path):
    ((_, labels),) = samples(opened(talks(tmp_path), tmp_path), [-1])
    assert set(labels) == {IGNORE_INDEX}
    with pytest.raises(IndexError, match="no sample 9: ids run from 0 to 8"):
        opened(talks(tmp_path), tmp_path).batch([9])


def test_the_tokens_are_used_again_unless_something_that_decides_them_changed(tmp_path):
    def entries() -> int:
        return sum(path.is_dir() for path in (tmp_path / "cache").iterdir())

    path = jsonl(tmp_path / "a.jsonl", [{"text": "some text", "body": "some text"}])
    one, other = tokenizer(tmp_path / "t"), tokenizer(tmp_path / "u", size=300)
    opened(DataConfig(path, tokenizer=one, sequence=3), tmp_path)
    opened(DataConfig(path, tokenizer=one, sequence=5, epochs=2), tmp_path)
    assert entries() == 1
    opened(DataConfig(path, tokenizer=one, column="body"), tmp_path)
    opened(DataConfig(path, tokenizer=other), tmp_path)
    opened(DataConfig(path), tmp_path)
    jsonl(tmp_path / "a.jsonl", [{"text": "some other text"}])
    opened(DataConfig(path, tokenizer=one), tmp_path)
    assert entries() == 5


def test_the_digest_names_the_samples(tmp_path):
    def digest(name: str, text: str, sequence: int) -> str:
        return opened(
            DataConfig(jsonl(tmp_path / f"{name}.jsonl", [{"text": text}]), sequence=sequence), tmp_path
        ).digest

    assert digest("a", "text", 3) == digest("b", "text", 3)
    assert len({digest("a", "text", 3), digest("a", "text", 4), digest("a", "texT", 3)}) == 3


def test_every_broken_row_is_named_at_once(tmp_path):
    rows = [
        {"text": "good"},
        {"text": 7},
        {"text": None},
        "{",
        {"text": "a\0b"},
        '{"text": "\\ud800"}',
        {"body": "x"},
    ]
    with pytest.raises(PlanError) as caught:
        opened(DataConfig(jsonl(tmp_path / "a.jsonl", rows)), tmp_path)
    assert {
        Path(fault.location).name: fault.problem.split("; needed")[0] for fault in caught.value.diagnostics
    } == {
        "a.jsonl:2": "the column 'text' holds a value of type int",
        "a.jsonl:3": "the column 'text' holds nothing (null)",
        "a.jsonl:4": "not JSON: Expecting property name enclosed in double quotes (column 2)",
        "a.jsonl:5": "the column 'text' holds a zero byte: binary data?",
        "a.jsonl:6": "the column 'text' holds half a character (\\ud800) at position 0",
        "a.jsonl:7": "there is no column 'text'; the columns are: body",
    }


def test_a_column_that_no_row_has_is_not_said_for_every_row(tmp_path):
    rows = [{"body": "x"}] * 1000
    with pytest.raises(
        PlanError, match=r"a.jsonl:1: there is no column 'text'; the columns are: body"
    ) as caught:
        opened(DataConfig(jsonl(tmp_path / "a.jsonl", rows)), tmp_path)
    assert len(caught.value.diagnostics) == MAX_DIAGNOSTICS + 1
    assert f"the first {MAX_DIAGNOSTICS} errors" in caught.value.diagnostics[-1].problem


@pytest.mark.parametrize("rows", [[], ["", ""], [{"text": ""}]])
def test_data_without_any_text_is_refused(tmp_path, rows: list):
    with pytest.raises(
        PlanError, match=r"data.source: '.*a.jsonl' holds no text in the column 'text': it is empty"
    ):
        opened(DataConfig(jsonl(tmp_path / "a.jsonl", rows)), tmp_path)


def test_conversations_without_an_answer_are_named(tmp_path):
    rows = [{"messages": TALKS[0]}, {"messages": TALKS[1][:1]}, {"talk": TALKS[2]}]
    with pytest.raises(PlanError) as caught:
        opened(talks(tmp_path, rows=rows), tmp_path)
    words = [(Path(fault.location).name, fault.problem.split(":")[0]) for fault in caught.value.diagnostics]
    assert words == [
        ("talks.jsonl:2", "the conversation has no answer"),
        ("talks.jsonl:3", "there is no column 'messages'; the columns are"),
    ]


def test_a_tokenizer_that_cannot_do_what_is_asked_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "messages": TALKS[0]}])
    with pytest.raises(PlanError, match="no end-of-text token"):
        opened(DataConfig(path, tokenizer=tokenizer(tmp_path / "t", end=None)), tmp_path)
    with pytest.raises(PlanError, match="no chat template"):
        opened(DataConfig(path, chat="messages", tokenizer=tokenizer(tmp_path / "u")), tmp_path)
    marked = DataConfig(path, chat="messages", tokenizer=tokenizer(tmp_path / "v", MARKED, end=None))
    assert len(opened(marked, tmp_path)) == 1, "a conversation needs no end of text"
