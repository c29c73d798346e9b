"""Where a harmful step came from: each rank plays its own micro-batches again, alone, and looks at every block.

The parameters have not changed and dropout is stateless, so the second playing has the numbers of the first, before
anything was summed over ranks. It costs one more forward and backward, and only when a step is harmful. The ranks then
tell each other what they found in one small message, GUARD, which is in no program: good steps do not send it.
"""

from collections.abc import Callable
from math import isfinite

import torch
from torch import nn

from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.engine.evaluation import untouched
from meshwright.engine.spikes import Stage, Suspect
from meshwright.engine.state import State
from meshwright.model.drive import backward, backward_from

STAGES: tuple[Stage, ...] = ("", "forward", "loss", "backward")
WIDTH = 5  # numbers that each rank tells: loss, norm, stage, block, parameter


def find_suspects(plan: Plan, state: State, forward: Callable[[int], None], count: float) -> tuple[Suspect, ...]:
    """What the samples of each rank did in this step, by rank; every rank calls it and gets the same.

    `forward(micro)` runs the model's forward and leaves its pass in `state`; `count` is what the loss is divided by.
    The gradients of this rank alone are left in the parameters.
    """
    for parameter in state.subject.trainable.values():
        parameter.grad = None
    loss, stage, block = 0.0, "", ""
    with untouched(state.subject.module):
        for micro in range(state.num_real):
            share, found, where = _play(plan, state, forward, micro, count)
            loss += share
            stage, block = (stage, block) if stage else (found, where)
    norms = _norms(state.subject.trainable)
    names, visits = list(norms), plan.anatomy.visits
    odd = [name for name in names if not isfinite(norms[name])]
    if stage == "backward":
        odd = [name for name in odd if name in {weight.name for weight in plan.anatomy.of(block)}] or odd
    largest = odd[0] if odd else max(names, key=lambda name: norms[name])
    if not stage and odd:
        stage, block = "backward", ""
    if not block:
        block = next((w.visits[0] for w in plan.anatomy.weights if w.name == largest and w.visits[0] in visits), "")
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    place = visits.index(block) if block in visits else -1
    mine = [loss, total, STAGES.index(stage), place, names.index(largest) if state.num_real else -1]
    told = _exchanged(state, mine)
    return tuple(_suspect(rank, row, visits, names) for rank, row in enumerate(told))


def _play(plan: Plan, state: State, forward: Callable[[int], None], micro: int, count: float) -> tuple[float, Stage, str]:
    """The share of one micro-batch in the loss, and where a number first was not finite: the stage and the block."""
    forward(micro)
    outputs, closing = state.closings.pop(micro)
    visits = state.passes.pop(micro).visits
    stage: Stage = ""
    block = next((name for name, visit in visits.items() if any(_odd(leaf) for _, leaf in visit.outputs)), "")
    total = state.loss.total(outputs, state.micros[micro])
    if block:
        stage = "forward"
    elif _odd(total):
        stage = "loss"
    share = total.item() / (count or 1.0)
    if total.requires_grad:
        backward_from(total, 1.0 / (count or 1.0))
    backward(closing)
    for name in reversed(list(visits)):
        backward(visits[name])
        grads = (state.subject.parameters[weight.name].grad for weight in plan.anatomy.of(name))
        if not stage and any(grad is not None and _odd(grad) for grad in grads):
            stage, block = "backward", name
    return share, stage, block


def _odd(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def _norms(parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """The norm of each gradient, taken in float64 so that it does not overflow where the gradient did not."""
    return {name: 0.0 if p.grad is None else p.grad.double().norm().item() for name, p in parameters.items()}


def _exchanged(state: State, mine: list[float]) -> list[list[float]]:
    group = state.world.group(AXES)
    told = torch.tensor(mine, dtype=torch.float64, device=state.world.device)
    gathered = torch.empty(group.size * WIDTH, dtype=torch.float64, device=state.world.device)
    group.all_gather(gathered, told, action="GUARD").wait()
    return gathered.view(-1, WIDTH).tolist()


def _suspect(rank: int, row: list[float], visits: tuple[str, ...], names: list[str]) -> Suspect:
    loss, norm, (stage, block, parameter) = row[0], row[1], map(int, row[2:])
    return Suspect(
        rank,
        loss,
        norm,
        STAGES[stage],
        visits[block] if block >= 0 else "",
        names[parameter] if parameter >= 0 else "",
    )
