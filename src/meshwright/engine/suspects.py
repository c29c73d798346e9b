"""Where a harmful step came from: each rank plays its own micro-batches again, alone, and looks at every block.

The parameters have not changed and dropout is stateless, so the second playing has the numbers of the first, before
anything was summed over ranks. It costs one more forward and backward, and only when a step is harmful. The ranks then
tell each other what they found in one small message, GUARD, which is in no program: good steps do not send it.

Weights that are stored in shards are brought together once more for each block, forward and backward, in the plan's order of
blocks: so all ranks meet, also one that has no rows or whose forward leaves a block out. No whole gradient outlives its block.
Ranks that have slices of the same weights, or parts of the model, play the same rows: what they find they add up first, in a
GUARD of their own. Parts play one micro-batch after the other, and send each other what they take once more.
"""

from collections.abc import Mapping
from math import isfinite

import torch

from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.engine.evaluation import untouched
from meshwright.engine.replay import Replay, Seen
from meshwright.engine.spikes import Stage, Suspect
from meshwright.engine.state import State

STAGES: tuple[Stage, ...] = ("", "forward", "loss", "backward")
WIDTH = 5  # numbers that each rank tells: loss, norm, stage, block, parameter


def find_suspects(plan: Plan, state: State, replay: Replay) -> tuple[Suspect, ...]:
    """What the samples of each rank did in this step, by rank; every rank calls it and gets the same."""
    for parameter in state.subject.trainable.values():
        parameter.grad = None
    with untouched(state.subject.module):
        for micro in range(len(state.micros)):
            replay.play(micro) if micro < state.num_real else replay.stand_in(micro)
    names, visits = [weight.name for weight in plan.anatomy.trainable], plan.anatomy.visits
    loss, squares, stage, block = _joined(plan, state, replay.seen)
    norms = {name: squares[name] ** 0.5 for name in names}
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


def _joined(plan: Plan, state: State, seen: Seen) -> tuple[float, Mapping[str, float], Stage, str]:
    """Of all ranks that play these rows the loss, the squares of whole gradients, and where a number first was not finite."""
    space, names, visits = plan.space, [weight.name for weight in plan.anatomy.trainable], plan.anatomy.visits
    if not space.weight_axes:
        _, stage, block = seen.first or (0, "", "")
        return seen.loss, seen.squares, stage, block
    coordinate = plan.mesh.coordinate(state.world.rank)
    counted = set(space.told_first(coordinate))
    tells = not any(coordinate[axis] for axis in space.weight_axes if axis != "pp")  # those with other slices have the same loss
    mine = [seen.squares[name] if name in counted else 0.0 for name in names]
    micro, stage, block = seen.first or (-1, "", "")
    mine += [seen.loss if tells else 0.0, micro, STAGES.index(stage), visits.index(block) if block in visits else -1]
    group = state.world.group(space.weight_axes)
    told = torch.tensor(mine, dtype=torch.float64, device=state.world.device)
    gathered = told.new_empty(group.size * len(told))
    group.all_gather(gathered, told, action="GUARD").wait()
    rows = gathered.view(group.size, -1)
    met = [(int(micro), int(kind), int(place)) for micro, kind, place in rows[:, -3:].tolist() if kind]
    last, none = STAGES.index("backward"), (-1, 0, -1)
    _, kind, place = min(met, key=lambda each: (*each[:2], -each[2] if each[1] == last else each[2]), default=none)
    *squares, loss = rows[:, :-3].sum(0).tolist()
    return loss, dict(zip(names, squares, strict=True)), STAGES[kind], visits[place] if place >= 0 else ""


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
