"""What a collective needs, what it sends, and how it is said: one table, read by all three bodies.

A rank that is about to take part in a collective *announces* it: the tensors are checked, the bytes that will leave
this rank are written into its ledger, and the announcement itself, a `Call`, is what error messages quote and what
ranks compare with each other. So a mistake reads the same, and a byte counts the same, on threads, on processes and on
the fake world.

    collective       operand   output    sent by each of n ranks (operand of S bytes)
    all_reduce       S         in place  2 S (n-1)/n
    all_gather       S         n S       S (n-1)
    reduce_scatter   S         S/n       S (n-1)/n
    all_to_all       S         S         S (n-1)/n
    broadcast        S         in place  S, by its source only
    scatter          n S       S         S (n-1), by its source only; S is the output
    gather           S         n S       S, by all but its target
    reduce           S         in place  S, by all but its target
    barrier          0                   0
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from meshwright.comm.group import Entry, Group
from meshwright.core.errors import Fault, PlanError, nearest, raise_faults
from meshwright.core.mesh import AXES

ALGORITHMS = ("backend",)
FROM_ONE, TO_ONE = ("broadcast", "scatter"), ("gather", "reduce")  # who sends: the one rank alone, or all but it

# half types are summed in float32 and rounded once: n roundings of 8 bits each would show in a parity test
ACCUMULATE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class CollectiveError(RuntimeError):
    """A collective that did not complete: which rank called what, for which action, and where to look."""


@dataclass(frozen=True)
class Call:
    """One collective as a rank asks for it. Two calls are equal when they can meet: all but the action agrees."""

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int | None = None  # of a gather or a reduce: the target
    algorithm: str = "backend"
    action: str = field(default="", compare=False)

    def __str__(self) -> str:
        what = self.collective
        if self.collective != "barrier":
            what += f" of {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        if self.source is not None:
            what += f" {'to' if self.collective in TO_ONE else 'from'} index {self.source}"
        return f"{what} for {self.action}" if self.action else f"{what} (no action named)"


def announce(
    group: Group,
    collective: str,
    tensor: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    action: str,
    source: int | None = None,
    algorithm: str = "backend",
) -> Call:
    """The call that this rank of `group` is about to issue; its bytes are added to the ledger of the group.

    Raises PlanError for an unknown algorithm, ValueError for tensors that do not fit the collective.
    """
    call = Call(collective, tuple(tensor.shape), tensor.dtype, source, algorithm, action)
    if algorithm not in ALGORITHMS:
        raise PlanError(f"there is no all_reduce algorithm '{algorithm}'", fix=nearest(algorithm, ALGORITHMS), where=action)
    _check(call, tensor, output, group.size)
    if collective in ("scatter", "gather") and (output is None) == (source == group.index):
        text = f"{call}: the rank at index {group.index} came {'without' if output is None else 'with'} the whole tensor"
        raise ValueError(f"{text}. Pass it at index {source}, and None elsewhere")
    nbytes = tensor.numel() * tensor.element_size()
    sends = (source == group.index) == (collective in FROM_ONE) or collective not in (*FROM_ONE, *TO_ONE)
    sent = sent_bytes(collective, nbytes, group.size) if sends else 0.0
    dtype = str(tensor.dtype).removeprefix("torch.")
    group.ledger.record(Entry(action, collective, group.axes, group.size, nbytes, sent, algorithm, dtype))
    return call


def sent_bytes(collective: str, nbytes: int, size: int) -> float:
    """The bytes that leave one of `size` ranks (the one that sends, where not all do) that puts in `nbytes`."""
    others = size - 1
    match collective:
        case "all_reduce":
            return 2 * nbytes * others / size
        case "all_gather":
            return float(nbytes * others)
        case "reduce_scatter" | "all_to_all":
            return nbytes * others / size
        case "scatter":
            return float(nbytes * others)
        case "broadcast" | "gather" | "reduce":
            return float(nbytes if others else 0)
        case _:
            return 0.0


def ordered_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """`axes` in the order of the mesh, each once, so that equal sets of axes are one group.

    Raises PlanError for an axis that no mesh has.
    """
    wanted = set(axes)
    raise_faults(Fault(f"there is no axis '{axis}'", nearest(axis, AXES), "group") for axis in sorted(wanted - set(AXES)))
    return tuple(axis for axis in AXES if axis in wanted)


@torch.no_grad()
def ordered_sum(summands: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor: the sum of `summands` (same shape and dtype), added from first to last, so its bits are fixed."""
    first = summands[0]
    total = first.to(ACCUMULATE.get(first.dtype, first.dtype), copy=True)
    for summand in summands[1:]:
        total += summand
    return total.to(first.dtype)


def slices(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The `size` equal flat pieces of contiguous `tensor`, as views: piece i belongs to the rank at index i."""
    return tensor.view(size, tensor.numel() // size).unbind(0)


def _check(call: Call, tensor: torch.Tensor, output: torch.Tensor | None, size: int) -> None:
    if not tensor.is_contiguous() or not (output is None or output.is_contiguous()):
        raise ValueError(f"{call}: a tensor is not contiguous; collectives move flat memory. Pass tensor.contiguous()")
    if call.source is not None and not 0 <= call.source < size:
        raise ValueError(f"{call}: the group has {size} ranks. Name a rank from 0 to {size - 1}, an index in the group")
    if call.collective in ("reduce_scatter", "all_to_all") and tensor.numel() % size:
        raise ValueError(f"{call}: {tensor.numel()} elements do not divide by {size} ranks. Pad to a multiple of {size}")
    if output is None:
        return
    if output.dtype != tensor.dtype:
        raise ValueError(f"{call}: the output is {output.dtype}; needed is {tensor.dtype}. Make it with tensor.new_empty")
    if output is tensor:
        raise ValueError(f"{call}: the output is the operand itself, and would be overwritten while it is read. Pass another")
    needed = {"reduce_scatter": tensor.numel() // size, "all_to_all": tensor.numel()}.get(call.collective, tensor.numel() * size)
    if output.numel() != needed:
        text = f"{call}: the output has {output.numel()} elements; needed for {size} ranks are {needed}"
        raise ValueError(f"{text}. Make it with tensor.new_empty({needed})")
