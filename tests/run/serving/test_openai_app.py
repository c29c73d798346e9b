"""The routes of the API with a model behind them, on one rank and on several; clients that go away."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.generation.serving_loop import NewToken, serve_requests
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.run.serving.openai_requests import ServedModel
from meshwright.run.serving.request_queue import RequestQueue
from meshwright.testing.ranks import run_on_threads
from tests.run.serving.asgi_client import Answered, call
from tests.run.serving.served_llama import END, llama, served_with_template
from tests.tiny_model import tiny_job

pytest.importorskip("starlette", reason="an extra: pip install meshwright[serve]")

from meshwright.run.serving import openai_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "ab", "max_tokens": 12, "temperature": 0}
MESSAGES = [{"role": "user", "content": "hi"}]
Client = Callable[[Any], Coroutine[Any, Any, Any]]


@cache
def analyzed() -> AnalyzedModel:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return mw.analyze(llama(), {"input_ids": ids, "labels": ids})


class CountedQueue(RequestQueue):
    """Counts the tokens of each request."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served.decode)
        self.num_tokens = Counter[int]()

    def deliver(self, token: NewToken) -> bool:
        self.num_tokens[token.number] += 1
        return super().deliver(token)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> ServedModel:
    return served_with_template(str(tmp_path_factory.mktemp("tokenizer")))


def ask(
    served: ServedModel,
    client: Client,
    mesh: mw.Mesh | None = None,
    *,
    queue: RequestQueue | None = None,
    max_num_seqs: int = 4,
) -> Any:
    """What `client(app)` returns while the ranks of a mesh generate."""
    queue = queue or RequestQueue(served.decode)
    plan = mw.make_plan(analyzed(), tiny_job(), mesh or mw.Mesh())
    app, is_over, found = openai_app.make_app(served, queue, None), threading.Event(), []

    def run_client() -> None:
        try:
            found.append(asyncio.run(client(app)))
        finally:
            is_over.set()

    def rank(world: World) -> None:
        with mw.parallelize(analyzed(), plan, world=world) as trainer:
            source = None if world.rank else queue
            serve_requests(trainer.executor, source, max_num_seqs=max_num_seqs, should_stop=is_over.is_set)

    thread = threading.Thread(target=run_client)
    thread.start()
    try:
        run_on_threads(rank, plan.mesh)
    finally:
        queue.close()
        thread.join()
    return found[0]


def text_of(answered: Answered) -> str:
    """That of a stream of one completion."""
    return "".join(choice["text"] for each in answered.events[:-1] for choice in each["choices"])


