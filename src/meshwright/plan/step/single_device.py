"""The step of one device, before any technique: the list that strategies rewrite.

    COUNT   how many tokens of this step count towards the loss (all micro-batches)
    F       forward of one visit                      LOSS    loss of one micro-batch and its gradient
    B       backward of one visit, in reverse         TALLY   the loss of the whole step
    I       the half of a backward for what went in   W       the half for the weights, any time later
    CLIP    gradient norm of the logical parameters, and clipping by it; where ranks step different elements, before it
    SQUARE  the sum of squares of what this rank is the first to step      NORM   the sum of those over the ranks
    STEP    the optimizer; gradients are gone afterwards

A rank may step more than once: then the turns say behind which backwards, with the gradient of that micro-batch alone, over what
counts in it. SQUARE stands before each such STEP, nobody clips, and NORM adds up the squares of all of them.

Where the loss needs the rows of several ranks, GATHER (rows of one output or target, from all ranks) stands before it.
Strategies may add PACK (gradients of a bucket into one contiguous buffer) and UNPACK (out of a buffer of another dtype). Where
the job asks for the noise of the gradient, `core.noise` adds what measures it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES, ROOT
from meshwright.plan.sharding.param_sharding import Bundle
from meshwright.plan.sharding.rank_share import shares
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Program, Transfer, with_waits
from meshwright.plan.step.activation_memory import of_loss, taken
from meshwright.plan.step.chunked_loss import PIECE, cost

ROLE = "stage0"
LEAN = "F_LEAN"
FORWARDS = ("F", LEAN)  # kinds that the model's own forward reaches, block by block
BACKWARDS = ("B", "I")  # kinds that give the gradient of what a visit took in
COMPLETING = ("B", "W")  # kinds that leave the gradients of a visit's weights, and let go of what its forward kept
USES = (*FORWARDS, "RERUN", "B", "I", "W")  # kinds that need the weights of their block
FACTS = "facts"  # the subject of the GATHER that tells how many rows each rank has, and sums of what is the same on all
COUNT_NBYTES = 32  # weight, wishes to stop, rows, tokens: float64
TOTALS = {"COUNT": COUNT_NBYTES, "TALLY": 8}  # numbers of a step that ranks add up, and their bytes: float64
SCRATCH = (
    "scratch"  # what LOSS and each B hold for themselves alone: what the loss keeps, a gradient until it is added to another
)
NORM = "norm"  # the subject of the BROADCAST of the gradient norm


class Turn(NamedTuple):
    """A run of visits, forward or backward, for one micro-batch. Backwards go through `visits` in reverse.

    "I" and "W" are the halves of a backward. "STEP" is a step with what the backwards of that micro-batch have left. Without any,
    all of them make one step together.
    """

    kind: Literal["F", "B", "I", "W", "STEP"]
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
    if any(turn.kind == "STEP" for turn in turns):
        return Program.of({role_of(dict(space.coordinate)): [*actions, *_norm(space, last)]})
    names = tuple(weight.name for weight in space.anatomy.trainable)
    waits = [last, "COUNT()"] if space.stages else [last]  # not every backward follows a loss
    if space.norm_axes:
        square = Action("SQUARE", NORM, waits=(last,))
        actions += [square, *_norm(space, square.name)]
        waits += [action.name for action in actions[-2:]]
    actions.append(Action("CLIP", waits=tuple(waits), tensors=names))
    actions.append(Action("STEP", waits=("CLIP()",), tensors=names, frees=tuple(map(gradient, space.bundles()))))
    return Program.of({role_of(dict(space.coordinate)): actions})


def _norm(space: Space, last: str) -> list[Action]:
    """NORM, behind the `last` action that has to do with gradients; none where every rank knows all of them."""
    if not space.norm_axes:
        return []
    total = Transfer("all_reduce", space.norm_axes, 8, dtype="float64")
    return [Action("NORM", NORM, lane="wire", waits=(last,), transfer=total)]


def role_of(coordinate: Mapping[str, int]) -> str:
    """Whose list the ranks at `coordinate` play."""
    return f"stage{coordinate.get('pp', 0)}"


def micro_rows(actions: Iterable[Action], space: Space, job: Job) -> int:
    """The samples of a micro-batch of a rank that plays `actions`."""
    micros = {action.micro for action in actions if action.kind in COMPLETING}
    return job.train.batch // space.mesh.extent(space.data_axes) // len(micros)


def reads_sums(action: Action) -> bool:
    """Whether `action` looks at the summed gradients of all weights: all sums stand before the first that does."""
    return action.kind in ("SQUARE", "CLIP")


def steps(actions: Iterable[Action]) -> tuple[int, ...]:
    """The micro-batches with whose gradients alone a rank steps, in that order; none where it steps once, with those of all."""
    return tuple(action.micro for action in actions if action.kind == "STEP" and action.micro is not None)


def first_reader(actions: Sequence[Action], micro: int | None = None) -> int:
    """Where the first action stands that looks at all summed gradients: of one micro-batch, where that is stepped with alone."""
    return next(i for i, action in enumerate(actions) if reads_sums(action) and action.micro == micro)


def awaiting(actions: Iterable[Action], names: Iterable[str], micro: int | None = None) -> list[Action]:
    """`actions`, of which those that look at all summed gradients (of one micro-batch, likewise) wait for `names` too."""
    names = tuple(names)
    return [with_waits(action, names) if reads_sums(action) and action.micro == micro else action for action in actions]


def added_along(program: Program, axis: str, kinds: Iterable[str] = tuple(TOTALS)) -> Program:
    """`program` with these numbers of a step, of TOTALS, added up along `axis` too; once, whoever else asks for it."""

    def along(action: Action) -> Action:
        if action.kind not in kinds:
            return action
        before = action.transfer.axes if action.transfer else ()
        axes = before if axis in before else (*before, axis)
        return replace(action, lane="wire", transfer=Transfer("all_reduce", axes, TOTALS[action.kind], dtype="float64"))

    return program.edit(lambda actions: [along(action) for action in actions])


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


def owed(visit: str, micro: int) -> str:
    """The name under which the gradients are held, from I to W, that the weights of a visit still need."""
    return f"owed({visit}, {micro})"


def inside(visit: str, micro: int | None) -> str:
    """The name under which what a visit computes within, and its backward needs, is held until then."""
    return f"inside({visit}, {micro})"


class _Turns:
    """The actions of one turn after the other. `left` names the scratch that the last one has not freed."""

    def __init__(self, space: Space, job: Job, micro_batch: int) -> None:
        self._space, self._job, self._micro_batch = space, job, micro_batch
        self._mine, self._pieces = shares(space), cost(space, job, micro_batch)
        self._taken = taken(space, job, micro_batch)
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
        if turn.kind == "STEP":
            return self._step(turn)
        if turn.kind == "W":
            return [self._backward(visit, turn.micro, "W", ()) for visit in reversed(turn.visits)]
        ends = self._space.takes_loss and self._space.anatomy.visits[-1] in turn.visits
        loss = [self._loss(turn.micro)] if ends else []
        waits = tuple(action.name for action in loss)
        if turn.kind == "I":
            return [*loss, *(self._inputs(visit, turn.micro, waits) for visit in reversed(turn.visits))]
        return [*loss, *(self._backward(visit, turn.micro, "B", waits) for visit in reversed(turn.visits))]

    def _step(self, turn: Turn) -> list[Action]:
        """The step with what one micro-batch has left; the next one's backward makes gradients anew."""
        last = Action("B", turn.visits[0], turn.micro).name
        square = Action("SQUARE", NORM, turn.micro, waits=(last,))
        names = tuple(weight.name for weight in self._space.anatomy.trainable)
        frees = tuple(gradient(bundle) for bundle in self._space.bundles() if bundle.name in self._there)
        self._there.clear()
        step = Action("STEP", micro=turn.micro, waits=(square.name, "COUNT()"), tensors=names, frees=frees)
        return [square, step]

    def _forward(self, visit: str, micro: int) -> Action:
        mine = self._taken[visit]
        held = [Hold(stream(visit, micro), mine.stream)]
        held += [Hold(inside(visit, micro), mine.inside)] if self._space.anatomy.inside_numel else []
        frees, self.left = self.left, ()
        return Action("F", visit, micro, flops=self._mine[visit].flops * self._micro_batch, takes=tuple(held), frees=frees)

    def _loss(self, micro: int) -> Action:
        space, anatomy, width = self._space, self._space.anatomy, NBYTES[self._job.precision.compute]
        last = anatomy.visits[-1]
        waits = f"F({last}, {micro})", "COUNT()"
        if self._pieces is not None:
            held = Hold(returned(last, micro), self._pieces.returned), Hold(SCRATCH, self._pieces.scratch)
            frees, self.left = self.left, (SCRATCH,)
            how = {"waits": waits, "tensors": self._pieces.weights, "flops": self._pieces.flops, "takes": held, "frees": frees}
            return Action("LOSS", micro=micro, **how)
        logits = self._mine[last].hands_on * self._micro_batch
        kept = min(logits, PIECE) if space.logits.axes("S") else anatomy.loss_numel * self._micro_batch
        scratch = of_loss(space, self._job, kept if anatomy.loss_numel else 0, self._micro_batch)
        takes = [Hold(returned(last, micro), logits * width), Hold(SCRATCH, scratch)]
        frees, self.left = self.left, (SCRATCH,)
        return Action("LOSS", micro=micro, waits=waits, takes=tuple(takes), frees=frees)

    def _inputs(self, visit: str, micro: int, waits: tuple[str, ...]) -> Action:
        """The first half of a backward. What the forward kept stays until the second, and what comes to the weights with it."""
        share, width, rows = self._mine[visit], NBYTES[self._job.precision.compute], self._micro_batch
        last = self._space.takes_loss and visit == self._space.anatomy.visits[-1]  # then it is what the loss gave back
        held = () if last else (Hold(owed(visit, micro), share.owed * rows * width),)
        frees, self.left = self.left, ()
        waits = (f"F({visit}, {micro})", *waits)
        flops = (2 * share.flops - share.weights) * rows
        return Action("I", visit, micro, waits=waits, flops=flops, takes=held, frees=frees)

    def _backward(self, visit: str, micro: int, kind: Literal["B", "W"], waits: tuple[str, ...]) -> Action:
        anatomy, width = self._space.anatomy, NBYTES[self._job.precision.parameters]
        using = self._using[visit]
        # gradients that go into shards are packed after each backward, or are added up there
        later = () if self._pieces is None else self._pieces.weights  # LOSS has done these
        summed = (each for each in using if each.name in self._there and not each.homes[0].flat)
        added = [weight.numel for each in summed for weight in each.weights if weight.name not in later]
        new = {each.name: each for each in (*using, *self._using[ROOT]) if each.name not in self._there}
        self._there |= new.keys()
        fresh = sum(bundle.numel for bundle in new.values()) * width
        held = [Hold(SCRATCH, self._taken[visit].scratch(max(added, default=0) * width, fresh))]
        held += [Hold(gradient(bundle), bundle.numel * width) for bundle in new.values()]
        frees = [stream(visit, micro), *([inside(visit, micro)] if anatomy.inside_numel else [])]
        if self._space.takes_loss and visit == anatomy.visits[-1]:
            frees.append(returned(visit, micro))
        elif kind == "W":
            frees.append(owed(visit, micro))
        frees, self.left = (*frees, *self.left), (SCRATCH,)
        share, rows = self._mine[visit], self._micro_batch
        if kind == "W":
            flops = share.weights * rows
            return Action("W", visit, micro, waits=(f"I({visit}, {micro})",), flops=flops, takes=tuple(held), frees=frees)
        waits = (f"F({visit}, {micro})", *waits)
        return Action("B", visit, micro, waits=waits, flops=2 * share.flops * rows, takes=tuple(held), frees=frees)


