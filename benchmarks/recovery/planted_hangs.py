"""The model file of benchmarks/recovery/hang_reports.py: a tiny model that makes the other ranks wait, on one
rank and in one step.

The kind of the fault, the rank and the step come from the environment. The lines that a report has to name
end in a comment with the name of the fault. The loss is called in the analysis of the model, too, where no
step is under way.
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
from meshwright.comm.collectives.ledger import Ledger

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
        """Returns the logits."""
        return self.head(self.mix(self.embed(input_ids)).tanh())


def build() -> mw.Model:
    """Returns the model, and the loss that plants the fault."""
    plant, rank, step = (os.environ[f"PLANT_{key}"] for key in ("KIND", "RANK", "STEP"))
    planted: list[str] = []
    loss = mw.token_cross_entropy()

    def total(outputs: Any, batch: Any) -> torch.Tensor:
        if os.environ.get("RANK") == rank and not planted and _step_under_way() >= int(step):
            planted.append(plant)
            Path(os.environ["PLANT_MARK"]).write_text(str(time.time()))
            PLANTS[plant]()
        return loss.total(outputs, batch)

    return mw.Model(Bytes(), loss=mw.Loss(total, loss.count))


def _step_under_way() -> int:
    """Returns the step that this process trains; 0 before the first one, when the model is analyzed."""
    ledgers = [each for each in gc.get_objects() if type(each) is Ledger]
    return max((each.step or 0 for each in ledgers if each.phase in ("first_step", "step")), default=0)


def missing() -> None:
    """Sleeps for ten minutes."""
    time.sleep(600)  # missing


def python_loop() -> None:
    """Loops without end in Python."""
    while True:
        sum(range(1000))  # python_loop


def native_loop() -> None:
    """Runs native code that holds the GIL."""
    re.match("(a+)+$", "a" * 60 + "b")  # native_loop


def exits() -> None:
    """Exits with code 0."""
    sys.exit(0)  # exits


def exits_with_code() -> None:
    """Exits with code 3, without a message."""
    sys.exit(3)  # exits_with_code


def raises() -> None:
    """Raises an error."""
    raise ValueError("planted")  # raises


def is_killed() -> None:
    """Kills itself with SIGKILL: no line of the file is reported."""
    os.kill(os.getpid(), signal.SIGKILL)


def wrong_size() -> None:
    """Issues the next all-reduce with another size."""

    def other(original: Callable[..., Work], group: Group, tensor: torch.Tensor, **options: Any) -> Work:
        return original(group, torch.ones(tensor.numel() + 8, dtype=tensor.dtype), **options)  # wrong_size

    _replace_next_all_reduce(other)


def wrong_order() -> None:
    """Issues a collective that the other ranks issue later, or never."""

    def other(original: Callable[..., Work], group: Group, tensor: torch.Tensor, **options: Any) -> Work:
        original(group, torch.ones(5), action="GLOBAL_NORM()").wait()  # wrong_order
        return original(group, tensor, **options)

    _replace_next_all_reduce(other)


def _replace_next_all_reduce(other: Callable[..., Work]) -> None:
    """Routes the next all_reduce of this process through `other`."""
    classes: set[Any] = {type(each) for each in gc.get_objects() if isinstance(each, Group) and each.size > 1}
    for cls in classes:
        original = cls.all_reduce

        def replaced(
            group: Group,
            tensor: torch.Tensor,
            original: Callable[..., Work] = original,
            cls: Any = cls,
            **options: Any,
        ) -> Work:
            cls.all_reduce = original
            return other(original, group, tensor, **options)

        cls.all_reduce = replaced


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
