"""A store client whose requests time out: a request without an answer is left to a thread.

torch's TCPStore bounds the wait for a key, not the wait for its server. When the link to the server's host
dies, `check`, `get`, `add` and even a `wait` with a timeout block until the kernel gives the connection up, a
quarter of an hour later (torch 2.13: seen on hosts whose link was cut; only `set` returns, because nothing
answers it). The report on a hang cannot wait so long.

    request ---> thread ---> store        an answer within `ANSWER_TIMEOUT_S`: the answer
                         (no answer)      else: StoreSilentError for this request, and at once for later
                                          ones until the store has answered after all
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Self

import torch.distributed as dist

ANSWER_TIMEOUT_S = 4.0  # a machine that is too busy to answer earlier is rare, and asked again


class StoreSilentError(RuntimeError):
    """The store has not answered. Check the link to the host that keeps it; it may answer later."""


class StoreClient:
    """Requests to `store`, from any thread. `close` it in the end."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._requests: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        self._last_answer: Future[object] | None = None
        self._request_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def for_rank(cls, store: dist.Store, rank: int) -> Self:
        """Returns a client for the part of `store` that belongs to the k-th of these calls on every rank."""
        own = store.clone()  # pyrefly: ignore[missing-attribute]  torch's stubs lack it; a connection of its own, used by a thread
        return cls(dist.PrefixStore(f"watchdog/{own.add(f'watchdogs/{rank}', 1)}", own))

    def set(self, key: str, value: str) -> None:
        """Stores `value` under `key`. Raises StoreSilentError, or what the store raises."""
        self._request(partial(self._store.set, key, value))

    def add(self, key: str, number: int) -> int:
        """Adds `number` to the count under `key` and returns the sum. Raises StoreSilentError, or what the
        store raises.
        """
        found = self._request(partial(self._store.add, key, number))
        return found if isinstance(found, int) else 0

    def check(self, keys: list[str]) -> bool:
        """Returns whether all `keys` have values. Raises StoreSilentError, or what the store raises."""
        return bool(self._request(partial(self._store.check, keys)))

    def get(self, key: str) -> bytes:
        """Returns the value under `key`, which exists. Raises StoreSilentError, or what the store raises."""
        found = self._request(partial(self._store.get, key))
        return found if isinstance(found, bytes) else b""

    def close(self) -> None:
        """Ends the thread; one that still waits for an answer ends when it arrives, or with the process."""
        if self._thread is not None:
            self._requests.put(None)
            if self._last_answer is None or self._last_answer.done():
                self._thread.join()

    def _request(self, request: Callable[[], object]) -> object:
        with self._request_lock:
            if self._last_answer is not None and not self._last_answer.done():
                raise StoreSilentError(
                    "the store has not answered an earlier request. Check the link to the host that keeps it"
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True, name="store client")
                self._thread.start()
            self._last_answer = answer = Future[object]()
            self._requests.put((request, answer))
            try:
                return answer.result(ANSWER_TIMEOUT_S)
            except TimeoutError:
                text = f"the store has not answered for {ANSWER_TIMEOUT_S:g} s"
                raise StoreSilentError(f"{text}. Look at the link to the host that keeps it") from None

    def _serve(self) -> None:
        while (asked := self._requests.get()) is not None:
            question, answer = asked
            try:
                answer.set_result(question())
            except RuntimeError as error:
                answer.set_exception(error)
