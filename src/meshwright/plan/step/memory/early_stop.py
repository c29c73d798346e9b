"""The part of a rerun that nothing needs: the last product of a block call, which no backward reads.

    RECOMPUTE   norm [q k v] attend [o] add norm [gate up] silu, times | [down] add
                                       autograd saves nothing behind it ^

A rerun whose output the next block call takes computes all of it. Where outputs of products are kept for the
rerun, that of the last one is not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.step.memory.memory_names import output_name
from meshwright.plan.step.memory.recomputed_segments import CallKey
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import FORWARD_KINDS


def skipped_fraction(model_spec: ModelSpec, block_call: str) -> Fraction:
    """Returns the part of the operations of the forward of `block_call` that its last rerun leaves out."""
    flops = dict(zip(model_spec.block_calls, model_spec.flops, strict=True))[block_call]
    skipped = sum(each.flops for each in model_spec.unread_products if each.block_call == block_call)
    return Fraction(min(skipped, flops), flops or 1)


def stop_reruns_early(actions: Sequence[Action], model_spec: ModelSpec) -> list[Action]:
    """Returns `actions` with reruns that leave out the products that nothing reads."""
    layers = dict[str, tuple[str, ...]]()
    for each in model_spec.unread_products:
        layers[each.block_call] = (*layers.get(each.block_call, ()), each.layer)
    whole = _forward_flops(actions)

    def edit(action: Action) -> Action:
        skipped = layers.get(action.subject, ()) if action.kind == "RECOMPUTE" else ()
        output = output_name(action.subject, action.microbatch or 0)
        if not skipped or any(each.name == output for each in action.allocations):
            return action
        less = round(whole[_call(action)] * skipped_fraction(model_spec, action.subject))
        return replace(action, skipped_layers=skipped, flops=max(0, action.flops - less))

    return [edit(action) for action in actions]


def run_reruns_whole(actions: Sequence[Action], is_selected: Callable[[str], bool]) -> list[Action]:
    """Returns `actions` in which the reruns of the block calls that are `is_selected` compute everything."""
    flops = _forward_flops(actions)

    def edit(action: Action) -> Action:
        if not (action.skipped_layers and is_selected(action.subject)):
            return action
        return replace(action, skipped_layers=(), flops=flops[_call(action)])

    return [edit(action) for action in actions]


def _forward_flops(actions: Iterable[Action]) -> dict[CallKey, int]:
    return {_call(each): each.flops for each in actions if each.kind in FORWARD_KINDS}


def _call(action: Action) -> CallKey:
    return action.subject, action.microbatch
