"""What a model's visits hold, weighed: a forward and a backward on fake tensors, in the dtypes of a job, that count bytes.

    F(v)    before --- run ---> after       inside = after - before - handed on
    LOSS    before --- loss and its backward ---> gradient of the logits        the most of it, less that
    B(v)    before --- run ---> after       the most of it, beside what was there; the gradients of weights apart, or with them

The number of rows is one that divides nothing else, so what it does not divide is there once, whatever the rows are. Backwards,
visits that are alike are weighed once. Attention is what torch's kernel keeps on a CPU: its output and a number per query and
head, and masks as it is given them; where a model attends by itself, its scores.

The bytes of all storages that live while a model runs on a trial, and the most of them: autograd's own, too.

Blocks run on fake tensors. Between blocks, what is small is computed for real, as positions and padding are: whether there is a
mask of all pairs of tokens at all may depend on values. What is large has no values there either.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.model.analysis.extra_trials import rows_of
from meshwright.model.blocks.driver import Drive, Pass, Visit, backward, backward_from
from meshwright.model.blocks.loss_inputs import Judge
from meshwright.model.rng.dropout_mode import trial
from meshwright.model.rng.sites import Dice
from meshwright.model.tensors.pytree import storage_of
from meshwright.model.trial.op_counter import CAUSAL, Working
from meshwright.model.trial.trial import depends_on_values
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.op_costs import Done, Line, Load, Weighed, Works

LARGE = 1 << 21  # elements
Kind = Literal["fixed", "each", "weights"]  # of bytes, as `Line` has them


class Scales(TorchDispatchMode):
    """While active, `now` are the bytes that live of what was made since, or noted, in a forward on so many `rows`.

    That is a number which divides nothing else: what it divides is there for each row. `weights` are the numbers of elements of
    the model's weights: what else has as many is made of one, or becomes its gradient. `within()` tells whether a block runs, on
    tensors of `mode`. `log` has the bytes behind every operation since the last `begin`, and what that made; `ran` has the
    operations. Of what was made before that nobody sees that it is gone, unless it is `watch`ed, until the next one.
    """

    def __init__(self, mode: FakeTensorMode, within: Callable[[], bool], rows: int, weights: Container[int]) -> None:
        super().__init__()
        self.log: list[tuple[Line, tuple[int, ...]]] = []
        self.ran: list[Any] = []
        self._sums: dict[Kind, int] = {"fixed": 0, "each": 0, "weights": 0}
        self._mode, self._within, self._rows, self._weights = mode, within, rows, weights
        self._live: dict[int, tuple[StorageWeakRef, int, Kind]] = {}
        self._young: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        born = tuple(key for key in map(self._noted, tree_leaves(out)) if key)
        self._young.update(born)
        self._look(self._young)
        self.log.append((self.now, born))
        self.ran.append(func._overloadpacket)
        return out

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what was made before, too."""
        for tensor in tensors:
            self._noted(tensor)
        self.begin()

    @property
    def now(self) -> Line:
        """The bytes that live."""
        return self._line(self._sums)

    def begin(self, watch: Iterable[int] = ()) -> Line:
        """Forget the log, not what lives: the bytes of that. Storages by these keys are looked at as young ones."""
        self._look(list(self._live))
        self._young, self.log, self.ran = {key for key in watch if key in self._live}, [], []
        return self.now

    def settle(self) -> Line:
        """The bytes that live now: what went with the names of a function has gone."""
        self._look(self._young)
        return self.now

    @property
    def young(self) -> frozenset[int]:
        """What was made since the last `begin` and lives."""
        return frozenset(self._young)

    def of(self, tensors: Iterable[torch.Tensor]) -> Line:
        """The bytes of the storages of `tensors`, each once."""
        found = {tensor.untyped_storage()._cdata: self._weighed(tensor) for tensor in tensors}
        return self._line({kind: sum(nbytes for nbytes, each in found.values() if each == kind) for kind in self._sums})

    def _line(self, sums: Mapping[Kind, int]) -> Line:
        return Line(sums["fixed"], sums["each"] / self._rows, sums["weights"])

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._within() or any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            with self._mode:
                return func(*args, **kwargs)
        try:
            with self._mode:
                made = func(*args, **kwargs)
            large = any(isinstance(each, torch.Tensor) and each.numel() > LARGE for each in tree_leaves(made))
        except Exception as error:
            if not depends_on_values(error):
                raise
            large, made = False, None
        return made if large else func(*args, **kwargs)

    def _noted(self, tensor: Any) -> int:
        """The key of a storage that is new; 0 where there is none."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return 0
        storage = tensor.untyped_storage()
        before = self._live.get(storage._cdata)
        if before is not None and not before[0].expired():
            return 0
        if before is not None:
            self._sums[before[2]] -= before[1]
        nbytes, kind = self._weighed(tensor)
        self._sums[kind] += nbytes
        self._live[storage._cdata] = StorageWeakRef(storage), nbytes, kind
        return storage._cdata

    def _weighed(self, tensor: torch.Tensor) -> tuple[int, Kind]:
        """The bytes of a tensor's storage, and of which kind they are."""
        nbytes = tensor.untyped_storage().nbytes()
        numel = nbytes // tensor.itemsize
        return nbytes, "each" if numel % self._rows == 0 else "weights" if numel in self._weights else "fixed"

    def _look(self, keys: Iterable[int]) -> None:
        for key in [key for key in keys if self._live[key][0].expired()]:
            _, nbytes, kind = self._live.pop(key)
            self._sums[kind] -= nbytes
            self._young.discard(key)


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
