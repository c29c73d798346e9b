"""Dropout masks that belong to samples, not to devices.

A *site* is a place where the forward draws: the n-th draw within one visit of a block. The number at a site is a hash of

    (seed, step, site)  ->  key            (key, global sample id)  ->  the sample's key
    (the sample's key, logical index within the sample)  ->  64 bits  ->  keep if bits / 2^64 >= p

so however the batch is divided over ranks and micro-batches, a sample meets the same masks, and a block that is run
again (recompute) meets them again. The sample dim of a site cannot be told from its shape when the local batch is 1;
it is learnt beforehand from trial runs at one or more batch sizes, and kept in `Sites`:

    "first"    dim 0 is the batch                       (B, T, C), (B, heads, T, T)
    "second"   dim 1 is the batch                       (T, B, C)
    "rows"     dim 0 is batch x something, sample-major (B*T, C), (B*heads, T, T)
    "shared"   none: one draw for all samples           a relative-position bias (heads, T, T)

A trial leaves the kinds that its shape allows; the first that all trials allow, in the order above, is taken. One trial
at a batch size that occurs nowhere else in the model settles nearly all sites; a second one at another size, the rest.
Where a rank has a slice of the tensor, the logical index is that in the whole one (model/sliced.py).

Cost per element: one splitmix64, about ten integer operations; temporary memory of a few chunks of `model.random`.
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

SampleLayout = Literal["first", "second", "rows", "shared"]
SAMPLE_LAYOUTS: tuple[SampleLayout, ...] = ("first", "second", "rows", "shared")


@dataclass
class DrawSites:
    """For every site, the kinds that all trials so far allow, and the last trial's batch and shape.

    `inside` names the columns layer and the rows layer of sites that lie between such.
    """

    layouts: dict[str, tuple[SampleLayout, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, torch.Size]] = field(default_factory=dict)
    layer_pairs: dict[str, tuple[str, str]] = field(default_factory=dict)

    def record(self, site: str, shape: torch.Size, batch: int) -> None:
        """Note that `site` drew a tensor of `shape` when the forward ran on `batch` samples."""
        fits = {
            "first": len(shape) > 0 and shape[0] == batch,
            "second": len(shape) > 1 and shape[1] == batch,
            "rows": len(shape) > 0 and shape[0] > batch and shape[0] % batch == 0,
            "shared": True,
        }
        before = self.layouts.get(site, SAMPLE_LAYOUTS)
        self.layouts[site] = tuple(kind for kind in before if fits[kind])
        self.shapes[site] = batch, shape

    def layout(self, site: str) -> SampleLayout:
        """Where the samples of `site` lie. Raises PlanError for a site that no trial met."""
        if site not in self.layouts:
            what = "the forward draws random numbers at a place that it did not pass in the trial run"
            fix = "let the forward draw whatever the data and the step are, or set the dropout to 0"
            raise PlanError(what, fix=fix, location=site)
        return self.layouts[site][0]

    def full_shape(self, site: str) -> tuple[int, ...]:
        """The shape that the whole model draws at `site` for one sample."""
        batch, shape = self.shapes[site]
        return sample_shape(self.layout(site), shape, batch)


def sample_shape(layout: SampleLayout, shape: torch.Size, batch: int) -> tuple[int, ...]:
    """Of a tensor of `shape` for `batch` samples, the part of one of them."""
    match layout:
        case "first":
            return tuple(shape[1:])
        case "second":
            return (shape[0], *shape[2:])
        case "rows":
            return (shape[0] // max(1, batch), *shape[1:])
        case "shared":
            return tuple(shape)


class StatelessRNG:
    """The random numbers of one rank's forward: knows the step, the samples and the block that runs.

    The engine calls `begin` before each micro-batch and `enter` before each block. Draws between blocks count on from
    the last block that was entered; an engine that stubs blocks out enters a visit of its own after each of them.
    """

    def __init__(self, seed: int, sites: DrawSites | None = None) -> None:
        self.sites = DrawSites() if sites is None else sites
        self._seed = seed
        self._step = 0
        self._samples = torch.zeros(0, dtype=torch.int64)
        self._block_call = ""
        self._num_draws = 0
        self._trial_batch: int | None = None
        self._shardings: dict[str, tuple[DrawSharding, ...]] = {}

    @property
    def num_draws(self) -> int:
        """How many sites the visit has passed."""
        return self._num_draws

    @property
    def location(self) -> str:
        """Where the forward is, in words: the visit that was entered last."""
        return self._block_call or "before the first block"

    def begin_forward(self, step: int, sample_ids: torch.Tensor) -> None:
        """Say which forward comes: the global step, and the global ids (int64, local batch) of its samples in order."""
        self._step = step
        self._samples = sample_ids.to(torch.int64)
        self.enter_block("")

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Meanwhile, another forward or visit may begin; afterwards, the dice are where they were."""
        before = self._step, self._samples, self._block_call, self._num_draws
        try:
            yield
        finally:
            self._step, self._samples, self._block_call, self._num_draws = before

    @property
    def in_trial(self) -> bool:
        """Whether a trial forward is under way."""
        return self._trial_batch is not None

    def begin_trial(self, batch: int | None) -> None:
        """Say that a trial forward on `batch` samples comes; None ends the trials."""
        self._trial_batch = batch
        self.enter_block("")

    def set_shardings(self, shardings: Mapping[str, tuple[DrawSharding, ...]]) -> None:
        """Say by which divisions this rank may have slices at each site; at all others it has all."""
        self._shardings = {site: each for site, each in shardings.items() if each}

    def enter_block(self, block_call: str) -> None:
        """Say which visit of a block comes; its sites are numbered from 0, also when it is run again."""
        self._block_call = block_call
        self._num_draws = 0

    def keep_mask(self, shape: Iterable[int], p: float, device: torch.device) -> torch.Tensor:
        """A bool mask of `shape` for the next site: False with probability `p`. All True on trial."""
        threshold = round(p * 2**53)
        return self._draw(
            torch.Size(shape), lambda k: k >= threshold, torch.ones((), dtype=torch.bool, device=device)
        )

    def uniform(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Numbers in [0, 1) of `shape` for the next site. All 0.5 on trial."""
        digits = {torch.float64: 53, torch.float32: 24}.get(
            dtype, 8
        )  # more digits than the dtype has would round up to 1
        half = torch.full((), 0.5, dtype=dtype, device=device)
        return self._draw(torch.Size(shape), lambda k: (k >> (53 - digits)).double().mul_(2.0**-digits), half)

    def keep_mask_region(self, region: DrawRegion, p: float, device: torch.device) -> torch.Tensor:
        """A bool mask like that of `keep`, of a part of what the next site draws."""
        threshold = round(p * 2**53)
        on_trial = torch.ones((), dtype=torch.bool, device=device)
        return self._draw(torch.Size(region.full_shape), lambda k: k >= threshold, on_trial, region)

    def _draw(
        self,
        size: torch.Size,
        convert: Callable[[torch.Tensor], torch.Tensor],
        on_trial: torch.Tensor,
        part: DrawRegion | None = None,
    ) -> torch.Tensor:
        site = f"{self._block_call}/{self._num_draws}"
        self._num_draws += 1
        if self._trial_batch is not None:
            self.sites.record(site, size, self._trial_batch)
            return on_trial.expand(size).clone()
        kind, samples = self.sites.layout(site), self._samples.to(on_trial.device)
        key_of_site = derive_key(self._seed, "dropout", self._step, site)
        if kind == "shared":
            keys, order = (
                random_bits(key_of_site, torch.zeros(1, dtype=torch.int64, device=on_trial.device)),
                size,
            )
        else:
            self._check_num_samples(site, kind, size)
            keys = random_bits(key_of_site, samples)
            order = torch.Size((size[1], size[0], *size[2:])) if kind == "second" else size
        if part is not None:
            return self._draw_region(site, kind, part, keys, convert, on_trial)
        drawn, mine = on_trial.new_empty(order), None
        if site in self._shardings:
            local = sample_shape(kind, size, len(samples))
            mine = (
                find_slice(self.sites.full_shape(site), local, self._shardings[site], site)
                if drawn.numel()
                else None
            )
        _fill(drawn.view(len(keys), order.numel() // max(len(keys), 1)), keys, convert, mine)
        return drawn.transpose(0, 1) if kind == "second" else drawn

    def _draw_region(
        self,
        site: str,
        kind: SampleLayout,
        part: DrawRegion,
        keys: torch.Tensor,
        convert: Callable[[torch.Tensor], torch.Tensor],
        on_trial: torch.Tensor,
    ) -> torch.Tensor:
        local = sample_shape(kind, torch.Size(part.full_shape), len(self._samples))
        if kind == "second" or any(-dim > len(local) - (kind == "rows") for dim, _ in part.spans):
            what = f"a part of a tensor of {part.full_shape} is drawn, and in the trial run its kind was '{kind}'"
            raise PlanError(
                what,
                fix="put samples first: [rows, heads, tokens, width]; or set the dropout to 0",
                location=site,
            )
        drawn = on_trial.new_empty(part.region_shape)
        mine = locate_region(part, self.sites.full_shape(site), local, self._shardings.get(site, ()), site)
        if drawn.numel():
            _fill(drawn.view(len(keys), -1), keys, convert, mine)
        return drawn

    def _check_num_samples(self, site: str, kind: SampleLayout, size: torch.Size) -> None:
        dim, batch = 1 if kind == "second" else 0, len(self._samples)
        given = size[dim] if dim < len(size) else None
        if given is None or ((given % batch if kind == "rows" else given - batch) if batch else given):
            what = f"a tensor of {tuple(size)} is drawn for {batch} samples, and in the trial run its kind was '{kind}'"
            raise PlanError(
                what, fix="run the forward on the samples announced by Dice.begin, all at once", location=site
            )


def _fill(
    drawn: torch.Tensor,
    keys: torch.Tensor,
    convert: Callable[[torch.Tensor], torch.Tensor],
    mine: TensorSlice | NestedSlice | None = None,
) -> None:
    """Fill `drawn` (samples, elements of one sample), a chunk at a time; where they are a slice, with the numbers of `mine`."""
    num_samples, width = drawn.shape
    rows = max(1, CHUNK_NUMEL // max(width, 1))
    for column in range(0, width, CHUNK_NUMEL):
        index = torch.arange(column, min(column + CHUNK_NUMEL, width), dtype=torch.int64, device=drawn.device)
        index = index if mine is None else mine.global_indices(index)
        for row in range(0, num_samples, rows):
            part = drawn[row : row + rows, column : column + CHUNK_NUMEL]
            part.copy_(convert(top53(random_bits(keys[row : row + rows, None], index))))
