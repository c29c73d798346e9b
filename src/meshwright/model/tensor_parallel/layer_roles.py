"""Finds the layers of a model with weights: their kind, and how they may be sharded.

The *role* of a layer tells along which side of its weight it can be sharded without changing the results:

    colwise           y = x W splits by outputs: each rank computes some of them       q, k, v, gate, up
    rowwise           y = x W splits by inputs, and partial sums are added             attention output, down
    packed_colwise    several colwise layers in one weight, each split by itself       qkv, gate-up
    packed_rowwise    the same for rowwise
    vocab             an embedding split along the vocabulary
    experts           weights of many experts, distributed by expert
    latent            a compressed key-value projection, part of it shared by all heads
    replicated        unsharded on every rank

A role is declared by the user, else by the model (transformers: `base_model_tp_plan`, `_tp_plan`), else, for
norms, routers and experts, given by the kind. A layer without a role stays unsharded and is reported with its
bytes.
Patterns name modules or parameters; "*" stands for one part between dots: "layers.*.mlp.up".

Limits: names and flags are read; only a run shows that a declared role is right (`meshwright verify`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from meshwright.model.hf.declared_tp_plan import declared_roles, output_head
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name

ROLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "vocab", "experts", "latent", "replicated")
DECLARED_BY_USER, DECLARED_BY_MODEL, KNOWN_BY_KIND = "declared by you", "declared by the model", "by its kind"
ROLES_KEY = "model.layer_roles"
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_ROUTERS = re.compile(r"(Router|TopK|Gate|Gating)\w*$")
_ROLE_OF_KIND = MappingProxyType({"norm": "replicated", "router": "replicated", "experts": "experts"})
_KINDS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    (nn.Linear, "linear"),
    (nn.Embedding, "embedding"),
    (nn.MultiheadAttention, "attention"),
    (nn.modules.conv._ConvNd, "convolution"),
    ((nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase), "norm"),
)


@dataclass(frozen=True)
class LayerRole:
    """One module with its own weights: kind, shape of its largest weight, elements, role ("": unknown), and
    source of the role.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    numel: int
    role: str = ""
    source: str = ""

    @property
    def pattern(self) -> str:
        """The name with "*" for every number: equal for the same place in every layer."""
        return LAYER_NUMBER.sub("*", self.name)


def find_layer_roles(module: nn.Module, declared: Mapping[str, str] | None = None) -> tuple[LayerRole, ...]:
    """Returns the layers of `module` in module order; `declared` maps patterns to roles and overrides the
    model's own.

    Raises PlanError for an unknown role, and for a pattern that matches no weights.
    """
    asked, head = dict(declared or {}), output_head(module)
    model_roles = declared_roles(module)
    found = []
    for name, submodule in module.named_modules():
        own_params = {leaf: weight for leaf, weight in submodule._parameters.items() if weight is not None}
        if own_params:
            kind = "head" if submodule is head else _kind(submodule)
            role, source = _find_role(name, list(own_params), kind, asked, model_roles)
            largest = max(own_params.values(), key=lambda weight: (weight.dim(), weight.numel()))
            numel = sum(weight.numel() for weight in own_params.values())
            found.append(LayerRole(name, kind, tuple(largest.shape), numel, role, source))
    _check_patterns(asked, module)
    return tuple(found)


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """Returns the names of the weight matrices of inner linear layers: neither embedding nor head.

    The head is the one that the model declares, else its last linear layer. A weight shared with one of
    these is not inner.
    """
    layer_roles = find_layer_roles(module)
    linears = [layer_role.name for layer_role in layer_roles if layer_role.kind == "linear"]
    ends = {layer_role.name for layer_role in layer_roles if layer_role.kind in ("embedding", "head")}
    ends |= set(linears[-1:]) if output_head(module) is None else set()
    inner = [
        layer_role.name
        for layer_role in layer_roles
        if layer_role.kind in ("linear", "attention", "router") and layer_role.name not in ends
    ]
    shared = {id(weight) for name in ends for weight in module.get_submodule(name)._parameters.values()}
    return frozenset(
        _param_name(name, leaf)
        for name in inner
        for leaf, weight in module.get_submodule(name)._parameters.items()
        if weight is not None and weight.dim() == 2 and id(weight) not in shared
    )


