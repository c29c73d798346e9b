"""What glue brings together of tokens in one trial forward, and in the backwards of which visits its gradients go back.

    hidden = layers.1(x)         a rank has some of the tokens
    pooled = hidden.mean(1)      forward: brought together behind layers.1
    y = hidden - pooled          apart, and given to layers.2       backward: when layers.2 has had its own, what it took in flows

A step cuts the graph where a visit takes something in, and what glue has made flows once, behind the backward of the visit that
took it in first; what the model gives out flows behind the loss (model/drive.py). So all follows from the graph that autograd has
made: from what the loss takes, back to what visits gave out, from there within the visit to what it took in, and on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.model.blocks.loss_inputs import Judge
from meshwright.model.sequence_analysis.lengths import Sizes
from meshwright.model.sequence_parallel.sharded_activation import Apart, locals_of
from meshwright.model.tensors.pytree import tensors
from meshwright.plan.model_spec.sequence_info import Together

Node = Any  # torch.autograd.graph.Node
Edge = tuple[Node, int]  # and which of its outputs


@dataclass(eq=False)
class Moved:
    """One tensor that was brought together behind `visit` (empty: in the loss), and given `into` another (empty: to glue).

    It has `numel` elements, with as many tokens as there are: so many `tokens`, of which each rank gave its own; 0: a summand.
    """

    visit: str
    numel: int
    tokens: int
    dtype: torch.dtype
    into: str = ""
    node: Node | None = None
    back: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Entered:
    """A tensor that a visit takes in, as it runs on it, where gradients of both flow, the tokens of one that is apart, 0: none.

    `keys`: it is given with all tokens.
    """

    inner: torch.Tensor
    outer: Edge | None
    within: Edge | None
    tokens: int
    keys: bool


@dataclass
class _Passed:
    """A visit: what it took in, each with what it ran on instead; the glue of that which it took in first; what it gave out."""

    visit: str
    taken: list[tuple[Edge, Edge]]
    glue: list[Edge]
    gave: list[Edge]


class Met:
    """Follows one forward, on tokens as `sizes` says; `found` is what was brought together, in order."""

    def __init__(self, sizes: Sizes) -> None:
        self.found: list[Moved] = []
        self._sizes = sizes
        self._passed: list[_Passed] = []
        self._entered: list[_Entered] = []
        self._behind = ""
        self._borders: set[Node] = set()
        self._seen: set[Edge] = set()

    def bring(self, visit: str, made: torch.Tensor, tokens: int = 0, into: str = "") -> torch.Tensor:
        """Behind `visit` glue, or a visit, is given `made`, which nobody else has: of all `tokens`, or a sum. Returns it."""
        planned = self._sizes.planned.get(tokens, tokens)
        self.found.append(Moved(visit, self._sizes.count(made.shape), planned, made.dtype, into, made.grad_fn))
        return made

    def enter(self, behind: str, value: Any, dims: Iterable[tuple[int, ...]], new: Mapping[int, torch.Tensor]) -> None:
        """A visit behind another takes in `value`; of its tensors, in order, these `dims` are tokens, and `new` run instead."""
        self._behind, found = behind, dict[int, _Entered]()
        for tensor, along in zip(tensors(value), dims, strict=True):
            inner = new.get(id(tensor), tensor)
            apart = tensor if type(tensor) is Apart else None
            outer = inner if apart is None else apart.local  # a rank cuts its tokens out of all else, every time
            tokens = 0 if apart is None else apart.share.length
            found.setdefault(id(tensor), _Entered(inner, edge(outer), edge(inner), tokens, keys=not along))
        self._entered = list(found.values())

    def leave(self, visit: str, outputs: Any, *, whole: bool) -> None:
        """It has run, on all tokens of what it takes in where that is `whole`."""
        pairs = list[tuple[Edge, Edge]]()
        for each in self._entered:
            brought = each.tokens > 0 and (whole or each.keys)
            if brought:
                self.bring(self._behind, each.inner, each.tokens, visit)
            outer = each.within if brought else each.outer
            if outer is not None and each.within is not None:
                pairs.append((outer, each.within))
        glue = [outer for outer, _ in pairs if outer[0] not in self._borders and outer not in self._seen]
        self._seen.update(glue)
        gave = edges(outputs)
        self._borders |= {node for node, _ in gave}
        self._passed.append(_Passed(visit, pairs, list(dict.fromkeys(glue)), gave))
        self._entered = []

    def ended(self, outputs: Any, total: torch.Tensor | None) -> None:
        """The forward has given `outputs`, of which a loss has made `total`; None: all that need a gradient seem to get one."""
        given = edges(locals_of(outputs))
        marked = set(given)
        if total is not None:
            reached = _reached(edges(total), {node for node, _ in given})
            self._note("", reached)
            marked &= reached
        self._flow("", [each for each in given if each[0] not in self._borders and each not in self._seen], marked)
        for passed in reversed(self._passed):
            inside = _reached([each for each in passed.gave if each in marked], {node for _, (node, _) in passed.taken})
            marked |= {outer for outer, inner in passed.taken if inner in inside}
            self._flow(passed.visit, passed.glue, marked)
        self._passed.clear()
        self._borders.clear()
        self._seen.clear()
        for moved in self.found:
            moved.node = None

    def _flow(self, visit: str, glue: Iterable[Edge], marked: set[Edge]) -> None:
        """What was taken in flows, as far as it has a gradient, to what visits gave out, which then have one."""
        reached = _reached([each for each in glue if each in marked], self._borders)
        self._note(visit, reached)
        marked |= {each for each in reached if each[0] in self._borders}

    def _note(self, visit: str, reached: set[Edge]) -> None:
        nodes = {node for node, _ in reached}
        for moved in self.found:
            if moved.node is not None and moved.node in nodes:
                moved.back.append(visit)


def settled(few: Sequence[Moved], more: Sequence[Moved] | None, rows: tuple[int, int]) -> tuple[tuple[Together, ...], str]:
    """What is brought together on any number of rows, as two forwards show it; and why it is not the same on all (empty: it is).

    They ran on so many `rows`, the second on other numbers of tokens too, and in float64; None: it did not run.
    """
    for visit in dict.fromkeys(each.visit for each in (*few, *(more or ()))):
        counts = [sum(each.visit == visit for each in some) for some in (few, few if more is None else more)]
        if counts[0] != counts[1]:
            text = f"{_behind(visit)} brings tokens of several ranks together {counts[0]} times on {rows[0]} rows"
            return (), f"{text}, and {counts[1]} times on {rows[1]} longer or shorter ones"
    found = list[Together]()
    for number, one in enumerate(few):
        two = one if more is None else more[number]
        each, rest = divmod(one.numel, rows[0])
        by_row = not rest and two.numel == each * rows[0 if more is None else 1]
        if (not by_row and two.numel != one.numel) or (two.visit, two.back) != (one.visit, one.back):
            text = f"what {_behind(one.visit)} needs of several ranks' tokens depends on the number of rows, or of tokens"
            return (), f"{text}: {one.numel:,} elements of {rows[0]} rows, {two.numel:,} of {rows[1]}"
        own = not one.dtype.is_floating_point or (more is not None and two.dtype == one.dtype)
        dtype = str(one.dtype).removeprefix("torch.") if own else ""
        found.append(Together(one.visit, each if by_row else one.numel, one.tokens, by_row, tuple(one.back), dtype, one.into))
    return tuple(found), ""


def taken_of(judge: Judge, outputs: Any, batch: Mapping[str, torch.Tensor], targets: Iterable[str]) -> torch.Tensor | None:
    """The loss of what a forward gave out, as a rank takes it: of its own tokens, where it is a sum over those."""
    if judge.whole_batch:
        return None
    read = tensors(outputs if judge.logits is None else judge.logits(outputs))
    lengths = {each.share.length if type(each) is Apart else 0 for each in read}
    (length,) = lengths if len(lengths) == 1 else (0,)
    own = judge.by_token and length > 0 and all(batch[key].shape[1] == length for key in targets)
    return judge.total(locals_of(outputs) if own else outputs, batch)


def _behind(visit: str) -> str:
    return f"the glue behind '{visit}'" if visit else "the loss"


def edge(tensor: torch.Tensor) -> Edge | None:
    """Where a gradient of `tensor` begins to flow; None: it has none."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.requires_grad and tensor.grad_fn is not None else None


def edges(value: Any) -> list[Edge]:
    """The same of the tensors in `value` that have one."""
    return [found for found in map(edge, tensors(value)) if found is not None]


def _reached(starts: Iterable[Edge], ends: Collection[Node]) -> set[Edge]:
    """Where gradients come to from `starts`; nobody looks behind `ends`."""
    reached = set(starts)
    todo, known = [node for node, _ in reached], set[Node]()
    while todo:
        node = todo.pop()
        if node in known or node in ends:
            continue
        known.add(node)
        behind = [(each, number) for each, number in node.next_functions if each is not None]
        reached.update(behind)
        todo += [each for each, _ in behind]
    return reached
