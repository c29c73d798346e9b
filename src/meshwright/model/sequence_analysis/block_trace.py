"""What visits do with tokens, as one forward shows that runs on all of them: what they take in and give out, and what mixes.

A block is given tensors of its own in place of those of glue, so that nobody else has them: what glue computes with is what
blocks give out, and a tensor of a block's that it gets hold of otherwise is found.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.blocks.inplace_writes import BEHIND, Brought
from meshwright.model.hf.metadata import instead
from meshwright.model.hf.output_capture import marks
from meshwright.model.sequence_analysis.block_inputs import Takes, Visit, attended, called, plain, shape_of, taken_in
from meshwright.model.sequence_analysis.conv_rules import convolution, followed
from meshwright.model.sequence_analysis.gathers import Met
from meshwright.model.sequence_analysis.lengths import Computed, Sizes, run_again
from meshwright.model.sequence_analysis.token_rules import ATTENDS, MADE_INSIDE, OWN, Along, Held, Step, token_dims
from meshwright.model.sequence_parallel.attention_call import Attention
from meshwright.model.sequence_parallel.hf_attention import plug
from meshwright.model.sequence_parallel.sharded_activation import Apart, aparts, given
from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.model.tensor_parallel.layer_roles import find_sockets
from meshwright.model.tensors.function_modes import title
from meshwright.model.tensors.grad_alias import another
from meshwright.model.tensors.op_tables import reads
from meshwright.model.tensors.pytree import named, swap, tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of, visit_of
from meshwright.plan.model_spec.sequence_info import Attend, Convolve, Passing


@dataclass(eq=False)
class Visited(TorchFunctionMode):
    """What a forward of `module` does with tokens, of which there are as many as `sizes` says; some begin in visits `begins`."""

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    enter: Callable[[str], None]
    mode: FakeTensorMode
    sizes: Sizes
    begins: Collection[str] = ()
    found: dict[str, Passing] = field(default_factory=dict)
    attends: list[Attend] = field(default_factory=list)
    convolves: list[Convolve] = field(default_factory=list)
    looks: bool = False  # between blocks, at values
    unseen: bool = False  # between blocks, memory is handed out
    computed: dict[str, list[Computed]] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    held: Held = field(default_factory=WeakIdKeyDictionary)

    def __post_init__(self) -> None:
        super().__init__()
        self._visit: Visit | None = None
        self._last = ""
        self._brought, self.met = Brought(Apart), Met(self.sizes)
        self._calls: Counter[str] = Counter()

    @property
    def trial(self) -> int:
        """The primes by which tokens are told."""
        return self.sizes.product

    def _share(self, length: int) -> Share:
        return Share(length, ((0, length),), self._bring, self._add)

    def run(self, rows: Mapping[str, torch.Tensor], loss: Callable[[Any], torch.Tensor | None]) -> None:
        """Run the forward on `rows`, which have all tokens on every rank, and take the `loss` of what it gives out."""
        self.enter("")
        with self:
            outputs, self._last = self.module(**rows), ""
            try:
                total = loss(outputs)
            except Exception:  # it needs values, or other outputs: if it is wrong, the first step shows where
                total, self.looks = None, True
        self.met.ended(outputs, total)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile, the blocks of the module take in and give out tokens as they do on a rank that has some."""
        inner = {id(part) for block in self.blocks.values() for part in block.modules()} - {
            id(each) for each in self.blocks.values()
        }
        experts = {socket.name for socket in find_sockets(self.module) if socket.kind == "experts"}
        before = {name: block.__dict__.get("forward") for name, block in self.blocks.items()}
        shares = lambda queries, keys: (self._share(queries), self._share(keys))  # noqa: E731  what a name would say twice
        plugged = plug(self.module, shares, torch._C.DisableTorchFunction, self._biased)
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
            self.looks = self.looks or reads(func.__name__.strip("_"))
            self.unseen = self.unseen or title(func) in BEHIND
            self._between(args, kwargs, result)
            self._brought.watch(func.__name__, args, kwargs)
            return result
        name = title(func).removesuffix(" of").strip("_")
        if not visit.aside:
            self.computed.setdefault(visit.name, []).append(Computed.of(visit.modules[-1][0], name, args, kwargs))
        if func is F.scaled_dot_product_attention:
            self._attended(visit, Attention(*args, **kwargs), result)
        elif not visit.aside:
            step = Step(name, args, kwargs, tensors(result), self.held, self.trial)
            visit.read = visit.read or bool(step.made and (step.of("own") or step.of("mask") or step.of("keys")))
            self._note(visit, self._convolved(visit, step) if func is F.conv1d else followed(step))
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

    def _note(self, visit: Visit, why: str) -> None:
        if why and not visit.mixes:
            name = visit.modules[-1][0]
            visit.mixes = f"{name} {why}" + (f": {instead(self.module, name)}" if why.startswith(ATTENDS) else "")

    def _bring(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """Glue, or a mask, needs all tokens of what a rank has some of."""
        self._brought.add(local)
        return self.met.bring(self._last, another(local), local.shape[dim])

    def _add(self, part: torch.Tensor) -> torch.Tensor:
        """Glue needs a few tokens, or a sum of all."""
        if part._is_view():
            self._brought.add(part)
        return self.met.bring(self._last, another(part))

    def _run(self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A block runs; within another one, or without gradients, it is no visit."""
        if self._visit is not None or not torch.is_grad_enabled():
            if self._visit is None and aparts((args, kwargs)):
                raise PlanError(f"{name} {run_again()}", fix="set mesh.cp = 1", where="model")
            return forward(*args, **kwargs)
        self._calls[name] += 1
        visit = Visit(visit_of(name, self._calls[name]), [(name, block)])
        slots = tuple(slot for slot, _ in named((args, kwargs)))
        takes = taken_in((args, kwargs), self.sizes, self.held, begins=visit.name in self.begins)
        self.met.enter(self._last, (args, kwargs), takes.dims, takes.new)
        self._note(visit, takes.why)
        new, alone = takes.new, not aparts((args, kwargs))
        self._note(visit, "" if alone else run_again())
        args, kwargs = swap((args, kwargs), new)
        visit.known = frozenset(takes.known)
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
                visit.leaks = visit.leaks or bool(token_dims(each, self.trial))
                self._note(visit, f"hands {mark.channel} on behind what it gives out" if visit.leaks else "")
                self.held.pop(each, None)
        gives = tuple(self._gives(visit, each) for each in tensors(outputs))
        self._note(visit, "attends to something else than its own tokens" if visit.idle and takes.some else "")
        passing = Passing(visit.name, tuple(takes.dims), gives, visit.mixes, slots, takes_of=tuple(takes.of))
        own = visit.attends if alone else any(each.visit == visit.name for each in self.attends)
        if visit.mixes and not visit.leaks and not own:
            passing = self._whole(passing, outputs, takes) if alone or not visit.read else self._pooled(passing, outputs)
            self.convolves = [each for each in self.convolves if passing.mixes or each.visit != visit.name]
        self.met.leave(visit.name, outputs, whole=passing.whole)
        return self._left(passing, outputs, visit.rows)

    def _left(self, passing: Passing, outputs: Any, rows: Mapping[str, int]) -> Any:
        """A block has been left: what glue is given of its outputs."""
        pairs = list(zip(tensors(outputs), passing.gives, strict=True))
        of = tuple(self.sizes.planned_in(each.shape[dims[0]]) if dims else 0 for each, dims in pairs)
        passing = replace(passing, gives_of=of)
        within = tuple((name, count) for name, count in rows.items() if count != passing.runs(0) > 0)
        self.found[passing.visit] = replace(passing, within=within)
        told = [(dims[0], self._share(self.sizes.in_glue(each.shape[dims[0]]))) if dims else None for each, dims in pairs]
        back = {id(each): self.sizes.outward(each) for each, dims in pairs if dims}
        return given(swap(outputs, back), told)

    def _whole(self, passing: Passing, outputs: Any, takes: Takes) -> Passing:
        """A visit that cannot run on some of the tokens, and may run on all: it is given no other's; as it was, if it may not."""
        found, none = tensors(outputs), ((),) * len(passing.takes)
        gives = tuple(token_dims(each, self.trial) for each in found)
        told = [each.shape[dims[0]] in self.sizes.planned for each, dims in zip(found, gives, strict=True) if len(dims) == 1]
        if told and all(told) and not any(len(dims) > 1 for dims in gives):
            return replace(passing, takes=none, takes_of=(), gives=gives, mixes="", whole=True)
        if takes.some:
            return passing
        return replace(passing, takes=none, takes_of=(), gives=((),) * len(found), mixes="")  # some other size is as large

    def _pooled(self, passing: Passing, outputs: Any) -> Passing:
        """A visit that gives out no tokens: every rank may run it on all of them, brought together for it."""
        pools = bool(passing.gives) and not any(token_dims(each, self.trial) for each in tensors(outputs))
        return replace(passing, takes=((),) * len(passing.takes), takes_of=(), mixes="", whole=True) if pools else passing

    def _gives(self, visit: Visit, tensor: torch.Tensor) -> tuple[int, ...]:
        """Which dims of a tensor that a visit gives out are tokens."""
        dims, along = token_dims(tensor, self.trial), self.held.get(tensor)
        if along is not None and along.kind in ("part", "around"):
            self._note(visit, along.made)
            self.held.pop(tensor)  # glue may compute with it, if the visit runs on all tokens
        if not dims or (along is not None and along.kind == "keys"):
            return ()
        if along is None:
            visit.read = True  # who knows what
            self._note(visit, "gives out tokens that it was not given: put into an attribute, or made by code out of sight")
        elif along.kind == "made":
            self._note(visit, MADE_INSIDE.format(along.made))
        if any(tensor.shape[dim] not in self.sizes.planned for dim in dims):
            shape = shape_of(tensor, self.sizes)
            self._note(visit, f"gives out a tensor of shape {shape}, in which tokens are merged with another dim")
            return ()
        return dims

    def _attended(self, visit: Visit, given: Attention, made: torch.Tensor) -> None:
        """A visit attends."""
        if plain(given, self.sizes):
            visit.idle = True
            self.idle += [] if visit.name in self.idle else [visit.name]
            return
        visit.attends = True
        self._note(visit, run_again())
        declared = any(vars(module).get("is_causal") is True for _, module in visit.modules)
        found = attended(visit, given, self.held, self.sizes, declared=declared)
        if isinstance(found, Attend):
            self.held[made] = OWN
            self.attends.append(found)
        else:
            self._note(visit, found)

    def _convolved(self, visit: Visit, step: Step) -> str:
        """Note a convolution. Returns why nobody can answer it."""
        why, found = convolution(step)
        attended = sum(each.visit == visit.name for each in self.attends)
        where = {"visit": visit.name, "module": visit.modules[-1][0], "tokens": self.sizes.planned.get(found.tokens, 0)}
        self.convolves.append(replace(found, **where, attended=attended, called=tuple(visit.called)))
        return why

    def _enter(self, name: str, aside: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module within a block is called."""
        if self._visit is not None:
            called(self._visit, name, args, self.sizes)
            self._visit.modules.append((name, module))
            self._visit.aside += aside

    def _leave(self, aside: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module within a block has been left; what experts give out has tokens as what they were given."""
        if self._visit is None or not self._visit.modules or self._visit.modules[-1][1] is not module:
            return
        self._visit.called.append(self._visit.modules.pop()[0])
        self._visit.aside -= aside
        for each in tensors(output) if aside else ():
            dims = token_dims(each, self.trial)
            if dims:
                self.held[each] = OWN
