"""Calls an ASGI application without a socket, as a client that may go away."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answered:
    """A response: its status, and the body in the parts in which it was sent."""

    status: int = 0
    parts: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(b"".join(self.parts))

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; that of the last one is a word."""
        lines = b"".join(self.parts).decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


async def call(
    app: Any,
    method: str,
    path: str,
    body: object = None,
    *,
    left: asyncio.Event | None = None,
    **headers: str,
) -> Answered:
    """Returns the response; the client goes away when `left` is set."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    answered, left = Answered(), left or asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered.status = message["status"]
        elif message.get("body"):
            answered.parts.append(message["body"])

    named = {"host": "127.0.0.1:8000", **headers}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http",
        "query_string": b"", "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    await app(scope, receive, send)
    return answered
