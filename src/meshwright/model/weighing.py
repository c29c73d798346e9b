"""What a model's visits hold, weighed: a forward and a backward on fake tensors, in the dtypes of a job, that count bytes.

    F(v)    before --- run ---> after       inside = after - before - handed on
    LOSS    before --- loss and its backward ---> gradient of the logits        the most of it, less that
    B(v)    before --- run ---> after       the most of it, beside what was there; the gradients of weights apart, or with them

The number of rows is one that divides nothing else, so what it does not divide is there once, whatever the rows are. Backwards,
visits that are alike are weighed once. Attention is what torch's kernel keeps on a CPU: its output and a number per query and
head, and masks as it is given them; where a model attends by itself, its scores.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.core.anatomy import block_of
from meshwright.core.load import Line, Load, Weighed
from meshwright.core.work import Done, Works
from meshwright.model.dice import Dice
from meshwright.model.drive import Drive, Pass, Visit, backward, backward_from
from meshwright.model.dropout import trial
from meshwright.model.further import rows_of
from meshwright.model.handed import Judge
from meshwright.model.scales import Scales
from meshwright.model.values import storage_of
from meshwright.model.working import CAUSAL, Working

PRIMES = (31, 37, 41, 43, 47)  # rows: as many as divide nothing else
Example = Mapping[str, torch.Tensor]
Make = Callable[[FakeTensorMode], tuple[nn.Module, dict[str, nn.Module]]]


@dataclass(frozen=True)
class Trial:
    """What is weighed: `make(mode)` gives a module of the mode's tensors and its blocks; `few` rows, and the loss `judge`.

    Products are taken in `compute` where that is not None.
    """

    make: Make
    few: Example
    judge: Judge
    in_place: bool
    compute: torch.dtype | None = None


def weigh(trial: Trial) -> Weighed | None:
    """What the visits of a forward hold; None where fake tensors cannot run it, or where the loss cannot be played."""
    try:
        return _Weighing(trial).run()
    except Exception:  # whatever it is, nothing is known then: what autograd saves in the first trial stands for it
        return None


class _Weighing:
    """One forward and backward."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._module, self._blocks = trial.make(mode)
        self._drive = Drive(self._blocks, in_place=trial.in_place)
        self._backward = False
        self._rows = _telling([*self._module.parameters(), *(value[0] for value in trial.few.values())])
        weights = {parameter.numel() for parameter in self._module.parameters() if parameter.ndim > 1}
        self._scales = Scales(mode, lambda: self._backward or not self._drive.in_glue, self._rows, weights)
        self._working = Working(self._rows)
        self._alike: dict[str, str] = {}  # of each visit the one whose backward was run for it
        self._begun: dict[str, Line] = {}
        self._left: dict[str, tuple[Line, frozenset[int]]] = {}
        self._forward: dict[str, Line] = {}

    def run(self) -> Weighed:
        """What each visit holds, what glue does, and what the loss has on top."""
        batch = {key: rows_of(value, self._rows) for key, value in self._trial.few.items()}
        inputs = {key: value for key, value in batch.items() if key not in self._trial.judge.targets}
        dice, scales = Dice(seed=0), self._scales
        scales.note([*self._module.parameters(), *self._module.buffers(), *batch.values()])
        start = scales.now

        def reach(visit: str) -> None:
            dice.enter(visit)
            self._begun[visit] = scales.begin()
            self._working.enter("forward", visit)

        def leave() -> None:
            visit = list(self._begun)[-1]
            self._working.enter("glue")
            self._left[visit] = scales.settle(), scales.young
            self._forward[visit] = max((now for now, _ in scales.log), key=self._at, default=Line()) - scales.now

        try:
            with scales, self._working:
                with trial(dice, self._rows), self._autocast(), self._working.within("glue"):
                    outputs, closing, passed = self._drive.forward(reach, lambda: self._module(**inputs), leave)
                glue = scales.begin() - start
                streams = {name: self._stream(visit) for name, visit in passed.visits.items()}
                self._backward = True
                with self._working.within("loss"):
                    lost = self._lost(outputs, batch, closing)
                del outputs
                learnt = dict(self._learnt(passed))
        finally:
            self._drive.detach()
        loads, own, handed = [], Line(), []
        for name, stream in streams.items():
            handed.append(self._begun[name] - start - own)
            inside = self._left[name][0] - self._begun[name] - stream
            own = own + stream + inside
            loads.append(Load(name, stream, inside, *learnt[name]))
        return Weighed(tuple(loads), glue - own, lost, max(handed, key=self._at), self._works(streams))

    def _works(self, visits: Iterable[str]) -> Works:
        """What was done meanwhile."""
        of = self._working.of
        done = (Done(visit, of("forward", visit), of("backward", self._alike[visit])) for visit in visits)
        return Works(tuple(done), of("glue"), of("loss"))

    def _autocast(self) -> AbstractContextManager:
        dtype = self._trial.compute
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype, cache_enabled=False)

    def _stream(self, visit: Visit) -> Line:
        """What a visit hands on, less what lies in the memory of what it was given."""
        _, young = self._left[visit.name]
        return self._scales.of(tensor for tensor, _ in visit.outputs if storage_of(tensor) in young)

    def _lost(self, outputs: Any, batch: Example, closing: Visit) -> Line:
        """What the loss and its backward have on top of the gradient that is left of them."""
        before = self._scales.begin()
        total = self._trial.judge.total(outputs, batch)
        backward_from(total, 1.0)
        del total, outputs
        backward(closing)
        most = max((now for now, _ in self._scales.log), key=self._at)
        return most - max(before, self._scales.begin(), key=self._at)

    def _at(self, line: Line) -> int:
        return line.at(self._rows)

    def _learnt(self, passed: Pass) -> Iterator[tuple[str, tuple[Line, Line, Line | None]]]:
        """Per visit, what its backward has on top: without the gradients of its weights, with them, and while it attends."""
        known: dict[Any, tuple[Line, Line, Line | None]] = {}
        first: dict[Any, str] = {}
        last = list(passed.visits)[-1]
        for name, visit in reversed(list(passed.visits.items())):
            key = self._kind(name, visit)
            if key not in known:
                known[key] = self._backwards(name, visit, own=name != last)
            visit.outputs, visit.glue = [], []
            self._alike[name] = first.setdefault(key, name)
            yield name, known[key]

    def _kind(self, name: str, visit: Visit) -> Any:
        """What visits have in common that are alike."""
        block = self._blocks[block_of(name)]
        weights = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in block.parameters())
        given = tuple((tuple(leaf.shape), leaf.dtype) for _, leaf in visit.outputs)
        return type(block), weights, given, self._left[name][0] - self._begun[name], len(visit.glue)

    def _backwards(self, name: str, visit: Visit, *, own: bool) -> tuple[Line, Line, Line | None]:
        """Of one visit; the gradient of what it gives out is its `own`, unless that of the loss."""
        given = _asked([leaf for _, leaf in visit.outputs])
        asked = self._scales.of(given) if own else Line()
        start = self._scales.begin(self._left[name][1]) - asked
        del given
        with self._working.within("backward", name):
            backward(visit)
        learnt = [each.grad for each in self._module.parameters() if each.grad is not None]
        weights = {storage_of(grad): self._scales.of([grad]) for grad in learnt}
        log, ran = self._scales.log, self._scales.ran
        last = {key: at for at, (_, born) in enumerate(log) for key in born}  # memory before had the same key
        made, beside, learning = Line(), [self._forward[name] + asked], [Line()]  # what is run again has that before its backward
        attending: list[Line] = []
        for at, (now, born) in enumerate(log):
            made = sum((weights[key] for key in born if key in weights and last[key] == at), start=made)
            beside.append(now - start - made)
            learning.append(now - start)
            attending += [beside[-1]] if ran[at] in CAUSAL else []
        late = max(attending, key=lambda line: line.signed(self._rows, Fraction(1), Fraction(1)), default=None)
        return max(beside, key=self._at), max(learning, key=lambda line: line.at(1)), late


def _telling(tensors: Iterable[torch.Tensor]) -> int:
    """A number of rows that divides no size of weights and of rows."""
    sizes = [tensor.numel() for tensor in tensors]
    return next((prime for prime in PRIMES if all(size % prime for size in sizes if size)), PRIMES[0])


def _asked(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of `leaves`, made where there are none: what comes later may not have been weighed."""
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = torch.empty_like(leaf)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
