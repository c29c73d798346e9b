"""Loads the model that a job names: a transformers config, a hub id, or a Python file with a factory.

    model.source = "configs/llama"           a folder with config.json, or a .json file
                                             (`model.hf.model_from_config`)
    model.source = "org/name"                a repository of the hub: see `model.hf.hub`
    model.source = "train.py:build"          build() returns an nn.Module, or a `Model` with more information

The file is imported from its path under a private name, with its folder on the import path as when it is run.
The factory is called once, with deferred initialization, so that even a model larger than this machine can be
loaded.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.model.hf.hub import is_hub_id, resolve_path
from meshwright.model.hf.model_from_config import config_factory, is_quantized, read_config, text_limits
from meshwright.model.hf.peft_name_map import is_adapted, suggest_fix, unload_adapters
from meshwright.model.hf.tokenizer_files import check_tokenizer
from meshwright.model.hf.training_settings import (
    disable_activation_checkpointing,
    disable_key_value_cache,
    use_torch_attention,
)
from meshwright.model.loading.compiled_modules import (
    compile_notes,
    find_compiled,
    remove_compile,
    remove_wrapper,
)
from meshwright.model.loading.deferred_init import DeferredInit, defer_init, logical_names
from meshwright.model.loading.pretrained_weights import find_weights
from meshwright.model.tensor_parallel.layer_roles import check_roles, find_layer_roles
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.python_file import folder_on_path, import_file

SOURCE_KEY = "model.source"


@dataclass(frozen=True)
class Model:
    """The return value of a factory: the module, and what cannot be seen from it.

    `example` is one batch as keyword arguments of the forward, samples along dim 0. `blocks` are the names of
    the submodules that form the chain, if the search would find others. `loss` is a `Loss`, a sum and a
    count; the trainer checks it. `layer_roles` says how weights may be sharded: {"layers.*.up": "colwise"};
    see `model.tensor_parallel.layer_roles`.
    """

    module: nn.Module
    example: Mapping[str, torch.Tensor] | None = None
    blocks: Sequence[str] | None = None
    loss: object | None = None
    layer_roles: Mapping[str, str] | None = None
    callbacks: Sequence[object] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be planned: its deferred initialization, and what its factory declares.

    `notes` say which of its settings were changed; `requests_checkpointing`: its own activation checkpointing
    was on, and is now left to the strategy.
    """

    name: str
    deferred_init: DeferredInit
    example: dict[str, torch.Tensor] | None = None
    blocks: tuple[str, ...] | None = None
    loss: object | None = None
    layer_roles: dict[str, str] | None = None
    callbacks: tuple[object, ...] = ()
    notes: tuple[str, ...] = ()
    requests_checkpointing: bool = False


def load_model(source: ModelConfig, seed: int) -> LoadedModel:
    """Returns the model that `source` names, not materialized; initial values are pretrained or drawn from
    `seed`.

    Raises PlanError for a source that is missing or cannot be read, a factory that is missing, raises (its
    own error is the cause) or returns something else, a model whose construction cannot be recorded, and
    weights that do not fit.
    """
    loaded = _load_architecture(source, seed)
    if not source.weights:
        return loaded
    return with_weights(loaded, resolve_path(source.weights, source, "model.weights"), source.skip)


def read_source_config(source: ModelConfig) -> Any:
    """Returns the transformers config that `source` names, without making a model; None for a file with a
    factory.

    Raises PlanError for one that is missing or cannot be read.
    """
    if source.source.endswith(".py") or source.source.rpartition(":")[0].endswith(".py"):
        return None
    return read_config(str(resolve_path(source.source, source, SOURCE_KEY)))


def with_weights(loaded: LoadedModel, path: Path, skip: Sequence[str] = ()) -> LoadedModel:
    """Returns `loaded` with the weights in `path`, a folder or a safetensors file, as initial values.

    The weights of an adapted model are those of its base. Names that match a pattern of `skip` are not
    loaded. Raises PlanError if the weights, or the tokenizer in the same folder, do not fit the model.
    """
    module, base_names = loaded.deferred_init.instantiate(), None
    if is_adapted(module):
        module, base_names = unload_adapters(module)
    if is_quantized(module):
        text = f"the config of '{loaded.name}' says that its weights are quantized (quantization_config)"
        raise PlanError(
            text,
            fix="give weights in floating point, and a config without that field",
            location="model.weights",
        )
    weights = find_weights(path, module, logical_names(module), skip)
    weights = weights if base_names is None else weights.rename(base_names)
    check_tokenizer(path, text_limits(module).vocab_size)
    return replace(loaded, deferred_init=loaded.deferred_init.with_weights(weights))


