"""A plan beside one device: every rank trains, and holds each number against the reference.

The comparison runs in float64 with plain SGD: Adam would hide a gradient that is wrong by a factor. Errors of gradients
and parameters are measured against the largest magnitude in their block, because a gradient that is truly zero (a key
bias) holds nothing but rounding noise. Each rank compares its own copy, so a replica that drifts is found. NaN is a
difference, and so is a collective that the program does not state; what was not compared does not pass. A technique that
rounds says how far off that may be (Strategy.tolerance): then that is allowed, but for initial values. Gradients are
read by one more action, put before CLIP: COMPARE (hold every gradient against one device, before it is clipped).

What each rank puts into collectives in one step, as its program states it: also where micro-batches have other rows.

Of other lengths, too: what is sent for such a micro-batch is what the plan of such rows says; for that the model is read on them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from itertools import zip_longest
from math import inf, isnan, nan

import torch

from meshwright.comm.collectives.group import Entry, World
from meshwright.engine.runtime.microbatches import BatchShapes, microbatch_shapes
from meshwright.engine.runtime.state import RankState
from meshwright.engine.step.executor import Executor
from meshwright.plan.job.job import Job, LossGuard, OptimizerConfig, PrecisionConfig, ScheduleConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.single_device import FORWARD_KINDS, stepped_microbatches
from meshwright.verifier.reference import ParityCase, Reference, ReferenceStep, TensorsByName
from meshwright.verifier.verdict import COMPARED_QUANTITIES, QUANTITIES, Difference, Verdict, diagnose_cause

PlannedMessage = tuple[
    str, str, tuple[str, ...], int, str
]  # action, collective, axes, bytes that the rank puts in, algorithm


class PlannedMessages:
    """What the ranks of `case.plan` put into collectives, for micro-batches of any shapes."""

    def __init__(self, parity_case: ParityCase) -> None:
        self._case = parity_case
        columns = (*parity_case.plan.model_spec.inputs, *parity_case.plan.model_spec.targets)
        self._known = {column.name for column in columns}
        self._plans = {
            frozenset((column.name, column.shape) for column in columns): parity_case.plan
        }  # by the shapes of one row

    def messages(
        self, rank: int, step_shapes: Sequence[tuple[BatchShapes, ...]]
    ) -> Iterator[tuple[int, PlannedMessage]]:
        """Those of `rank`, each with its step: `steps` are the shapes of its micro-batches; none: as planned."""
        mine, others, known = (
            self._case.plan.for_rank(rank),
            dict[BatchShapes, Plan](),
            dict[tuple[BatchShapes, ...], list[PlannedMessage]](),
        )
        for step, micros in enumerate(step_shapes):
            for shapes in set(micros) - others.keys():
                others[shapes] = self._on(rank, step, shapes)
            if micros not in known:
                known[micros] = planned_messages(mine, [others[shapes] for shapes in micros])
            yield from ((step, message) for message in known[micros])

    def _on(self, rank: int, step: int, shapes: BatchShapes) -> Plan:
        """The plan of micro-batches of these shapes, as `rank` plays it; `step` has such ones."""
        rows, lengths = (
            shapes[0][1][0],
            frozenset((name, shape[1:]) for name, shape in shapes if name in self._known),
        )
        if lengths not in self._plans:
            batch = self._case.batch_reader(self._case.plan, rank)(step)
            self._plans[lengths] = self._case.plan if batch is None else self._case.plan_for_batch(batch)
        there = self._plans[lengths].for_rank(rank)
        return there if rows == there.micro_batch else there.with_micro_batch(rows)


def planned_messages(plan: Plan, microbatch_plans: Sequence[Plan] = ()) -> list[PlannedMessage]:
    """What each rank puts into collectives in one step, in the order of the program.

    `micros` are by micro-batch the plans that say what is sent for it, where its rows may be others than those of `plan`.
    """
    others = {id(each): {action.name: action for action in each.actions} for each in microbatch_plans}
    known = [
        _resized(a, others[id(microbatch_plans[a.microbatch])])
        if microbatch_plans and a.microbatch is not None
        else a
        for a in plan.actions
    ]
    return [
        (
            action.name,
            move.collective,
            tuple(axis for axis in AXES if axis in move.axes),
            move.nbytes,
            move.algorithm,
        )
        for action in known
        for move in action.transfers
    ]


def _resized(action: Action, others: Mapping[str, Action]) -> Action:
    """`action` with the sizes of `others`, by name.

    Fewer rows may leave room for what a visit computes: then it is not run again there, and moves as much where it is.
    """
    for kind in (action.kind, *(FORWARD_KINDS if action.kind in (*FORWARD_KINDS, "RECOMPUTE") else ())):
        name = replace(action, kind=kind).name
        if name in others:
            return replace(others[name], kind=action.kind)
    return action


TOLERANCE = 1e-10


@dataclass
class RankReport:
    """What one rank found: differences, the worst error per quantity, a digest per parameter, what it sent."""

    rank: int
    differences: list[Difference] = field(default_factory=list)
    max_errors: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    sent_entries: list[Entry] = field(default_factory=list)
    microbatch_shapes: list[tuple[BatchShapes, ...]] = field(
        default_factory=list
    )  # by step, of each micro-batch; none: as planned
    num_steps: int = 0


def parity_job(job: Job) -> Job:
    """`job` as parity runs it: float64, SGD with its groups and clip, a constant learning rate of 0.1, no step left out."""
    groups = tuple(replace(group, name=None, momentum=0.0) for group in job.optimizer.groups)
    sgd = OptimizerConfig("sgd", lr=0.1, weight_decay=job.optimizer.weight_decay, momentum=0.5, groups=groups)
    wide = PrecisionConfig("float64", "float64", "float64")
    return replace(job, precision=wide, optimizer=sgd, schedule=ScheduleConfig(), guard=LossGuard())


def single_device_job(job: Job) -> Job:
    """`job` as one device plays it, which has no other batch size to compare its own with: it measures no noise."""
    return replace(job, train=replace(job.train, noise_scale=False))


def compare_rank(parity_case: ParityCase, world: World, reference: Reference) -> RankReport:
    """Train one rank of `case.plan` and compare it with `reference`, step by step."""
    report = RankReport(world.rank)
    watched = _RankComparison(parity_case, reference, report)
    subject = parity_case.make_trained_module()
    watched.values("initial value", 0, subject.parameters, reference.initial_values)
    world.ledger.recording = True
    state = RankState(subject, world, parity_case.loss)
    player = Executor(
        _with_probe(parity_case.plan.for_rank(world.rank)),
        state,
        stateless_rng=parity_case.make_rng(),
        extra_handlers={"COMPARE": lambda action, state: watched.gradients(action.microbatch)},
    )
    watched.player = player
    rows = parity_case.batch_reader(parity_case.plan, world.rank)
    try:
        for step, truth in enumerate(reference.steps):
            watched.step = step
            batch = rows(step)
            watched.samples(batch, truth)
            if not parity_case.plan.sharding.primary_rank_axes:
                report.microbatch_shapes.append(
                    microbatch_shapes(batch, parity_case.plan, subject.dummy_batch)
                )
            metrics = player.step(batch)
            watched.number("loss", metrics.loss, truth.loss)
            watched.number("grad norm", metrics.grad_norm, truth.grad_norm)
            parameters = player.gather_parameters()
            watched.values("parameter", step, parameters, truth.parameters)
            report.num_steps += 1
        report.digests = {name: _digest(parameter) for name, parameter in player.gather_parameters().items()}
    finally:
        player.close()
    report.sent_entries = list(world.ledger.entries)
    return report


def make_verdict(
    parity_case: ParityCase, reports: list[RankReport], rank_backend: str, versions: Mapping[str, str]
) -> Verdict:
    """The verdict over all ranks' reports: equality with one device, replicas alike, and what was sent as planned."""
    plan, stated = parity_case.plan, PlannedMessages(parity_case)
    found = [difference for report in reports for difference in report.differences]
    found += [
        d
        for report in reports
        for d in (_drift(report, reports[0]), _unplanned(report, stated))
        if d is not None
    ]
    found.sort(key=lambda d: (d.step, QUANTITIES.index(d.quantity)))
    missing = tuple(_missing(plan, reports))
    return Verdict(
        plan=plan.hash,
        mesh=str(plan.mesh),
        model=plan.model_spec.name,
        rank_backend=rank_backend,
        num_steps=min((report.num_steps for report in reports), default=0),
        tolerance=max(TOLERANCE, plan.tolerance),
        passed=not found and not missing,
        max_errors={
            key: _worst(report.max_errors[key] for report in reports if key in report.max_errors)
            for key in COMPARED_QUANTITIES
        },
        planned_nbytes={name: nbytes for name, _, _, nbytes, _ in planned_messages(plan)},
        cause=diagnose_cause(found) or ("incomplete" if missing else ""),
        first_difference=found[0] if found else None,
        num_other_differences=max(0, len(found) - 1),
        not_compared=missing,
        versions=dict(versions),
        reference="a replay of its weight versions in one process"
        if stepped_microbatches(plan.actions)
        else "one device",
    )


