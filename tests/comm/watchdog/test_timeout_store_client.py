"""The store client: a store that does not answer delays nobody for long, and is used again when it
recovers.
"""

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from meshwright.comm.watchdog import timeout_store_client
from meshwright.comm.watchdog.timeout_store_client import StoreClient, StoreSilentError


class Slow(dist.HashStore):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return super().check(keys)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(timeout_store_client, "ANSWER_TIMEOUT_S", 0.05)
    store = Slow()
    yield store
    store.answers.set()


def test_a_client_returns_what_its_store_returns() -> None:
    asked = StoreClient(dist.HashStore())
    asked.set("a", "1")
    assert asked.check(["a"])
    assert not asked.check(["b"])
    assert asked.get("a") == b"1"
    asked.close()


def test_a_question_without_an_answer_is_given_up_and_those_behind_it_at_once(slow: Slow) -> None:
    asked = StoreClient(slow)
    with pytest.raises(StoreSilentError, match=r"has not answered for 0\.05 s\. Look at the link"):
        asked.check(["a"])
    with pytest.raises(StoreSilentError, match="has not answered an earlier request"):
        asked.set("a", "1")
    asked.close()


def test_a_store_that_answers_after_all_is_asked_again(slow: Slow) -> None:
    asked = StoreClient(slow)
    with pytest.raises(StoreSilentError):
        asked.check(["a"])
    late = asked._last_answer
    assert late is not None
    slow.answers.set()
    assert late.result(10) is False
    asked.set("a", "1")
    assert asked.check(["a"])
    asked.close()


def test_an_error_of_the_store_is_raised_by_the_client() -> None:
    class Broken(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    asked = StoreClient(Broken())
    with pytest.raises(RuntimeError, match="connection reset"):
        asked.check(["a"])
    asked.close()


def test_an_unused_client_has_no_thread() -> None:
    before = threading.active_count()
    StoreClient(dist.HashStore()).close()
    assert threading.active_count() == before
