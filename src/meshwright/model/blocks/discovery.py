"""Finds the blocks of a model without annotations, and the blocks that contain each parameter.

Blocks are found from the module tree. The topmost lists of modules (`ModuleList`, `Sequential`, `ModuleDict`)
are the chains: each of their members is a block. A module beside or above a chain that has parameters and
contains no chain is a block too (embedding, final norm, head). A module that contains a chain is a container;
its direct parameters, and parameters that glue uses without calling their module, belong to the root. A model
without a chain is one block, and the plan notes that. A layer with its adapter (`model.hf.peft_name_map`)
counts as one layer.

    LlamaForCausalLM                      block
      model          contains a chain
        embed_tokens                      model.embed_tokens
        layers       a chain              model.layers.0, model.layers.1, ...
        norm                              model.norm
      lm_head                             lm_head
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from torch import nn

from meshwright.model.hf.peft_name_map import is_adapter_layer
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics, suggest_name

WHOLE_MODEL = "(model)"
_CHAINS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(module: nn.Module, declared: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Returns the blocks of `module` by name, in module order.

    `declared` names replace the search; WHOLE_MODEL alone is the module. Raises PlanError for a declared name
    that is not a submodule, and for one that lies inside another declared block or is the same module.
    """
    if declared:
        return _declared_blocks(module, declared)
    if not _holds_chain(module):
        return {WHOLE_MODEL: module}
    found: dict[str, nn.Module] = {}
    for name, block in _walk("", module):
        if not any(block is other for other in found.values()):
            found[name] = block
    return found


def param_owners(module: nn.Module, blocks: dict[str, nn.Module]) -> dict[int, list[str]]:
    """Returns, for each parameter (by id), the names of the blocks that contain it; other parameters are
    absent.
    """
    owners: dict[int, list[str]] = {}
    for name, block in blocks.items():
        for parameter in block.parameters():
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not _has_parameters(child):
            continue
        inside_chain = isinstance(module, _CHAINS)
        if isinstance(child, _CHAINS) or (not inside_chain and _holds_chain(child)):
            yield from _walk(path, child)
        else:
            yield path, child


def _holds_chain(module: nn.Module) -> bool:
    if is_adapter_layer(module):
        return False  # the dicts in which a layer keeps its adapters are not chains
    return (isinstance(module, _CHAINS) and _has_parameters(module)) or any(
        map(_holds_chain, module.children())
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _declared_blocks(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    if tuple(names) == (WHOLE_MODEL,):
        return {WHOLE_MODEL: module}
    modules = {name: inner for name, inner in module.named_modules(remove_duplicate=False) if name}
    diagnostics = [
        Diagnostic(
            f"the model has no module '{name}'", suggest_name(name, [*modules, WHOLE_MODEL]), "model.blocks"
        )
        for name in names
        if name not in modules
    ]
    for first, second in combinations((name for name in names if name in modules), 2):
        inside = modules[second] in modules[first].modules()
        if inside or modules[first] in modules[second].modules():
            outer, inner = (first, second) if inside else (second, first)
            relation = "is the same module as" if modules[first] is modules[second] else "is inside"
            text = f"'{inner}' {relation} '{outer}', and both are declared as blocks"
            diagnostics.append(Diagnostic(text, "declare one of the two", "model.blocks"))
    raise_diagnostics(diagnostics)
    return {name: modules[name] for name in names}
