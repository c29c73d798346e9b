"""Arranges ranks in a grid with one name per axis; pure arithmetic, no process is started.

Axes in order, outermost first, so that neighbours along the last axis are neighbours in rank (and share a
host):

    axis          batch      parameters
    outer         samples    copies, which differ between two rounds: one site each, or one data centre
    site          samples    copies likewise: the sites of a data centre
    pp                       layers: pipeline stages
    dp_replicate  samples    copies
    dp_shard      samples    copies that share their storage
    ep            samples    copies; of the experts each rank has others
    cp            tokens     copies
    tp_depth                 features: slices of a matrix along its other side
    tp                       features: slices of one matrix

    Mesh(dp_replicate=2, tp=3): rank = dp_replicate * 3 + tp        ranks 0 1 2 | 3 4 5

`MESH_AXES` says the same as data: code that means a property of an axis asks it. A *site* is all ranks at
one index along `outer` and `site`: between two rounds nothing crosses these axes.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from meshwright.plan.job.errors import Diagnostic, raise_diagnostics, suggest_name
from meshwright.plan.job.field_constraints import at_least, field_diagnostics

BatchPart = Literal["samples", "tokens"]
ParamPart = Literal["layers", "features", "experts"]


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh: of what each of its ranks may have another part.

    `batch_part`: other samples, or other tokens of the same samples; None: all have the same. `param_part`:
    other layers, features or experts; None: all have copies. `rank_names` are the words for one rank and for
    several. Along an axis that `meets_in_rounds` no gradient, count or loss is summed: parameters are, at the
    end of a round. Plans and manifests state the size of an axis that is not `in_every_plan` only if it is
    above 1.
    """

    name: str
    batch_part: BatchPart | None
    param_part: ParamPart | None
    rank_names: tuple[str, str]
    meets_in_rounds: bool = False
    in_every_plan: bool = True


