"""Puts data parallelism alone first for a model that fits on one device, unless it is clearly slower.

A model that fits on one device needs no tensor, pipeline or context parallelism. They can still be faster by
the estimate, because each rank then launches fewer kernels or reduces fewer gradients. A lead below the error
of the estimate is no reason to use them: what is simpler comes first.

`ESTIMATE_ERROR` is the mean error of step times on published runs (docs/concepts/cost_model.md).
"""

from dataclasses import dataclass, replace

from meshwright.planner.analytic.closed_form_memory import estimate_memory
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import Candidate, SearchResult, search

ESTIMATE_ERROR = 0.05
DATA_PARALLEL_ALONE = {"tp": 1, "pp": 1, "cp": 1}


@dataclass(frozen=True)
class DataParallelChoice:
    """Data parallelism alone (its fastest configuration), compared with the fastest of all.

    `candidate` is None if it has no configuration: the batch does not divide by the devices (`batch_divides`
    is False), or nothing of it fits.
    """

    candidate: Candidate | None
    fastest: Candidate
    batch_divides: bool

    @property
    def is_first(self) -> bool:
        """Whether it comes first."""
        return (
            self.candidate is not None
            and self.candidate.seconds <= (1 + ESTIMATE_ERROR) * self.fastest.seconds
        )


def fits_on_one_device(request: SearchRequest) -> bool:
    """Returns whether the whole model fits on a device, with one sample in a microbatch."""
    one = replace(request.base_config, micro_batch=1, num_microbatches=request.batch)
    return estimate_memory(request.shape, one).total <= request.usable_memory


def compare_data_parallel(request: SearchRequest, result: SearchResult) -> DataParallelChoice | None:
    """Returns how data parallelism alone compares with the best of `result`.

    None for one device, for a model that does not fit on one, and if a choice excludes it.
    """
    is_excluded = request.required_axes or any(
        request.fixed.get(axis, size) != size for axis, size in DATA_PARALLEL_ALONE.items()
    )
    if is_excluded or request.machine.num_devices == 1 or not fits_on_one_device(request):
        return None
    alone = search(replace(request, fixed={**request.fixed, **DATA_PARALLEL_ALONE}), 1).best
    divides = request.batch % request.machine.num_devices == 0
    return DataParallelChoice(alone[0] if alone else None, result.best[0], divides)


def put_first(result: SearchResult, candidate: Candidate, num_kept: int) -> SearchResult:
    """Returns `result` with `candidate` before the others."""
    others = [each for each in result.best if each.config != candidate.config]
    return replace(result, best=(candidate, *others)[:num_kept])