def issued_messages(report: RankReport) -> list[PlannedMessage]:
    """What a rank did put into collectives, over all its steps, in order."""
    return [
        (entry.action, entry.collective, tuple(entry.axes), entry.nbytes, entry.algorithm)
        for entry in report.sent_entries
    ]


def _missing(plan: Plan, reports: list[RankReport]) -> Iterator[str]:
    """What keeps the reports from being a proof, in sentences."""
    here = {report.rank for report in reports}
    for rank in sorted(set(range(plan.mesh.world_size)) - here):
        yield f"rank {rank} did not report"
    for report in reports:
        if not report.num_steps:
            yield f"rank {report.rank} compared no step"
        elif report.num_steps != reports[0].num_steps:
            yield f"rank {report.rank} compared {report.num_steps} steps and rank {reports[0].rank} {reports[0].num_steps}"
        for quantity in COMPARED_QUANTITIES if report.num_steps else ():
            if quantity not in report.max_errors and (
                quantity != "gradient" or plan.is_primary_rank(report.rank)
            ):
                yield f"rank {report.rank} compared no {quantity}"


def _drift(report: RankReport, other: RankReport) -> Difference | None:
    """The first parameter of which two ranks hold different bits; a rounding error that differs grows from step to step."""
    names = [
        name
        for name in {**other.digests, **report.digests}
        if report.digests.get(name) != other.digests.get(name)
    ]
    return (
        Difference(max(0, report.num_steps - 1), "replica", names[0], "", None, report.rank)
        if names
        else None
    )


