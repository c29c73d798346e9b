"""The sockets of a model: every module that holds weights of its own, what kind it is, and how it may be split.

A *socket* is where a technique could put its own computation: a linear layer, the embedding, attention, the experts. Its
*role* says along which side of the weight that is possible without a change of the numbers:

    columns           y = x W splits by outputs: each rank makes some of them        q, k, v, gate, up
    rows              y = x W splits by inputs, and the ranks' sums are added         attention output, down
    packed columns    several columns-linears in one weight, each split by itself     qkv, gate-up
    packed rows       the same for rows
    vocabulary        an embedding whose rows, the words, are divided
    experts           weights of many experts, divided among ranks by expert
    latent            a compressed key-value projection, of which a part is shared by all heads
    replicated        whole on every rank

A role comes from what the user declared, else from what the model declares (transformers: `base_model_tp_plan`, `_tp_plan`),
else, for norms and routers, from their kind. Where none is known the module stays whole on every rank, and that is said with
its bytes. Patterns name modules or parameters; "*" stands for a number or a word: "layers.*.mlp.up".

Limits: names and flags are read; that a declared role is the right one, the numbers must show (`verify`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from meshwright.model.hf.metadata import declared_roles, output_head
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name

ROLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "vocab", "experts", "latent", "replicated")
DECLARED_BY_USER, DECLARED_BY_MODEL, KNOWN_BY_KIND = "declared by you", "declared by the model", "by its kind"
ROLES_KEY = "model.layer_roles"
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_ROUTERS = re.compile(r"(Router|TopK|Gate|Gating)\w*$")
_KINDS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    (nn.Linear, "linear"),
    (nn.Embedding, "embedding"),
    (nn.MultiheadAttention, "attention"),
    (nn.modules.conv._ConvNd, "convolution"),
    ((nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase), "norm"),
)


@dataclass(frozen=True)
class LayerRole:
    """One module with weights of its own: its kind, the shape of its largest weight, elements, role ("": unknown), and source."""

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
    """The sockets of `module` in module order; `declared` maps patterns to roles, and wins over what the model declares.

    Raises PlanError for a declared role that is none, and for a pattern that names nothing with weights.
    """
    asked, head = dict(declared or {}), output_head(module)
    styles = declared_roles(module)
    found = []
    for name, owner in module.named_modules():
        own = {leaf: weight for leaf, weight in owner._parameters.items() if weight is not None}
        if own:
            kind = "head" if owner is head else _kind(owner)
            role, source = _find_role(name, list(own), kind, asked, styles)
            largest = max(own.values(), key=lambda weight: (weight.dim(), weight.numel()))
            numel = sum(weight.numel() for weight in own.values())
            found.append(LayerRole(name, kind, tuple(largest.shape), numel, role, source))
    _check_patterns(asked, module)
    return tuple(found)


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """The names of the matrices of linear layers inside of the model: neither of the embedding nor of the head.

    The head is what the model declares as such, else its last linear layer. A weight that one of these shares is not inside.
    """
    sockets = find_layer_roles(module)
    linears = [socket.name for socket in sockets if socket.kind == "linear"]
    ends = {socket.name for socket in sockets if socket.kind in ("embedding", "head")}
    ends |= set(linears[-1:]) if output_head(module) is None else set()
    inside = [
        socket.name
        for socket in sockets
        if socket.kind in ("linear", "attention", "router") and socket.name not in ends
    ]
    shared = {id(weight) for name in ends for weight in module.get_submodule(name)._parameters.values()}
    return frozenset(
        _param_name(name, leaf)
        for name in inside
        for leaf, weight in module.get_submodule(name)._parameters.items()
        if weight is not None and weight.dim() == 2 and id(weight) not in shared
    )


def find_traced_roles(module: nn.Module, declared: Mapping[str, str] | None = None) -> dict[str, str]:
    """The role of each layer that can be divided, by module name (core.anatomy.Call): pairs as declared, all else by its kind.

    Without a head that the model declares, its last linear layer may be one.
    """
    by_kind = {"embedding": "embedding", "head": "lm_head", "norm": "norm"}
    roles, sockets = {}, find_layer_roles(module, declared)
    linears = (
        [socket.name for socket in sockets if socket.kind == "linear"] if output_head(module) is None else []
    )
    for socket in sockets:
        if socket.kind == "linear" and socket.role in ("colwise", "rowwise"):
            roles[socket.name] = socket.role
        elif socket.kind == "linear" and (socket.role == "vocab" or socket.name in linears[-1:]):
            roles[socket.name] = "lm_head"
        elif socket.kind in by_kind:
            roles[socket.name] = by_kind[socket.kind]
    return roles


def _kind(owner: nn.Module) -> str:
    for types, kind in _KINDS:
        if isinstance(owner, types):
            return kind
    shapes = [weight.shape for weight in owner._parameters.values() if weight is not None]
    name, deepest = type(owner).__name__, max(map(len, shapes))
    counts = {shape[0] if shape else 1 for shape in shapes}
    if name == "Conv1D" and "transformers" in type(owner).__module__:
        return "linear"  # GPT-2's: a linear whose weight lies the other way round
    if deepest == 3 and ("Expert" in name or (len(counts) == 1 and counts != {1})):
        return "experts"
    if _ROUTERS.search(name):
        return "router"
    return "norm" if "Norm" in name and deepest == 1 else "weights"


def _find_role(
    name: str, leaves: list[str], kind: str, asked: Mapping[str, str], styles: Mapping[str, str]
) -> tuple[str, str]:
    for roles, source in ((asked, DECLARED_BY_USER), (styles, DECLARED_BY_MODEL)):
        whole = next((role for pattern, role in roles.items() if matches_pattern(pattern, name)), None)
        parts = {
            leaf: role
            for leaf in leaves
            for pattern, role in roles.items()
            if matches_pattern(pattern, _param_name(name, leaf))
        }
        if kind == "experts" and parts:
            return ", ".join(f"{leaf} {role}" for leaf, role in parts.items()), source
        if whole is not None or parts:
            return whole or next(iter(parts.values())), source
    return ("replicated", KNOWN_BY_KIND) if kind in ("norm", "router") else ("", "")


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether `pattern`, in which a "*" stands for one part between dots, is `name`."""
    given, parts = pattern.split("."), name.split(".")
    return len(given) == len(parts) and all(
        mine in ("*", part) for mine, part in zip(given, parts, strict=True)
    )


def check_roles(declared: object) -> None:
    """Raise PlanError unless `declared` is a mapping from patterns to roles."""
    if not isinstance(declared, Mapping) or not all(isinstance(key, str) for key in declared):
        text = f"the sockets are {declared!r}; needed are patterns of module names with a role each"
        raise PlanError(
            text, fix='write layer_roles={"layers.*.up": "colwise", "layers.*.down": "rowwise"}', location=ROLES_KEY
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
