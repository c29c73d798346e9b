"""A model of two towers with a contrastive loss: each sample is compared with all samples of the global
batch.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.tiny_model import tiny_job

IMAGE, TEXT, WIDTH = 7, 9, 4


class Towers(nn.Module):
    """Two linear towers, their rows of length 1, and a learned temperature; `bare` returns the parameter
    itself.
    """

    def __init__(self, *, bare: bool = False, inside: bool = False) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Linear(IMAGE, WIDTH),
            nn.Sequential(nn.Linear(TEXT, 5), nn.Tanh(), nn.Linear(5, WIDTH)),
        )
        self.log_scale = nn.Parameter(torch.tensor(0.7))
        self.bare, self.inside = bare, inside

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        if self.inside:
            return first @ second.T, first, second
        return first, second, self.log_scale if self.bare else self.log_scale.exp()


def info_nce(outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
    """The sum over rows of the cross-entropies of both directions; rows of one `kind` are no negatives of
    each other.
    """
    first, second, scale = outputs
    logits = scale * first @ second.T
    kind = batch["kind"]
    same = (kind[:, None] == kind[None, :]) & ~torch.eye(len(kind), dtype=torch.bool)
    logits = logits.masked_fill(same, -30.0)
    right = torch.arange(len(logits))
    return F.cross_entropy(logits, right, reduction="sum") + F.cross_entropy(logits.T, right, reduction="sum")


def number_of_samples(batch: Batch) -> torch.Tensor:
    """Returns how many rows there are."""
    return torch.tensor(len(batch["kind"]))


CONTRASTIVE = Loss(info_nce, number_of_samples, targets=("kind",), whole_batch=True)


def pairs(count: int = 24) -> dict[str, torch.Tensor]:
    """Rows of both kinds of input, and a kind per row."""
    generator = torch.Generator().manual_seed(3)
    image, text = (
        torch.randn(count, width, generator=generator, dtype=torch.float64) for width in (IMAGE, TEXT)
    )
    return {"image": image, "text": text, "kind": torch.randint(5, (count,), generator=generator)}


def global_batches(count: int, size: int = 12) -> list[dict[str, torch.Tensor]]:
    """`pairs(count)` in batches of `size`; the last may be short."""
    samples = pairs(count)
    return [
        {key: value[first : first + size] for key, value in samples.items()}
        for first in range(0, count, size)
    ]


def analyzed_towers(
    loss: Loss = CONTRASTIVE,
    model: type[Towers] = Towers,
    example: dict[str, torch.Tensor] | None = None,
    **options: bool,
) -> AnalyzedModel:
    """Returns what the towers are made of, read from float32 rows."""
    samples = {
        key: value.float() if value.is_floating_point() else value
        for key, value in (example or pairs(4)).items()
    }
    return analyze(lambda: model(**options), samples, loss=loss)


def towers_plan(
    analyzed: AnalyzedModel,
    mesh: Mesh,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
    job: Job | None = None,
) -> Plan:
    """The plan over the data axes of `mesh`."""
    return make_plan(analyzed, job or tiny_job(), mesh, strategies, micro_batch)
