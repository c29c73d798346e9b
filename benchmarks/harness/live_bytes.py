"""The bytes of all tensors that Python can reach, each storage once, and their maximum during a step.

A step is sampled after every action of the engine: the program gets a COMPARE action (which counts the live
bytes) after each of its compute actions. Tensors that only autograd holds, the activations inside a block,
are not reached and not counted; weights, gradients, optimizer states, buffers, and the values at block
boundaries are.
"""

import gc
from dataclasses import replace

import torch

from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action

PROBED_KINDS = ("F", "B", "PACK", "UNPACK", "RESHARD", "ACCUMULATE", "LOCAL_NORM", "CLIP", "STEP")


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a leaf; None also for a view that a failed in-place operation has left
    invalid.
    """
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        return None


def _address(storage: torch.UntypedStorage) -> int:
    """Returns where a storage lies; 0 if it has no memory: that of a fake tensor."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


def live_storages() -> dict[int, int]:
    """Returns the bytes of every storage of a tensor or gradient that Python can reach, by address."""
    storages = {}
    for found in gc.get_objects():
        if type(found) in (
            torch.Tensor,
            torch.nn.Parameter,
        ):  # isinstance would trigger warnings of torch's deprecated names
            for tensor in (found, _gradient(found)):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[_address(storage)] = storage.nbytes()
    storages.pop(0, None)  # of tensors without memory
    return storages


def live_bytes() -> int:
    """Returns the bytes of `live_storages`."""
    return sum(live_storages().values())


def add_live_probes(plan: Plan) -> Plan:
    """Returns `plan` with a COMPARE after each action of `PROBED_KINDS`, to be handled by an extra handler of
    its executor.
    """
    return replace(plan, program=plan.program.edit(_with_probes))


def _with_probes(actions: list[Action]) -> list[Action]:
    edited = []
    for number, action in enumerate(actions):
        edited.append(action)
        if action.kind in PROBED_KINDS and action.stream == "compute":
            edited.append(Action("COMPARE", str(number)))
    return edited
