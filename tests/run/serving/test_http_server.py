"""An application is served on an address of the loopback; others need a key."""

import http.client
import socket
from typing import Any

import pytest

from meshwright.plan.job.errors import PlanError

pytest.importorskip("uvicorn", reason="an extra: pip install meshwright[serve]")

from meshwright.run.serving.http_server import HttpServer, check_address


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says its path."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_application_is_served_until_the_end(host: str):
    with HttpServer(app, host, 0) as server:
        assert server.is_running
        address = server.url.removeprefix("http://").removesuffix("/v1")
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request("GET", "/here")
        assert connection.getresponse().read() == b"/here"
        connection.close()
    assert not server.is_running
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(address.rpartition(":")[2])), timeout=5)


def test_other_hosts_need_a_key():
    with pytest.raises(PlanError, match=r"--host 0\.0\.0\.0 lets other hosts ask(?s:.*)--api-key-file"):
        check_address("0.0.0.0", 0, None)
    check_address("0.0.0.0", 0, "secret")
    check_address("localhost", 0, None)


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PlanError, match=rf"--port {port} cannot be listened on(?s:.*)--port 0 for any"):
            check_address("127.0.0.1", port, None)