def _load_architecture(source: ModelConfig, seed: int) -> LoadedModel:
    path, separator, function = source.source.rpartition(":")
    if separator and path.endswith(".py"):
        if source.overrides:
            what = (
                f"overrides ({', '.join(source.overrides)}) with a factory; they replace fields of a "
                "transformers config"
            )
            raise PlanError(
                what,
                fix="set these values in the factory, and remove model.overrides",
                location="model.overrides",
            )
        return load_factory(_import_factory(Path(path), function), seed, name=function, frozen=source.frozen)
    if source.source.endswith(".py"):
        fix = f"write {source.source}:NAME, where NAME is a function without arguments that returns the model"
        raise PlanError(f"{source.source} names a file and no factory", fix=fix, location=SOURCE_KEY)
    path = Path(source.source)
    name = (
        path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    )
    folder = resolve_path(source.source, source, SOURCE_KEY) if is_hub_id(source.source) else source.source
    factory = config_factory(str(folder), source.overrides, trust_remote_code=source.trust_remote_code)
    return load_factory(factory, seed, name=name, frozen=source.frozen)


def load_factory(
    factory: Callable[[], nn.Module | Model], seed: int, name: str, frozen: Sequence[str] = ()
) -> LoadedModel:
    """Returns the model that `factory` returns, with deferred initialization and the initial values of
    `seed`.

    Parameters with a name, or tied name, that matches a pattern of `frozen` are not trained.
    """

    def build() -> tuple[Model, nn.Module]:
        model = _check_model(_call_factory(factory, name), name)
        return model, model.module

    return _load(build, seed, name, frozen)


def load_module(given: nn.Module | Model, seed: int) -> LoadedModel:
    """Returns a copy of `given` with deferred initialization and its values."""
    name = "model" if isinstance(given, Model) else type(remove_wrapper(given)).__name__
    model = _check_model(given, name)
    if isinstance(model.module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        text = f"a {type(model.module).__name__}, which divides batches itself"
        raise PlanError(
            text, fix="pass the module in it: model.module; the mesh divides batches", location=name
        )
    if any(parameter.is_meta for parameter in model.module.parameters()):
        raise PlanError(
            f"the parameters of {name} are on the device 'meta', where they have no values",
            fix=f"pass what makes it, a factory: lambda: {name}(...); each rank makes values of its own",
            location=name,
        )
    return _load(lambda: (model, copy.deepcopy(model.module)), seed, name, ())


def _load(
    build: Callable[[], tuple[Model, nn.Module]], seed: int, name: str, frozen: Sequence[str]
) -> LoadedModel:
    """Returns the loaded model; `build` returns what is declared, and the module or a copy of it."""
    returned: list[tuple[Model, PreparedModule]] = []

    def prepare() -> nn.Module:
        model, module = build()
        prepared = _prepare_for_training(module, find_compiled(model.module))
        returned.append((model, prepared))
        freeze(prepared.module, frozen)
        return prepared.module

    deferred_init = defer_init(prepare, seed)
    model, prepared = returned[0]
    layer_roles = None if model.layer_roles is None else dict(model.layer_roles)
    if layer_roles:
        find_layer_roles(deferred_init.instantiate(), layer_roles)  # refuses patterns without a match
    return LoadedModel(
        name,
        deferred_init,
        None if model.example is None else dict(model.example),
        None if model.blocks is None else tuple(model.blocks),
        model.loss,
        layer_roles,
        tuple(model.callbacks),
        prepared.notes,
        prepared.requests_checkpointing,
    )


@dataclass(frozen=True)
class PreparedModule:
    """A module with the settings that training needs, and what was changed for them."""

    module: nn.Module
    notes: tuple[str, ...]
    requests_checkpointing: bool


def _prepare_for_training(module: nn.Module, compiled: Sequence[str]) -> PreparedModule:
    """Changes the settings of `module`, in place; `compiled` are the modules that were compiled before it was
    copied.
    """
    module = remove_compile(module)
    notes = list(compile_notes(compiled))
    disable_key_value_cache(module)
    if requests_checkpointing := disable_activation_checkpointing(module):
        notes.append(
            "the model's own activation checkpointing is turned off: the strategy 'activation_checkpointing' "
            "recomputes its blocks, if it is among the strategies (by default it is)"
        )
    if attention := use_torch_attention(module):
        notes.append(
            f"attention runs by attn_implementation = '{attention[1]}' instead of '{attention[0]}', which "
            "cannot run on fake tensors"
        )
    return PreparedModule(module, tuple(notes), requests_checkpointing)


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Clears requires_grad of parameters with a name, or tied name, that matches one of `patterns` (fnmatch).

    Raises PlanError, with a diagnostic for each, for patterns that match nothing.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in named)]
    where = "model.frozen"
    raise_diagnostics(
        Diagnostic(f"'{each}' matches no parameter of the model", _nearest_name(each, named), where)
        for each in unused
    )
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def _nearest_name(pattern: str, names: Iterable[str]) -> str:
    names = list(names)
    similar = get_close_matches(pattern.replace("*", ""), names, n=1, cutoff=0.5)
    suggestion = f"did you mean '{similar[0]}'? " if similar else ""
    return (
        f"{suggestion}a name here is '{names[0] if names else ''}'; 'module.*' matches all parameters of a "
        "module"
    )


