"""A lane: collectives that Python plays itself, one behind the other, beside the computation.

What an all-reduce does round by round must go on while the main thread computes, so a lane has a thread. But who waits for
a result need not wait for that thread to wake up: it plays what is still to be played itself. So a call that is waited for at
once is played by its caller; the thread, if it comes meanwhile, sees that somebody is at it, and goes back to sleep.

    main     put(A) ... compute ... wait(A)          the thread has played A meanwhile
    main     put(B), wait(B)                         the main thread plays B
    main     put(C), put(D), wait(C) ... compute     the main thread plays C and calls the thread for D
"""

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from meshwright.comm.collectives.group import Work


class CommThreadWork(Work):
    """Something that was put into a lane."""

    def __init__(self, comm_thread: "CommThread", function: Callable[[], None]) -> None:
        self._comm_thread = comm_thread
        self._function: Callable[[], None] | None = function
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._done_lock = Lock()  # held by whoever ends it, or adds a call

    @property
    def is_done(self) -> bool:
        """Whether it has been played."""
        return self._function is None

    def wait(self) -> None:
        """Return when it has been played. Raises what it raised, or what a call raised that was to follow."""
        if self._function is not None:
            self._comm_thread.run_until(self)
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `call` called by whoever plays it."""
        with self._done_lock:
            if self._function is not None:
                self._callbacks.append(callback)
                return
        callback()

    def run(self) -> None:
        """Do it; the error, if any, is kept for those who wait."""
        try:
            if self._function is not None:
                self._function()
        except BaseException as error:
            self._error = error
        with self._done_lock:
            self._function = None
        for call in self._callbacks:
            try:
                call()
            except BaseException as error:
                self._error = self._error or error

    def cancel(self) -> None:
        """Never do it: whoever waits learns so."""
        self._error = RuntimeError(
            "the group was closed before this had been played. Wait for a collective before the world closes"
        )
        with self._done_lock:
            self._function = None


class CommThread:
    """Works in the order in which they were put, played by a thread of the lane's own or by whoever waits for one."""

    def __init__(self, name: str) -> None:
        self._queue: deque[CommThreadWork] = deque()
        self._run_lock = Lock()  # held by whoever plays
        self._wakeups: SimpleQueue[bool] = SimpleQueue()  # False: nothing more will come
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], None]) -> Work:
        """`do`, to be called after all that was put before."""
        work = CommThreadWork(self, function)
        self._queue.append(work)
        self._wakeups.put(True)
        return work

    def run_until(self, work: CommThreadWork) -> None:
        """Return when `work` has been played, with all before it."""
        with self._run_lock:
            while not work.is_done and self._queue:
                self._queue.popleft().run()
        if self._queue:  # the thread may have come for it while the turn was taken
            self._wakeups.put(True)

    def close(self) -> None:
        """Let the thread end. What has not been played is not played any more."""
        while self._queue:
            self._queue.popleft().cancel()
        self._wakeups.put(False)

    def _serve(self) -> None:
        while self._wakeups.get():
            while self._queue and self._run_lock.acquire(blocking=False):
                try:
                    if self._queue:
                        self._queue.popleft().run()
                finally:
                    self._run_lock.release()