MESH_AXES = (
    MeshAxis(
        "outer",
        "samples",
        None,
        ("site", "sites"),
        meets_in_rounds=True,
        in_every_plan=False,
    ),
    MeshAxis(
        "site",
        "samples",
        None,
        ("site of a data centre", "sites of a data centre"),
        meets_in_rounds=True,
        in_every_plan=False,
    ),
    MeshAxis("pp", None, "layers", ("pipeline stage", "pipeline stages")),
    MeshAxis("dp_replicate", "samples", None, ("data-parallel replica", "data-parallel replicas")),
    MeshAxis("dp_shard", "samples", None, ("data-parallel shard", "data-parallel shards")),
    MeshAxis(
        "ep",
        "samples",
        "experts",
        ("expert-parallel rank", "expert-parallel ranks"),
        in_every_plan=False,
    ),
    MeshAxis("cp", "tokens", None, ("context-parallel rank", "context-parallel ranks")),
    MeshAxis(
        "tp_depth",
        None,
        "features",
        ("tensor-parallel slice", "tensor-parallel slices"),
        in_every_plan=False,
    ),
    MeshAxis("tp", None, "features", ("tensor-parallel rank", "tensor-parallel ranks")),
)
AXES = tuple(axis.name for axis in MESH_AXES)
ROUND_AXES = tuple(axis.name for axis in MESH_AXES if axis.meets_in_rounds)
SITE_AXES = tuple(axis.name for axis in MESH_AXES if not axis.meets_in_rounds)  # those of one site
DATA_PARALLEL_NAMES = ("dp", "ddp", "fsdp", "hsdp", "data")  # words for an axis that users bring along
SIZE = at_least(
    1, "write a positive number; Mesh.infer resolves -1 (infer one axis), given the number of ranks"
)


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes; an axis of size 1 is unused. In a config, one size may be -1: the
    number of ranks decides it.

    `pp` counts pipeline ranks. `dp_replicate` counts full copies of the parameters. `dp_shard` counts ranks
    that have other samples and share one copy. `ep` counts the ranks that have other samples and other
    experts. `cp` counts the ranks that share the tokens of a sample. `tp` counts the ranks that share each
    matrix. `tp_depth` is the third axis of 3-D tensor parallelism. `outer` counts the sites, which meet only
    in rounds; or, with `site`, the data centres, each of which has that many sites.
    """

    outer: int = field(default=1, metadata=SIZE)
    site: int = field(default=1, metadata=SIZE)
    pp: int = field(default=1, metadata=SIZE)
    dp_replicate: int = field(default=1, metadata=SIZE)
    dp_shard: int = field(default=1, metadata=SIZE)
    ep: int = field(default=1, metadata=SIZE)
    cp: int = field(default=1, metadata=SIZE)
    tp_depth: int = field(default=1, metadata=SIZE)
    tp: int = field(default=1, metadata=SIZE)

    def __post_init__(self) -> None:
        raise_diagnostics(field_diagnostics(self, "mesh"))

    @classmethod
    def infer(cls, sizes: Mapping[str, int], world_size: int | None = None) -> "Mesh":
        """Returns the mesh with `sizes`, one of which may be -1: it is inferred so that the product equals
        `world_size`.

        Raises PlanError for an unknown axis, two unknown sizes, a world size that does not divide, or none to
        infer from.
        """
        diagnostics = [unknown_axis_diagnostic(axis, f"mesh.{axis}") for axis in sizes if axis not in AXES]
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            diagnostics.append(
                Diagnostic(
                    f"{' and '.join(open_axes)} are both -1; only one axis can be inferred",
                    "write the number of ranks of all axes but one",
                    "mesh",
                )
            )
        diagnostics += [
            Diagnostic(
                f"the size is {size}; needed is a number of at least 1, or -1 to infer it",
                "write 1, 2, 3...",
                f"mesh.{axis}",
            )
            for axis, size in sizes.items()
            if size < 1 and size != -1
        ]
        raise_diagnostics(diagnostics)
        fixed = prod(size for size in sizes.values() if size != -1)
        if open_axes and world_size is None:
            raise_diagnostics(
                [
                    Diagnostic(
                        f"{open_axes[0]} is -1 and the number of ranks is not known",
                        "say how many: --world N",
                        "mesh",
                    )
                ]
            )
        if open_axes and world_size is not None:
            if world_size % fixed:
                text = f"{world_size} ranks do not divide by {fixed}, the product of the other axes"
                raise_diagnostics(
                    [
                        Diagnostic(
                            text,
                            f"use a multiple of {fixed} ranks, or change the other axes",
                            f"mesh.{open_axes[0]}",
                        )
                    ]
                )
            sizes = {**sizes, open_axes[0]: world_size // fixed}
        mesh = cls(**sizes)
        if world_size is not None and mesh.world_size != world_size:
            text = f"the mesh {mesh} has {mesh.world_size} ranks and {world_size} were started"
            fix = f"start {mesh.world_size} ranks, set one axis to -1, or leave the mesh out and let "
            if mesh.world_size == 1:
                text = f"without a mesh the plan is for one device, and {world_size} ranks were started"
                fix = "set mesh.dp_shard = -1 (ZeRO, FSDP) or mesh.dp_replicate = -1 (DDP), or let "
            fix += f"`meshwright plan CONFIG --devices {world_size} --out plan.toml` choose it"
            raise_diagnostics([Diagnostic(text, fix, "mesh")])
        return mesh

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`."""
        return getattr(self, axis)

    def as_dict(self) -> dict[str, int]:
        """Returns the sizes by axis, as plans store them; some axes only if they are used."""
        sizes = {axis: self.size(axis.name) for axis in MESH_AXES}
        return {axis.name: size for axis, size in sizes.items() if axis.in_every_plan or size > 1}

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return prod(map(self.size, AXES))

    def group_size(self, axes: Iterable[str]) -> int:
        """Returns the number of ranks in a group that spans `axes`."""
        return prod(map(self.size, axes))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the index of `rank` along every axis. Raises ValueError for a rank that the mesh does not
        have.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"there is no rank {rank} in {self}: it has {self.world_size}."
                f" Count ranks from 0 to {self.world_size - 1}"
            )
        index = {}
        for axis in reversed(AXES):
            rank, index[axis] = divmod(rank, self.size(axis))
        return {axis: index[axis] for axis in AXES}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Returns the rank at `coordinate`; a missing axis counts as 0."""
        return self.index(coordinate, AXES)

    def index(self, coordinate: Mapping[str, int], axes: Iterable[str]) -> int:
        """Returns the index of `coordinate` in its group along `axes`, the last axis innermost; a missing
        axis counts as 0.
        """
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinate.get(axis, 0)
        return index

    def peers(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` only along `axes`, itself included, in rank order."""
        free = set(axes)
        first = self.rank({axis: index for axis, index in self.coordinate(rank).items() if axis not in free})
        return tuple(first + offset for offset in self._plane(free))

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Returns all groups that span `axes`: together they contain each rank once."""
        free = set(axes)
        offsets = self._plane(free)
        return tuple(tuple(first + offset for offset in offsets) for first in self._plane(set(AXES) - free))

    def _plane(self, axes: Set[str]) -> list[int]:
        ranks = [0]
        for axis in AXES:
            steps = range(self.size(axis)) if axis in axes else (0,)
            ranks = [rank * self.size(axis) + step for rank in ranks for step in steps]
        return ranks

    def __str__(self) -> str:
        used = [f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return " x ".join(used) if used else "one device"


def axes_with(part: BatchPart | ParamPart) -> tuple[str, ...]:
    """Returns the axes along which the ranks of a site have another `part` each, outermost first."""
    return tuple(
        axis.name
        for axis in MESH_AXES
        if part in (axis.batch_part, axis.param_part) and not axis.meets_in_rounds
    )


# the axes of copies: ranks that may have other samples or tokens for the same weights
REPLICA_AXES = tuple(axis for axis in axes_with("samples") if axis not in axes_with("experts"))
GRAD_SUM_AXES = (*REPLICA_AXES, *axes_with("tokens"))


def in_mesh_order(axes: Collection[str]) -> tuple[str, ...]:
    """Returns `axes`, each once, outermost first."""
    return tuple(axis for axis in AXES if axis in axes)


def unknown_axis_diagnostic(axis: str, location: str) -> Diagnostic:
    """Returns the diagnostic of `axis`, which no mesh has; the repair lists the axes."""
    known = f"the axes are {', '.join(AXES)}"
    fix = f"{suggest_name(axis, AXES)} ({known})"
    if axis in DATA_PARALLEL_NAMES:
        fix = "data parallelism is dp_replicate (DDP: full copies) or dp_shard (ZeRO, FSDP: shards)"
        fix += f"; {known}"
    return Diagnostic(f"there is no axis '{axis}'", fix, location)


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number`, rising."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})
