"""The routes of the OpenAI API, as an ASGI application.

    GET  /v1/models, /v1/models/NAME      what is served
    POST /v1/completions                  answers to prompts
    POST /v1/chat/completions             an answer to a conversation
         "stream": true                   server-sent events: data: {...} ... data: [DONE]

With an API key every request states it (Authorization: Bearer KEY). Without one the server is on the
loopback, and answers requests that name a loopback host alone: a page in a browser, whose domain was made to
point to 127.0.0.1, names its own.

A client that goes away is noticed while its answer runs, and the answer is cancelled.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.cluster_env import is_loopback
from meshwright.run.serving.openai_requests import (
    AnswerRequest,
    ApiError,
    ServedModel,
    read_chat,
    read_completion,
)
from meshwright.run.serving.openai_responses import Json, ResponseBodies
from meshwright.run.serving.request_queue import AnswerPiece, AnswerStream, RequestQueue

try:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    text = f"starlette, with which a model is served, cannot be imported: {error}"
    raise PlanError(text, fix='pip install "meshwright[serve]"', location="serve") from error

MAX_BODY_NBYTES = 1 << 24
Result = TypeVar("Result")


def make_app(served: ServedModel, queue: RequestQueue, api_key: str | None) -> Starlette:
    """Returns the application that answers for `served` through `queue`."""
    routes = _Routes(served, queue)
    app = Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
        ],
        exception_handlers={
            **dict.fromkeys((ApiError, HTTPException, Exception), _error_response),
            ClientDisconnect: _no_response,
        },
    )
    app.add_middleware(_Guard, api_key=api_key)
    return app


class _Guard:
    """Lets requests with the API key pass; without a key, those that name a loopback host."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        answer = self._app if error is None else JSONResponse(error.as_dict(), error.status)
        await answer(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._api_key is None:
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if is_loopback(name.strip("[]")):
                return None
            text = f"the request names the host '{host}', and this server has no API key. Repair: ask "
            return ApiError(f"{text}127.0.0.1, or start it with --api-key-file", status=403)
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self._api_key.encode()):
            return None
        text = "the API key is wrong" if given else "there is no API key"
        fix = "pass that of the server: Authorization: Bearer KEY"
        return ApiError(f"{text}. Repair: {fix}", status=401, code="invalid_api_key")


class _Routes:
    def __init__(self, served: ServedModel, queue: RequestQueue) -> None:
        self._served, self._queue = served, queue

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served.name:
            text = f"there is no model '{name}'. Repair: ask for '{self._served.name}'"
            raise ApiError(text, status=404, param="model", code="model_not_found")
        return JSONResponse(self._description())

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    def _description(self) -> Json:
        served = self._served
        more = {"max_model_len": served.max_model_len, "owned_by": "meshwright"}
        return {"id": served.name, "object": "model", "created": served.created, **more}

    async def _answer(
        self, request: Request, read: Callable[[object, ServedModel], AnswerRequest]
    ) -> Response:
        body = await _json_body(request)
        # a tokenizer takes a while for a long text, and other clients wait for their tokens
        asked = await asyncio.to_thread(read, body, self._served)
        bodies, stream = ResponseBodies(asked, self._served), self._queue.submit(asked)
        if asked.is_streamed:
            return _EventStream(bodies, stream, self._queue)
        pieces = await _unless_client_leaves(_collect(stream), request.receive, stream, self._queue)
        return JSONResponse(bodies.whole_body(pieces))


class _EventStream(Response):
    """A response of server-sent events."""

    def __init__(self, bodies: ResponseBodies, stream: AnswerStream, queue: RequestQueue) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._bodies, self._stream, self._queue = bodies, stream, queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await _unless_client_leaves(self._send(send), receive, self._stream, self._queue)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events():
            event = {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}
            await send(event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        for body in self._bodies.first():
            yield json.dumps(body)
        try:
            async for piece in self._stream:
                yield json.dumps(self._bodies.piece(piece))
        except ApiError as error:  # the status has been sent
            yield json.dumps(error.as_dict())
            return
        for body in self._bodies.last():
            yield json.dumps(body)
        yield "[DONE]"


async def _collect(stream: AnswerStream) -> list[AnswerPiece]:
    return [piece async for piece in stream]


async def _unless_client_leaves(
    answer: Coroutine[Any, Any, Result], receive: Receive, stream: AnswerStream, queue: RequestQueue
) -> Result:
    """Returns the result of `answer`. Raises ClientDisconnect if the client goes away before; whatever ends
    it early cancels the answers of `stream`.
    """
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    except BaseException:
        queue.cancel(stream)
        raise
    finally:
        answering.cancel()
        leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json_body(request: Request) -> object:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_NBYTES:
            text = (
                f"the body has more than {MAX_BODY_NBYTES} bytes. Repair: ask with fewer or shorter prompts"
            )
            raise ApiError(text, status=413)
    try:
        found: object = json.loads(content)
    except ValueError as error:
        text = f"the body is no JSON: {error}. Repair: send a JSON object"
        raise ApiError(text, param="body") from None
    return found


async def _error_response(request: Request, error: Exception) -> Response:
    """Returns any error in the form of the API."""
    if isinstance(error, HTTPException):  # of a route
        text = f"{request.method} {request.url.path}: {error.detail}. Repair: ask /v1/models, "
        text += "/v1/completions or /v1/chat/completions"
        return _error_response_of(ApiError(text, status=error.status_code))
    if isinstance(error, ApiError):
        return _error_response_of(error)
    return _error_response_of(ApiError("the server failed; its log says why", status=500))


async def _no_response(request: Request, error: Exception) -> Response:
    """Returns what nobody receives."""
    return Response(status_code=499)


def _error_response_of(error: ApiError) -> JSONResponse:
    return JSONResponse(error.as_dict(), error.status)
