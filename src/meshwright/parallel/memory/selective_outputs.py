"""Keeps outputs of operations in the first run of a checkpointed block call, and takes them in its rerun.

A function mode sees torch functions, and around those that may call kernels of the kinds a dispatch mode sees
what is below: a norm, an activation function or a sum costs one call of Python, and nothing below it.

    first run     x --- norm --- [mm] --- silu --- [mm] --- y       what [mm] returns is kept, in order
    rerun         x --- norm ---  |   --- silu ---  |   --- y'      its kernel does not run

Below autograd, so that the graph of the rerun is that of any run: its nodes save what they always save, and
what was kept is the same memory. Of a product that no backward reads (early_stop.py) nothing is kept.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.recording.op_table import find_op
from meshwright.model.trial.kept_outputs import KEPT_KERNELS
from meshwright.parallel.memory.early_stop import UnreadProducts
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.step.memory.kept_outputs import kept_ops
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD
from meshwright.plan.strategy_interface import Runtime

LOCATION = "strategies.activation_checkpointing"
# kinds of torch functions (model/recording/op_table.py) in which there is no matrix product
WITHOUT_KERNELS = ("constant", "pointwise", "view", "reduction", "lookup", "random", "metadata", "read")
EXCLUDE_FIX = "leave the kind of operation out of `save`, or the block out of `blocks`"


class _KeptCall:
    """What one operation returned, and what it was called with: the operation, shapes and dtypes.

    Once something has written into it, it is lost, and the operation has to run again.
    """

    __slots__ = ("_versions", "called_with", "returned")

    def __init__(self, called_with: Any, returned: Any) -> None:
        self.called_with, self.returned = called_with, _alias(returned)
        self._versions = _versions(self.returned)

    @property
    def is_lost(self) -> bool:
        return _versions(self.returned) != self._versions

    def drop_if_lost(self) -> None:
        if self.is_lost:
            self.returned, self._versions = None, [-1]


class _Kernels(TorchDispatchMode):
    """While active, `run(func, args, kwargs)` gives what operations of the kinds `ops` return, but for
    `unread` products.
    """

    def __init__(
        self, ops: Iterable[str], unread: UnreadProducts | None, run: Callable[[Any, Any, Any], Any]
    ) -> None:
        super().__init__()
        self._packets = frozenset().union(*(KEPT_KERNELS[op] for op in ops))
        self._unread, self._run = unread, run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_unread = self._unread is not None and self._unread.are_running
        if func._overloadpacket in self._packets and not is_unread:
            return self._run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _AroundKernels(TorchFunctionMode):
    """While active, has `run` wherever a torch function may call kernels of `ops`."""

    def __init__(
        self, ops: Iterable[str], unread: UnreadProducts | None, run: Callable[[Any, Any, Any], Any]
    ) -> None:
        super().__init__()
        self._kernels = _Kernels(ops, unread, run)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _calls_no_kernel(func):
            return func(*args, **(kwargs or {}))
        with self._kernels:
            return func(*args, **(kwargs or {}))


class KeepOutputs(_AroundKernels):
    """While active, keeps what operations of the kinds `ops` return, in `kept`, in order, but for `unread`
    products.
    """

    def __init__(self, ops: Iterable[str], unread: UnreadProducts | None = None) -> None:
        super().__init__(ops, unread, self._keep)
        self.kept = deque[_KeptCall]()

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        returned = func(*args, **kwargs)
        self.kept.append(_KeptCall(_called_with(func, args, kwargs), returned))
        return returned

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for each in self.kept:
            each.drop_if_lost()


class TakeOutputs(_AroundKernels):
    """While active, operations of the kinds `ops` return what `kept` holds, in order, and do not run: but for
    those whose outputs something has overwritten, and `unread` products.

    Raises PlanError, with the name `block_call`, for other operations than were kept.
    """

    def __init__(
        self,
        ops: Iterable[str],
        kept: deque[_KeptCall],
        block_call: str,
        unread: UnreadProducts | None = None,
    ) -> None:
        super().__init__(ops, unread, self._take)
        self._kept, self._block_call = kept, block_call

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = self._kept.popleft() if self._kept else None
        if found is None or found.called_with != _called_with(func, args, kwargs):
            before = "nothing" if found is None else _text(found.called_with)
            called = _text(_called_with(func, args, kwargs))
            text = f"the block '{self._block_call}' runs again and calls {called}, where {before} was kept"
            raise _other_operations(text)
        return func(*args, **kwargs) if found.is_lost else found.returned

    def check_all_taken(self) -> None:
        """Raises PlanError if the rerun has ended without some of what was kept."""
        if self._kept:
            text = (
                f"the block '{self._block_call}' has run again without {len(self._kept)} operations of its "
            )
            raise _other_operations(f"{text}first run: {_text(self._kept[0].called_with)}")


def keep_in_forwards(runtime: Runtime, unread: UnreadProducts) -> None:
    """Makes block calls keep, and take, what the actions of the rank say, but for `unread` products."""
    actions = {action.name: action for action in runtime.state.plan.actions if kept_ops(action)}
    kept: dict[tuple[str, int | None], deque[_KeptCall]] = {}
    for block in dict.fromkeys(block_of(action.subject) for action in actions.values()):
        runtime.state.patches.wrap_forward(block, partial(_run, runtime, actions, kept, unread))


def _run(
    runtime: Runtime,
    actions: Mapping[str, Action],
    kept: dict[tuple[str, int | None], deque[_KeptCall]],
    unread: UnreadProducts,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    action = actions.get(runtime.state.current_action)
    if action is None or not torch.is_grad_enabled():  # an evaluation
        return forward(*args, **kwargs)
    key, ops = (action.subject, action.microbatch), kept_ops(action)
    if action.kind == CHECKPOINTED_FORWARD:
        keeping = KeepOutputs(ops, unread)
        with keeping:
            outputs = forward(*args, **kwargs)
        kept[key] = keeping.kept
        return outputs
    taking = TakeOutputs(ops, kept.pop(key), action.subject, unread)
    with taking:
        outputs = forward(*args, **kwargs)
    taking.check_all_taken()
    return outputs


@cache
def _calls_no_kernel(func: Any) -> bool:
    """Returns whether the torch function `func` certainly calls none of KEPT_KERNELS: then what runs below it
    costs no call of Python.
    """
    return func.__name__ == "__get__" or find_op(func.__name__).kind in WITHOUT_KERNELS


def _alias(returned: Any) -> Any:
    """Returns the tensors of `returned` with their memory and version counters, and no graph."""
    # below autograd a view gets a counter of its own: then a later write into the tensor would not be seen
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        if isinstance(returned, torch.Tensor):
            return returned.detach()
        return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in returned)


def _versions(returned: Any) -> list[int]:
    return [
        each._version for each in _tensors((returned,) if isinstance(returned, torch.Tensor) else returned)
    ]


def _tensors(values: Iterable[Any] | None) -> list[torch.Tensor]:
    return [each for each in values or () if isinstance(each, torch.Tensor)]


def _called_with(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    return func, *((each.shape, each.dtype) for each in _tensors((*args, *kwargs.values())))


def _text(called_with: tuple[Any, ...]) -> str:
    func, *given = called_with
    return f"{func} on {', '.join(str(list(shape)) for shape, _ in given)}"


def _other_operations(text: str) -> PlanError:
    fix = f"make its forward depend only on its inputs, weights and buffers, or {EXCLUDE_FIX}"
    return PlanError(text, fix=fix, location=LOCATION)