def find_traced_roles(module: nn.Module, declared: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the role of each layer that can be sharded, by module name: pairs as declared, others by kind.

    Without a head that the model declares, the last linear layer counts as one.
    """
    by_kind = {"embedding": "embedding", "head": "lm_head", "norm": "norm"}
    roles, layer_roles = {}, find_layer_roles(module, declared)
    linears = (
        [layer_role.name for layer_role in layer_roles if layer_role.kind == "linear"]
        if output_head(module) is None
        else []
    )
    for layer_role in layer_roles:
        if layer_role.kind == "linear" and layer_role.role in ("colwise", "rowwise"):
            roles[layer_role.name] = layer_role.role
        elif layer_role.kind == "linear" and (layer_role.role == "vocab" or layer_role.name in linears[-1:]):
            roles[layer_role.name] = "lm_head"
        elif layer_role.kind in by_kind:
            roles[layer_role.name] = by_kind[layer_role.kind]
    return roles


def _kind(submodule: nn.Module) -> str:
    for types, kind in _KINDS:
        if isinstance(submodule, types):
            return kind
    shapes = [weight.shape for weight in submodule._parameters.values() if weight is not None]
    name, deepest = type(submodule).__name__, max(map(len, shapes))
    counts = {shape[0] if shape else 1 for shape in shapes}
    if name == "Conv1D" and "transformers" in type(submodule).__module__:
        return "linear"  # of GPT-2: a linear layer with a transposed weight
    if deepest == 3 and ("Expert" in name or (len(counts) == 1 and counts != {1})):
        return "experts"
    if _ROUTERS.search(name):
        return "router"
    return "norm" if "Norm" in name and deepest == 1 else "weights"


def _find_role(
    name: str, leaves: list[str], kind: str, asked: Mapping[str, str], model_roles: Mapping[str, str]
) -> tuple[str, str]:
    for roles, source in ((asked, DECLARED_BY_USER), (model_roles, DECLARED_BY_MODEL)):
        module_role = next((role for pattern, role in roles.items() if matches_pattern(pattern, name)), None)
        param_roles = {
            leaf: role
            for leaf in leaves
            for pattern, role in roles.items()
            if matches_pattern(pattern, _param_name(name, leaf))
        }
        if kind == "experts" and param_roles:
            return ", ".join(f"{leaf} {role}" for leaf, role in param_roles.items()), source
        if module_role is not None or param_roles:
            return module_role or next(iter(param_roles.values())), source
    role = _ROLE_OF_KIND.get(kind, "")
    return role, KNOWN_BY_KIND if role else ""


def matches_pattern(pattern: str, name: str) -> bool:
    """Returns whether `pattern`, in which "*" stands for one part between dots, matches `name`."""
    pattern_parts, name_parts = pattern.split("."), name.split(".")
    return len(pattern_parts) == len(name_parts) and all(
        pattern_part in ("*", part) for pattern_part, part in zip(pattern_parts, name_parts, strict=True)
    )


def check_roles(declared: object) -> None:
    """Raises PlanError unless `declared` maps patterns to roles."""
    if not isinstance(declared, Mapping) or not all(isinstance(key, str) for key in declared):
        text = f"layer_roles are {declared!r}; needed are patterns of module names with a role each"
        raise PlanError(
            text,
            fix='write layer_roles={"layers.*.up": "colwise", "layers.*.down": "rowwise"}',
            location=ROLES_KEY,
        )
    raise_diagnostics(
        Diagnostic(f"'{pattern}' has the role {role!r}", suggest_name(str(role), ROLES), ROLES_KEY)
        for pattern, role in declared.items()
        if role not in ROLES
    )


def _check_patterns(asked: Mapping[str, str], module: nn.Module) -> None:
    weights = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names = dict.fromkeys([*weights, *(name.rpartition(".")[0] for name in weights)])
    patterns = {LAYER_NUMBER.sub("*", name) for name in names if name}
    raise_diagnostics(
        Diagnostic(
            f"'{pattern}' names no module or parameter with weights",
            suggest_name(pattern, patterns),
            ROLES_KEY,
        )
        for pattern in asked
        if not any(matches_pattern(pattern, name) for name in names)
    )


def _param_name(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf
