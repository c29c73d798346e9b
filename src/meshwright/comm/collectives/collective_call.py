"""Validates each collective before it is issued, and records the bytes that it sends.

A rank that is about to take part in a collective *announces* it: the tensors are checked, the bytes that will
leave this rank are written into its ledger, and the announcement itself, a `CollectiveCall`, is quoted in
error messages and compared between ranks. So errors and byte counts are the same on threads, on processes and
in the fake world. The docstring of `Group` has the table of inputs, outputs and bytes sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import torch

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import cached_num_sent
from meshwright.comm.collectives.comm_volume import ONE_RECEIVER, sends_bytes, sent_nbytes
from meshwright.comm.collectives.deterministic_sum import SUMMABLE_DTYPES
from meshwright.comm.collectives.group import ExchangedMessage, Group, Rounds
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name
from meshwright.plan.sharding.mesh import AXES, SITE_AXES, Mesh, in_mesh_order

POINT_TO_POINT = ("send", "recv")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
EXCHANGE = "exchange"
UNEVEN = "all_to_all_v"  # its rows differ from rank to rank: a call states the shape of one row


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as a rank issues it.

    Two calls are equal if they can pair: everything but the action agrees.
    """

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int | None = None  # of a gather, a reduce or a send: the target; of a shift: by how many places
    algorithm: str = BACKEND
    action: str = field(default="", compare=False)

    def __str__(self) -> str:
        what = self.collective
        if self.collective != "barrier":
            shape = f"{'rows of ' if self.collective == UNEVEN else ''}{list(self.shape)}"
            what += f" of {str(self.dtype).removeprefix('torch.')} {shape}"
        if self.collective == "shift":
            what += f" by {self.source}"
        elif self.source is not None:
            what += f" {'to' if self.collective in (*ONE_RECEIVER, 'send') else 'from'} index {self.source}"
        if self.algorithm != BACKEND:
            what += f" ({self.algorithm})"
        return f"{what} for {self.action}" if self.action else f"{what} (no action named)"


def announce(
    group: Group,
    collective: str,
    tensor: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    action: str,
    source: int | None = None,
    algorithm: str = BACKEND,
) -> CollectiveCall:
    """Returns the call that this rank of `group` is about to issue.

    Adds its bytes to the ledger of the group. Raises PlanError for an algorithm that is unknown or cannot run
    in this group, ValueError for tensors that do not fit or are on another device than the group's,
    CollectiveError in debug mode when the ranks do not call the same.
    """
    given = None if output is None else (output.shape, output.dtype)
    call, entry, refusal = _announcement(
        group.axes,
        group.size,
        group.index,
        collective,
        tensor.shape,
        tensor.dtype,
        given,
        action,
        source,
        algorithm,
    )
    if refusal is None:
        refusal = _memory_refusal(group.index, group.size, collective, tensor, output)
    if refusal is not None:
        raise _refusal_error(group, call, refusal)
    _check_device(call, group, tensor, output)
    _record(group, call, entry)
    return call


def announce_rows(
    group: Group,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    action: str,
) -> CollectiveCall:
    """Returns the uneven all-to-all that this rank of `group` is about to issue, as `announce` does.

    Raises ValueError for tensors or splits that do not fit.
    """
    call = CollectiveCall(UNEVEN, tuple(tensor.shape[1:]), tensor.dtype, action=action)
    refusal = _rows_refusal(group, output, output_splits, tensor, input_splits)
    refusal = refusal or _memory_refusal(group.index, group.size, UNEVEN, tensor, output)
    if refusal is not None:
        raise _refusal_error(group, call, refusal)
    _check_device(call, group, tensor, output)
    name, nbytes = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.itemsize
    _record(group, call, LedgerEntry(action, UNEVEN, group.axes, group.size, nbytes, nbytes, dtype=name))
    return call


def announce_exchange(
    group: Group, rounds: Rounds, messages: Sequence[ExchangedMessage], action: str
) -> tuple[CollectiveCall, Rounds]:
    """Returns the exchange that this rank of `group` is about to take part in, and its rounds; records its
    messages.

    The rounds end with a RuntimeError if they have sent other bytes than the messages say, and so the ledger.
    """
    call = CollectiveCall(EXCHANGE, tuple(each.nbytes for each in messages), torch.uint8, action=action)
    entries = [
        LedgerEntry(
            action,
            each.collective,
            group.axes,
            each.num_ranks or group.size,
            each.nbytes,
            sent_nbytes(each.collective, each.nbytes, each.num_ranks or group.size)
            if sends_bytes(each.collective, is_root=each.root == group.index)
            else 0.0,
            dtype=each.dtype,
        )
        for each in messages
    ]
    _record(group, call, *entries)
    return call, _counted(rounds, sum(each.sent_nbytes for each in entries), action)


