"""A plan beside one device: every rank trains, and holds each number against the reference.

The comparison runs in float64 with plain SGD: Adam would hide a gradient that is wrong by a factor. Errors of gradients
and parameters are measured against the largest magnitude in their block, because a gradient that is truly zero (a key
bias) holds nothing but rounding noise. Each rank compares its own copy, so a replica that drifts is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256

import torch

from meshwright.comm.group import Entry, World
from meshwright.core.job import Job, Optimizer, Precision, Schedule
from meshwright.core.plan import Plan
from meshwright.core.program import Action, Program
from meshwright.core.steps import ROLE
from meshwright.engine.player import Player
from meshwright.engine.state import State
from meshwright.verifier.reference import Case, Reference, StepTruth, Values
from meshwright.verifier.verdict import Difference, Verdict, diagnose

TOLERANCE = 1e-10


@dataclass
class RankReport:
    """What one rank found: differences, the worst error per quantity, a digest of its parameters, what it sent."""

    rank: int
    differences: list[Difference] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    sent: list[Entry] = field(default_factory=list)
    steps: int = 0


def exact_job(job: Job) -> Job:
    """`job` as parity runs it: float64, SGD with its groups and clip, a constant learning rate of 0.1."""
    sgd = Optimizer("sgd", lr=0.1, weight_decay=job.optimizer.weight_decay, momentum=0.5, groups=job.optimizer.groups)
    return replace(job, precision=Precision("float64", "float64", "float64"), optimizer=sgd, schedule=Schedule())


def compare_rank(case: Case, world: World, reference: Reference) -> RankReport:
    """Train one rank of `case.plan` and compare it with `reference`, step by step."""
    report = RankReport(world.rank)
    watched = _Watch(case, reference, report)
    subject = case.make_subject()
    watched.values("initial value", 0, subject.parameters, reference.initial)
    world.ledger.recording = True
    state = State(subject, world, case.loss)
    player = Player(_with_probe(case.plan), state, dice=case.make_dice(), extra={"PROBE": watched.gradients})
    rows = case.rows(case.plan, world.rank)
    try:
        for step, truth in enumerate(reference.steps):
            watched.step = step
            batch = rows(step)
            watched.samples(batch, truth, case.plan.data_index(world.rank))
            metrics = player.step(batch)
            watched.number("loss", metrics.loss, truth.loss)
            watched.number("grad norm", metrics.grad_norm, truth.grad_norm)
            watched.values("parameter", step, subject.parameters, truth.parameters)
            report.steps += 1
    finally:
        player.close()
    report.digest = _digest(subject.parameters)
    report.sent = list(world.ledger.entries)
    return report


def judge(case: Case, reports: list[RankReport], body: str, versions: Mapping[str, str], tolerance: float = TOLERANCE) -> Verdict:
    """The verdict over all ranks' reports: equality with one device, replicas alike, and what was sent as planned."""
    found = sorted((d for report in reports for d in report.differences), key=lambda d: d.step)
    for report in reports[1:]:
        if report.digest != reports[0].digest:
            found.append(Difference(report.steps, "replica", "all parameters", "any", float("nan"), report.rank))
    worst = {key: max(report.worst.get(key, 0.0) for report in reports) for key in reports[0].worst}
    planned = planned_bytes(case.plan)
    unplanned = [
        report.rank for report in reports if sent_bytes(report) != {key: value * report.steps for key, value in planned.items()}
    ]
    if unplanned:
        found.append(Difference(0, "ledger", "", "", float("nan"), unplanned[0]))
    plan = case.plan
    return Verdict(
        plan=plan.hash,
        mesh=str(plan.mesh),
        model=plan.anatomy.name,
        body=body,
        steps=reports[0].steps,
        tolerance=tolerance,
        passed=not found,
        worst=worst,
        bytes_planned=planned,
        cause=diagnose(found),
        first=found[0] if found else None,
        others=max(0, len(found) - 1),
        versions=dict(versions),
    )


def planned_bytes(plan: Plan) -> dict[str, int]:
    """The bytes that each action of the program puts into a collective, per rank and step."""
    return {action.name: action.transfer.nbytes for action in plan.program.actions(ROLE) if action.transfer is not None}


