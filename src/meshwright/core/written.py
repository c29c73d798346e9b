"""A program as plain values (dict, list, str, int), for a file, and back again.

The names of the parameters that an action concerns are left out: they are many, and the plan has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.core.program import Action, Hold, Program, Transfer


def written(program: Program) -> dict[str, list[dict[str, Any]]]:
    """The actions of every role, with what differs from the defaults."""
    return {role: [_plain(action) for action in actions] for role, actions in program.roles}


def program_of(roles: Mapping[str, list[Mapping[str, Any]]]) -> Program:
    """The program that `written` wrote. Raises KeyError or TypeError for values that it did not write."""
    return Program.of({role: [_action(plain) for plain in actions] for role, actions in roles.items()})


def _plain(action: Action) -> dict[str, Any]:
    move = action.transfer
    said: dict[str, Any] = {
        "kind": action.kind,
        "subject": action.subject,
        "micro": action.micro,
        "lane": action.lane,
        "waits": list(action.waits),
        "flops": action.flops,
        "takes": [[hold.name, hold.nbytes] for hold in action.takes],
        "frees": list(action.frees),
        "transfer": None if move is None else _moved(move),
    }
    return {key: value for key, value in said.items() if value not in ("", None, [], 0) or (key == "micro" and value is not None)}


def _moved(move: Transfer) -> list[Any]:
    return [
        move.collective,
        list(move.axes),
        move.nbytes,
        move.algorithm,
        move.dtype,
        *([] if move.peer is None else [move.peer]),
        *([None, list(move.among)] if move.among else []),
    ]


def _move(
    collective: str,
    axes: list[str],
    nbytes: int,
    algorithm: str,
    dtype: str,
    peer: int | None = None,
    among: Sequence[int] = (),
) -> Transfer:
    return Transfer(collective, tuple(axes), nbytes, algorithm, dtype, peer=peer, among=tuple(among))


def _action(plain: Mapping[str, Any]) -> Action:
    move = plain.get("transfer")
    return Action(
        kind=plain["kind"],
        subject=plain.get("subject", ""),
        micro=plain.get("micro"),
        lane=plain["lane"],
        waits=tuple(plain.get("waits", ())),
        transfer=None if move is None else _move(*move),
        flops=plain.get("flops", 0),
        takes=tuple(Hold(name, nbytes) for name, nbytes in plain.get("takes", ())),
        frees=tuple(plain.get("frees", ())),
    )