def _counted(rounds: Rounds, stated: float, action: str) -> Rounds:
    sent = 0
    for sends, receives in rounds:
        sent += sum(each.numel() * each.itemsize for _, each in sends)
        yield sends, receives
    if abs(sent - stated) > 0.5:  # stated as a float
        text = f"{action or 'an exchange'} has sent {sent} bytes, and its messages are {stated:g} bytes"
        raise RuntimeError(f"{text}. State in the messages what the rounds send")


def _record(group: Group, call: CollectiveCall, *entries: LedgerEntry) -> None:
    ledger = group.ledger
    for entry in entries:
        ledger.record(entry)
    if group.size > 1 and not ledger.is_comparing:
        ledger.flight_recorder.record(group, call)
        if ledger.check_desync is not None and not (
            ledger.compare_first_step_only and ledger.phase != "first_step"
        ):
            ledger.check_desync(group, call)


def _rows_refusal(
    group: Group,
    output: torch.Tensor,
    output_splits: Sequence[int],
    tensor: torch.Tensor,
    input_splits: Sequence[int],
) -> str | None:
    if output.dtype != tensor.dtype or output.shape[1:] != tensor.shape[1:]:
        given, needed = (f"{each.dtype} rows of {list(each.shape[1:])}" for each in (output, tensor))
        return f"the output has {given}; needed are {needed}. Make it with tensor.new_empty"
    for what, splits, given in (("output", output_splits, output), ("input", input_splits, tensor)):
        if len(splits) != group.size or min(splits) < 0 or sum(splits) != given.shape[0]:
            text = f"the {what} has {given.shape[0]} rows, and its splits are {list(splits)}"
            return f"{text}. Give one number of rows for each of the {group.size} ranks"
        if splits[group.index]:
            text = f"the {what} has {splits[group.index]} rows for this rank itself"
            return f"{text}. Leave them out: they are not sent"
    return None


@lru_cache(maxsize=256)
def ordered_axes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `axes` in the order of `mesh`, each once, so that equal sets of axes are one group; without
    an axis of sites if there is one site.

    Raises PlanError for an axis that no mesh has.
    """
    wanted = set(axes)
    raise_diagnostics(
        Diagnostic(f"there is no axis '{axis}'", suggest_name(axis, AXES), "group")
        for axis in sorted(wanted - set(AXES))
    )
    return in_mesh_order({axis for axis in wanted if axis in SITE_AXES or mesh.size(axis) > 1})


def member_ranks(ranks: tuple[int, ...], member_indices: Sequence[int], own_rank: int) -> tuple[int, ...]:
    """Returns those of `ranks` at `member_indices` (empty: all); only `own_rank` if it is not one of them."""
    found = tuple(ranks[index] for index in member_indices) or ranks
    return found if own_rank in found else (own_rank,)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two contiguous tensors of one dtype share memory.

    Works for meta and fake tensors too.
    """
    if one.untyped_storage() is not other.untyped_storage():
        return False
    begin = max(one.storage_offset(), other.storage_offset())
    return begin < min(one.storage_offset() + one.numel(), other.storage_offset() + other.numel())


