"""Deferred initialization: a module on the meta device, with the initial value of any parameter on demand.

A model of 70 billion parameters takes 280 GB merely to be constructed, and each rank needs a shard of it.
`defer_init` runs the constructor with parameters that have no storage, while a tape records what it does to
them (`model.loading.init_recorder`, `model.loading.init_tape`). Afterwards any parameter can be made alone,
on any rank.

    deferred = defer_init(lambda: Net(), seed=0)
    module = deferred.instantiate()                             a copy on the meta device, one per rank
    deferred.materialize(module, ["layers.3"], device=..., dtype=...)

Initial values depend on the seed, the parameter's name and the element's index, and on nothing else. They are
rounded to float32 and then cast, so that a float64 run and a bfloat16 run of one job start from the same
numbers. A frozen parameter that was made in another dtype than the trained ones, and one that is not
floating-point, keeps its dtype. The values differ from those of torch's generator; their distributions and
their constants do not.

*Logical parameter*: names that share one `nn.Parameter` are one parameter, under the first name that
`named_parameters` gives; the others are aliases, and stay tied.

Cost: memory for the buffers only.

Limits: values drawn from `random` or `numpy` before registration are whatever those give. A parameter that is
computed before it is registered (`nn.Parameter(torch.randn(3) * 0.02)`) keeps its value in memory.
"""

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from meshwright.model.loading.init_recorder import is_meta, record_init
from meshwright.model.loading.init_tape import InitTape, StorageWindow, replay_rows
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name
from meshwright.plan.model_spec.model_spec import PretrainedSource

Result = TypeVar("Result")


class StoredValues(Protocol):
    """Initial values that are stored somewhere, by name of the parameter."""

    @property
    def pretrained_source(self) -> PretrainedSource | None:
        """Their location on disk, if they have one."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: range | None = None,
    ) -> torch.Tensor:
        """Returns the value of `name`, or its `rows` along dim 0, in `dtype` (None: as stored)."""
        ...


@dataclass(frozen=True)
class LogicalParam:
    """A logical parameter: shape and dtype from the constructor, requires_grad, and its tied names."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    aliases: tuple[str, ...] = ()


def defer_init(build: Callable[[], nn.Module], seed: int) -> "DeferredInit":
    """Returns the deferred initialization of the model that `build` constructs; `build` is called once.

    Raises PlanError, naming every parameter concerned, if a parameter is never initialized, is filled in a
    way that cannot be replayed, or shares memory with another without being the same object, if a buffer is
    computed from a parameter, and for a module compiled by TorchScript. Errors of `build` itself pass
    through.
    """
    with record_init(seed) as tape:
        module = build()
        raise_diagnostics(_script_diagnostics(module))
        for owner in module.modules():  # parameters that were assigned without registration
            for name, param in owner._parameters.items():
                if param is not None and not tape.holds(param):
                    owner.register_parameter(name, param)
    names = logical_names(module)
    params = {first: module.get_parameter(first) for first in names}
    raise_diagnostics(_init_diagnostics(module, params, tape))
    tape.name_random_entries((name, storage_id(param)) for name, param in params.items())
    logical = {
        name: LogicalParam(tuple(param.shape), param.dtype, param.requires_grad, names[name])
        for name, param in params.items()
    }
    return DeferredInit(
        module,
        logical,
        {name: StorageWindow.from_tensor(param) for name, param in params.items()},
        tape,
        seed,
    )


