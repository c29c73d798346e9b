"""What visits do with tokens, as one forward shows that runs on all of them: what they take in and give out, and what mixes.

A block is given tensors of its own in place of those of glue, so that nobody else has them: what glue computes with is what
blocks give out, and a tensor of a block's that it gets hold of otherwise is found.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.core.anatomy import block_of
from meshwright.core.errors import PlanError
from meshwright.core.tokens import Attend, Passing
from meshwright.model.alias import another
from meshwright.model.apart import Apart, Share, aparts, given
from meshwright.model.attend import mask_of
from meshwright.model.attention import Attention
from meshwright.model.bytoken import MADE_INSIDE, OWN, Along, Held, Step, followed, token_dims
from meshwright.model.captured import marks
from meshwright.model.glue import title
from meshwright.model.lengths import Computed, run_again
from meshwright.model.plugs import plug
from meshwright.model.sockets import find_sockets
from meshwright.model.trial import PROBE_BATCH
from meshwright.model.values import leaves, named, swap, tensors
from meshwright.model.writing import Brought


@dataclass
class _Visit:
    """A visit that runs: which modules are under way within, and what keeps it from running on some of the tokens."""

    name: str
    modules: list[tuple[str, nn.Module]]
    mixes: str = ""
    attends: bool = False
    aside: int = 0  # how many experts are under way: what they do is their own


@dataclass(eq=False)
class Visited(TorchFunctionMode):
    """What a forward of `module` does with `trial` tokens, which stand for `length`."""

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    enter: Callable[[str], None]
    mode: FakeTensorMode
    trial: int
    length: int
    found: dict[str, Passing] = field(default_factory=dict)
    attends: list[Attend] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    computed: dict[str, list[Computed]] = field(default_factory=dict)
    held: Held = field(default_factory=WeakIdKeyDictionary)

    def __post_init__(self) -> None:
        super().__init__()
        self._visit: _Visit | None = None
        self._last = ""
        self._brought = Brought(Apart)
        self._calls: Counter[str] = Counter()
        self._share = Share(self.trial, ((0, self.trial),), self._bring)

    def run(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Run the forward on `rows`: what is read has all tokens, on every rank."""
        self.enter("")
        with self:
            self.module(**rows)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile, the blocks of the module take in and give out tokens as they do on a rank that has some."""
        inner = {id(part) for block in self.blocks.values() for part in block.modules()} - {
            id(each) for each in self.blocks.values()
        }
        experts = {socket.name for socket in find_sockets(self.module) if socket.kind == "experts"}
        before = {name: block.__dict__.get("forward") for name, block in self.blocks.items()}
        plugged = plug(self.module, lambda: self._share, torch._C.DisableTorchFunction, self._biased)
        handles = list[RemovableHandle]()
        for name, part in self.module.named_modules():
            if id(part) in inner:  # those of transformers run otherwise on trial (model/configs.py), and each way token by token
                aside = name in experts and type(part).__module__.startswith("transformers.")
                handles.append(part.register_forward_pre_hook(partial(self._enter, name, aside)))
                handles.append(part.register_forward_hook(partial(self._leave, aside)))
        for name, block in self.blocks.items():
            block.forward = partial(self._run, name, block, block.forward)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            plugged.out()
            for name, block in self.blocks.items():
                block.__dict__.pop("forward", None)
                if before[name] is not None:
                    block.__dict__["forward"] = before[name]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, visit = kwargs or {}, self._visit
        result = func(*args, **kwargs)
        if visit is None:
            self._between(args, kwargs, result)
            self._brought.watch(func.__name__, args, kwargs)
            return result
        name = title(func).removesuffix(" of").strip("_")
        if not visit.aside:
            self.computed.setdefault(visit.name, []).append(Computed.of(visit.modules[-1][0], name, args, kwargs))
        if func is F.scaled_dot_product_attention:
            visit.attends = True
            self._note(visit, run_again())
            self._note(visit, self._attended(visit, Attention(*args, **kwargs), result))
        elif not visit.aside:
            self._note(visit, followed(Step(name, args, kwargs, tensors(result), self.held, self.trial)))
        return result

    def _biased(self, bias: torch.Tensor) -> None:
        """A bias by position is made, rows of own queries and columns of all keys."""
        self.held[bias] = Along("mask")

    def _between(self, args: Any, kwargs: Any, result: Any) -> None:
        """Glue computes something: of what lies within blocks, it has no more than they give out."""
        if self._last and tensors(result) and any(each in self.held for each in tensors((args, kwargs))):
            passing = self.found[self._last]
            why = f"{block_of(self._last)} hands tokens on behind what it gives out, in an attribute or a list"
            self.found[self._last] = replace(passing, mixes=passing.mixes or why)

    @staticmethod
    def _note(visit: _Visit, why: str) -> None:
        visit.mixes = visit.mixes or (f"{visit.modules[-1][0]} {why}" if why else "")

    def _bring(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """Glue, or a mask, needs all tokens of what a rank has some of."""
        self._brought.add(local)
        self.met[self._last] += self._true(local) // (PROBE_BATCH if local.shape[0] == PROBE_BATCH else 1)
        return another(local)

    def _true(self, tensor: torch.Tensor) -> int:
        """The number of elements of a tensor, with as many tokens as there are."""
        dims = token_dims(tensor, self.trial)
        return prod(size // self.trial * self.length if dim in dims else size for dim, size in enumerate(tensor.shape))

    def _run(self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A block runs; within another one, or without gradients, it is no visit."""
        if self._visit is not None or not torch.is_grad_enabled():
            if self._visit is None and aparts((args, kwargs)):
                raise PlanError(f"{name} {run_again()}", fix="set mesh.cp = 1", where="model")
            return forward(*args, **kwargs)
        self._calls[name] += 1
        visit = _Visit(name if self._calls[name] == 1 else f"{name}#{self._calls[name]}", [(name, block)])
        slots = tuple(slot for slot, _ in named((args, kwargs)))
        takes, new = self._take(visit, (args, kwargs))
        alone = not aparts((args, kwargs))
        self._note(visit, "" if alone else run_again())
        args, kwargs = swap((args, kwargs), new)
        self._visit, self._last, capturing = visit, visit.name, marks()
        self.enter(visit.name)
        try:
            with self.mode:
                outputs = forward(*args, **kwargs)
        finally:
            self._visit = None
        swap((args, kwargs), {id(new[id(each)]): each for each in tensors((args, kwargs)) if id(each) in new})
        for mark in capturing:
            for each in tensors(mark.added):
                self._note(visit, f"hands {mark.channel} on behind what it gives out" if token_dims(each, self.trial) else "")
                self.held.pop(each, None)
        gives = tuple(self._gives(visit, each) for each in tensors(outputs))
        passing = Passing(visit.name, takes, gives, visit.mixes, slots)
        if visit.mixes and alone and not visit.attends:
            passing = self._whole(passing, outputs)
        self.found[visit.name], gives = passing, passing.gives
        return given(outputs, gives, self._share)

    def _whole(self, passing: Passing, outputs: Any) -> Passing:
        """A visit that cannot run on some of the tokens, and may run on all: it is given no other's; as it was, if it may not."""
        gives = tuple(token_dims(each, self.trial) for each in tensors(outputs))
        told = [each.shape[dims[0]] == self.trial for each, dims in zip(tensors(outputs), gives, strict=True) if len(dims) == 1]
        if not told or not all(told) or any(len(dims) > 1 for dims in gives):
            return passing
        return replace(passing, takes=((),) * len(passing.takes), gives=gives, mixes="", whole=True)

    def _take(self, visit: _Visit, value: Any) -> tuple[tuple[tuple[int, ...], ...], dict[int, torch.Tensor]]:
        """Which dims of what a visit takes in are tokens, and what it shall be given instead, by identity."""
        takes, new = list[tuple[int, ...]](), dict[int, torch.Tensor]()
        if any(type(each) is int and each == self.trial for each in leaves(value)):
            self._note(visit, "is told how many tokens there are: a rank has some of them, and their shape tells")
        for tensor in tensors(value):
            local = tensor.local if type(tensor) is Apart else tensor
            dims, last = token_dims(local, self.trial), local.ndim - 1
            if dims == (last,) and last > 1 and local.shape[-2] == 1:  # a row of keys for every query, all of them
                along, dims = Along("keys"), ()
                local = self._bring(local, last) if type(tensor) is Apart else another(local)
            else:
                along = OWN if len(dims) == 1 else Along("mask")
            if (len(dims) > 1 and dims != (last - 1, last)) or any(local.shape[dim] != self.trial for dim in dims):
                self._note(visit, f"takes in a tensor of shape {self._shape(local)}, whose tokens cannot be told apart")
            takes.append(dims)
            if dims or along.kind == "keys":
                new[id(tensor)] = new.get(id(tensor), another(local))
                self.held[new[id(tensor)]] = along
        return tuple(takes), new

    def _gives(self, visit: _Visit, tensor: torch.Tensor) -> tuple[int, ...]:
        """Which dims of a tensor that a visit gives out are tokens."""
        dims, along = token_dims(tensor, self.trial), self.held.get(tensor)
        if along is not None and along.kind == "part":
            self._note(visit, along.made)
        if not dims or (along is not None and along.kind == "keys"):
            return ()
        if along is None:
            self._note(visit, "gives out tokens that it was not given: put into an attribute, or made by code out of sight")
        elif along.kind == "made":
            self._note(visit, MADE_INSIDE.format(along.made))
        if any(tensor.shape[dim] != self.trial for dim in dims):
            self._note(visit, f"gives out a tensor of shape {self._shape(tensor)}, in which tokens are merged with another dim")
            return ()
        return dims

    def _shape(self, tensor: torch.Tensor) -> str:
        dims = token_dims(tensor, self.trial)
        sizes = [size // self.trial if dim in dims else size for dim, size in enumerate(tensor.shape)]
        words = ["rows" if size == PROBE_BATCH else str(size) for size in sizes]
        words = [("tokens" if sizes[d] == 1 else f"{word} * tokens") if d in dims else word for d, word in enumerate(words)]
        return f"[{', '.join(words)}]"

    def _attended(self, visit: _Visit, given: Attention, made: torch.Tensor) -> str:
        """Note a call of attention. Returns why it is none by tokens."""
        for each in (given.query, given.key, given.value):
            along, dims = self.held.get(each), token_dims(each, self.trial)
            if along is None or along.kind != "own" or dims != (each.ndim - 2,) or each.shape[-2] != self.trial:
                return "attends to something else than its own tokens"
        self.held[made] = OWN
        mask = None if given.attn_mask is None else self.held.get(given.attn_mask)
        if mask is not None and mask.kind not in ("mask", "keys"):
            return MADE_INSIDE.format(mask.made) if mask.made else "attends with a mask that has tokens in one dim alone"
        declared = any(vars(module).get("is_causal") is True for _, module in visit.modules)
        self.attends.append(
            Attend(
                visit.name,
                heads=given.query.shape[-3] if given.query.ndim > 3 else 1,
                groups=given.key.shape[-3] if given.key.ndim > 3 else 1,
                width=given.query.shape[-1],
                values=given.value.shape[-1],
                queries=self.length,
                keys=self.length,
                causal=given.is_causal or (given.attn_mask is not None and declared),
                masked=given.attn_mask is not None,
                needed=any(each.requires_grad for each in given.tensors),
                mask=mask_of(given.attn_mask),
                learns=(given.query.requires_grad, given.key.requires_grad, given.value.requires_grad),
            )
        )
        return ""

    def _enter(self, name: str, aside: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module within a block is called."""
        if self._visit is not None:
            self._visit.modules.append((name, module))
            self._visit.aside += aside

    def _leave(self, aside: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module within a block has been left; what experts give out has tokens as what they were given."""
        if self._visit is None or not self._visit.modules or self._visit.modules[-1][1] is not module:
            return
        self._visit.modules.pop()
        self._visit.aside -= aside
        for each in tensors(output) if aside else ():
            dims = token_dims(each, self.trial)
            if dims:
                self.held[each] = OWN
