"""Exported tokenizers: bytes give the same ids as in training, others are those that were trained with."""

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from meshwright.run.data.tokenizer import ByteTokenizer, make_tokenizer
from meshwright.run.export.tokenizer_export import (
    END_OF_TEXT,
    companion_files,
    copy_files,
    use_special_tokens,
    write_tokenizer,
)
from tests.run.data.corpora import MARKED, tokenizer

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> transformers.PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(ByteTokenizer(), folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@settings(deadline=None)
@given(text=TEXTS, spells_out_the_end=st.booleans())
def test_the_tokenizer_of_bytes_gives_the_bytes_of_any_text(exported, text: str, spells_out_the_end: bool):
    text = f"{END_OF_TEXT}{text}" if spells_out_the_end else text
    ids = exported(text)["input_ids"]
    assert ids == list(text.encode())
    assert exported.decode(ids) == text


def test_every_byte_is_a_token_and_zero_ends_a_text(exported):
    assert sorted(exported.get_vocab().values()) == list(range(256))
    assert exported.eos_token_id == ByteTokenizer.eos_token_id
    assert exported.decode([104, 105, 0], skip_special_tokens=True) == "hi"


def test_another_tokenizer_is_written_with_its_template_and_its_special_tokens(tmp_path):
    trained = make_tokenizer(tokenizer(tmp_path / "trained", MARKED))
    write_tokenizer(trained, tmp_path)
    assert make_tokenizer(str(tmp_path)).digest == trained.digest
    config = LlamaConfig(bos_token_id=7, eos_token_id=9, pad_token_id=8)
    use_special_tokens(config, trained)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        None,
        trained.eos_token_id,
        None,
    )


def test_companions_of_the_tokenizer_stay_behind_where_another_one_was_trained_with(tmp_path):
    folder = tmp_path / "model"
    tokenizer(folder, MARKED)
    names = ("config.json", "generation_config.json", "preprocessor_config.json", "code.py", "merges.txt")
    for name in names:
        (folder / name).write_text("")

    def kept(*, with_tokenizer: bool, remote: bool = False) -> set[str]:
        return {path.name for path in companion_files(folder, with_tokenizer=with_tokenizer, remote=remote)}

    tokens = {"tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"}
    assert kept(with_tokenizer=False) == {"preprocessor_config.json"}
    assert kept(with_tokenizer=True) == {"preprocessor_config.json", "generation_config.json", *tokens}
    assert kept(with_tokenizer=False, remote=True) == {"preprocessor_config.json", "code.py"}
    assert not list(companion_files(None, with_tokenizer=True, remote=True))
    (tmp_path / "out").mkdir()
    copy_files(iter([folder / "code.py"]), tmp_path / "out")
    assert (tmp_path / "out" / "code.py").is_file()
