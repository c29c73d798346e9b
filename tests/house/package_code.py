"""The code of the package as data: what names, classes and annotations stand for. Nothing is run."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tests.house.source import Function, Source

ITERABLES = ("list", "set", "frozenset", "Sequence", "Iterable", "Iterator", "Generator", "Collection")
MAPPINGS = ("dict", "Mapping", "defaultdict")
QUESTIONS = {"property", "cached_property"}
MAX_DEPTH = 10  # of aliases and attributes that are looked up for one type


@dataclass(frozen=True)
class Type:
    """What an annotation says: a class of the package, the types of a tuple's items, or of all elements."""

    owner: "ClassCode | None" = None
    items: tuple["Type | None", ...] = ()
    element: "Type | None" = None

    def item(self, index: int) -> "Type | None":
        """The type of an item of a tuple, or of any element."""
        return self.items[index] if -len(self.items) <= index < len(self.items) else self.element


class ModuleCode:
    """A module: its name, and what the names in it stand for."""

    def __init__(self, name: str, tree: ast.Module, modules: Mapping[str, "ModuleCode"]) -> None:
        self.name, self._modules = name, modules
        self._imports: dict[str, tuple[str, str]] = {}
        self._aliases: dict[str, ast.expr] = {}
        self._code: dict[str, FunctionCode | ClassCode] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self._imports |= {
                    alias.asname or alias.name: (node.module, alias.name) for alias in node.names
                }
        for node in tree.body:
            if isinstance(node, Function):
                self._code[node.name] = FunctionCode(self, node)
            elif isinstance(node, ast.ClassDef):
                self._code[node.name] = ClassCode(self, node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._aliases[node.targets[0].id] = node.value

    def named(self, name: str, depth: int = 0) -> "FunctionCode | ClassCode | ModuleCode | None":
        """The code of the package that `name` stands for in this module."""
        if name in self._code or name not in self._imports or depth > MAX_DEPTH:
            return self._code.get(name)
        module, original = self._imports[name]
        found = self._modules[module].named(original, depth + 1) if module in self._modules else None
        return found or self._modules.get(f"{module}.{original}")

    def annotated(
        self, node: ast.expr | None, owner: "ClassCode | None" = None, depth: int = 0
    ) -> Type | None:
        """The type that the annotation `node` names, in a class if it has an `owner`."""
        if depth > MAX_DEPTH:
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body, owner, depth + 1)
        if isinstance(node, ast.Name):
            found = owner if node.id == "Self" else self.named(node.id)
            if isinstance(found, ClassCode):
                return Type(found)
            module, name = self._imports.get(node.id, ("", node.id))
            there = self._modules.get(module, self)
            return there.annotated(there._aliases.get(name), owner, depth + 1)
        if isinstance(node, ast.BinOp):
            sides = (self.annotated(side, owner, depth + 1) for side in (node.left, node.right))
            return next((side for side in sides if side), None)
        if not isinstance(node, ast.Subscript):
            return None
        kind = node.value.id if isinstance(node.value, ast.Name) else ""
        if kind not in ("tuple", *ITERABLES, *MAPPINGS):
            return None
        given = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        types = [self.annotated(each, owner, depth + 1) for each in given]
        if kind == "tuple" and ast.unparse(given[-1]) != "...":
            return Type(items=tuple(types))
        return Type(element=types[-1] if kind in MAPPINGS else types[0])


@dataclass(frozen=True, eq=False)
class FunctionCode:
    """A function of a module, or a method of its class `owner`."""

    module: ModuleCode
    node: Function
    owner: "ClassCode | None" = None

    @cached_property
    def decorators(self) -> set[str]:
        """The names of its decorators, without their arguments."""
        bare = (each.func if isinstance(each, ast.Call) else each for each in self.node.decorator_list)
        return {each.attr if isinstance(each, ast.Attribute) else ast.unparse(each) for each in bare}

    @property
    def result(self) -> Type | None:
        """The type of what it returns."""
        return self.module.annotated(self.node.returns, self.owner)

    @property
    def parameters(self) -> list[ast.arg]:
        """Its parameters by position, then those by name only."""
        return [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]

    @property
    def takes_self(self) -> bool:
        """Whether its first parameter is the object, or the class."""
        return self.owner is not None and "staticmethod" not in self.decorators

    def __str__(self) -> str:
        owner = f"{self.owner.node.name}." if self.owner else ""
        return f"{self.module.name}: {owner}{self.node.name}"


@dataclass(frozen=True, eq=False)
class ClassCode:
    """A class of a module."""

    module: ModuleCode
    node: ast.ClassDef

    @cached_property
    def methods(self) -> dict[str, FunctionCode]:
        """Its methods by name, with those of its bases."""
        found: dict[str, FunctionCode] = {}
        for base in self._bases:
            found |= base.methods
        own = (each for each in self.node.body if isinstance(each, Function))
        return found | {each.name: FunctionCode(self.module, each, self) for each in own}

    @property
    def constructor(self) -> FunctionCode | None:
        """What runs when an object is made; None if that only sets fields."""
        return self.methods.get("__init__") or self.methods.get("__post_init__")

    def attribute(self, name: str) -> Type | None:
        """The type that a property or a field of this name states."""
        method = self.methods.get(name)
        if method is not None and method.decorators & QUESTIONS:
            return method.result
        if name in self._fields:
            return self.module.annotated(self._fields[name], self)
        return next((found for base in self._bases if (found := base.attribute(name))), None)

    @cached_property
    def _bases(self) -> list["ClassCode"]:
        named = (self.module.named(base.id) for base in self.node.bases if isinstance(base, ast.Name))
        return [each for each in named if isinstance(each, ClassCode) and each is not self]

    @cached_property
    def _fields(self) -> dict[str, ast.expr]:
        nodes = [each for each in ast.walk(self.node) if isinstance(each, ast.AnnAssign)]
        return {ast.unparse(each.target).removeprefix("self."): each.annotation for each in nodes}

    @cached_property
    def assigned(self) -> dict[str, list[tuple[FunctionCode, ast.expr]]]:
        """What methods assign to attributes, by the attribute's name."""
        found: dict[str, list[tuple[FunctionCode, ast.expr]]] = {}
        for method in self.methods.values():
            for node in (each for each in ast.walk(method.node) if isinstance(each, ast.Assign)):
                for target, value in matched(node.targets[0], node.value):
                    if isinstance(target, ast.Attribute):
                        found.setdefault(target.attr, []).append((method, value))
        return found


def matched(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The parts of a target of an assignment, each with its own part of the value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def read_modules(sources: Sequence[Source]) -> dict[str, ModuleCode]:
    """The modules of the package by name."""
    modules: dict[str, ModuleCode] = {}
    for source in sources:
        name = (
            source.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        )
        modules[name] = ModuleCode(name, source.tree, modules)
    return modules
