"""Keeps outputs of operations in the first run of a checkpointed block call, and takes them in its rerun.

    first run     x --- norm --- [mm] --- silu --- [mm] --- y       what [mm] returns is kept, in order
    rerun         x --- norm ---  |   --- silu ---  |   --- y'      its kernel does not run

Below autograd, so that the graph of the rerun is that of any run: its nodes save what they always save, and
what was kept is the same memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.model.trial.kept_outputs import op_of_kernel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.step.memory.kept_outputs import kept_ops
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD
from meshwright.plan.strategy_interface import Runtime

LOCATION = "strategies.activation_checkpointing"
EXCLUDE_FIX = "leave the kind of operation out of `save`, or the block out of `blocks`"


class _KeptCall:
    """What one operation returned, and what it was called with: the operation, shapes and dtypes.

    Once something has written into it, it is lost, and the operation has to run again.
    """

    __slots__ = ("_versions", "called_with", "returned")

    def __init__(self, called_with: Any, returned: Any) -> None:
        self.called_with, self.returned = called_with, tree_map(_alias, returned)
        self._versions = _versions(self.returned)

    @property
    def is_lost(self) -> bool:
        return _versions(self.returned) != self._versions

    def drop_if_lost(self) -> None:
        if self.is_lost:
            self.returned, self._versions = None, [-1]


class KeepOutputs(TorchDispatchMode):
    """While active, keeps what operations of the kinds `ops` return, in `kept`, in order."""

    def __init__(self, ops: Iterable[str]) -> None:
        super().__init__()
        self._ops, self.kept = frozenset(ops), deque[_KeptCall]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        if op_of_kernel(func._overloadpacket) in self._ops:
            self.kept.append(_KeptCall(_called_with(func, args, kwargs), returned))
        return returned

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for each in self.kept:
            each.drop_if_lost()


class TakeOutputs(TorchDispatchMode):
    """While active, operations of the kinds `ops` return what `kept` holds, in order, and do not run: but for
    those whose outputs something has overwritten.

    Raises PlanError, with the name `block_call`, for other operations than were kept.
    """

    def __init__(self, ops: Iterable[str], kept: deque[_KeptCall], block_call: str) -> None:
        super().__init__()
        self._ops, self._kept, self._block_call = frozenset(ops), kept, block_call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if op_of_kernel(func._overloadpacket) not in self._ops:
            return func(*args, **(kwargs or {}))
        found = self._kept.popleft() if self._kept else None
        if found is None or found.called_with != _called_with(func, args, kwargs):
            before = "nothing" if found is None else _text(found.called_with)
            called = _text(_called_with(func, args, kwargs))
            text = f"the block '{self._block_call}' runs again and calls {called}, where {before} was kept"
            raise _other_operations(text)
        return func(*args, **(kwargs or {})) if found.is_lost else found.returned

    def check_all_taken(self) -> None:
        """Raises PlanError if the rerun has ended without some of what was kept."""
        if self._kept:
            text = (
                f"the block '{self._block_call}' has run again without {len(self._kept)} operations of its "
            )
            raise _other_operations(f"{text}first run: {_text(self._kept[0].called_with)}")


def keep_in_forwards(runtime: Runtime) -> None:
    """Makes block calls keep, and take, what the actions of the rank say."""
    actions = {action.name: action for action in runtime.state.plan.actions if kept_ops(action)}
    kept: dict[tuple[str, int | None], deque[_KeptCall]] = {}
    for block in dict.fromkeys(block_of(action.subject) for action in actions.values()):
        runtime.state.patches.wrap_forward(block, partial(_run, runtime, actions, kept))


def _run(
    runtime: Runtime,
    actions: Mapping[str, Action],
    kept: dict[tuple[str, int | None], deque[_KeptCall]],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    action = actions.get(runtime.state.current_action)
    if action is None or not torch.is_grad_enabled():  # an evaluation
        return forward(*args, **kwargs)
    key, ops = (action.subject, action.microbatch), kept_ops(action)
    if action.kind == CHECKPOINTED_FORWARD:
        keeping = KeepOutputs(ops)
        with keeping:
            outputs = forward(*args, **kwargs)
        kept[key] = keeping.kept
        return outputs
    taking = TakeOutputs(ops, kept.pop(key), action.subject)
    with taking:
        outputs = forward(*args, **kwargs)
    taking.check_all_taken()
    return outputs


def _alias(value: Any) -> Any:
    """Returns a tensor with the memory and the version counter of `value`, and no graph."""
    if not isinstance(value, torch.Tensor):
        return value
    # below autograd a view gets a counter of its own: then a later write into `value` would not be seen
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(returned: Any) -> list[int]:
    return [each._version for each in tree_leaves(returned) if isinstance(each, torch.Tensor)]


def _called_with(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
    return func, *((tuple(each.shape), each.dtype) for each in given)


def _text(called_with: tuple[Any, ...]) -> str:
    func, *given = called_with
    return f"{func} on {', '.join(str(list(shape)) for shape, _ in given)}"


def _other_operations(text: str) -> PlanError:
    fix = f"make its forward depend only on its inputs, weights and buffers, or {EXCLUDE_FIX}"
    return PlanError(text, fix=fix, location=LOCATION)
