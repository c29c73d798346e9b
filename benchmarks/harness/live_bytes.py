"""The bytes of all tensors that Python can reach, each storage once, and the most of them at any moment of a
step.

A step is sampled behind every act of the engine: the program gets a COMPARE (take the bytes that are live)
behind each of its compute actions. Tensors that only autograd holds, the activations inside a block, are not
reached and not counted; weights, gradients, moments, buffers, and what blocks hand on, are.
"""

import gc
from dataclasses import replace

import torch

from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action

AT = ("F", "B", "PACK", "UNPACK", "RESHARD", "ACCUMULATE", "LOCAL_NORM", "CLIP", "STEP")


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf; None also for a view that was written into where autograd forbids it, as some
    failure left it.
    """
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        return None


def live_storages() -> dict[int, int]:
    """The bytes of every storage that a tensor or a gradient in Python's reach lies in, by address."""
    storages = {}
    for found in gc.get_objects():
        if type(found) in (
            torch.Tensor,
            torch.nn.Parameter,
        ):  # isinstance would wake torch's deprecated names
            for tensor in (found, _gradient(found)):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # of tensors without memory
    return storages


def live_bytes() -> int:
    """The bytes of `live_storages`."""
    return sum(live_storages().values())


def probed(plan: Plan) -> Plan:
    """`plan` with a COMPARE behind each action of `AT`, to be handled by whoever plays it."""
    return replace(plan, program=plan.program.edit(_with_probes))


def _with_probes(actions: list[Action]) -> list[Action]:
    edited = []
    for number, action in enumerate(actions):
        edited.append(action)
        if action.kind in AT and action.stream == "compute":
            edited.append(Action("COMPARE", str(number)))
    return edited
