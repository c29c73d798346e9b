"""Checks the sums of tied gradients along pp.

A sum that leaves out a user of a weight, or begins before another sum of the same gradients has ended, gives
wrong numbers without an error; ranks that reach their sums in different orders wait for ever.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest

from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action, Role, transitive_waits
from meshwright.plan.step.tied_params import sums_grads


def check_tied_params(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields every problem of the sums of tied gradients along pp, each with its role."""
    if not any(map(_tied_sums, plan.program.roles)):
        return
    for rank_plan in plan.role_plans():
        role, view = rank_plan.role, rank_plan.view
        users = {
            param_sharding.param.name: plan.sharding.pp_ranks_using(param_sharding.param)
            for param_sharding in view.logical_param_shardings
        }
        for tied_sum in _tied_sums(role):
            yield from ((role.name, text) for text in _check_tied_sum(tied_sum, role.actions, users, plan))
    for one, other in combinations(range(plan.mesh.pp), 2):
        own_names, other_names = (list(_sums_with(a, b, plan)) for a, b in ((one, other), (other, one)))
        for left, right in zip_longest(own_names, other_names):
            if left != right:
                differing = " and ".join(tied_sum[0] if tied_sum else "nothing" for tied_sum in (left, right))
                text = (
                    f"its sums with {plan.stage_role(other).name} along pp differ: {differing} are at the "
                    "same place"
                )
                yield plan.stage_role(one).name, text
                break


def _tied_sums(role: Role) -> list[Action]:
    return [action for action in role.actions if action.kind == "REDUCE_TIED"]


def _check_tied_sum(
    tied_sum: Action, actions: Sequence[Action], users: dict[str, tuple[int, ...]], plan: Plan
) -> Iterator[str]:
    members = _member_ranks(tied_sum, plan)
    wrong_names = [name for name in tied_sum.tensors if users.get(name) != members]
    if wrong_names:
        text = f"{tied_sum.name} sums the gradient of {wrong_names[0]} over pp ranks {_as_text(members)}"
        yield f"{text}, and pp ranks {_as_text(users.get(wrong_names[0], ()))} use it"
    awaited_names = transitive_waits(actions, tied_sum)
    for other in actions:
        if (
            other != tied_sum
            and sums_grads(other)
            and set(tied_sum.tensors).intersection(other.tensors)
            and other.name not in awaited_names
        ):
            yield (
                f"{tied_sum.name} does not wait for {other.name}, which changes the gradient of "
                f"{tied_sum.tensors[0]}"
            )


def _sums_with(pp_rank: int, other: int, plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Yields name, bytes and dtype of the sums of `pp_rank` in which the rank at `other` takes part.

    They must be equal on both.
    """
    for tied_sum in _tied_sums(plan.stage_role(pp_rank)):
        if tied_sum.transfer is not None and other in _member_ranks(tied_sum, plan):
            yield tied_sum.name, tied_sum.transfer.nbytes, tied_sum.transfer.dtype


def _member_ranks(tied_sum: Action, plan: Plan) -> tuple[int, ...]:
    return () if tied_sum.transfer is None else tied_sum.transfer.member_indices or tuple(range(plan.mesh.pp))


def _as_text(indices: Sequence[int]) -> str:
    return " and ".join(map(str, indices)) or "none"
