"""What a request may say, and how it is refused."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.run.data.tokenizer import ByteTokenizer
from meshwright.run.serving.openai_requests import (
    NEUTRAL,
    AnswerRequest,
    ApiError,
    ServedModel,
    read_chat,
    read_completion,
)
from tests.run.serving.served_llama import END, served_model, served_with_template

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> ServedModel:
    return served_with_template(str(tmp_path_factory.mktemp("tokenizer")))


def completion(served: ServedModel, **body: Any) -> AnswerRequest:
    return read_completion({"prompt": "ab", **body}, served)


def refusal(served: ServedModel, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        completion(served, **body)
    return error.value


def test_fields_become_sampling_parameters(served: ServedModel):
    fields = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "n": 2}
    found = completion(
        served, **fields, repetition_penalty=1.5, stop=["x"], stream=True, model="tiny", user="me"
    )
    expected = SamplingParams(5, True, 0.5, 7, 0.9, 0.1, 1.5, (END,), (), 3, 2)
    assert (found.params, found.stop_strings, found.is_streamed, found.is_chat) == (
        expected,
        ("x",),
        True,
        False,
    )


def test_temperature_zero_is_the_most_likely_token(served: ServedModel):
    params = completion(served, temperature=0, top_p=0.5, top_k=3, seed=1, max_tokens=2).params
    assert params == SamplingParams(2, stop_token_ids=(END,), seed=1)


def test_without_a_seed_each_request_has_its_own(served: ServedModel):
    seeds = {completion(served).params.seed for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([65, 66], [[65, 66]]), ([[65], [66]], [[65], [66]])],
)
def test_a_prompt_is_a_text_or_tokens_or_several(served: ServedModel, prompt: Any, expected: list[Any]):
    found = completion(served, prompt=prompt).prompts
    assert found == [served.encode(each) if isinstance(each, str) else each for each in expected]


def test_an_answer_has_16_tokens_or_in_a_chat_what_fits(served: ServedModel):
    assert completion(served).params.max_new_tokens == 16
    assert completion(served, prompt="x" * 40).params.max_new_tokens == 8
    found = read_chat({"messages": HELLO}, served)
    assert served.decode(list(found.prompts[0])) == "user: hello\nassistant:"
    assert found.params.max_new_tokens == 48 - len("user: hello\nassistant:")
    limits = {"max_tokens": 4, "max_completion_tokens": 3}
    assert read_chat({"messages": HELLO, **limits}, served).params.max_new_tokens == 3


def test_a_message_may_be_written_in_parts(served: ServedModel):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    found = read_chat({"messages": [{"role": "user", "content": parts}]}, served)
    assert found.prompts == read_chat({"messages": HELLO}, served).prompts


@pytest.mark.parametrize(
    ("body", "param", "texts"),
    [
        ({"prompt": ""}, None, ["prompt 0 is empty", "Repair: begin it with one token"]),
        ({"prompt": ["a", ""]}, None, ["prompt 1 is empty"]),
        ({"prompt": []}, None, ["there are no prompts"]),
        ({"prompt": "x" * 60}, None, ["60 tokens", "48 positions", "shorten it to at most 47 tokens"]),
        ({"prompt": "x" * 40, "max_tokens": 9}, None, ["which with max_tokens = 9", "or pass max_tokens=8"]),
        ({"prompt": [400]}, None, ["contains token 400", "vocabulary of the model has 259"]),
        ({"prompt": 3}, "prompt", ["prompt = 3; needed is a valid string"]),
        ({"top_p": 0}, "top_p", ["top_p = 0", "above 0, up to 1", "pass temperature=0 for the"]),
        ({"top_p": 2}, "top_p", ["top_p = 2.0; needed is a number above 0, up to 1"]),
        ({"temperature": -1}, "temperature", ["temperature = -1", "above 0", "pass temperature=0"]),
        ({"temperature": "hot"}, "temperature", ["temperature = 'hot'; needed is a valid number"]),
        ({"max_tokens": 0}, "max_tokens", ["max_tokens = 0; needed is a", "pass max_tokens=1, or more"]),
        ({"n": 5}, "n", ["n = 5; needed is at most 4", "pass n=4", "--max-num-seqs 5"]),
        ({"n": 0}, "n", ["n = 0; needed is a whole number of at least 1"]),
        ({"stop": ["a", ""]}, None, ["stop contains an empty text"]),
        ({"logprobs": 5}, "logprobs", ["logprobs = 5", "Repair: pass logprobs=0"]),
        ({"presence_penalty": 1}, "presence_penalty", ["presence_penalty = 1 is not known"]),
        ({"top_pp": 1}, "top_pp", ["there is no field 'top_pp'", "did you mean 'top_p'?"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_repair(
    served: ServedModel, body: Any, param: Any, texts: list[str]
):
    error = refusal(served, **body)
    assert (error.status, error.as_dict()["error"]["type"]) == (400, "invalid_request_error")
    assert [text for text in texts if text not in str(error)] == []
    assert error.param == param


def test_all_that_is_wrong_is_said_at_once(served: ServedModel):
    text = str(refusal(served, prompt="", top_p=2, n=9))
    assert all(each in text for each in ("prompt 0 is empty", "top_p = 2", "n = 9"))
    text = str(refusal(served, seed="a", logit_bias={"1": 5}, foo=1))
    assert all(each in text for each in ("seed = 'a'", "logit_bias = {'1': 5}", "no field 'foo'"))


def test_values_that_change_nothing_are_no_reason_to_refuse(served: ServedModel):
    assert completion(served, **NEUTRAL).params.n == 1
    assert completion(served, **dict.fromkeys([*NEUTRAL, "top_p", "n", "stop", "user"])).params.n == 1


def test_another_model_is_not_found(served: ServedModel):
    error = refusal(served, model="gpt")
    assert (error.status, error.code) == (404, "model_not_found")
    assert str(error) == "there is no model 'gpt'; served is 'tiny'. Repair: pass model='tiny'"


@pytest.mark.parametrize("body", [[], "text", None, {}])
def test_a_body_is_an_object_with_a_prompt(served: ServedModel, body: Any):
    with pytest.raises(ApiError, match="needed is"):
        read_completion(body, served)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages is empty"),
        ([{"role": "user"}], "message 0 is {'role': 'user'}; needed are a role and a content"),
        ([*HELLO, {"role": "user", "content": [{"type": "image_url"}]}], "message 1 is"),
        ("hello", "messages = 'hello'; needed is a valid list"),
    ],
)
def test_messages_that_are_none_are_refused(served: ServedModel, messages: Any, text: str):
    with pytest.raises(ApiError) as error:
        read_chat({"messages": messages}, served)
    assert text in str(error.value)


def test_a_chat_needs_a_template():
    with pytest.raises(
        ApiError, match=r"tokenizer 'bytes' has no chat template\. Repair: ask /v1/completions"
    ):
        read_chat({"messages": HELLO}, served_model(ByteTokenizer()))


def test_the_most_tokens_may_be_fewer_than_the_positions(served: ServedModel):
    text = str(refusal(replace(served, max_model_len=30), prompt="x" * 20, max_tokens=11))
    assert "which with max_tokens = 11 is more than the 30 positions" in text
