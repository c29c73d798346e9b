"""Follows a value through the code, as a reader does who wants to know what becomes of it.

The *forms* of a value are classes: a config becomes a request, then a plan. A name holds the value if it is
the parameter that the walk starts with, or is assigned an expression that holds it, itself or one of its
attributes. An expression holds the
value if it is such a name; an attribute, an item or the result of a call of it, if that is of a form by its
annotation; or a choice, tuple or list with such a part.

A *walk* reads a function in source order. It enters every function of the package that is called with the
value, and every property and method of the value that gives a form of it, at the first call, and reads it
before the rest of the caller (depth first); a function is entered once. A property or method of the value
that gives something else is a question to it, and no step. Nothing is run: what is called follows from
imports, annotations and assignments, of an abstract class the method of that class. `raise` is not read.

A *room* is a module. A *stay* is a stretch of entered functions in one room. A *return* is a stay in a room
that the walk has left before: the reader opens the file another time.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tests.house.package_code import MAX_DEPTH, QUESTIONS, ClassCode, FunctionCode, ModuleCode, Type, matched

SAME_TYPE = ("replace", "tuple", "list", "sorted", "reversed", "set", "iter", "frozenset")


class Names:
    """The names of one function: their types, and which of them hold the value."""

    def __init__(self, function: FunctionCode, forms: frozenset[str] = frozenset()) -> None:
        self.function, self.forms = function, forms
        self.types: dict[str, Type | None] = {}
        self.holding: set[str] = set()
        for parameter in function.parameters:
            self.types[parameter.arg] = function.module.annotated(parameter.annotation, function.owner)
        if function.takes_self and function.parameters:
            self.types[function.parameters[0].arg] = Type(function.owner)

    def is_form(self, kind: Type | None) -> bool:
        """Whether a type is a form of the value, or has one inside."""
        if kind is None:
            return False
        named = kind.owner is not None and kind.owner.node.name in self.forms
        return named or any(map(self.is_form, (*kind.items, kind.element)))

    def holds(self, node: ast.expr) -> bool:
        """Whether an expression holds the value."""
        match node:
            case ast.Name():
                return node.id in self.holding
            case ast.Starred() | ast.NamedExpr():
                return self.holds(node.value)
            case ast.Tuple() | ast.List():
                return any(map(self.holds, node.elts))
            case ast.IfExp():
                return self.holds(node.body) or self.holds(node.orelse)
            case ast.BoolOp():
                return any(map(self.holds, node.values))
            case ast.Attribute() | ast.Subscript():
                return self.is_of_value(node.value) and self.is_form(self.type_of(node))
            case ast.Call():
                receiver = isinstance(node.func, ast.Attribute) and self.is_of_value(node.func.value)
                return (receiver or any(map(self.holds, arguments(node)))) and self.is_form(
                    self.type_of(node)
                )
            case ast.ListComp() | ast.GeneratorExp():
                inside = any(
                    isinstance(each, ast.Name) and each.id in self.holding for each in ast.walk(node)
                )
                return inside and self.is_form(self.type_of(node))
        return False

    def is_of_value(self, node: ast.expr) -> bool:
        """Whether an expression is the value, or a part of it of any type."""
        part = isinstance(node, ast.Attribute | ast.Subscript)
        return self.holds(node) or (part and self.is_of_value(node.value))

    def called(self, node: ast.expr, depth: int = 0) -> FunctionCode | ClassCode | None:
        """What a call of `node` calls, as far as it is code of the package."""
        module = self.function.module
        if isinstance(node, ast.Name):
            found = None if node.id in self.types else module.named(node.id)
            return None if isinstance(found, ModuleCode) else found
        if not isinstance(node, ast.Attribute):
            return None
        named = module.named(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(named, ModuleCode):
            found = named.named(node.attr)
            return None if isinstance(found, ModuleCode) else found
        kind = Type(named) if isinstance(named, ClassCode) else self.type_of(node.value, depth + 1)
        return kind.owner.methods.get(node.attr) if kind is not None and kind.owner is not None else None

    def type_of(self, node: ast.expr, depth: int = 0) -> Type | None:
        """The type of an expression, as far as annotations say it."""
        if depth > MAX_DEPTH:
            return None
        match node:
            case ast.Name():
                return self.types.get(node.id)
            case ast.Attribute():
                kind = self.type_of(node.value, depth + 1)
                return (
                    None if kind is None or kind.owner is None else _attribute(kind.owner, node.attr, depth)
                )
            case ast.Subscript():
                kind = self.type_of(node.value, depth + 1)
                index = node.slice.value if isinstance(node.slice, ast.Constant) else None
                return None if kind is None else kind.item(index) if isinstance(index, int) else kind.element
            case ast.Starred() | ast.NamedExpr():
                return self.type_of(node.value, depth + 1)
            case ast.IfExp():
                return self.type_of(node.body, depth + 1) or self.type_of(node.orelse, depth + 1)
            case ast.BoolOp():
                return next((kind for each in node.values if (kind := self.type_of(each, depth + 1))), None)
            case ast.Tuple():
                return Type(items=tuple(self.type_of(each, depth + 1) for each in node.elts))
            case ast.ListComp() | ast.GeneratorExp():
                return Type(element=self.type_of(node.elt, depth + 1))
            case ast.Call():
                return self._result(node, depth)
        return None

    def entered(self, node: ast.expr) -> Type | None:
        """The type of what `with node as name` names: of a context manager that yields, or of the object."""
        kind = self.type_of(node)
        if kind is not None and kind.owner is not None:
            method = kind.owner.methods.get("__enter__")
            return (method.result if method else None) or kind
        return kind and kind.element

    def bind(self, target: ast.expr, holds: bool, kind: Type | None) -> None:
        """Notes what an assignment to `target` gives its names."""
        if isinstance(target, ast.Tuple | ast.List):
            for index, each in enumerate(target.elts):
                self.bind(each, holds, kind and kind.item(index))
        elif isinstance(target, ast.Name):
            self.types[target.id] = kind
            self.holding = self.holding | {target.id} if holds else self.holding - {target.id}
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and holds:
            self.holding = self.holding | {target.value.id}

    def _result(self, node: ast.Call, depth: int) -> Type | None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        given = [self.type_of(each, depth + 1) for each in node.args]
        if name in SAME_TYPE and given:
            return given[0]
        if name == "zip":
            return Type(element=Type(items=tuple(each and each.element for each in given)))
        if name == "enumerate" and given:
            return Type(element=Type(items=(None, given[0] and given[0].element)))
        if name == "next" and given:
            return given[0] and given[0].element
        if isinstance(node.func, ast.Attribute) and node.func.attr == "enter_context" and node.args:
            return self.entered(node.args[0])
        found = self.called(node.func, depth + 1)
        return Type(found) if isinstance(found, ClassCode) else found and found.result


def _attribute(owner: ClassCode, name: str, depth: int) -> Type | None:
    stated, assigned = owner.attribute(name), owner.assigned.get(name, ())
    return stated or next((Names(method).type_of(value, depth + 1) for method, value in assigned), None)


def arguments(call: ast.Call) -> list[ast.expr]:
    """All arguments of a call."""
    return [*call.args, *(each.value for each in call.keywords)]


@dataclass
class Walk:
    """A walk that follows a value of these `forms`; `is_end` says of a function that it is not read."""

    forms: frozenset[str]
    is_end: Callable[[FunctionCode], bool] = lambda function: False
    steps: list[FunctionCode] = field(default_factory=list)
    ended: bool = False

    @property
    def stays(self) -> list[str]:
        """The modules of the walk, one for each stay."""
        return [room for room, _ in groupby(each.module.name for each in self.steps)]

    @property
    def returns(self) -> list[str]:
        """The modules of the stays in rooms that were left before."""
        return [room for index, room in enumerate(self.stays) if room in self.stays[:index]]

    def enter(self, function: FunctionCode, holding: set[str]) -> None:
        """Reads `function`, whose parameters `holding` hold the value."""
        if self.ended or function in self.steps:
            return
        self.steps.append(function)
        self.ended = self.is_end(function)
        names = Names(function, self.forms)
        names.holding = holding
        self._read(function.node.body, names)

    def _read(self, body: Sequence[ast.stmt], names: Names) -> None:
        for node in body:
            if not self.ended and not isinstance(node, ast.Raise):
                self._statement(node, names)

    def _statement(self, node: ast.stmt, names: Names) -> None:
        match node:
            case ast.Assign():
                self._expression(node.value, names)
                for target in node.targets:
                    for part, value in matched(target, node.value):
                        names.bind(part, names.holds(value), names.type_of(value))
                return
            case ast.AnnAssign() if node.value is not None:
                self._expression(node.value, names)
                kind = names.function.module.annotated(node.annotation) or names.type_of(node.value)
                names.bind(node.target, names.holds(node.value), kind)
                return
            case ast.For():
                self._expression(node.iter, names)
                kind = names.type_of(node.iter)
                names.bind(node.target, names.is_of_value(node.iter), kind and kind.element)
            case ast.With():
                for item in node.items:
                    self._expression(item.context_expr, names)
                    if item.optional_vars is not None:
                        kind = names.entered(item.context_expr)
                        names.bind(item.optional_vars, names.holds(item.context_expr), kind)
            case ast.ClassDef():
                return
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, names)
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            for inner in vars(node).get(block, ()):
                self._read([inner] if isinstance(inner, ast.stmt) else inner.body, names)

    def _expression(self, node: ast.expr, names: Names) -> None:
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            self._comprehension(node, names)
            return
        if isinstance(node, ast.Lambda):
            return
        for child in ast.iter_child_nodes(node):
            inner = child.value if isinstance(child, ast.keyword | ast.FormattedValue) else child
            if isinstance(inner, ast.expr):
                self._expression(inner, names)
        if isinstance(node, ast.NamedExpr):
            names.bind(node.target, names.holds(node.value), names.type_of(node.value))
        elif isinstance(node, ast.Attribute) and names.is_of_value(node.value):
            found = names.called(node)
            is_asked = isinstance(found, FunctionCode) and found.decorators & QUESTIONS
            if is_asked and names.is_form(found.result):
                self.enter(found, {"self"})
        elif isinstance(node, ast.Call):
            self._call(node, names)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, names: Names
    ) -> None:
        types, holding = dict(names.types), names.holding
        for each in node.generators:
            self._expression(each.iter, names)
            kind = names.type_of(each.iter)
            names.bind(each.target, names.is_of_value(each.iter), kind and kind.element)
            for condition in each.ifs:
                self._expression(condition, names)
        for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self._expression(part, names)
        names.types, names.holding = types, holding

    def _call(self, node: ast.Call, names: Names) -> None:
        found = names.called(node.func)
        receiver = isinstance(node.func, ast.Attribute) and names.holds(node.func.value)
        if not receiver and not any(map(names.holds, arguments(node))):
            return
        if isinstance(found, ClassCode):
            found = found.constructor
            receiver = True
        elif receiver and isinstance(found, FunctionCode) and not names.is_form(found.result):
            return  # a question
        if found is not None:
            self.enter(found, _held_parameters(found, node, names, receiver))
        for given in (each for each in arguments(node) if not names.holds(each)):
            function = names.called(given) if isinstance(given, ast.Name | ast.Attribute) else None
            if isinstance(function, FunctionCode) and not function.decorators & QUESTIONS:
                self.enter(function, {each.arg for each in function.parameters})


def _held_parameters(function: FunctionCode, call: ast.Call, names: Names, receiver: bool) -> set[str]:
    parameters = [each.arg for each in function.parameters]
    own = parameters[: 1 if function.takes_self else 0]
    others = parameters[len(own) :]
    held = set(own) if receiver else set()
    for index, each in enumerate(call.args):
        if names.holds(each):
            held |= set(others[index:] if isinstance(each, ast.Starred) else others[index : index + 1])
    return held | {each.arg for each in call.keywords if each.arg and names.holds(each.value)}


def follow(
    modules: Mapping[str, ModuleCode],
    start: str,
    forms: Sequence[str],
    is_end: Callable[[FunctionCode], bool] = lambda function: False,
) -> Walk:
    """The walk from `start`, "module:function:parameter"."""
    module, function, parameter = start.split(":")
    first = modules[module].named(function)
    if not isinstance(first, FunctionCode):
        raise ValueError(f"{module} has no function {function}")
    walk = Walk(frozenset(forms), is_end)
    walk.enter(first, {parameter})
    return walk
