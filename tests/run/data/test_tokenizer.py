"""Codecs: texts to ids and back, what names them, and which tokenizers are refused."""

import pytest

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.data import tokenizer as tokenizer_module
from meshwright.run.data.tokenizer import (
    ByteTokenizer,
    PretrainedTokenizer,
    is_path,
    make_tokenizer,
    resolve_tokenizer,
    tokenizer_diagnostics,
    tokenizer_notes,
)
from tests.run.data.corpora import END, PLAIN, tokenizer

TEXT = "def f(x):\n    return 'Gr\u00fc\u00dfe, \u4e16\u754c'"


def test_bytes_are_their_own_tokens():
    codec = make_tokenizer("")
    assert isinstance(codec, ByteTokenizer)
    (ids,) = codec.encode([TEXT])
    assert bytes(ids.tolist()) == TEXT.encode()
    assert codec.decode(ids.tolist()) == TEXT
    assert codec.decode([255, 97]) == "\ufffda"
    assert (codec.vocab_size, codec.eos_token_id) == (256, 0)


def test_a_tokenizer_is_loaded_from_its_folder(tmp_path):
    codec = make_tokenizer(tokenizer(tmp_path))
    assert isinstance(codec, PretrainedTokenizer)
    ids = codec.encode([TEXT, "", "x"])
    assert codec.decode(ids[0].tolist()) == TEXT
    assert len(ids[0]) < len(TEXT.encode())
    assert [len(each) for each in ids[1:]] == [0, 1]
    assert codec.encode([]) == []
    assert codec.eos_token_id == codec.hf_tokenizer.convert_tokens_to_ids(END)
    assert codec.vocab_size == max(codec.hf_tokenizer.get_vocab().values()) + 1


def test_no_special_token_is_added(tmp_path):
    codec = make_tokenizer(tokenizer(tmp_path))
    assert codec.eos_token_id not in codec.encode(["a text"])[0]


def test_the_digest_names_all_that_decides_the_ids(tmp_path):
    made = {
        "a": tokenizer(tmp_path / "a"),
        "same": tokenizer(tmp_path / "same"),
        "size": tokenizer(tmp_path / "size", size=300),
        "template": tokenizer(tmp_path / "template", PLAIN),
        "end": tokenizer(tmp_path / "end", end="<|user|>"),
    }
    digests = {name: make_tokenizer(folder).digest for name, folder in made.items()}
    assert digests["a"] == digests["same"]
    assert len(set(digests.values())) == 4


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        PlanError,
        match=r"data.tokenizer: no tokenizer: '.*empty' contains none that can be read(.|\n)*tokenizer.json",
    ):
        make_tokenizer(str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["./none", "/no/such/folder", "a/b/c", "~/tokenizer"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch):
    monkeypatch.setattr(
        tokenizer_module.transformers.AutoTokenizer,
        "from_pretrained",
        lambda *args, **more: pytest.fail("it was"),
    )
    with pytest.raises(PlanError, match=rf"data.tokenizer: no tokenizer: there is no folder '{name}'"):
        make_tokenizer(name)
    assert not is_path("owner/name")
    assert not is_path("gpt2")


def test_a_job_trains_with_the_named_tokenizer_else_that_of_the_model_else_bytes(tmp_path):
    own = tokenizer(tmp_path / "model")
    other = tokenizer(tmp_path / "other")
    (tmp_path / "bare").mkdir()

    def resolved(model: str, named: str, vocab_size: int | None) -> str:
        return resolve_tokenizer(Job(ModelConfig(model), DataConfig("text", tokenizer=named)), vocab_size)

    assert resolved(own, "", 400) == own
    assert resolved(own, other, 400) == other
    assert resolved(own, "bytes", 400) == "bytes"
    bare = str(tmp_path / "bare")
    assert [resolved(bare, "", size) for size in (256, 100, None)] == ["bytes"] * 3
    with pytest.raises(
        PlanError, match=r"data.tokenizer: a model of 32,000 tokens, and '.*bare' comes without"
    ):
        resolved(bare, "", 32_000)


def test_a_tokenizer_without_an_end_of_text_packs_nothing(tmp_path):
    codec = make_tokenizer(tokenizer(tmp_path, end=None))
    (fault,) = tokenizer_diagnostics(codec, is_packed=True)
    assert "no end-of-text token" in fault.problem
    assert "eos_token" in fault.fix
    assert not list(tokenizer_diagnostics(codec, is_packed=False))
    assert not list(tokenizer_diagnostics(ByteTokenizer(), is_packed=True))


def test_bytes_beside_the_tokenizer_of_the_model_are_noted(tmp_path):
    folder = tokenizer(tmp_path)
    (note,) = tokenizer_notes(Job(ModelConfig(folder), DataConfig("a", tokenizer="bytes")))
    assert note.startswith("texts are read as bytes, and the model has a tokenizer: leave data.tokenizer out")
    for job in (
        Job(ModelConfig(folder), DataConfig("a", tokenizer=folder)),
        Job(ModelConfig("model.py:build"), DataConfig("a", tokenizer="bytes")),
    ):
        assert not list(tokenizer_notes(job))
