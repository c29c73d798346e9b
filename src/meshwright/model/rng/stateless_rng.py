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

Cost: one splitmix64 per element, about ten integer operations; temporary memory of a few chunks of
`model.tensors.counter_rng`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from meshwright.model.rng.sharded_draws import (
    DrawRegion,
    DrawSharding,
    NestedSlice,
    TensorSlice,
    find_slice,
    locate_region,
)
from meshwright.model.tensors.counter_rng import CHUNK_NUMEL, derive_key, random_bits, top53
from meshwright.plan.job.errors import PlanError

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
        threshold = round(p * 2**53)
        return self._draw(
            torch.Size(shape), lambda k: k >= threshold, torch.ones((), dtype=torch.bool, device=device)
        )

    def uniform(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns numbers in [0, 1) of `shape` for the next site. All `trial_draw` in a trial."""
        # more digits than the dtype has would round up to 1
        digits = {torch.float64: 53, torch.float32: 24}.get(dtype, 8)
        trial_value = torch.full((), self._trial_draw, dtype=dtype, device=device)
        return self._draw(
            torch.Size(shape), lambda k: (k >> (53 - digits)).double().mul_(2.0**-digits), trial_value
        )

    def keep_mask_region(self, region: DrawRegion, p: float, device: torch.device) -> torch.Tensor:
        """Returns a bool mask like that of `keep_mask`, for a region of what the next site draws."""
        threshold = round(p * 2**53)
        trial_value = torch.ones((), dtype=torch.bool, device=device)
        return self._draw(torch.Size(region.full_shape), lambda k: k >= threshold, trial_value, region)

    def _draw(
        self,
        size: torch.Size,
        convert: Callable[[torch.Tensor], torch.Tensor],
        trial_value: torch.Tensor,
        region: DrawRegion | None = None,
    ) -> torch.Tensor:
        site = f"{self._block_call}/{self._num_draws}"
        self._num_draws += 1
        if self._trial_batch is not None:
            self.sites.record(site, size, self._trial_batch)
            return trial_value.expand(size).clone()
        layout, sample_ids = self.sites.layout(site), self._samples.to(trial_value.device)
        key_of_site = derive_key(self._seed, "dropout", self._step, site)
        if layout == "shared":
            keys, drawn_shape = (
                random_bits(key_of_site, torch.zeros(1, dtype=torch.int64, device=trial_value.device)),
                size,
            )
        else:
            self._check_num_samples(site, layout, size)
            keys = random_bits(key_of_site, sample_ids)
            drawn_shape = torch.Size((size[1], size[0], *size[2:])) if layout == "dim1" else size
        if region is not None:
            return self._draw_region(site, layout, region, keys, convert, trial_value)
        drawn, tensor_slice = trial_value.new_empty(drawn_shape), None
        if site in self._shardings:
            local_shape = sample_shape(layout, size, len(sample_ids))
            tensor_slice = (
                find_slice(self.sites.full_shape(site), local_shape, self._shardings[site], site)
                if drawn.numel()
                else None
            )
        _fill(drawn.view(len(keys), drawn_shape.numel() // max(len(keys), 1)), keys, convert, tensor_slice)
        return drawn.transpose(0, 1) if layout == "dim1" else drawn

    def _draw_region(
        self,
        site: str,
        layout: SampleLayout,
        region: DrawRegion,
        keys: torch.Tensor,
        convert: Callable[[torch.Tensor], torch.Tensor],
        trial_value: torch.Tensor,
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
        drawn = trial_value.new_empty(region.region_shape)
        nested_slice = locate_region(
            region, self.sites.full_shape(site), local_shape, self._shardings.get(site, ()), site
        )
        if drawn.numel():
            _fill(drawn.view(len(keys), -1), keys, convert, nested_slice)
        return drawn

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


def _fill(
    drawn: torch.Tensor,
    keys: torch.Tensor,
    convert: Callable[[torch.Tensor], torch.Tensor],
    tensor_slice: TensorSlice | NestedSlice | None = None,
) -> None:
    """Fills `drawn` (samples, elements of one sample); `tensor_slice` gives indices in the full tensor."""
    num_samples, width = drawn.shape
    chunk_samples = max(1, CHUNK_NUMEL // max(width, 1))
    for element in range(0, width, CHUNK_NUMEL):
        index = torch.arange(
            element, min(element + CHUNK_NUMEL, width), dtype=torch.int64, device=drawn.device
        )
        index = index if tensor_slice is None else tensor_slice.global_indices(index)
        for sample in range(0, num_samples, chunk_samples):
            chunk = drawn[sample : sample + chunk_samples, element : element + CHUNK_NUMEL]
            chunk.copy_(convert(top53(random_bits(keys[sample : sample + chunk_samples, None], index))))
