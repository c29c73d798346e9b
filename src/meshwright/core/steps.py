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
from collections.abc import Iterable, Sequence

from meshwright.core.anatomy import NBYTES, ROOT
from meshwright.core.job import Job
from meshwright.core.program import Action, Hold, Program, Transfer, with_waits
from meshwright.core.space import Bundle, Space

ROLE = "stage0"
LEAN = "F_LEAN"
FORWARDS = ("F", LEAN)  # kinds that the model's own forward reaches, block by block
USES = (*FORWARDS, "RERUN", "B")  # kinds that need the weights of their block
FACTS = "facts"  # the subject of the GATHER that tells how many rows each rank has, and sums of what is the same on all
COUNT_NBYTES = 32  # weight, wishes to stop, rows, tokens: float64
NORM = "norm"  # the subject of the BROADCAST of the gradient norm


def one_device(space: Space, job: Job, micro_batch: int, num_micro: int) -> Program:
    """The program of a rank that trains alone on `num_micro` micro-batches of `micro_batch` samples."""
    actions = [Action("COUNT")]
    for micro in range(num_micro):
        actions += _forward(space, job, micro, micro_batch)
        actions += _backward(space, job, micro, micro_batch)
    actions.append(Action("TALLY", waits=tuple(f"LOSS({micro})" for micro in range(num_micro))))
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


def inside(visit: str, micro: int | None) -> str:
    """The name under which what a visit computes within, and its backward needs, is held until then."""
    return f"inside({visit}, {micro})"


def _forward(space: Space, job: Job, micro: int, micro_batch: int) -> list[Action]:
    anatomy, width = space.anatomy, NBYTES[job.precision.compute]
    actions = []
    within = dict(zip(anatomy.visits, anatomy.inside_numel, strict=False))
    for visit, numel, flops in zip(anatomy.visits, anatomy.stream_numel, anatomy.flops, strict=True):
        held = [Hold(stream(visit, micro), numel * micro_batch * width)]
        held += [Hold(inside(visit, micro), within[visit] * micro_batch * width)] if visit in within else []
        actions.append(Action("F", visit, micro, flops=flops * micro_batch, takes=tuple(held)))
    actions.append(Action("LOSS", micro=micro, waits=(f"F({anatomy.visits[-1]}, {micro})", "COUNT()")))
    return actions


def _backward(space: Space, job: Job, micro: int, micro_batch: int) -> list[Action]:
    anatomy, width = space.anatomy, NBYTES[job.precision.parameters]
    appearing: dict[str, list[Hold]] = defaultdict(list)
    for bundle in space.bundles() if micro == 0 else ():
        appearing[first_backward(bundle, anatomy.visits)].append(Hold(gradient(bundle), bundle.numel * width))
    actions = []
    for visit, flops in zip(reversed(anatomy.visits), reversed(anatomy.flops), strict=True):
        waits = (f"F({visit}, {micro})", f"LOSS({micro})")
        frees = (stream(visit, micro), *((inside(visit, micro),) if anatomy.inside_numel else ()))
        actions.append(
            Action("B", visit, micro, "compute", waits, (), None, 2 * flops * micro_batch, tuple(appearing[visit]), frees)
        )
    return actions


def backwards(actions: Sequence[Action], bundle: Bundle, visits: tuple[str, ...]) -> list[int]:
    """Where the backwards stand that complete the gradients of `bundle`, one per micro-batch."""
    last = bundle.last or visits[0]
    return [i for i, action in enumerate(actions) if action.kind == "B" and action.subject == last]


def first_backward(bundle: Bundle, visits: tuple[str, ...]) -> str:
    """The visit whose backward is the first to add to the gradients of `bundle`: the last of its users in the forward."""
    used = {visit for weight in bundle.weights for visit in weight.visits}
    return visits[-1] if ROOT in used else max(used, key=visits.index)