class DeferredInit:
    """The result of `defer_init`: `logical_params` by name, copies of the module, values on demand."""

    def __init__(
        self,
        module: nn.Module,
        logical_params: dict[str, LogicalParam],
        windows: dict[str, StorageWindow],
        tape: InitTape,
        seed: int,
        weights: StoredValues | None = None,
    ) -> None:
        self.logical_params = logical_params
        self._weights = weights
        self._module = module
        self._windows = windows
        self._tape = tape
        self._seed = seed
        self._first_names = {
            alias: name for name, entry in logical_params.items() for alias in (name, *entry.aliases)
        }
        self._trained_dtypes = {entry.dtype for entry in logical_params.values() if entry.requires_grad}

    @property
    def pretrained_source(self) -> PretrainedSource | None:
        """The source of stored initial values; None if all are drawn from the seed."""
        return None if self._weights is None else self._weights.pretrained_source

    def with_weights(self, weights: StoredValues) -> "DeferredInit":
        """Returns this deferred initialization with the stored `weights` as initial values of their
        parameters.

        Raises PlanError for parameters that are not stored and were computed from parameters that are: from
        values now replaced.
        """
        raise_diagnostics(self._stale_diagnostics(weights))
        module = self.instantiate()
        for path, owner in module.named_modules():
            for leaf, buffer in owner._buffers.items():
                name = f"{path}.{leaf}" if path else leaf
                if buffer is not None and name in weights:
                    owner._buffers[leaf] = weights.read(name, buffer.dtype)
        return DeferredInit(module, self.logical_params, self._windows, self._tape, self._seed, weights)

    @property
    def forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the module's forward, by name."""
        return inspect.signature(self._module.forward).parameters

    def with_constants(self, constants: Mapping[str, object]) -> "DeferredInit":
        """Returns this deferred initialization of a module whose forward gets `constants` in every call."""
        module = self.instantiate()
        module.register_forward_pre_hook(partial(_add_constants, constants=dict(constants)), with_kwargs=True)
        return DeferredInit(module, self.logical_params, self._windows, self._tape, self._seed, self._weights)

    def keeps_dtype(self, name: str) -> bool:
        """Returns whether the parameter `name` keeps the dtype of its constructor, whatever the dtype of the
        job.

        So does one that is not floating-point, and a frozen one in another dtype than all trained ones: that
        is on purpose.
        """
        entry = self.logical_params[self._first_name(name)]
        frozen_in_other_dtype = (
            not entry.requires_grad and bool(self._trained_dtypes) and entry.dtype not in self._trained_dtypes
        )
        return frozen_in_other_dtype or not entry.dtype.is_floating_point

    def init_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the initial value of `name` in a job of `dtype`; in float64 all floats have
        it.
        """
        made_in = self.logical_params[self._first_name(name)].dtype
        widened = dtype == torch.float64 and made_in.is_floating_point
        return made_in if self.keeps_dtype(name) and not widened else dtype

    def read(self, reader: Callable[[nn.Module], Result]) -> Result:
        """Returns `reader(module)`, without a copy: the reader must not change the module."""
        return reader(self._module)

    def instantiate(self) -> nn.Module:
        """Returns a fresh copy of the module: meta parameters, ties kept, its own buffers with their
        values.
        """
        try:
            return copy.deepcopy(self._module)
        except (TypeError, RuntimeError) as error:
            what = f"a {type(self._module).__name__} cannot be copied ({error}), and every rank needs a copy"
            fix = (
                "keep open files, locks and computed tensors out of the module's attributes, or define "
                "__deepcopy__"
            )
            raise PlanError(what, fix=fix, location="model") from error

    def initial_value(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rows: range | None = None,
    ) -> torch.Tensor:
        """Returns the initial value of the parameter (or alias) `name`, whole or its `rows` along dim 0, on
        `device`.

        Rows are made alone if the recorded initialization allows it, else cut out of the whole. The dtype is
        that of `init_dtype`; drawn values are cast to it by way of float32.

        Raises PlanError if the value has a NaN: an element that was never written, or a faulty
        initialization.
        """
        first, dtype = self._first_name(name), self.init_dtype(name, dtype)
        if self._weights is not None and first in self._weights:
            return self._weights.read(first, dtype, device, rows)
        value = self._draw(first, torch.device(device), rows)
        if not value.is_floating_point():
            return value
        value = value.to(torch.float32)
        if value.numel() and bool(
            value.min().isnan()
        ):  # a NaN shows in the minimum, without a mask as large as the weight
            fix = "initialize every element, for example with torch.nn.init"
            raise PlanError(
                "the initial value holds NaN: elements that were never written, or 0/0",
                fix=fix,
                location=first,
            )
        return value.to(dtype)

    def _draw(self, first: str, device: torch.device, rows: range | None) -> torch.Tensor:
        window = self._windows[first]
        partial = None if rows is None else replay_rows(self._tape, window, self._seed, device, rows)
        if partial is not None:
            return partial
        full = self._tape.replay(window, self._seed, device)
        return full if rows is None else full[rows.start : rows.stop].clone()

    def materialize(
        self,
        module: nn.Module,
        names: Iterable[str] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        without_values: Container[str] = (),
    ) -> None:
        """Replaces meta parameters of `module` (an instance) by real ones with initial values, one at a time.

        `names` are parameters, aliases, or submodules, which stand for all their parameters and buffers; None
        means the whole module. A tied parameter is replaced under all its names. Buffers move to `device`;
        floating-point ones become float64 if `dtype` is float64 and otherwise keep their dtype, because
        rounded position tables are wrong ones. Parameters whose first name is in `without_values` get shape,
        dtype and device, one element of memory, and no value.

        Raises PlanError for a name that is neither a parameter nor a submodule.
        """
        clear_fake_caches(module)
        wanted, owners = self._resolve(module, names)
        for first in wanted:
            entry = self.logical_params[first]
            if first in without_values:
                value = torch.zeros((), dtype=self.init_dtype(first, dtype), device=device).expand(
                    entry.shape
                )
            else:
                value = self.initial_value(first, dtype, device)
            param = nn.Parameter(value, requires_grad=entry.requires_grad)
            for alias in (first, *entry.aliases):
                path, _, leaf = alias.rpartition(".")
                module.get_submodule(path)._parameters[leaf] = param
        for owner in owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    widen = dtype == torch.float64 and buffer.is_floating_point()
                    owner._buffers[name] = buffer.to(device, torch.float64 if widen else buffer.dtype)

    def _resolve(self, module: nn.Module, names: Iterable[str] | None) -> tuple[list[str], list[nn.Module]]:
        if names is None:
            return list(self.logical_params), list(module.modules())
        submodules = dict(module.named_modules(remove_duplicate=False))
        wanted: list[str] = []
        owners: list[nn.Module] = []
        for name in names:
            if name in submodules:
                owners += submodules[name].modules()
                prefix = f"{name}." if name else ""
                wanted += [first for alias, first in self._first_names.items() if alias.startswith(prefix)]
            else:
                wanted.append(self._first_name(name))
        return list(dict.fromkeys(wanted)), owners

    def _stale_diagnostics(self, weights: StoredValues) -> Iterator[Diagnostic]:
        names = {window.storage: name for name, window in self._windows.items()}
        for name, window in self._windows.items():
            if name not in weights:
                read = {
                    storage
                    for n in self._tape.required_entries(window.storage)
                    for storage in self._tape.entries[n].reads
                }
                sources = sorted(names[storage] for storage in read if names.get(storage, name) in weights)
                if sources:
                    text = (
                        f"its initial value is computed from {sources[0]}, which is loaded from weights "
                        "afterwards"
                    )
                    fix = (
                        "initialize it without looking at others (no DoRA, no PiSSA), or store it with "
                        "them: model.weights"
                    )
                    yield Diagnostic(text, fix, name)

    def _first_name(self, name: str) -> str:
        if name not in self._first_names:
            raise PlanError(
                f"there is no parameter '{name}'", fix=suggest_name(name, self._first_names), location="model"
            )
        return self._first_names[name]


def _add_constants(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], constants: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**constants, **kwargs}


def logical_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the first name of every parameter of `module`, with its tied names."""
    by_object: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        by_object.setdefault(id(param), []).append(name)
    return {first: tuple(aliases) for first, *aliases in by_object.values()}


