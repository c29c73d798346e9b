"""Trains a small model under pipeline or sharded layouts, and records its weights before each step, for tests
of the gradient noise scale.
"""

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.step.test_gradient_noise import ANALYZED, noisy
from tests.tiny_model import Tiny, executor_of, tiny_job, token_samples


def train_and_record(
    mesh: Mesh, strategies: tuple[Strategy, ...], micro_batch: int = 2
) -> tuple[list[list[Metrics]], list[Tiny]]:
    """Each rank's metrics of three steps, and the model as it was before each."""
    plan = make_plan(ANALYZED, noisy(tiny_job()), mesh, strategies, micro_batch)
    assert static_checks(plan) == []

    def rank(world: World) -> tuple[list[Metrics], list[Tiny]]:
        executor, local_batches = (
            executor_of(ANALYZED, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        models, metrics = [], []
        for step in range(3):
            model = Tiny().double()
            model.load_state_dict(executor.gather_parameters())
            models.append(model)
            metrics.append(executor.step(local_batches.batch(step)))
        executor.close()
        return metrics, models

    found = run_on_threads(rank, plan.mesh)
    return [metrics for metrics, _ in found], found[0][1]
