"""A communication thread: runs collectives that are implemented in Python one after the other.

Beside the computation. An all-reduce that runs round by round has to continue while the main thread computes,
so it needs a thread. But a caller that waits for a result need not wait for that thread to wake up: it runs
the queued work itself. So a call that is waited for at once runs in its caller; the thread, if it wakes up
meanwhile, finds the queue busy and sleeps again.

    main     submit(A) ... compute ... wait(A)             the thread has run A meanwhile
    main     submit(B), wait(B)                            the main thread runs B
    main     submit(C), submit(D), wait(C) ... compute     the main thread runs C and wakes the thread for D
"""

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from meshwright.comm.collectives.group import Work


class CommThreadWork(Work):
    """A function in the queue of a communication thread."""

    def __init__(self, comm_thread: "CommThread", function: Callable[[], None]) -> None:
        self._comm_thread = comm_thread
        self._function: Callable[[], None] | None = function
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._done_lock = Lock()  # held by whoever ends it, or adds a call

    @property
    def is_done(self) -> bool:
        """Whether it has run."""
        return self._function is None

    def wait(self) -> None:
        """Returns when it has run. Raises its error, or that of one of its callbacks."""
        if self._function is not None:
            self._comm_thread.run_until(self)
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the thread that runs it."""
        with self._done_lock:
            if self._function is not None:
                self._callbacks.append(callback)
                return
        callback()

    def run(self) -> None:
        """Runs it; keeps the error, if any, for the threads that wait."""
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
        """Drops it; threads that wait get an error."""
        self._error = RuntimeError(
            "the group was closed before this collective had run. Wait for a collective before the world "
            "closes"
        )
        with self._done_lock:
            self._function = None


class CommThread:
    """A queue of functions, run in order by its own thread or by a thread that waits for one of them."""

    def __init__(self, name: str) -> None:
        self._queue: deque[CommThreadWork] = deque()
        self._run_lock = Lock()  # held by whoever plays
        self._wakeups: SimpleQueue[bool] = SimpleQueue()  # False: nothing more will come
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], None]) -> Work:
        """Returns the work of `function`, which runs after everything submitted before it."""
        work = CommThreadWork(self, function)
        self._queue.append(work)
        self._wakeups.put(True)
        return work

    def run_until(self, work: CommThreadWork) -> None:
        """Returns when `work` and everything before it have run."""
        with self._run_lock:
            while not work.is_done and self._queue:
                self._queue.popleft().run()
        if self._queue:  # the thread may have come for it while the turn was taken
            self._wakeups.put(True)

    def close(self) -> None:
        """Ends the thread. What has not run is cancelled."""
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
