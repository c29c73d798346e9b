"""The JSON form of a program: the ranks and actions of every role as plain values.

It leaves out the names of the parameters of an action: they are many, and the plan has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from meshwright.plan.hardware.memory_tiers import MEMORY_TIERS, MemoryTier
from meshwright.plan.step.program import (
    Action,
    Allocation,
    Period,
    Program,
    Role,
    RuntimeSize,
    SiteRanks,
    Transfer,
)


def program_to_dict(program: Program) -> dict[str, dict[str, Any]]:
    """Returns every role by name as plain values (dict, list, str, int): in `ranks` the first one and the one
    behind the last, of the first of several sites; in `actions` the fields that are not at their defaults.
    """
    return {
        role.name: {
            "ranks": _ranks_to_list(role.ranks),
            "actions": [_action_to_dict(action) for action in role.actions],
        }
        for role in program.roles
    }


def program_from_dict(roles: Mapping[str, Mapping[str, Any]]) -> Program:
    """Returns the program that `program_to_dict` wrote. Raises KeyError or TypeError for other values."""
    return Program(
        tuple(
            Role(name, _ranks_from_list(*fields["ranks"]), tuple(map(_action_from_dict, fields["actions"])))
            for name, fields in roles.items()
        )
    )


def _ranks_to_list(ranks: range | SiteRanks) -> list[int]:
    if isinstance(ranks, range):
        return [ranks.start, ranks.stop]
    return [ranks.first.start, ranks.first.stop, ranks.num_sites, ranks.num_site_ranks]


def _ranks_from_list(start: int, stop: int, *sites: int) -> range | SiteRanks:
    return SiteRanks(range(start, stop), *sites) if sites else range(start, stop)


def _action_to_dict(action: Action) -> dict[str, Any]:
    transfer = action.transfer
    fields: dict[str, Any] = {
        "kind": action.kind,
        "subject": action.subject,
        "microbatch": action.microbatch,
        "stream": action.stream,
        "waits": list(action.waits),
        "previous_waits": list(action.previous_waits),
        "flops": action.flops,
        "allocations": [
            [
                allocation.name,
                allocation.nbytes,
                *([] if allocation.runtime_size is None else [_size_fields(allocation.runtime_size)]),
                *([] if allocation.tier == "device" else [allocation.tier]),
            ]
            for allocation in action.allocations
        ],
        "frees": list(action.frees),
        "transfer": None if transfer is None else _transfer_to_list(transfer),
        "period": None if action.period is None else list(astuple(action.period)),
    }
    return {
        key: value
        for key, value in fields.items()
        if value not in ("", None, [], 0) or (key == "microbatch" and value is not None)
    }


def _transfer_to_list(transfer: Transfer) -> list[Any]:
    fields: list[Any] = [
        transfer.collective,
        list(transfer.axes),
        transfer.nbytes,
        transfer.algorithm,
        transfer.dtype,
        transfer.peer,
        list(transfer.member_indices),
        [_transfer_to_list(carrier) for carrier in transfer.carried_by],
        _size_fields(transfer.runtime_size),
        transfer.carried_from or None,  # a peer may be 0, so that only None is left out
        transfer.root or None,
    ]
    while fields[-1] in (None, []):
        fields.pop()
    return fields


def _size_fields(size: RuntimeSize | None) -> list[Any]:
    return [] if size is None else [size.count, size.row_nbytes, size.expected_rows, size.max_rows]


def _transfer_from_list(
    collective: str,
    axes: list[str],
    nbytes: int,
    algorithm: str,
    dtype: str,
    peer: int | None = None,
    member_indices: Sequence[int] = (),
    carried_by: Sequence[Any] = (),
    runtime_size: Sequence[Any] = (),
    carried_from: int | None = None,
    root: int | None = None,
) -> Transfer:
    return Transfer(
        collective,
        tuple(axes),
        nbytes,
        algorithm,
        dtype,
        peer=peer,
        member_indices=tuple(member_indices),
        carried_by=tuple(_transfer_from_list(*carrier) for carrier in carried_by),
        carried_from=carried_from or 0,
        runtime_size=RuntimeSize(*runtime_size) if runtime_size else None,
        root=root or 0,
    )


def _action_from_dict(fields: Mapping[str, Any]) -> Action:
    transfer = fields.get("transfer")
    return Action(
        kind=fields["kind"],
        subject=fields.get("subject", ""),
        microbatch=fields.get("microbatch"),
        stream=fields["stream"],
        waits=tuple(fields.get("waits", ())),
        transfer=None if transfer is None else _transfer_from_list(*transfer),
        flops=fields.get("flops", 0),
        allocations=tuple(_allocation_from_list(*each) for each in fields.get("allocations", ())),
        frees=tuple(fields.get("frees", ())),
        previous_waits=tuple(fields.get("previous_waits", ())),
        period=Period(*fields["period"]) if "period" in fields else None,
    )


def _allocation_from_list(name: str, nbytes: int, *more: Any) -> Allocation:
    sizes = [RuntimeSize(*each) for each in more if not isinstance(each, str)]
    tier: MemoryTier = next((each for each in MEMORY_TIERS if each in more), "device")
    return Allocation(name, nbytes, sizes[0] if sizes else None, tier)
