"""Which optimizers bear cuts: what is declared by a class, and what is known of torch's own.

An optimizer that a user brings sees pieces of weights where the plan cuts them. One that computes each element from that
element's gradient and state alone does not notice; any other would compute something else than on one device, without a word,
so it is refused unless its class declares the grain it needs, and the layout gives that:

    class Mine(torch.optim.Optimizer):
        grain = "element"
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from meshwright.core.arena import Grain
from meshwright.core.errors import PlanError
from meshwright.core.rules import FINENESS

Grains = Mapping[str, Grain]
ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD)


def grain_needed(optimizer: torch.optim.Optimizer) -> Grain | None:
    """The grain that the class of `optimizer` declares, or that is known of torch's own; None: nobody knows."""
    kind = type(optimizer)
    declared = next((vars(each)["grain"] for each in kind.__mro__ if "grain" in vars(each)), None)
    if declared is not None and declared not in FINENESS:
        text = f"{kind.__name__} declares grain = {declared!r}"
        raise PlanError(text, fix=f"declare one of {', '.join(FINENESS)}", where="optimizer")
    return "element" if declared is None and kind in ELEMENTWISE else declared


def keys_by_block(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The keys of its state that hold one element per block."""
    kind = type(optimizer)
    return frozenset(next((vars(each)["by_block"] for each in kind.__mro__ if "by_block" in vars(each)), ()))


def check_grains(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], grains: Grains) -> None:
    """Raise PlanError where an optimizer steps a weight that is cut more finely than it bears; `grains` are those of the cuts."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        needed, kind = grain_needed(optimizer), type(optimizer).__name__
        mine = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        cut = next((name for name in mine if name in grains and _too_fine(grains[name], needed)), None)
        if cut is not None:
            known = f"needs the grain '{needed}'" if needed else "does not say whether it may see a part of a weight"
            text = f"{kind} {known}, and the plan cuts {cut} by {grains[cut]}"
            fix = (
                f'if it computes every element by itself, say so: class {kind}: grain = "element"; else have whole weights on '
                'each rank ("replicate" in place of "zero"), or on one: optimizer.name = "adafactor" cuts so, whoever steps them'
            )
            raise PlanError(text, fix=fix, where="optimizer")


def _too_fine(cut: Grain, needed: Grain | None) -> bool:
    """Whether cuts at the grain `cut` are finer than `needed`; of an optimizer that says nothing, it may be whole weights."""
    return FINENESS.index(cut) < FINENESS.index(needed or "matrix")