def _unplanned(report: RankReport, stated: PlannedMessages) -> Difference | None:
    """The first collective that is not the one that the program states at this place."""
    steps = report.microbatch_shapes or [()] * report.num_steps
    for found, stands in zip_longest(issued_messages(report), stated.messages(report.rank, steps)):
        step, theirs = stands or (len(steps), None)
        if found != theirs:
            said = f"{found or 'no collective'} where the program states {theirs or 'none'}"
            return Difference(step, "ledger", said, "", None, report.rank)
    return None


class _RankComparison:
    """Compares as the rank goes, and writes what it finds into the report."""

    def __init__(self, case: ParityCase, reference: Reference, report: RankReport) -> None:
        self._case, self._reference, self._report = case, reference, report
        self.player: Executor | None = None
        self.step = 0
        self._allowed = max(TOLERANCE, case.plan.tolerance)

    def samples(self, batch: Mapping[str, torch.Tensor] | None, truth: ReferenceStep) -> None:
        """The rows must be those of the reference's global batch that this rank reads."""
        self._note("samples", 0.0)
        wanted = self._case.plan.samples_read(self._report.rank)
        for key, whole in truth.batch.items():
            rows = whole[[row for row in wanted if row < len(whole)]]
            mine = rows[:0] if batch is None else batch[key]
            if mine.shape != rows.shape or not torch.equal(mine, rows):
                self._add("samples", key, "", None)

    def number(self, quantity: str, mine: float, wanted: float) -> None:
        error = abs(mine - wanted) / max(abs(wanted), 1e-300)
        self._note(quantity, error)
        if not error <= self._allowed:
            self._add(quantity, "", "", error)

    def values(
        self,
        quantity: str,
        step: int,
        mine: Mapping[str, torch.Tensor],
        wanted: TensorsByName,
        factor: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Each tensor against the scale of its block, in the order of backward: the last block first.

        `factor` is asked when the first of them differs: by what all do.
        """
        self.step, common = step, cache(factor)
        scales, allowed = self._scales(wanted), TOLERANCE if quantity == "initial value" else self._allowed
        for name in reversed(list(wanted)):
            block = self._reference.block_of[name]
            error = _distance(mine[name].detach(), wanted[name]) / scales[block]
            self._note(quantity, error)
            if not error <= allowed:
                self._add(quantity, name, block, error, common())

    def gradients(self, micro: int | None) -> None:
        """The handler of COMPARE: every gradient as the optimizer is about to see it, before clipping; where there is one.

        Of a step with one micro-batch, those of this rank's part: others take theirs at other times.
        """
        if self.player is None or not self._case.plan.is_primary_rank(self._report.rank):
            return
        truth = self._reference.steps[self.step]
        found = self.player.gather_gradients(local_only=micro is not None)
        wanted = (
            truth.gradients
            if micro is None
            else {name: truth.microbatch_gradients[micro][name] for name in found}
        )
        self.values("gradient", self.step, found, wanted, lambda: self._common_factor(found, wanted))

    def _common_factor(self, mine: TensorsByName, wanted: TensorsByName) -> float | None:
        """The number f with mine = f * wanted for all gradients at once, when there is one."""
        norm = sum((tensor * tensor).sum().item() for tensor in wanted.values())
        if not norm > 0:
            return None
        factor = sum((mine[name] * wanted[name]).sum().item() for name in wanted) / norm
        scales = self._scales(wanted)
        errors = [
            _distance(mine[name], factor * tensor) / scales[self._reference.block_of[name]]
            for name, tensor in wanted.items()
        ]
        return factor if all(error <= 1e-8 * max(1.0, abs(factor)) for error in errors) else None

    def _scales(self, wanted: TensorsByName) -> dict[str, float]:
        scales: dict[str, float] = {}
        for name, tensor in wanted.items():
            block = self._reference.block_of[name]
            # whole numbers are compared by themselves: a table of them would make every other error in its block look small
            largest = tensor.abs().max().item() if tensor.numel() and tensor.is_floating_point() else 0.0
            scales[block] = max(scales.get(block, 1e-30), largest)
        return scales

    def _note(self, quantity: str, error: float) -> None:
        self._report.max_errors[quantity] = _worst([self._report.max_errors.get(quantity, 0.0), error])

    def _add(
        self, quantity: str, name: str, block: str, error: float | None, factor: float | None = None
    ) -> None:
        self._report.differences.append(
            Difference(self.step, quantity, name, block, error, self._report.rank, factor)
        )


def _with_probe(plan: Plan) -> Plan:
    """`plan` with a COMPARE where CLIP stands: it waits for all that CLIP waits for. Where nobody clips, before each STEP."""

    def insert(actions: list[Action]) -> list[Action]:
        edited = []
        for action in actions:
            if action.kind == "CLIP" or (action.kind == "STEP" and action.microbatch is not None):
                edited.append(
                    Action(
                        "COMPARE", microbatch=action.microbatch, waits=action.waits, tensors=action.tensors
                    )
                )
            edited.append(action)
        return edited

    program: Program = plan.program.edit(insert)
    return replace(plan, program=program)


def _distance(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of two elements; infinite when the shapes differ, NaN when an element is NaN.

    Of whole numbers, which are exact: infinite when any differs.
    """
    if mine.shape != wanted.shape:
        return inf
    if not wanted.is_floating_point():
        return 0.0 if mine.dtype == wanted.dtype and torch.equal(mine, wanted) else inf
    return (mine - wanted).abs().max().item() if mine.numel() else 0.0


def _worst(errors: Iterable[float]) -> float:
    """The largest of `errors`; NaN is worse than any number, and having none is NaN too."""
    found = list(errors)
    return nan if not found or any(isnan(error) for error in found) else max(found)


def _digest(parameter: torch.Tensor) -> str:
    return sha256(
        parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