def last_backward(actions: Sequence[Action]) -> Action:
    """The last action that leaves gradients of weights: behind it all are there."""
    return next(action for action in reversed(actions) if action.kind in COMPLETING)


def users(bundle: Bundle, visits: tuple[str, ...]) -> frozenset[str]:
    """The visits whose backwards add to the gradients of `bundle`: all of `visits` where glue uses one of its weights."""
    found = frozenset(visit for weight in bundle.weights for visit in weight.visits)
    return frozenset(visits) if ROOT in found else found


def backwards(actions: Sequence[Action], bundle: Bundle, visits: tuple[str, ...], alone: int | None = None) -> list[int]:
    """Where the backwards stand that complete the gradients of `bundle`, one per micro-batch, in the order of the list.

    Where one micro-batch is stepped with `alone`, its own.
    """
    return Backwards(actions).of(bundle, visits, alone)


class Backwards:
    """Where the completing backwards of every visit stand in a list: looked for once, whatever the number of bundles."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions, self._at = actions, dict[str, list[int]]()
        for i, action in enumerate(actions):
            if action.kind in COMPLETING:
                self._at.setdefault(action.subject, []).append(i)

    def of(self, bundle: Bundle, visits: tuple[str, ...], alone: int | None = None) -> list[int]:
        """As `backwards` has them."""
        found = sorted(i for visit in users(bundle, visits) for i in self._at.get(visit, ()))
        micros = ((self._actions[i].micro, i) for i in found)
        return sorted({micro: i for micro, i in micros if alone in (None, micro)}.values())
