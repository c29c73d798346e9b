"""The model file of benchmarks/recovery/hang_reports.py: a tiny model which, on one rank and in one step, does what
makes others wait.

What to do, on which rank and in which step comes from the environment. The lines that a report has to name
end in a comment with the name of the plant. The first call of the loss is the reading of the model, before
any rank meets another.
"""

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import Group, Work

WIDTH = 32


class Bytes(nn.Module):
    """A model of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(256, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 256),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.head(self.mix(self.embed(input_ids)).tanh())


def build() -> mw.Model:
    """The model, and the loss that acts."""
    plant, rank, step = (os.environ[f"PLANT_{key}"] for key in ("KIND", "RANK", "STEP"))
    calls: list[int] = []
    usual = mw.token_cross_entropy()

    def total(outputs: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == int(step) + 1 and os.environ.get("RANK") == rank:
            Path(os.environ["PLANT_MARK"]).write_text(str(time.time()))
            PLANTS[plant]()
        return usual.total(outputs, batch)

    return mw.Model(Bytes(), loss=mw.Loss(total, usual.count))


def missing() -> None:
    """Does not come for ten minutes."""
    time.sleep(600)  # missing


def python_loop() -> None:
    """Computes for ever."""
    while True:
        sum(range(1000))  # python_loop


def native_loop() -> None:
    """Is in native code that holds the interpreter."""
    re.match("(a+)+$", "a" * 60 + "b")  # native_loop


def exits() -> None:
    """Believes that the run is over."""
    sys.exit(0)  # exits


def exits_with_code() -> None:
    """Gives up, and says nothing."""
    sys.exit(3)  # exits_with_code


def raises() -> None:
    """Fails."""
    raise ValueError("planted")  # raises


def is_killed() -> None:
    """Is hit from outside: no line is to blame."""
    os.kill(os.getpid(), signal.SIGKILL)


def wrong_size() -> None:
    """Its next all-reduce is of another size."""

    def other(usual: Callable[..., Work], group: Group, tensor: torch.Tensor, **more: Any) -> Work:
        return usual(group, torch.ones(tensor.numel() + 8, dtype=tensor.dtype), **more)  # wrong_size

    _instead(other)


def wrong_order() -> None:
    """It issues one that the others issue later, or never."""

    def other(usual: Callable[..., Work], group: Group, tensor: torch.Tensor, **more: Any) -> Work:
        usual(group, torch.ones(5), action="GLOBAL_NORM()").wait()  # wrong_order
        return usual(group, tensor, **more)

    _instead(other)


def _instead(other: Callable[..., Work]) -> None:
    """Have the next all_reduce of this process go through `other`."""
    kinds: set[Any] = {type(each) for each in gc.get_objects() if isinstance(each, Group) and each.size > 1}
    for kind in kinds:
        usual = kind.all_reduce

        def wrong(
            group: Group,
            tensor: torch.Tensor,
            usual: Callable[..., Work] = usual,
            kind: Any = kind,
            **more: Any,
        ) -> Work:
            kind.all_reduce = usual
            return other(usual, group, tensor, **more)

        kind.all_reduce = wrong


PLANTS = {
    each.__name__: each
    for each in (
        missing,
        python_loop,
        native_loop,
        exits,
        exits_with_code,
        raises,
        is_killed,
        wrong_size,
        wrong_order,
    )
}
