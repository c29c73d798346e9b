"""Pauses Python's garbage collector while a model is analyzed.

A trial makes some 100,000 objects that are all in use, and each collection looks through them and through the
modules of the libraries: 0.2 s each time for transformers, a sixth of the CPU time of an analysis. What is in
no cycle is freed as before.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Context manager (or decorator): no garbage collection runs inside."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
