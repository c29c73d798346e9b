"""The step of one device, before any technique: the list that strategies rewrite.

    COUNT   how many tokens of this step count towards the loss (all micro-batches)
    F       forward of one visit                      LOSS    loss of one micro-batch and its gradient
    B       backward of one visit, in reverse         TALLY   the loss of the whole step
    CLIP    gradient norm of the logical parameters, and clipping by it; where ranks step different elements, before it
    SQUARE  the sum of squares of what this rank is the first to step      NORM   the sum of those over the ranks
    STEP    the optimizer; gradients are gone afterwards

Where the loss needs the rows of several ranks, GATHER (rows of one output or target, from all ranks) stands before it.
Strategies may add PACK (gradients of a bucket into one contiguous buffer) and UNPACK (out of a buffer of another dtype). Where
the job asks for the noise of the gradient, `core.noise` adds what measures it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from meshwright.core.anatomy import NBYTES, ROOT
from meshwright.core.home import Bundle
from meshwright.core.job import Job
from meshwright.core.program import Action, Hold, Program, Transfer, with_waits
from meshwright.core.shares import shares
from meshwright.core.space import Space

ROLE = "stage0"
LEAN = "F_LEAN"
FORWARDS = ("F", LEAN)  # kinds that the model's own forward reaches, block by block
USES = (*FORWARDS, "RERUN", "B")  # kinds that need the weights of their block
FACTS = "facts"  # the subject of the GATHER that tells how many rows each rank has, and sums of what is the same on all
COUNT_NBYTES = 32  # weight, wishes to stop, rows, tokens: float64
SCRATCH = (
    "scratch"  # what LOSS and each B hold for themselves alone: what the loss keeps, a gradient until it is added to another
)
PIECE = 1 << 20  # elements of divided logits that the loss looks at at once
NORM = "norm"  # the subject of the BROADCAST of the gradient norm


class Turn(NamedTuple):
    """A run of visits, forward or backward, for one micro-batch. Backwards go through `visits` in reverse."""

    kind: Literal["F", "B"]
    visits: tuple[str, ...]
    micro: int


def one_after_another(visits: tuple[str, ...], num_micro: int) -> list[Turn]:
    """The turns of a rank that runs the whole model for one micro-batch after the other."""
    kinds: tuple[Literal["F", "B"], ...] = ("F", "B")
    return [Turn(kind, visits, micro) for micro in range(num_micro) for kind in kinds]


def one_device(space: Space, job: Job, micro_batch: int, turns: Sequence[Turn]) -> Program:
    """The program of a rank that trains alone, on micro-batches of `micro_batch` samples, in these turns."""
    parts = _Turns(space, job, micro_batch)
    actions = [Action("COUNT"), *(action for turn in turns for action in parts.of(turn))]
    losses = tuple(action.name for action in actions if action.kind == "LOSS")
    last = actions[-1].name
    actions.append(Action("TALLY", waits=losses, frees=parts.left))
    names = tuple(weight.name for weight in space.anatomy.trainable)
    waits = [last, "COUNT()"] if space.stages else [last]  # not every backward follows a loss
    if space.norm_axes:
        square = Action("SQUARE", NORM, waits=(last,))
        total = Transfer("all_reduce", space.norm_axes, 8, dtype="float64")
        actions += [square, Action("NORM", NORM, lane="wire", waits=(square.name,), transfer=total)]
        waits += [action.name for action in actions[-2:]]
    actions.append(Action("CLIP", waits=tuple(waits), tensors=names))
    actions.append(Action("STEP", waits=("CLIP()",), tensors=names, frees=tuple(map(gradient, space.bundles()))))
    return Program.of({role_of(dict(space.coordinate)): actions})


def role_of(coordinate: Mapping[str, int]) -> str:
    """Whose list the ranks at `coordinate` play."""
    return f"stage{coordinate.get('pp', 0)}"


def micro_rows(actions: Iterable[Action], space: Space, job: Job) -> int:
    """The samples of a micro-batch of a rank that plays `actions`."""
    micros = {action.micro for action in actions if action.kind == "B"}
    return job.train.batch // space.mesh.extent(space.data_axes) // len(micros)


def reads_sums(action: Action) -> bool:
    """Whether `action` looks at the summed gradients of all weights: all sums stand before the first that does."""
    return action.kind in ("SQUARE", "CLIP")


def first_reader(actions: Sequence[Action]) -> int:
    """Where the first action stands that looks at all summed gradients."""
    return next(i for i, action in enumerate(actions) if reads_sums(action))


def awaiting(actions: Iterable[Action], names: Iterable[str]) -> list[Action]:
    """`actions`, of which those that look at all summed gradients wait for `names` too."""
    names = tuple(names)
    return [with_waits(action, names) if reads_sums(action) else action for action in actions]


def gradient(bundle: Bundle) -> str:
    """The name under which the gradients of `bundle` are held."""
    return f"gradient({bundle.name})"


def output_gradient(name: str) -> str:
    """The name under which the gradient of one of the model's outputs travels."""
    return f"gradient({name})"