def _call_factory(factory: Callable[[], nn.Module | Model], name: str) -> object:
    try:
        return factory()
    except PlanError:
        raise
    except Exception as error:
        fix = suggest_fix(
            error, "correct the construction (the traceback above is its own); it must work without arguments"
        )
        raise PlanError(
            f"constructing '{name}' raised {type(error).__name__}: {error}", fix=fix, location=SOURCE_KEY
        ) from error


def _check_model(value: object, name: str) -> Model:
    model = Model(value) if isinstance(value, nn.Module) else value
    fix = "return an nn.Module, or meshwright.Model(module=..., example=..., blocks=[...], loss=...)"
    if not isinstance(model, Model) or not isinstance(model.module, nn.Module):
        inner = (
            f"a Model whose module is {model.module!r}"
            if isinstance(model, Model)
            else f"a value of type {type(value).__name__}"
        )
        raise PlanError(f"the factory '{name}' returned {inner}", fix=fix, location=SOURCE_KEY)
    if model.example is not None and not _is_batch(model.example):
        raise PlanError(
            f"the example of '{name}' is not a dict of tensors by name",
            fix="write example={'x': tensor}",
            location=SOURCE_KEY,
        )
    if isinstance(model.blocks, str) or not all(isinstance(block, str) for block in model.blocks or ()):
        raise PlanError(
            f"the blocks of '{name}' are {model.blocks!r}",
            fix="write blocks=['layers.0', 'layers.1']",
            location=SOURCE_KEY,
        )
    if model.layer_roles is not None:
        check_roles(model.layer_roles)
    return model


def _is_batch(example: object) -> bool:
    return isinstance(example, Mapping) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in example.items()
    )


def _import_factory(path: Path, function: str) -> Callable[[], nn.Module | Model]:
    if not path.is_file():
        raise PlanError(
            f"there is no file {path}",
            fix="give the path of a Python file: file.py:factory",
            location=SOURCE_KEY,
        )
    module = _import_file(path)
    if not callable(vars(module).get(function)):
        functions = [
            name
            for name, value in vars(module).items()
            if isfunction(value) and value.__module__ == module.__name__
        ]
        fix = (
            suggest_name(function, functions)
            if functions
            else "define a function without arguments that returns the model"
        )
        raise PlanError(f"{path} has no function '{function}'", fix=fix, location=SOURCE_KEY)

    def factory() -> nn.Module | Model:
        with folder_on_path(path):  # the factory may import its neighbours when it is called
            return vars(module)[function]()

    return factory


def _import_file(path: Path) -> ModuleType:
    try:
        return import_file(path, "model")
    except Exception as error:
        fix = suggest_fix(
            error, "correct the file (the traceback above is its own); it must import without side effects"
        )
        raise PlanError(
            f"importing {path} raised {type(error).__name__}: {error}", fix=fix, location=SOURCE_KEY
        ) from error
