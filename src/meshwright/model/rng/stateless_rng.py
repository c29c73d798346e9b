"""Dropout masks that belong to samples, not to devices.

A *draw site* is the n-th draw within one block call of the forward. The number at a site is a hash of

    (seed, step, site)  ->  key            (key, global sample id)  ->  the sample's key
    (the sample's key, logical index within the sample)  ->  64 bits  ->  keep if bits / 2^64 >= p

so a sample gets the same masks however the batch is split over ranks and microbatches, and a block that is
recomputed draws them again. The sample dim of a site cannot be read off its shape when the local batch is 1.
Trials at one or more batch sizes determine it beforehand, and `DrawSites` keeps it:

    "dim0"       dim 0 is the batch                           (B, T, C), (B, heads, T, T)
    "dim1"       dim 1 is the batch                           (T, B, C)
    "flattened"  dim 0 is batch x something, sample-major     (B*T, C), (B*heads, T, T)
    "shared"     one draw for all samples                     a relative-position bias (heads, T, T)

Each trial keeps the layouts that the drawn shape allows; of those that all trials allow, the first in this
order is used. One trial at a batch size that occurs nowhere else in the model decides nearly all sites; a
second one at another size decides the rest. On a rank with a slice of the tensor, the logical index is the
index in the full tensor (model/rng/sharded_draws.py).

Cost: one splitmix64 per element, about ten integer operations; on a GPU one kernel for a mask
(model/rng/draw_ops.py), and where a rank draws several ranges of a tensor the computation of their indices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from meshwright.model.rng import draw_ops
from meshwright.model.rng.sharded_draws import (
    DrawRegion,
    DrawSharding,
    NestedSlice,
    TensorSlice,
    find_slice,
    locate_region,
)
from meshwright.model.tensors.counter_rng import chunk_numel, derive_key, signed64
from meshwright.plan.job.errors import PlanError

DrawOp = Callable[..., torch.Tensor]  # an operator of draw_ops, with some arguments given
SampleLayout = Literal["dim0", "dim1", "flattened", "shared"]
SAMPLE_LAYOUTS: tuple[SampleLayout, ...] = ("dim0", "dim1", "flattened", "shared")


@dataclass
class DrawSites:
    """For every site, the layouts that all trials so far allow, and the last trial's batch size and shape.

    `layer_pairs` names, for a site between a colwise and a rowwise layer, these two layers.
    """

    layouts: dict[str, tuple[SampleLayout, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, torch.Size]] = field(default_factory=dict)
    layer_pairs: dict[str, tuple[str, str]] = field(default_factory=dict)

    def record(self, site: str, shape: torch.Size, batch: int) -> None:
        """Records that `site` drew a tensor of `shape` when the forward ran on `batch` samples."""
        fits = {
            "dim0": len(shape) > 0 and shape[0] == batch,
            "dim1": len(shape) > 1 and shape[1] == batch,
            "flattened": len(shape) > 0 and shape[0] > batch and shape[0] % batch == 0,
            "shared": True,
        }
        allowed = self.layouts.get(site, SAMPLE_LAYOUTS)
        self.layouts[site] = tuple(layout for layout in allowed if fits[layout])
        self.shapes[site] = batch, shape

    def layout(self, site: str) -> SampleLayout:
        """Returns the sample layout of `site`. Raises PlanError for a site that no trial reached."""
        if site not in self.layouts:
            what = "the forward draws random numbers at a site that the trial did not reach"
            fix = "let the forward draw at the same sites for any data and step, or set the dropout to 0"
            raise PlanError(what, fix=fix, location=site)
        return self.layouts[site][0]

    def full_shape(self, site: str) -> tuple[int, ...]:
        """Returns the shape that the unsharded model draws at `site` for one sample."""
        batch, shape = self.shapes[site]
        return sample_shape(self.layout(site), shape, batch)


def sample_shape(layout: SampleLayout, shape: torch.Size, batch: int) -> tuple[int, ...]:
    """Returns the shape of one sample's part of a tensor of `shape` for `batch` samples."""
    match layout:
        case "dim0":
            return tuple(shape[1:])
        case "dim1":
            return (shape[0], *shape[2:])
        case "flattened":
            return (shape[0] // max(1, batch), *shape[1:])
        case "shared":
            return tuple(shape)


class StatelessRNG:
    """The random numbers of one rank's forward, from the step, the samples and the current block call.

    The engine calls `begin_forward` before each microbatch and `enter_block` before each block. Draws
    between blocks continue the numbering of the last block call; an engine that replaces blocks by stubs
    enters a block call of its own after each of them.
    """

    def __init__(self, seed: int, sites: DrawSites | None = None, trial_draw: float = 0.5) -> None:
        self.sites = DrawSites() if sites is None else sites
        self._trial_draw = trial_draw
        self._seed = seed
        self._step = 0
        self._samples = torch.zeros(0, dtype=torch.int64)
        self._block_call = ""
        self._num_draws = 0
        self._trial_batch: int | None = None
        self._shardings: dict[str, tuple[DrawSharding, ...]] = {}

    @property
    def num_draws(self) -> int:
        """The number of sites that the current block call has passed."""
        return self._num_draws

    @property
    def location(self) -> str:
        """The current block call, as text for an error message."""
        return self._block_call or "before the first block"

    def begin_forward(self, step: int, sample_ids: torch.Tensor) -> None:
        """Starts a forward: its global step, and the global ids (int64) of its local samples in order."""
        self._step = step
        self._samples = sample_ids.to(torch.int64)
        self.enter_block("")

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Context manager in which another forward may run; on exit the state is what it was on entry."""
        before = self._step, self._samples, self._block_call, self._num_draws
        try:
            yield
        finally:
            self._step, self._samples, self._block_call, self._num_draws = before

    @property
    def in_trial(self) -> bool:
        """Whether a trial forward is running."""
        return self._trial_batch is not None

    def begin_trial(self, batch: int | None) -> None:
        """Starts a trial forward on `batch` samples; None ends the trials."""
        self._trial_batch = batch
        self.enter_block("")

    def repeat_draws(self, block_call: str) -> None:
        """Draws in a trial what `block_call` has drawn, as the current block call, which equals it."""
        batch = self._trial_batch
        while batch is not None and (site := f"{block_call}/{self._num_draws}") in self.sites.shapes:
            samples, shape = self.sites.shapes[site]
            if samples != batch:
                return
            self.sites.record(f"{self._block_call}/{self._num_draws}", shape, batch)
            self._num_draws += 1

    def set_shardings(self, shardings: Mapping[str, tuple[DrawSharding, ...]]) -> None:
        """Sets, by site, the shardings of which this rank may have a slice; elsewhere it has everything."""
        self._shardings = {site: each for site, each in shardings.items() if each}

    def enter_block(self, block_call: str) -> None:
        """Starts a block call, whose sites are numbered from 0, also when it is recomputed."""
        self._block_call = block_call
        self._num_draws = 0

    def keep_mask(self, shape: Iterable[int], p: float, device: torch.device) -> torch.Tensor:
        """Returns a bool mask of `shape` for the next site: False with probability `p`. All True in a
        trial.
        """
        return self._draw(torch.Size(shape), _keep_draw(p), torch.bool, device)

    def uniform(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns numbers in [0, 1) of `shape` for the next site. All `trial_draw` in a trial."""
        return self._draw(torch.Size(shape), partial(draw_ops.uniform, dtype=dtype), dtype, device)

    def keep_mask_region(self, region: DrawRegion, p: float, device: torch.device) -> torch.Tensor:
        """Returns a bool mask like that of `keep_mask`, for a region of what the next site draws."""
        return self._draw(torch.Size(region.full_shape), _keep_draw(p), torch.bool, device, region)

    def _draw(
        self,
        size: torch.Size,
        op: DrawOp,
        dtype: torch.dtype,
        device: torch.device,
        region: DrawRegion | None = None,
    ) -> torch.Tensor:
        site = f"{self._block_call}/{self._num_draws}"
        self._num_draws += 1
        if self._trial_batch is not None:
            self.sites.record(site, size, self._trial_batch)
            value = 1.0 if dtype == torch.bool else self._trial_draw
            return torch.full((), value, dtype=dtype, device=device).expand(size).clone()
        layout = self.sites.layout(site)
        self._samples = self._samples.to(device)  # once a forward
        samples, drawn_shape = self._samples, size
        draw = partial(op, key=signed64(derive_key(self._seed, "dropout", self._step, site)))
        if layout == "shared":
            samples = torch.zeros(1, dtype=torch.int64, device=device)
        else:
            self._check_num_samples(site, layout, size)
            drawn_shape = torch.Size((size[1], size[0], *size[2:])) if layout == "dim1" else size
        if region is not None:
            return self._draw_region(site, layout, region, samples, draw)
        tensor_slice = None
        if site in self._shardings and drawn_shape.numel():
            local_shape = sample_shape(layout, size, len(self._samples))
            tensor_slice = find_slice(self.sites.full_shape(site), local_shape, self._shardings[site], site)
        drawn = _draw_samples(samples, drawn_shape, draw, tensor_slice)
        return drawn.transpose(0, 1) if layout == "dim1" else drawn

    def _draw_region(
        self,
        site: str,
        layout: SampleLayout,
        region: DrawRegion,
        samples: torch.Tensor,
        draw: DrawOp,
    ) -> torch.Tensor:
        local_shape = sample_shape(layout, torch.Size(region.full_shape), len(self._samples))
        if layout == "dim1" or any(
            -dim > len(local_shape) - (layout == "flattened") for dim, _ in region.spans
        ):
            what = (
                f"a region of a tensor of {region.full_shape} is drawn, and in the trial its sample "
                f"layout was '{layout}'"
            )
            raise PlanError(
                what,
                fix="put samples first: [samples, heads, tokens, width]; or set the dropout to 0",
                location=site,
            )
        nested_slice = locate_region(
            region, self.sites.full_shape(site), local_shape, self._shardings.get(site, ()), site
        )
        return _draw_samples(samples, torch.Size(region.region_shape), draw, nested_slice)

    def _check_num_samples(self, site: str, layout: SampleLayout, size: torch.Size) -> None:
        dim, batch = 1 if layout == "dim1" else 0, len(self._samples)
        dim_size = size[dim] if dim < len(size) else None
        if dim_size is None or (
            (dim_size % batch if layout == "flattened" else dim_size - batch) if batch else dim_size
        ):
            what = (
                f"a tensor of {tuple(size)} is drawn for {batch} samples, and in the trial its sample "
                f"layout was '{layout}'"
            )
            raise PlanError(
                what,
                fix="run the forward once, on all samples that StatelessRNG.begin_forward was given",
                location=site,
            )


def _keep_draw(p: float) -> DrawOp:
    return partial(draw_ops.keep_mask, threshold=round(p * 2**53))


def _draw_samples(
    samples: torch.Tensor,
    shape: torch.Size,
    draw: DrawOp,
    tensor_slice: TensorSlice | NestedSlice | None,
) -> torch.Tensor:
    """Returns what `draw` returns for `samples`, as a tensor of `shape`; `tensor_slice` gives indices in the
    full tensor.
    """
    width = shape.numel() // max(len(samples), 1)
    if tensor_slice is None or not shape.numel():
        return draw(samples, first=0, width=width, index=None).view(shape)
    if tensor_slice.first_index is not None:
        return draw(samples, first=tensor_slice.first_index, width=width, index=None).view(shape)
    parts, step = [], chunk_numel(samples.device)
    for begin in range(0, width, step):
        index = torch.arange(begin, min(begin + step, width), dtype=torch.int64, device=samples.device)
        index = tensor_slice.global_indices(index)
        parts.append(draw(samples, first=0, width=len(index), index=index))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(shape)
