"""Compares a plan with one device where all ranks are threads of this process."""

from collections.abc import Callable

from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.one_device.recorded_run import record_run
from meshwright.verifier.parity import RankReport, compare_rank
from meshwright.verifier.reference import run_reference


def compare_on_threads(
    parity_case: ParityCase,
    num_steps: int,
    timeout_s: float = 60.0,
    on_rank: Callable[[ParityCase, World], ParityCase] = lambda parity_case, world: parity_case,
) -> list[RankReport]:
    """Returns the report of each rank of the plan over `num_steps` steps.

    No rank waits longer than `timeout_s` seconds for another one. `on_rank` may change what one rank plays.
    """
    mesh = parity_case.plan.mesh
    recorded = run_on_threads(
        lambda world: record_run(on_rank(parity_case, world), world, num_steps), mesh, timeout_s=timeout_s
    )
    reference = run_reference(parity_case, num_steps, recorded[0])
    return run_on_threads(
        lambda world: compare_rank(on_rank(parity_case, world), world, reference), mesh, timeout_s=timeout_s
    )
