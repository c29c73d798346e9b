"""Models whose heads are exchanged for tokens: one device's numbers in float64, and no byte that the program does not state."""

import pytest

from meshwright.api import make_plan, read, trace, verify
from meshwright.core.errors import PlanError
from meshwright.core.job import Job, Optimizer, Train
from meshwright.core.mesh import Mesh
from meshwright.core.sources import DataSource, ModelSource
from meshwright.core.strategy import Strategy
from meshwright.model.reading import Reading
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.data.replicate import Replicate
from meshwright.strategies.data.zero import Zero
from meshwright.strategies.memory.recompute import Recompute
from meshwright.strategies.sequence.hybrid import Hybrid
from meshwright.strategies.sequence.ulysses import Ulysses
from meshwright.strategies.tensor.line import Line
from meshwright.verifier.static import prove
from tests.strategies.sequence.test_ring_models import gpt2, sliding
from tests.strategies.tensor.llama import batches, known, llama

ROWS, TOKENS = 4, 9
COPIES = Replicate(axis="cp")


def equal(reading: Reading, mesh: Mesh, *strategies: Strategy, micro_batch: int = 2) -> None:
    """Check that the plan's program can work, is what is issued, and gives what one device gives."""
    source, train = DataSource("random", sequence=TOKENS), Train(batch=ROWS, clip=0.5)
    job = Job(ModelSource("llama"), source, train, Optimizer("adamw", lr=0.1, weight_decay=0.1))
    plan = make_plan(reading, job, mesh, strategies, micro_batch)
    assert not prove(plan)
    verdict = verify(reading, plan, batches(2, ROWS))
    assert verdict.passed, verdict
    traced = trace(reading, plan)
    assert traced.passed, traced


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(cp=3), (Ulysses(), COPIES)),
        (Mesh(cp=2, tp=3), (Ulysses(), Line(), COPIES)),
        (Mesh(cp=6), (Hybrid(inner=3), COPIES)),
        (Mesh(cp=4, tp=2), (Hybrid(), Line(), COPIES)),
        (Mesh(dp_shard=2, cp=2), (Batch(axis="dp_shard"), Ulysses(), Zero(stage=3), Recompute())),
        (Mesh(dp_shard=2, cp=4), (Batch(axis="dp_shard"), Hybrid(), Zero(stage=3), Recompute())),
    ],
    ids=str,
)
def test_a_llama_with_grouped_queries(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    equal(known(), mesh, *strategies)


@pytest.mark.parametrize("make", [gpt2, sliding], ids=lambda make: make.__name__)
@pytest.mark.parametrize("strategy", [Ulysses(), Hybrid(inner=3)], ids=str)
def test_models_with_three_heads_and_with_masks(make, strategy: Strategy) -> None:
    model = make()
    model.config.use_cache = False
    reading = read(model, batches(1, ROWS)[0])
    equal(reading, Mesh(cp=3), strategy, COPIES)


def test_heads_that_tensor_parallelism_has_divided_count() -> None:
    with pytest.raises(
        PlanError, match=r"attention has 2 heads on a rank, and they go to 3 ranks[^|]*or set mesh.cp to 1 or 2$"
    ) as told:
        equal(known(), Mesh(cp=3, tp=2), Ulysses(), Line(), COPIES)
    assert len(told.value.faults) == 2  # the other rank of tp has four


def test_layers_that_are_frozen_in_part_send_gradients_of_what_learns() -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "head" in name)
    reading = read(model, batches(1, ROWS)[0])
    first, second = reading.tokens.attends
    assert (first.learns, second.learns) == ((True, False, False), (True, True, True))
    equal(reading, Mesh(cp=3), Ulysses(), COPIES)
