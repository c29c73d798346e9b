"""Local SGD: every H steps the parameters of all sites become their mean.

Why it works: each site takes H steps of its own from the same start. Where the steps are small, H steps and
one mean come close to H steps with the mean gradient, and send 1 / H of the bytes. Early in a run, when
parameters move fast, sites drift apart most: post-local SGD averages after each of the first `warmup_steps`
steps, and only then begins rounds of H (rounds.py has what holds for all rounds).

    step        1  2  3  4  5  6  7  8  9  10        sync_every = 4, warmup_steps = 2
    average     x  x           x           x

    x <- 1/k sum over the k sites of x        masters, shards or parameters: what the optimizer steps

With plain SGD, H = 1 and as many tokens at each site, that is data parallelism: the mean of steps is the step
of the mean. Optimizer states stay those of the site.

Cost: per round 2 (k-1)/k N bytes over `outer`; between rounds 0. No state beyond the totals of the round.
Limits: the noise that averaging takes out of the parameters is noise that a larger H lets in; momentum of a
site knows nothing of the others.
Paper: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767 (algorithm 1); Lin et
al. 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217 (post-local SGD, section 3).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from meshwright.parallel.outer.rounds import RoundStrategy
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Period


@dataclass(frozen=True)
class LocalSGD(RoundStrategy):
    """Averages the parameters of the sites along `axis` every `sync_every` steps, and after each of the first
    `warmup_steps` steps.
    """

    name: ClassVar[str] = "local_sgd"
    warmup_steps: int = field(default=0, metadata=at_least(0))

    def period(self, job: Job) -> Period:
        return Period(self.sync_every, self.warmup_steps, job.train.steps)

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        if self.warmup_steps > job.train.steps > 0:
            text = f"{self.warmup_steps} warm-up steps in a run of {job.train.steps}"
            fix = f"write fewer than {job.train.steps}, or raise train.steps"
            yield Diagnostic(text, fix, f"strategies.{self.name}.warmup_steps")

    def end_round(self, name: str, mean: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> None:
        """Leaves the mean as it is."""

    def on_sites(self, job: Job, sites: Sequence[Mapping[str, nn.Parameter]]) -> Callable[[int], None] | None:
        period = self.period(job)

        @torch.no_grad()
        def end_step(step: int) -> None:
            for name in sites[0] if period.ends_with(step) else ():
                mean = torch.stack([site[name] for site in sites]).mean(0)
                for site in sites:
                    site[name].copy_(mean)

        return end_step