@pytest.mark.parametrize("mesh", [mw.Mesh(), mw.Mesh(dp_replicate=2), mw.Mesh(tp=2), mw.Mesh(pp=2)], ids=str)
def test_answers_are_those_of_generate(served: ServedModel, mesh: mw.Mesh):
    async def client(app: Any) -> list[Answered]:
        bodies = [{**BODY, "prompt": prompt} for prompt in ("ab", "xyz")]
        bodies.append({**BODY, "stream": True, "stream_options": {"include_usage": True}})
        return await asyncio.gather(*(call(app, "POST", COMPLETIONS, body) for body in bodies))

    first, second, stream = ask(served, client, mesh)
    ids = [torch.tensor([served.encode(prompt)]) for prompt in ("ab", "xyz")]
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": END}
    expected = [served.decode(llama().generate(each, **how)[0, each.shape[1] :].tolist()) for each in ids]
    assert [each.json["choices"][0]["text"] for each in (first, second)] == expected
    usage = {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    assert first.json["usage"] == usage
    assert text_of(stream) == expected[0]
    assert (stream.events[-1], stream.events[-2]["usage"]) == ("[DONE]", usage)


def test_a_chat_as_a_whole_and_as_a_stream(served: ServedModel):
    body = {"messages": MESSAGES, "max_tokens": 6, "seed": 5, "n": 2, "logprobs": True}

    async def client(app: Any) -> list[Answered]:
        return [await call(app, "POST", CHAT, {**body, "stream": stream}) for stream in (False, True)]

    whole, stream = ask(served, client)
    texts, tokens = ["", ""], [[], []]
    for choice in (choice for each in stream.events[:-1] for choice in each["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
        tokens[choice["index"]] += (choice.get("logprobs") or {"content": []})["content"]
    choices = whole.json["choices"]
    assert texts == [each["message"]["content"] for each in choices]
    assert tokens == [each["logprobs"]["content"] for each in choices]
    assert all(-20 < each["logprob"] < 0 for row in tokens for each in row)
    assert texts[0] != texts[1]
    assert stream.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {each["finish_reason"] for each in choices} <= {"stop", "length"}


def test_logprobs_of_a_completion_have_places_in_its_text(served: ServedModel):
    async def client(app: Any) -> Answered:
        return await call(app, "POST", COMPLETIONS, {**BODY, "logprobs": 0})

    logprobs = ask(served, client).json["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 12
    ends = [0, *(sum(map(len, logprobs["tokens"][: k + 1])) for k in range(11))]
    assert logprobs["text_offset"] == ends


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_away_makes_room_for_the_next(served: ServedModel, is_streamed: bool):
    """One sequence runs at once, so the second answer waits until the first has ended."""
    queue = CountedQueue(served)

    async def client(app: Any) -> list[Answered]:
        left, long = asyncio.Event(), {**BODY, "max_tokens": 46, "stream": is_streamed}
        leaving = asyncio.ensure_future(call(app, "POST", COMPLETIONS, long, left=left))
        while queue.num_tokens[0] < 2:
            await asyncio.sleep(0.001)
        left.set()
        return [await call(app, "POST", COMPLETIONS, BODY), await leaving]

    answered, gone = ask(served, client, queue=queue, max_num_seqs=1)
    assert b"[DONE]" not in b"".join(gone.parts)
    assert answered.json["usage"]["completion_tokens"] == queue.num_tokens[1] == 12
    assert queue.num_tokens[0] < 46


def test_models_are_listed(served: ServedModel):
    async def client(app: Any) -> list[Answered]:
        return [await call(app, "GET", path) for path in ("/v1/models", "/v1/models/tiny", "/v1/models/big")]

    found, one, other = asyncio.run(client(openai_app.make_app(served, RequestQueue(served.decode), None)))
    assert [each["id"] for each in found.json["data"]] == [one.json["id"]] == ["tiny"]
    assert (other.status, other.json["error"]["code"]) == (404, "model_not_found")


def status(served: ServedModel, *request: Any, key: str | None = None, **headers: str) -> tuple[int, str]:
    """The status of a response, and its message."""
    app = openai_app.make_app(served, RequestQueue(served.decode), key)
    answered = asyncio.run(call(app, *request, **headers))
    return answered.status, answered.json.get("error", {}).get("message", "")


def test_a_key_is_asked_for(served: ServedModel):
    models = "GET", "/v1/models"
    assert status(served, *models, key="secret", authorization="Bearer secret") == (200, "")
    assert status(served, *models, key="secret", host="example.com", authorization="Bearer secret")[0] == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer s\u00e9cret"}):
        code, text = status(served, *models, key="secret", **headers)
        assert (code, text.partition("Repair: ")[2]) == (
            401,
            "pass that of the server: Authorization: Bearer KEY",
        )


@pytest.mark.parametrize(("host", "code"), [
    ("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:8000", 200), ("evil.example:8000", 403), ("", 403),
])  # fmt: skip
def test_without_a_key_only_the_loopback_may_be_named(served: ServedModel, host: str, code: int):
    assert status(served, "GET", "/v1/models", host=host)[0] == code


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (("POST", COMPLETIONS, b"{"), 400, "the body is no JSON"),
        (("POST", COMPLETIONS, b" " * (1 << 24) + b"  "), 413, "more than 16777216 bytes"),
        (("POST", COMPLETIONS, {"prompt": "a", "top_p": 2}), 400, "top_p = 2.0"),
        (("GET", COMPLETIONS), 405, "Method Not Allowed"),
        (("POST", "/v1/embeddings", {}), 404, "Not Found. Repair: ask /v1/models"),
    ],
)
def test_errors_have_the_form_of_the_api(served: ServedModel, request_: Any, code: int, text: str):
    found, message = status(served, *request_)
    assert found == code
    assert text in message


def test_a_server_that_stops_says_so(served: ServedModel):
    queue = RequestQueue(served.decode)
    app = openai_app.make_app(served, queue, None)

    async def client(*, is_streamed: bool) -> Answered:
        asking = asyncio.ensure_future(call(app, "POST", COMPLETIONS, {**BODY, "stream": is_streamed}))
        await asyncio.sleep(0.2)
        queue.close()
        return await asking

    stream = asyncio.run(client(is_streamed=True))
    assert "the server is stopping" in b"".join(stream.parts).decode()
    later = asyncio.run(client(is_streamed=False))
    assert (later.status, later.json["error"]["type"]) == (503, "server_error")
