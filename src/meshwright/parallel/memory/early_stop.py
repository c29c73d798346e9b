"""Ends the computing of a rerun with the last thing that its backward reads (torch's `early_stop`).

The last product of a Llama layer, that of `down_proj`, is added to the residual stream, and a sum saves
nothing: for the backward of the layer nobody needs its value. PyTorch leaves the rerun with an exception.
Here a rerun builds the graph of the backward, and the product is a node of it; so the node is made, and its
kernel is not called: it returns zeros.

    rerun     norm [gate up] silu, times -> saved    [down] -> 0    add -> nobody reads it
    backward  the gradients of [down] need what was saved before it, and its weight

Cost: none. What is saved: of a Llama layer 17 to 20 % of the forward, so 4 to 5 % of a step in which all run
again.
Limits: products of layers without submodules, none of convolutions and of experts. The plan knows them from
the recorded forward of the model. Whether nothing behind the product saves a tensor in this run, under its
precision and other techniques, is looked up in the graph of the first rerun, which computes it; where
something does, all reruns of the block call compute it. Dropout behind the product saves its mask, so such a
block runs to its end. A compiled block does, too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.blocks.checkpointing import tensors_with_graph
from meshwright.model.trial.kept_outputs import LINEAR_KERNELS
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD
from meshwright.plan.strategy_interface import Runtime

PRODUCT_NODES = ("AddmmBackward0", "MmBackward0")


def stop_early(runtime: Runtime) -> "UnreadProducts":
    """Makes the reruns of the rank leave out the products that its actions say; returns these."""
    products = UnreadProducts(runtime)
    actions = products.actions.values()
    for block in dict.fromkeys(block_of(action.subject) for action in actions):
        runtime.state.patches.wrap_forward(block, products.run_block)
    for layer in dict.fromkeys(layer for action in actions for layer in action.skipped_layers):
        runtime.state.patches.wrap_forward(layer, partial(products.run_layer, layer))
    return products


class UnreadProducts:
    """The layers of one rank whose products reruns leave out, and what their first reruns have shown.
    `are_running`: such a layer runs, whose output is not kept for a rerun.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._state = runtime.state
        self.actions = {each.name: each for each in runtime.state.plan.actions if each.skipped_layers}
        self._layers = {  # by the names of the first runs and of the reruns
            replace(each, kind=kind).name: each.skipped_layers
            for each in self.actions.values()
            for kind in (CHECKPOINTED_FORWARD, each.kind)
        }
        self.are_running = False
        self._is_unread: dict[str, bool] = {}  # by block call
        self._returned: list[torch.Tensor] = []  # by the layers, in the first rerun of a block call

    def run_block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block; the first rerun of a block call shows whether its products are unread."""
        action = self.actions.get(self._state.current_action)
        if action is None or action.subject in self._is_unread or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._returned.clear()
        outputs = forward(*args, **kwargs)
        returned = [each.grad_fn for each in self._returned]
        roots = [each.grad_fn for each in tensors_with_graph(outputs)]
        self._is_unread[action.subject] = len(returned) == len(action.skipped_layers) and all(
            node is not None and _is_unread(node, roots) for node in returned
        )
        self._returned.clear()
        return outputs

    def run_layer(self, layer: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `layer`, in a rerun that leaves out its product without it."""
        self.are_running = layer in self._layers.get(self._state.current_action, ())
        try:
            return self._run_layer(forward, *args, **kwargs)
        finally:
            self.are_running = False

    def _run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        action = self.actions.get(self._state.current_action) if self.are_running else None
        if action is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._is_unread.get(action.subject):
            with _WithoutProducts():
                return forward(*args, **kwargs)
        outputs = forward(*args, **kwargs)
        self._returned.append(outputs)
        return outputs


class _WithoutProducts(TorchDispatchMode):
    """While active, products of two matrices are zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._overloadpacket in LINEAR_KERNELS:
            first, second = args[-2:]
            return first.new_zeros(first.shape[0], second.shape[1])
        return func(*args, **(kwargs or {}))


def _is_unread(returned: Any, roots: Iterable[Any]) -> bool:
    """Returns whether no node of the graph from `roots` that is behind the products below the node `returned`
    keeps a tensor.
    """
    products = set[Any]()
    for node in _nodes([returned], products):
        if node.name() in PRODUCT_NODES:
            products.add(node)
    behind = _nodes_above(products, list(_nodes(roots, products)))
    return bool(products) and returned in {*behind, *products} and not any(map(_keeps_tensors, behind))


def _nodes(roots: Iterable[Any], stops: set[Any]) -> Iterator[Any]:
    """Yields the nodes of the graph from `roots`, each once; not what is below those in `stops`."""
    waiting, seen = list(roots), set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node not in stops:
            waiting += [each for each, _ in node.next_functions]


def _nodes_above(products: set[Any], nodes: list[Any]) -> set[Any]:
    """Returns those of `nodes` from which one of `products` is reached, without these."""
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for each, _ in node.next_functions if node not in products else ():
            users.setdefault(each, []).append(node)
    above, waiting = set[Any](), list(products)
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user not in above:
                above.add(user)
                waiting.append(user)
    return above


def _keeps_tensors(node: Any) -> bool:
    """Returns whether `node` keeps tensors for its backward, or may: a function of a user's."""
    if isinstance(node, BackwardCFunction):
        kept = (*node.saved_tensors, *vars(node).values())
        return not type(node).__module__.startswith("meshwright.") or any(map(_has_tensor, kept))
    return any(_has_tensor(getattr(node, name)) for name in dir(node) if name.startswith("_saved_"))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)
