"""Compares how a lossy plan learns with how its exact counterpart does: a gap of losses beside the spread of
seeds.

Why: that a plan applies what its codes say (parity.py) does not say how well a model learns from that. This
depends on the model and the data, so both plans are trained on them, with several seeds. A seed decides the
order of the data, initial values and dropout; under the same seed both plans see the same samples and begin
with the same values, so that what they differ by is the technique.

    seed 0    exact     5.55 -> 3.21        lossy   5.55 -> 3.22       gap   +0.01
    seed 1    exact     5.54 -> 3.18        lossy   5.54 -> 3.18       gap   +0.00
    seed 2    exact     5.56 -> 3.25        lossy   5.56 -> 3.24       gap   -0.01

    gap       mean of (lossy - exact) over the seeds, as a share of the mean exact loss
    spread    largest - smallest exact loss, likewise

The loss is that of the held-out samples after the last step, or without any the mean over the last tenth of
the steps. Outcomes:

    within      gap <= spread: another seed changes more than the technique does
    behind      gap > spread
    diverged    a loss of the lossy plan is not finite
    untold      the exact runs are of no use as a measure: their losses are not finite, have not fallen by
                more than the spread, or are equal for all seeds

The exact counterpart of a plan has the same job, mesh and microbatches; strategies that are not exact are
left out, or replaced (`Strategy.exact_counterpart`). That of sites which train apart is one site that has all
samples, in more microbatches: data parallelism of all sites gives the same numbers. The loss of a step is
then the mean over the sites, and the last step ends a round.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.microbatches import LocalBatch
from meshwright.engine.step.executor import StepExecutor
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import ROUND_AXES, Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.verdict_and_cause import write_json

Trained = tuple[tuple[float, ...], tuple[float, float] | None]  # by `train_curve`
NUM_SEEDS = 3
MIN_STEPS, DEFAULT_STEPS = 10, 100
OUTCOMES = {
    "within": "learns as well as its exact counterpart",
    "behind": "learns worse than its exact counterpart",
    "diverged": "diverges, and its exact counterpart does not",
    "untold": "cannot be compared with its exact counterpart",
}


@dataclass(frozen=True)
class LossCurve:
    """One run: its seed, whether it was the exact plan, the losses of all steps, and that of the held-out
    samples before the first and after the last step (none: None).
    """

    seed: int
    is_exact: bool
    losses: tuple[float, ...]
    held_out: tuple[float, float] | None = None

    @property
    def first(self) -> float:
        """The loss in the beginning."""
        return self.held_out[0] if self.held_out else fmean(self.losses[: self._window])

    @property
    def last(self) -> float:
        """The loss that is compared."""
        return self.held_out[1] if self.held_out else fmean(self.losses[-self._window :])

    @property
    def _window(self) -> int:
        return max(1, len(self.losses) // 10)

    def __str__(self) -> str:
        plan = "exact" if self.is_exact else "lossy"
        return f"seed {self.seed}, {plan}: loss {self.first:.4f} -> {self.last:.4f}"


@dataclass(frozen=True)
class CurveVerdict:
    """The outcome: `curves` are the runs, the exact and the lossy one of each seed in turn.

    `techniques` are the strategies that are not exact, as text; `rank_backend` says where the ranks ran.
    """

    plan: str
    exact_plan: str
    mesh: str
    model: str
    rank_backend: str
    techniques: tuple[str, ...]
    num_steps: int
    curves: tuple[LossCurve, ...]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[LossCurve, LossCurve]]:
        """The exact and the lossy run of each seed."""
        return list(zip(self.curves[::2], self.curves[1::2], strict=True))

    @property
    def gaps(self) -> list[float]:
        """How far the lossy plan is behind under each seed, as a share of the mean exact loss."""
        return [(lossy.last - exact.last) / self._scale for exact, lossy in self.pairs]

    @property
    def gap(self) -> float:
        """The mean of the gaps; below 0 where the lossy plan is ahead."""
        return fmean(self.gaps)

    @property
    def spread(self) -> float:
        """How far apart the exact runs are, as a share of their mean loss."""
        last = [exact.last for exact, _ in self.pairs]
        return (max(last) - min(last)) / self._scale

    @property
    def fall(self) -> float:
        """How far the loss of the exact runs has fallen, in the mean, as a share of where it has ended."""
        return fmean(exact.first - exact.last for exact, _ in self.pairs) / self._scale

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        if not all(_is_finite(exact) for exact, _ in self.pairs) or not 0 < self.spread < self.fall:
            return "untold"
        if not all(_is_finite(lossy) for _, lossy in self.pairs):
            return "diverged"
        return "within" if self.gap <= self.spread else "behind"

    @property
    def passed(self) -> bool:
        """Whether the lossy plan learns as well as the exact one."""
        return self.outcome == "within"

    @property
    def reason(self) -> str:
        """Why the outcome is what it is, in a sentence, and what to do if it is not the wanted one."""
        exact, spread = self.pairs[0][0], f"seeds alone change it by {self.spread:.2%}"
        what = "the held-out loss" if exact.held_out else "the loss of the last tenth of the steps"
        if self.outcome == "untold":
            if not all(_is_finite(each) for each, _ in self.pairs):
                return "the exact runs diverge: repair the job first, such as optimizer.lr"
            if not self.spread:
                return (
                    "the exact runs of all seeds are equal: neither initial values nor the order of the data "
                    "depend on train.seed, so there is no spread to compare with"
                )
            return (
                f"{what} has fallen by {self.fall:.2%} in {self.num_steps} steps, and {spread}: add --steps"
            )
        if self.outcome == "diverged":
            seeds = [str(lossy.seed) for _, lossy in self.pairs if not _is_finite(lossy)]
            text = f"{what} is not finite with seed {', '.join(seeds)}"
            return f"{text}: lose less in each step, or lower the learning rate"
        where = "above" if self.gap > 0 else "below"
        text = f"{what} is {abs(self.gap):.2%} {where} the exact one in the mean, and {spread}"
        if self.outcome == "behind":
            text += ": lose less in each step, or see with more --steps whether the gap closes"
        return text

    def write(self, path: Path) -> None:
        """Writes verdict and curves as JSON; a loss that is not finite becomes a text."""
        told = {"passed": self.passed, "outcome": self.outcome, "reason": self.reason}
        numbers = {"gap": self.gap, "gaps": self.gaps, "spread": self.spread, "fall": self.fall}
        write_json(path, {**told, **numbers, **asdict(self)})

    def __str__(self) -> str:
        return f"{self.mesh} {OUTCOMES[self.outcome]}: {self.reason}"

    @property
    def _scale(self) -> float:
        return abs(fmean(exact.last for exact, _ in self.pairs)) or 1.0


def exact_counterparts(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """Returns the strategies of the exact plan that a plan of `strategies` is compared with."""
    found = (each if each.exact else each.exact_counterpart() for each in strategies)
    return tuple(each for each in found if each is not None)


def one_site(mesh: Mesh) -> Mesh:
    """Returns the mesh of the exact plan: `mesh`, with one of its sites."""
    return replace(mesh, **dict.fromkeys(ROUND_AXES, 1))


def default_steps(plan: Plan) -> int:
    """Returns for how many steps curves of `plan` run: at most DEFAULT_STEPS, up to the end of a round; or
    for the first round.
    """
    most = min(DEFAULT_STEPS, plan.job.train.steps)
    ends = _ends_of_rounds(plan)
    return max((end for end in ends if end <= most), default=min(ends, default=most))


def mean_over_sites(plan: Plan, by_rank: Sequence[Trained]) -> Trained:
    """Returns the curve of `plan`, of which each rank returned that of its site: the mean of the losses of
    each step, and those of the held-out samples, which all sites have alike.
    """
    of_sites = {plan.site_of(rank): losses for rank, (losses, _) in enumerate(by_rank)}
    return tuple(map(fmean, zip(*of_sites.values(), strict=True))), by_rank[0][1]


def _ends_of_rounds(plan: Plan) -> list[int]:
    """Returns after how many steps a round of `plan` ends; [] without rounds."""
    period, steps = plan.program.period, range(plan.job.train.steps)
    return [] if period is None else [step + 1 for step in steps if period.ends_with(step)]


def curve_diagnostics(plan: Plan, num_steps: int, num_available_steps: int | None) -> Iterator[Diagnostic]:
    """Yields why `num_steps` steps of `plan` show nothing, or cannot be taken; None available steps: endless
    data.
    """
    train, is_coded_from = plan.job.train, plan.program.first_coded_step
    if plan.exact:
        names = ", ".join(dict.fromkeys(each.name for each in plan.strategies)) or "none"
        text = f"every strategy of the plan is exact ({names}): there is no lossy plan to compare with it"
        yield Diagnostic(text, "leave out --curve: verify compares the numbers with one device", "--curve")
    ends = _ends_of_rounds(plan)
    if ends and num_steps <= train.steps and num_steps not in ends:
        text = f"step {num_steps} lies in the middle of a round, when each site has parameters of its own"
        near = [end for end in ends if end >= MIN_STEPS] or ends
        nearest = min(near, key=lambda end: abs(end - num_steps))
        yield Diagnostic(text, f"write --steps {nearest}, which ends one", "--steps")
    if num_steps < MIN_STEPS:
        text = f"{num_steps} steps are no curve"
        yield Diagnostic(text, f"write --steps {MIN_STEPS} or more", "--steps")
    if num_steps > train.steps:
        text = f"{num_steps} steps, and the run has {train.steps}, for which its learning rates are"
        yield Diagnostic(text, f"write --steps {train.steps}, or a larger train.steps", "--steps")
    if num_available_steps is not None and num_steps > num_available_steps:
        text = f"the data end after {num_available_steps} of {num_steps} steps"
        fix = f"write --steps {num_available_steps}, or data.epochs = 0: without end"
        yield Diagnostic(text, fix, "--steps")
    if num_steps <= is_coded_from:
        text = f"the first {is_coded_from} steps of the plan are exact, and {num_steps} are compared"
        yield Diagnostic(text, f"write more --steps than {is_coded_from}, or smaller exact_steps", "--steps")


def train_curve(
    executor: StepExecutor,
    world: World,
    read_batch: Callable[[int], LocalBatch],
    read_held_out: Callable[[], Iterable[LocalBatch]] | None,
    num_steps: int,
) -> Trained:
    """Trains one rank; returns the loss of each step, and that of the held-out samples before and after.

    All ranks call it, and get the same. A step that was skipped has the loss of the step before.
    """

    def evaluate() -> float:
        world.ledger.phase = "evaluate"
        return 0.0 if read_held_out is None else executor.evaluate(read_held_out()).loss

    before, losses = evaluate(), list[float]()
    for step in range(num_steps):
        world.ledger.phase, world.ledger.step = "step" if step else "first_step", step + 1
        metrics = executor.step(read_batch(step))
        losses.append(losses[-1] if metrics.is_skipped and losses else metrics.loss)
    return tuple(losses), None if read_held_out is None else (before, evaluate())


def _is_finite(curve: LossCurve) -> bool:
    return isfinite(curve.last)
