"""Models whose heads are exchanged for tokens: one device's numbers in float64, and no byte that the program does not state."""

import pytest
import torch

from meshwright.api import make_plan, read, trace, verify
from meshwright.model.analysis.analyze import Reading
from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.parallel.context.hybrid import Hybrid
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.ddp import Replicate
from meshwright.parallel.data.zero import Zero
from meshwright.parallel.memory.activation_checkpointing import Recompute
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.tensor.megatron_1d import Line
from meshwright.plan.job.data_source import DataSource, ModelSource
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, Optimizer, Train
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy
from meshwright.verifier.static_checks import prove
from meshwright.verifier.verdict import Verdict
from tests.argument_names import named
from tests.parallel.context.test_ring_models import bert, gpt2, padded, sliding
from tests.parallel.tensor.odd_llama import batches, known, llama

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


MIXED = [
    (gpt2, Mesh(cp=3), (Ulysses(), Recompute(), COPIES)),
    (sliding, Mesh(cp=3), (Ulysses(), COPIES)),
    (bert, Mesh(cp=3), (Hybrid(inner=3), COPIES)),
    (llama, Mesh(cp=4), (Hybrid(), Recompute(), COPIES)),
    (llama, Mesh(cp=2, tp=3), (Ulysses(), Line(), COPIES)),
    (llama, Mesh(pp=2, cp=2), (Ulysses(), Pipeline(), COPIES)),
]


def mixed(make, mesh: Mesh, strategies, example: int) -> Verdict:
    """What becomes of three steps of micro-batches of one row, of which one needs no mask, and the others do in some."""
    model = make()
    model.config.use_cache = False
    found = padded(model, 3)[1]
    reading = read(model, found[example])
    job = Job(ModelSource("own"), DataSource("random", sequence=TOKENS), Train(batch=ROWS, clip=0.5), Optimizer("sgd", lr=0.1))
    plan = make_plan(reading, job, mesh, strategies, 1)
    assert not any(move.dtype == "bool" for action in plan.actions for move in action.inner)
    return verify(reading, plan, found)


@pytest.mark.parametrize(("make", "mesh", "strategies"), MIXED, ids=named)
@pytest.mark.parametrize("example", [0, -1], ids=["read without a mask", "read with a mask"])
def test_which_rows_are_padded_makes_no_difference_to_what_is_sent(make, mesh: Mesh, strategies, example: int) -> None:
    verdict = mixed(make, mesh, strategies, example)
    assert verdict.passed, verdict


def test_rows_of_a_mask_that_are_others_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Share.rows_together

    def shifted(share: Share, mask: torch.Tensor) -> torch.Tensor | None:
        rows = right(share, mask)
        return None if rows is None else rows.roll(1, -2)

    monkeypatch.setattr(Share, "rows_together", shifted)
    assert not mixed(llama, Mesh(cp=2), (Ulysses(), COPIES), -1).passed


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