def stream(visit: str, micro: int) -> str:
    """The name under which what a visit hands on is held from its F to its B."""
    return f"stream({visit}, {micro})"


def returned(visit: str, micro: int) -> str:
    """The name under which the gradient of what a visit has handed to the loss is held from there to its B."""
    return f"stream gradient({visit}, {micro})"


def inside(visit: str, micro: int | None) -> str:
    """The name under which what a visit computes within, and its backward needs, is held until then."""
    return f"inside({visit}, {micro})"


class _Turns:
    """The actions of one turn after the other. `left` names the scratch that the last one has not freed."""

    def __init__(self, space: Space, job: Job, micro_batch: int) -> None:
        self._space, self._job, self._micro_batch = space, job, micro_batch
        self._mine = shares(space)
        self._using: dict[str, list[Bundle]] = {visit: [] for visit in (*space.anatomy.visits, ROOT)}
        for bundle in space.bundles():
            for visit in bundle.visits:
                self._using[visit].append(bundle)
        self._there: set[str] = set()  # the bundles that have gradients
        self.left: tuple[str, ...] = ()

    def of(self, turn: Turn) -> list[Action]:
        """The actions of `turn`; the loss, where it belongs to it, stands before the backward."""
        if turn.kind == "F":
            return [self._forward(visit, turn.micro) for visit in turn.visits]
        ends = self._space.takes_loss and self._space.anatomy.visits[-1] in turn.visits
        loss = [self._loss(turn.micro)] if ends else []
        waits = tuple(action.name for action in loss)
        return [*loss, *(self._backward(visit, turn.micro, waits) for visit in reversed(turn.visits))]

    def _forward(self, visit: str, micro: int) -> Action:
        share, width, rows = self._mine[visit], NBYTES[self._job.precision.compute], self._micro_batch
        held = [Hold(stream(visit, micro), share.hands_on * rows * width)]
        held += [Hold(inside(visit, micro), share.inside * rows * width)] if self._space.anatomy.inside_numel else []
        frees, self.left = self.left, ()
        return Action("F", visit, micro, flops=share.flops * rows, takes=tuple(held), frees=frees)

    def _loss(self, micro: int) -> Action:
        space, anatomy, width = self._space, self._space.anatomy, NBYTES[self._job.precision.compute]
        last = anatomy.visits[-1]
        logits = self._mine[last].hands_on * self._micro_batch
        kept = min(logits, PIECE) if space.logits.axes("S") else anatomy.loss_numel * self._micro_batch
        takes = [Hold(returned(last, micro), logits * width)]
        takes.append(Hold(SCRATCH, (kept if anatomy.loss_numel else 0) * max(width, NBYTES["float32"])))  # in that at least
        frees, self.left = self.left, (SCRATCH,)
        return Action("LOSS", micro=micro, waits=(f"F({last}, {micro})", "COUNT()"), takes=tuple(takes), frees=frees)

    def _backward(self, visit: str, micro: int, waits: tuple[str, ...]) -> Action:
        anatomy, width = self._space.anatomy, NBYTES[self._job.precision.parameters]
        using = self._using[visit]
        # gradients that go into shards are packed after each backward, or are added up there
        added = [weight.numel for each in using if each.name in self._there and not each.homes[0].flat for weight in each.weights]
        new = {each.name: each for each in (*using, *self._using[ROOT]) if each.name not in self._there}
        self._there |= new.keys()
        held = [Hold(SCRATCH, max(added, default=0) * width)]
        held += [Hold(gradient(bundle), bundle.numel * width) for bundle in new.values()]
        frees = [stream(visit, micro), *([inside(visit, micro)] if anatomy.inside_numel else [])]
        frees += [returned(visit, micro)] if waits and visit == anatomy.visits[-1] else []
        frees, self.left = (*frees, *self.left), (SCRATCH,)
        flops = 2 * self._mine[visit].flops * self._micro_batch
        waits = (f"F({visit}, {micro})", *waits)
        return Action("B", visit, micro, "compute", waits, (), None, flops, tuple(held), frees)


def backwards(actions: Sequence[Action], bundle: Bundle, visits: tuple[str, ...]) -> list[int]:
    """Where the backwards stand that complete the gradients of `bundle`, one per micro-batch."""
    last = bundle.last or visits[0]
    return [i for i, action in enumerate(actions) if action.kind == "B" and action.subject == last]


def first_backward(bundle: Bundle, visits: tuple[str, ...]) -> str:
    """The visit whose backward is the first to add to the gradients of `bundle`: the last of its users in the forward."""
    used = {visit for weight in bundle.weights for visit in weight.visits}
    return visits[-1] if ROOT in used else max(used, key=visits.index)
