"""Buffers that a training forward writes, where the parts of a model lie on several ranks: each must belong to one of them.

A block's own buffers are written where the block runs, and saved from there. What the glue between blocks writes (a counter, a
running mean) every rank would write for the glue that it runs, and each would have another value of it. A buffer that is not
saved with the model (persistent=False) is nobody's state: each rank may have its own.
"""

from collections.abc import Collection, Iterator

from torch import nn

from meshwright.core.anatomy import block_of
from meshwright.core.errors import Fault
from meshwright.core.plan import Plan


def buffer_faults(plan: Plan, module: nn.Module, written: Collection[str]) -> Iterator[Fault]:
    """The buffers of `module` among those `written` by its forward that no part of `plan` has to itself."""
    if not plan.space.stages:
        return
    blocks = tuple(f"{block_of(visit)}." for visit in plan.anatomy.visits)
    saved = module.state_dict().keys()
    for name in written:
        if name in saved and not name.startswith(blocks):
            text = f"the buffer '{name}' is written between blocks, and each rank with a part of the model would get its own"
            fix = "write it inside of one block, declare a larger block around it (Model(blocks=[...])), or, if it need not be "
            yield Fault(text, fix + "saved, register it with persistent=False", "model")