def rank_slices(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Returns the `size` equal flat slices of contiguous `tensor`, as views.

    Slice i belongs to the rank at index i.
    """
    return tensor.view(size, tensor.numel() // size).unbind(0)


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns the first sixteen of `ranks` as text."""
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")


# of an algorithm, as a diagnostic of the plan; of tensors, as a text that ends with the repair
Refusal = Diagnostic | str


@lru_cache(maxsize=4096)
def _announcement(
    axes: tuple[str, ...],
    size: int,
    index: int,
    collective: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    given: tuple[tuple[int, ...], torch.dtype] | None,
    action: str,
    source: int | None,
    algorithm: str,
) -> tuple[CollectiveCall, LedgerEntry, Refusal | None]:
    call = CollectiveCall(collective, tuple(shape), dtype, source, algorithm, action)
    refusal = _refusal(call, size, index, given)
    name, numel = str(dtype).removeprefix("torch."), prod(shape)
    nbytes, sent = numel * dtype.itemsize, 0.0
    if refusal is not None or (collective == "shift" and not source):
        pass
    elif algorithm != BACKEND:
        sent = (
            float(cached_num_sent(get_algorithm(algorithm), size, index, numel) * dtype.itemsize)
            if size > 1
            else 0.0
        )
    elif sends_bytes(collective, is_root=source == index):
        sent = sent_nbytes(collective, nbytes, size)
    return call, LedgerEntry(action, collective, axes, size, nbytes, sent, algorithm, name), refusal


def _refusal(
    call: CollectiveCall, size: int, index: int, given: tuple[tuple[int, ...], torch.dtype] | None
) -> Refusal | None:
    """The reason in sizes and dtypes why the call cannot work among `size` ranks; `given`: of the output."""
    algorithm = None if call.algorithm == BACKEND else get_algorithm(call.algorithm, call.action)
    if algorithm is not None and size > 1 and (impossible := algorithm.refusal(size)) is not None:
        return Diagnostic(*impossible)
    if call.source is not None and not 0 <= call.source < size:
        return f"the group has {size} ranks. Name a rank from 0 to {size - 1}, an index in the group"
    if call.collective in POINT_TO_POINT and call.source == index:
        return "that is this rank itself. Copy the tensor: target.copy_(tensor)"
    name = str(call.dtype).removeprefix("torch.")
    if call.collective in REDUCING and call.dtype not in SUMMABLE_DTYPES:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in SUMMABLE_DTYPES))
        return f"{name} cannot be summed. Cast it to one of {known}"
    numel = prod(call.shape)
    if call.collective in ("reduce_scatter", "all_to_all") and numel % size:
        return f"{numel} elements do not divide by {size} ranks. Pad to a multiple of {size}"
    if call.collective in ("scatter", "gather") and (given is None) == (call.source == index):
        text = f"the rank at index {index} passed {'no' if given is None else 'a'} full tensor"
        return f"{text}. Pass it at index {call.source}, and None elsewhere"
    if given is None:
        return None
    shape, dtype = given
    if dtype != call.dtype:
        return f"the output is {dtype}; needed is {call.dtype}. Make it with tensor.new_empty"
    needed = {"reduce_scatter": numel // size, "all_to_all": numel, "shift": numel}.get(
        call.collective, numel * size
    )
    if prod(shape) != needed:
        text = f"the output has {prod(shape)} elements; needed for {size} ranks are {needed}"
        return f"{text}. Make it with tensor.new_empty({needed})"
    return None


def _memory_refusal(
    index: int, size: int, collective: str, tensor: torch.Tensor, output: torch.Tensor | None
) -> str | None:
    """The reason why the call cannot work in the memory of these tensors, whose sizes fit.

    See `Group`, "in place".
    """
    if not tensor.is_contiguous() or not (output is None or output.is_contiguous()):
        return "a tensor is not contiguous; collectives move flat memory. Pass tensor.contiguous()"
    if output is None or not shares_memory(tensor, output):
        return None
    if collective in ("all_to_all", UNEVEN, "shift"):
        return (
            "the output shares memory with the operand, and would be overwritten while it is read. Pass "
            "another"
        )
    whole, piece = (tensor, output) if collective == "reduce_scatter" else (output, tensor)
    if piece.storage_offset() == whole.storage_offset() + index * (whole.numel() // size):
        return None
    own = f"the slice of index {index}, its own"
    return (
        f"the local slice overlaps the full tensor, but is not {own}. Pass that slice (in "
        "place), or another tensor"
    )


def _refusal_error(group: Group, call: CollectiveCall, refusal: Refusal) -> Exception:
    where = (
        f"{call} over {' x '.join(group.axes)} (rank {group.ranks[group.index]} of ranks "
        f"{format_ranks(group.ranks)})"
    )
    if isinstance(refusal, Diagnostic):
        return PlanError(f"{where}: {refusal.problem}", fix=refusal.fix, location=call.action)
    return ValueError(f"{where}: {refusal}")


def _check_device(
    call: CollectiveCall, group: Group, tensor: torch.Tensor, output: torch.Tensor | None
) -> None:
    if group.device is None:
        return
    for each in (tensor, output):
        if each is None or each.device == group.device or call.collective == "barrier":
            continue
        numbered = (
            each.device.index is not None and group.device.index is not None
        )  # "cpu" is cpu:0, "cuda" the current one
        if each.device.type != group.device.type or numbered:
            rank = group.ranks[group.index]
            here = f"this group (ranks {format_ranks(group.ranks)}) works on {group.device}"
            text = f"{call}: on rank {rank} a tensor is on {each.device}, and {here}"
            raise ValueError(f'{text}. Move it: tensor.to("{group.device}")')
