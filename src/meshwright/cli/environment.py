"""The environment as the command meets it: which rank this process is, and how local ranks are started and stopped."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING

from meshwright.core.errors import PlanError

if TYPE_CHECKING:
    from meshwright.verbs.ranks import Launcher, Ranked


def this_rank() -> "Ranked | None":
    """This process as one rank, when torchrun or our own launcher has started it."""
    if "RANK" not in os.environ:
        return None
    said = os.environ
    words = {"RANK": said["RANK"], "WORLD_SIZE": said.get("WORLD_SIZE", ""), "LOCAL_RANK": said.get("LOCAL_RANK", said["RANK"])}
    odd = [f"{key}={value!r}" for key, value in words.items() if not value.isdecimal()]
    if odd:
        fix = "start it with torchrun, or unset RANK to let meshwright start the local ranks itself"
        raise PlanError(
            f"RANK is set in the environment, and {' and '.join(odd)}: needed are numbers", fix=fix, where="environment"
        )
    lifeline = said.get("MESHWRIGHT_LIFELINE")
    rank, world, local_rank = map(int, words.values())
    lifeline_fd = None if lifeline is None else int(lifeline)
    return import_module("meshwright.verbs.ranks").Ranked(rank, world, local_rank, said.get("MESHWRIGHT_STORE"), lifeline_fd)


def launcher() -> "Launcher":
    """Starts `meshwright ARGV...` as `world` local ranks."""
    launch = import_module("meshwright.run.launch").launch
    return lambda argv, world, folder: launch(["-m", "meshwright", *argv], world, folder, dict(os.environ))


@contextmanager
def stop_flag() -> Iterator[list[int]]:
    """The SIGTERM and SIGINT that this rank receives: all ranks stop together after the step that carries the wish."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