def _script_diagnostics(module: nn.Module) -> Iterator[Diagnostic]:
    inside: set[int] = set()
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule) and id(inner) not in inside:
            inside.update(id(part) for part in inner.modules())
            text = (
                f"the module is compiled by TorchScript ({inner.original_name}): its parameters and forward "
                "cannot be accessed"
            )
            yield Diagnostic(
                text, "use the module itself, without torch.jit.script or torch.jit.trace", name or "model"
            )


def _init_diagnostics(
    module: nn.Module, params: dict[str, nn.Parameter], tape: InitTape
) -> Iterator[Diagnostic]:
    owner_of: dict[int, str] = {}
    for name, param in params.items():
        other = owner_of.setdefault(storage_id(param), name)
        if other != name:
            fix = f"tie them as one object: module.{name} = module.{other}"
            yield Diagnostic(f"shares its memory with {other} but is another nn.Parameter", fix, name)
        if tape.is_blank(storage_id(param)) and param.numel():
            text = (
                f"the parameter of shape {tuple(param.shape)} is never initialized: it would be "
                "uninitialized memory"
            )
            yield Diagnostic(text, "fill it in the constructor, for example with torch.nn.init.normal_", name)
    for name, buffer in module.named_buffers():
        if is_meta(buffer):
            text = "the buffer is computed from a parameter, which has no value during construction"
            yield Diagnostic(
                text, "compute it in the first forward, or make it a parameter with requires_grad=False", name
            )