def sent_bytes(report: RankReport) -> dict[str, int]:
    """The bytes that a rank did put into collectives, per action, over all its steps."""
    total: dict[str, int] = {}
    for entry in report.sent:
        total[entry.action] = total.get(entry.action, 0) + entry.nbytes
    return total


class _Watch:
    """Compares as the rank goes, and writes what it finds into the report."""

    def __init__(self, case: Case, reference: Reference, report: RankReport) -> None:
        self._case, self._reference, self._report = case, reference, report
        self.step = 0

    def samples(self, batch: Mapping[str, torch.Tensor] | None, truth: StepTruth, index: int) -> None:
        """The rows must be this rank's share of the reference's global batch."""
        plan = self._case.plan
        starts = [(micro * plan.num_data + index) * plan.micro_batch for micro in range(plan.num_micro)]
        wanted = [row for start in starts for row in range(start, start + plan.micro_batch)]
        for key, whole in truth.batch.items():
            rows = whole[[row for row in wanted if row < len(whole)]]
            mine = rows[:0] if batch is None else batch[key]
            if mine.shape != rows.shape or not torch.equal(mine, rows):
                self._add("samples", key, "", 1.0)

    def number(self, quantity: str, mine: float, wanted: float) -> None:
        error = abs(mine - wanted) / max(abs(wanted), 1e-300)
        self._note(quantity, error)
        if not error <= TOLERANCE:
            self._add(quantity, "", "", error)

    def values(self, quantity: str, step: int, mine: Mapping[str, torch.Tensor], wanted: Values) -> None:
        """Each tensor against the scale of its block, in the order of backward: the last block first."""
        self.step = step
        scales = self._scales(wanted)
        for name in reversed(list(wanted)):
            block = self._reference.block_of[name]
            tensor = mine[name].detach()
            error = ((tensor - wanted[name]).abs().max() / scales[block]).item() if tensor.numel() else 0.0
            self._note(quantity, error)
            if not error <= TOLERANCE:
                self._add(quantity, name, block, error, _factor(tensor, wanted[name]))

    def gradients(self, action: Action, state: State) -> None:
        """The handler of PROBE: every gradient as the optimizer is about to see it, before clipping."""
        grads = {name: p.grad for name, p in state.subject.trainable.items()}
        found = {name: torch.zeros_like(state.subject.parameters[name]) if g is None else g for name, g in grads.items()}
        self.values("gradient", self.step, found, self._reference.steps[self.step].gradients)

    def _scales(self, wanted: Values) -> dict[str, float]:
        scales: dict[str, float] = {}
        for name, tensor in wanted.items():
            block = self._reference.block_of[name]
            largest = tensor.abs().max().item() if tensor.numel() else 0.0
            scales[block] = max(scales.get(block, 1e-30), largest)
        return scales

    def _note(self, quantity: str, error: float) -> None:
        self._report.worst[quantity] = max(self._report.worst.get(quantity, 0.0), error)

    def _add(self, quantity: str, name: str, block: str, error: float, factor: float | None = None) -> None:
        self._report.differences.append(Difference(self.step, quantity, name, block, error, self._report.rank, factor))


def _with_probe(plan: Plan) -> Plan:
    """`plan` with a PROBE where CLIP stands: it waits for all that CLIP waits for."""

    def insert(actions: list[Action]) -> list[Action]:
        edited = []
        for action in actions:
            if action.kind == "CLIP":
                edited.append(Action("PROBE", waits=action.waits, tensors=action.tensors))
            edited.append(action)
        return edited

    program: Program = plan.program.edit(insert)
    return replace(plan, program=program)


def _factor(mine: torch.Tensor, wanted: torch.Tensor) -> float | None:
    """The number f with mine = f * wanted, when there is one; None for zeros and for other differences."""
    norm = (wanted * wanted).sum()
    if not norm > 0:
        return None
    factor = (mine * wanted).sum() / norm
    alike = (mine - factor * wanted).abs().max() <= 1e-8 * wanted.abs().max()
    return factor.item() if alike else None


def _digest(parameters: Mapping[str, torch.Tensor]) -> str:
    digest = sha256()
    for name in sorted(parameters):
        digest.update(parameters[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
