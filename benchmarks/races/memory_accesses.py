"""The accesses of each piece of memory that no later one replaces, and the races among them.

Two accesses race if they share a byte, one of them writes, and neither comes before the other
(vector_clocks.py). Memory that is freed goes back to the stream that allocated it: the next allocation of
that stream may get it, so it races with every access of another stream that this one has not waited for,
unless the allocator knows of that stream (`record_stream`).

    buffer   [ a | b | c ]     stream 1 writes a, stream 2 reads c: no race, they share no byte
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.races.vector_clocks import HOST, VectorClocks

MAX_ELEMENTS = 2**20  # of strided views that are compared element by element; larger ones share all between
SHOWN_FRAMES = 8

Frame = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class Site:
    """The place of an access: its operation, the action of the program that was under way, and the stack."""

    operation: str
    action: str
    frames: tuple[Frame, ...]

    def __str__(self) -> str:
        stack = "".join(f"\n      {file}:{line} {name}" for file, line, name in self.frames[:SHOWN_FRAMES])
        return f"{self.operation} in {self.action or 'no action'}{stack}"


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a view: those in [first, end), all of them if it has no strides."""

    first: int
    end: int
    element_nbytes: int = 1
    offset: int = 0
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @classmethod
    def of_view(cls, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], nbytes: int) -> "Region":
        """Returns the region of a view that is not empty; `nbytes` are those of an element."""
        last, numel = offset, 1
        for size, stride in zip(sizes, strides, strict=True):
            last += (size - 1) * stride
            numel *= size
        first, end = offset * nbytes, (last + 1) * nbytes
        if numel >= last + 1 - offset:  # dense, in some order of its dims
            return cls(first, end)
        return cls(first, end, nbytes, offset, sizes, strides)

    def overlaps(self, other: "Region") -> bool:
        """Returns whether both have a byte in common; strided ones of other element sizes count whole."""
        if self.first >= other.end or other.first >= self.end:
            return False
        if not self.sizes and not other.sizes:
            return True
        nbytes = self.element_nbytes if self.sizes else other.element_nbytes
        elements = [each.elements(nbytes) for each in (self, other)]
        if elements[0] is None or elements[1] is None:
            return True
        return bool(np.isin(elements[0], elements[1]).any())

    def covers(self, other: "Region") -> bool:
        """Returns whether it is dense and contains `other`."""
        return not self.sizes and self.first <= other.first and other.end <= self.end

    def elements(self, nbytes: int) -> np.ndarray | None:
        """Returns the numbers of its elements of `nbytes`; None if they have another size, or are many."""
        if not self.sizes:
            count = (self.end - self.first) // nbytes
            return np.arange(count) + self.first // nbytes if count <= MAX_ELEMENTS else None
        if self.element_nbytes != nbytes or np.prod(self.sizes) > MAX_ELEMENTS:
            return None
        found = np.array([self.offset])
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = (found[:, None] + np.arange(size if stride else 1) * stride).ravel()
        return found


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of `region` by `process`, in its `epoch`."""

    process: int
    epoch: int
    region: Region
    is_write: bool
    site: Site

    def __str__(self) -> str:
        where = "the host" if self.process == HOST else f"stream {self.process}"
        return f"{'write' if self.is_write else 'read'} on {where}, {self.site}"


@dataclass(frozen=True)
class Race:
    """Two accesses of one memory without an order; `is_reuse`: the second one is of a new tensor there."""

    first: Access
    second: Access
    is_reuse: bool = False

    def __str__(self) -> str:
        reuse = (
            "\n  memory was freed, and may belong to another tensor from here on:" if self.is_reuse else ""
        )
        return f"race\n  {self.first}{reuse}\n  {self.second}"

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it apart from races of the same two lines in other steps and microbatches."""
        sites = (self.first.site, self.second.site)
        return self.is_reuse, *((site.operation, site.frames[:1]) for site in sites)


@dataclass
class Memory:
    """One storage: the stream that allocated it (HOST: pinned host memory), and its accesses."""

    owner: int
    accesses: list[Access] = field(default_factory=list)
    recorded_streams: set[int] = field(default_factory=set)

    def add(self, access: Access, clocks: VectorClocks) -> Iterator[Race]:
        """Adds `access`, and yields the races of earlier ones with it."""
        kept = []
        for other in self.accesses:
            is_ordered = other.process == access.process or clocks.is_before(
                other.process, other.epoch, access.process
            )
            if (
                not is_ordered
                and (other.is_write or access.is_write)
                and other.region.overlaps(access.region)
            ):
                yield Race(other, access)
            is_replaced = is_ordered and (
                (access.is_write and access.region.covers(other.region))
                or (other.process, other.region, other.is_write)
                == (access.process, access.region, access.is_write)
            )
            if not is_replaced:
                kept.append(other)
        kept.append(access)
        self.accesses = kept

    def unordered_at_reuse(self, clocks: VectorClocks) -> list[Access]:
        """Returns the accesses that the owner's next work does not come after, if the memory is freed now.

        The allocator waits for what recorded streams have come to.
        """
        waits_for = (self.owner, *self.recorded_streams)
        for stream in waits_for:
            clocks.launch(stream)
        return [
            access
            for access in self.accesses
            if not any(clocks.is_before(access.process, access.epoch, stream) for stream in waits_for)
        ]


class FreedMemory:
    """The accesses of freed memory that its next owner would not come after."""

    def __init__(self) -> None:
        self._accesses: dict[int, list[Access]] = {}  # by the stream that allocated the memory

    def add(self, owner: int, accesses: Iterable[Access]) -> None:
        """Adds the unordered accesses of memory that `owner` may now reuse."""
        self._accesses.setdefault(owner, []).extend(accesses)

    def reuse(self, owner: int, clocks: VectorClocks, site: Site) -> Iterator[Race]:
        """Yields the races of an allocation on `owner` at `site` with what still uses the freed memory."""
        accesses = self._accesses.pop(owner, None)
        if not accesses:
            return
        epoch = clocks.launch(owner)
        for access in accesses:
            if not clocks.is_before(access.process, access.epoch, owner):
                yield Race(access, Access(owner, epoch, access.region, True, site), is_reuse=True)
