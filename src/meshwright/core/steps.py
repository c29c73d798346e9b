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

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.core.anatomy import NBYTES, ROOT
from meshwright.core.job import Job
from meshwright.core.program import Action, Hold, Program, Transfer, with_waits
from meshwright.core.shares import Share, shares
from meshwright.core.space import Bundle, Space

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


def one_device(space: Space, job: Job, micro_batch: int, num_micro: int) -> Program:
    """The program of a rank that trains alone on `num_micro` micro-batches of `micro_batch` samples."""
    actions, mine, largest = [Action("COUNT")], shares(space), _largest(space)
    for micro in range(num_micro):
        forwards = _forward(space, job, mine, micro, micro_batch)
        forwards[0] = replace(forwards[0], frees=(SCRATCH,) if micro else ())
        actions += [*forwards, *_backward(space, job, mine, largest[micro > 0], micro, micro_batch)]
    actions.append(Action("TALLY", waits=tuple(f"LOSS({micro})" for micro in range(num_micro)), frees=(SCRATCH,)))
    names = tuple(weight.name for weight in space.anatomy.trainable)
    last = f"B({space.anatomy.visits[0]}, {num_micro - 1})"
    waits = [last]
    if space.norm_axes:
        square = Action("SQUARE", NORM, waits=(last,))
        total = Transfer("all_reduce", space.norm_axes, 8, dtype="float64")
        actions += [square, Action("NORM", NORM, lane="wire", waits=(square.name,), transfer=total)]
        waits += [action.name for action in actions[-2:]]
    actions.append(Action("CLIP", waits=tuple(waits), tensors=names))
    actions.append(Action("STEP", waits=("CLIP()",), tensors=names, frees=tuple(map(gradient, space.bundles()))))
    return Program.of({ROLE: actions})


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


def _forward(space: Space, job: Job, mine: Mapping[str, Share], micro: int, micro_batch: int) -> list[Action]:
    anatomy, width = space.anatomy, NBYTES[job.precision.compute]
    actions = []
    for visit, share in mine.items():
        held = [Hold(stream(visit, micro), share.hands_on * micro_batch * width)]
        held += [Hold(inside(visit, micro), share.inside * micro_batch * width)] if anatomy.inside_numel else []
        actions.append(Action("F", visit, micro, flops=share.flops * micro_batch, takes=tuple(held)))
    last = anatomy.visits[-1]
    logits = mine[last].hands_on * micro_batch
    kept = min(logits, PIECE) if space.logits.axes("S") else anatomy.loss_numel * micro_batch
    takes = [Hold(returned(last, micro), logits * width)]
    takes.append(Hold(SCRATCH, (kept if anatomy.loss_numel else 0) * max(width, NBYTES["float32"])))  # taken in that at least
    actions.append(Action("LOSS", micro=micro, waits=(f"F({last}, {micro})", "COUNT()"), takes=tuple(takes)))
    return actions


def _backward(
    space: Space, job: Job, mine: Mapping[str, Share], largest: Mapping[str, int], micro: int, micro_batch: int
) -> list[Action]:
    anatomy, width = space.anatomy, NBYTES[job.precision.parameters]
    appearing: dict[str, list[Hold]] = defaultdict(list)
    for bundle in space.bundles() if micro == 0 else ():
        appearing[first_backward(bundle, anatomy.visits)].append(Hold(gradient(bundle), bundle.numel * width))
    actions = []
    for visit in reversed(anatomy.visits):
        waits = (f"F({visit}, {micro})", f"LOSS({micro})")
        frees = (stream(visit, micro), *((inside(visit, micro),) if anatomy.inside_numel else ()))
        frees += (returned(visit, micro),) if visit == anatomy.visits[-1] else ()
        held = [Hold(SCRATCH, largest[visit] * width), *appearing[visit]]
        frees += (SCRATCH,)
        flops = 2 * mine[visit].flops * micro_batch
        actions.append(Action("B", visit, micro, "compute", waits, (), None, flops, tuple(held), frees))
    return actions


def _largest(space: Space) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """By visit, the elements of its largest weight whose gradient is there already: in the first backward of all, and later.

    Gradients that go into shards are packed after each backward, or are added up there.
    """
    visits = space.anatomy.visits
    tied, later = dict.fromkeys(visits, 0), dict.fromkeys(visits, 0)
    for bundle in (bundle for bundle in space.bundles() if not bundle.homes[0].flat):
        first, most = first_backward(bundle, visits), max(weight.numel for weight in bundle.weights)
        for visit in (visit for visit in bundle.visits if visit != ROOT):
            later[visit] = max(later[visit], most)
            tied[visit] = max(tied[visit], most if visit != first else 0)
    return tied, later


def backwards(actions: Sequence[Action], bundle: Bundle, visits: tuple[str, ...]) -> list[int]:
    """Where the backwards stand that complete the gradients of `bundle`, one per micro-batch."""
    last = bundle.last or visits[0]
    return [i for i, action in enumerate(actions) if action.kind == "B" and action.subject == last]


def first_backward(bundle: Bundle, visits: tuple[str, ...]) -> str:
    """The visit whose backward is the first to add to the gradients of `bundle`: the last of its users in the forward."""
    used = {visit for weight in bundle.weights for visit in weight.visits}
    return visits[-1] if ROOT in used else max(used, key=visits.index)
