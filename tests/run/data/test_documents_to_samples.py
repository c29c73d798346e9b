"""Conversations as tokens: the loss covers what the assistant says, found exactly or refused."""

from pathlib import Path

import pytest

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.run.data.chat_template import encode_conversation, get_chat_template, has_generation_tag
from meshwright.run.data.token_dataset import EncodedDocument
from meshwright.run.data.tokenizer import ByteTokenizer, PretrainedTokenizer
from tests.run.data.corpora import FORGETFUL, MARKED, PLAIN, TALKS, tokenizer

LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "  1, and \u4e00.\n"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]


def codec(folder: Path, template: str) -> PretrainedTokenizer:
    return PretrainedTokenizer(tokenizer(folder, template))


def encoded(with_: PretrainedTokenizer, messages: object) -> EncodedDocument | Diagnostic:
    return encode_conversation(with_, has_generation_tag(get_chat_template(with_)), messages, "a.jsonl:4")


def trained_text(with_: PretrainedTokenizer, messages: object) -> str:
    found = encoded(with_, messages)
    assert isinstance(found, EncodedDocument)
    assert found.label_mask is not None
    assert found.ids.shape == found.label_mask.shape
    return with_.decode(found.ids[found.label_mask].tolist())


def refusal(with_: PretrainedTokenizer, messages: object) -> str:
    found = encoded(with_, messages)
    assert isinstance(found, Diagnostic)
    assert found.location == "a.jsonl:4"
    assert found.fix
    return found.problem


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_the_loss_covers_exactly_what_the_assistant_says(tmp_path, template: str):
    with_ = codec(tmp_path, template)
    assert trained_text(with_, TALKS[3]) == "It is 6.<|end|>"
    assert trained_text(with_, LONG) == "  1, and \u4e00.\n<|end|>2<|end|>"


def test_both_ways_find_the_same_tokens(tmp_path):
    marked, plain = (
        encoded(codec(tmp_path / name, text), LONG) for name, text in {"m": MARKED, "p": PLAIN}.items()
    )
    assert isinstance(marked, EncodedDocument)
    assert isinstance(plain, EncodedDocument)
    assert marked.ids.tolist() == plain.ids.tolist()
    assert marked.label_mask is not None
    assert plain.label_mask is not None
    assert marked.label_mask.tolist() == plain.label_mask.tolist()


def test_marks_are_found_in_every_spelling():
    assert has_generation_tag("{% generation %}")
    assert has_generation_tag("{%- generation -%}")
    assert not has_generation_tag("{% if add_generation_prompt %}")


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path):
    with_ = codec(tmp_path, FORGETFUL)
    assert trained_text(with_, TALKS[0]) == "It is 0.<|end|>", "one answer is never rewritten"
    assert "has no generation marks, and writes message 2 differently" in refusal(with_, LONG)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        (None, "the conversation is None; needed is a list of messages"),
        ([], "the conversation is []; needed is a list of messages"),
        ("user: hello", "the conversation is 'user: hello'; needed"),
        ([["user", "hello"]], "message 0 is ['user', 'hello']; needed is an object"),
        ([{"role": "user"}], "message 0 has no content; needed is a string"),
        ([{"role": "user", "content": 3}], "message 0 has content = 3; needed is a string"),
        ([{"from": "human", "content": "x"}], "message 0 has no role"),
        (
            LONG[:2],
            "the conversation has no answer: its roles are system, user, and only 'assistant' has labels",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path, messages: object, what: str):
    assert refusal(codec(tmp_path, PLAIN), messages).startswith(what)


def test_what_the_template_itself_refuses_is_said(tmp_path):
    strict = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}"
        + MARKED
    )
    assert refusal(codec(tmp_path, strict), LONG).endswith("refuses this conversation: the user speaks first")


def test_marks_round_nothing_are_noticed(tmp_path):
    empty = MARKED.replace(
        "{{ m['content'] }}<|end|>{% endgeneration %}", "{% endgeneration %}{{ m['content'] }}<|end|>"
    )
    assert "marks no token" in refusal(codec(tmp_path, empty), TALKS[0])


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    with pytest.raises(
        PlanError, match=r"has no chat template, and data.chat needs one(.|\n)*add chat_template"
    ):
        get_chat_template(PretrainedTokenizer(tokenizer(tmp_path)))
    with pytest.raises(PlanError, match="conversations with bytes as tokens"):
        get_chat_template(ByteTokenizer())
