"""Pieces of an answer are together the text of all tokens, up to the stop string that is complete first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.data.tokenizer import ByteTokenizer
from meshwright.run.serving.answer_text import AnswerText

decode = ByteTokenizer().decode


def pieces(tokens: bytes, *stop_strings: str) -> tuple[list[str], bool]:
    """The pieces after each token and at the end, and whether a stop string came."""
    text = AnswerText(decode, stop_strings)
    return [*(text.add(token) for token in tokens), text.finish()], text.is_stopped


@given(st.text(max_size=12), st.lists(st.text("ab\u20ac", min_size=1, max_size=3), max_size=2))
def test_the_pieces_are_the_text_up_to_a_stop_string(text: str, stop_strings: list[str]):
    found, is_stopped = pieces(text.encode(), *stop_strings)
    ends = [(text.find(each) + len(each), text.find(each)) for each in stop_strings if each in text]
    assert "".join(found) == text[: min(ends)[1] if ends else len(text)]
    assert is_stopped == bool(ends)


def test_a_letter_is_not_shown_before_its_last_byte():
    assert pieces("\u00e9\u20ac".encode())[0] == ["", "\u00e9", "", "", "\u20ac", ""]


def test_bytes_that_are_no_letter_are_shown_in_time():
    found, _ = pieces(b"a\xff\xff\xff\xff\xffb")
    assert "".join(found) == "a" + 5 * "\ufffd" + "b"
    assert found[5] == "\ufffd"  # three are held, of a letter of four bytes


def test_the_begin_of_a_stop_string_is_held_back():
    assert pieces(b"a\nHu!", "\nHuman:") == (["a", "", "", "", "\nHu!", ""], False)
    assert pieces(b"a\nHu", "\nHuman:") == (["a", "", "", "", "\nHu"], False)
    assert pieces(b"a<b>c", "<b>", "b>c") == (["a", "", "", "", "", ""], True)


def test_nothing_follows_a_stop_string():
    text = AnswerText(decode, ["b"])
    assert [text.add(token) for token in b"abc"] == ["a", "", ""]
    assert text.finish() == ""


class Words:
    """Tokens are words; a text begins without the space before all others, as in sentencepiece."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {'abc'[each]}" for each in ids).removeprefix(" ")


@pytest.mark.parametrize("ids", [[0, 1, 2, 0, 1], [2]])
def test_tokens_keep_their_spaces(ids: list[int]):
    text = AnswerText(Words().decode, [])
    assert "".join(text.add(token) for token in ids) == Words().decode(ids)
