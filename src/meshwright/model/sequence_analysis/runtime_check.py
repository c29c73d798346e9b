"""Whether blocks compute alike on as many tokens as one device has, and on as few as a rank has.

A block may ask how many tokens there are, and go another way by that:

    x = x if x.shape[1] <= 16 else self.far(x)         one device, 40 tokens: far(x)          a rank, 14 of them: x

The trial that finds how tokens go through a model (model/passing.py) has rows of lengths that tell dims of tokens from others.
What a run has is found here, by forwards on fake tensors: one as on one device, one as on the rank that has fewest tokens, and
what each block computes is compared, operation by operation, with the numbers in it. Once for the plan, and again for rows that
are longer than all before, or of which a rank has fewer: what is alike at both ends is taken to be so between them.

Limits: a branch that turns and turns back between two lengths is not seen. Of rows so long that masks of all queries would not
fit here, and of tokens that begin within a model, nothing is found out.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.sequence_analysis.analysis import Example, Ready, cut_to
from meshwright.model.sequence_analysis.lengths import Computed, unlike
from meshwright.model.sequence_analysis.token_dims import LONGEST
from meshwright.model.sequence_parallel.attention_call import Asked, Attending
from meshwright.model.sequence_parallel.conv_call import Convolved, Convolving
from meshwright.model.sequence_parallel.hf_attention import plug
from meshwright.model.sequence_parallel.sharded_forward import Dealt, Lengths
from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.model.tensor_parallel.layer_roles import find_sockets
from meshwright.model.tensors.function_modes import Glue, title
from meshwright.model.trial.slice_trial import quiet
from meshwright.model.trial.trial import PROBE_BATCH
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import visit_of
from meshwright.plan.model_spec.sequence_info import Deal, Tokens

Course = Mapping[str, list[Computed]]  # what each visit computes, in order


@dataclass
class Alike:
    """The blocks of a model, tried on rows like those of `inputs` of the lengths that somebody has; threads may share it.

    `ready` gives a trial of the model.
    """

    inputs: Example
    ready: Ready
    _least: dict[int, int] = field(default_factory=dict)  # by length in the plan: the fewest tokens on which they were alike
    _most: dict[int, int] = field(default_factory=dict)
    _course: Course = field(default_factory=dict)  # that on fewest
    _looking: Lock = field(default_factory=Lock, repr=False, compare=False)

    def check(self, tokens: Tokens, deal: Deal, lengths: Mapping[int, int]) -> None:
        """Raise PlanError where ranks to which `deal` gives tokens compute something else than one device.

        `lengths` says how many tokens rows have, by how many they have in the plan, where some are known.
        """
        lengths = {tokens.count_in(key): tokens.count_in(key) for key in tokens.inputs} | dict(lengths)
        if not lengths or any(passing.mixes for passing in tokens.visits):
            return
        if max(lengths.values()) > LONGEST and any(each.masked for each in tokens.attends):
            return
        ranks = range(deal.ranks)
        few = min(ranks, key=lambda index: sum(deal.run(length, index) for length in lengths.values()))
        least = {planned: deal.run(length, few) for planned, length in lengths.items()}
        with self._looking:
            fewer = any(count < self._least.get(planned, count + 1) for planned, count in least.items())
            course = self._tried(tokens, lengths, partial(_some, deal, few)) if fewer else self._course
            _compare(self._course, course, lengths)
            if any(length > self._most.get(planned, 0) for planned, length in lengths.items()):
                _compare(course, self._tried(tokens, lengths, _all), lengths)
                self._most |= lengths
            if fewer:
                self._course = course
                self._least |= least

    def _tried(self, tokens: Tokens, lengths: Mapping[int, int], share: Callable[[int], Share]) -> Course:
        """What blocks compute on rows of so many tokens, of which a rank has a share; on a thread where nothing is active."""
        with ThreadPoolExecutor(1) as apart:
            return apart.submit(self._run, tokens, lengths, share).result()

    def _run(self, tokens: Tokens, lengths: Mapping[int, int], share: Callable[[int], Share]) -> Course:
        rows = {key: cut_to(value, lengths) for key, value in self.inputs.items()}
        try:
            with quiet(), self.ready(rows, PROBE_BATCH) as run:
                forward = _Forward(tokens, Lengths.read(share, tokens, run.rows), run.enter, run.mode)
                with forward.of(run.module, run.blocks):
                    run.module(**run.rows)
        except PlanError:
            raise
        except Exception as error:
            words = " and ".join(map(str, lengths.values()))
            text = f"it does not run on rows of {words} tokens: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise PlanError(text, fix="give it rows that it takes, or set mesh.cp = 1", where="model") from error
        return forward.course


class _Forward(Dealt):
    """A forward on fake tensors as on a rank, that notes what blocks compute."""

    def __init__(self, tokens: Tokens, lengths: Lengths, enter: Callable[[str], None], mode: FakeTensorMode) -> None:
        super().__init__(tokens, lengths)
        self.course: dict[str, list[Computed]] = {}
        self._enter, self._mode = enter, mode
        self._calls: dict[str, int] = {}
        self._visit, self._aside = "", 0

    def _hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._visit and not self._aside:
            name = title(func).removesuffix(" of").strip("_")
            self.course.setdefault(self._visit, []).append(Computed.of(self._visit, name, args, kwargs))
        return func(*args, **kwargs)

    @contextmanager
    def of(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Meanwhile the blocks of `module` run as on the rank; what experts do is their own."""
        asks = lambda: self._runs.get(self._visit, 0) > 0  # noqa: E731  what a name would say twice
        plugged = plug(module, lambda queries, keys: self.coming(self._visit) if asks() else None, self._apart)
        for name, block in blocks.items():
            block.forward = partial(self._block, name, block.forward)
        for socket in find_sockets(module):
            if socket.kind == "experts":
                experts = module.get_submodule(socket.name)
                experts.forward = partial(self._experts, experts.forward)
        with ExitStack() as stack:
            stack.callback(plugged.out)
            stack.enter_context(Attending(_answer, lambda: self.asked(self._visit), asks))
            stack.enter_context(Convolving(_beside, lambda: self.convolving(self._visit) if asks() else None, self._apart))
            stack.enter_context(Glue(self._hear))
            yield

    def _block(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._visit or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        count = self._calls[name] = self._calls.get(name, 0) + 1
        visit = visit_of(name, count)
        args, kwargs = self.enter(visit, (args, kwargs))
        self._enter(visit)
        self._visit = visit
        try:
            with self._mode:
                outputs = forward(*args, **kwargs)
        finally:
            self._visit = ""
        return self.leave(outputs)

    def _experts(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._apart():
            return forward(*args, **kwargs)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1


def _compare(course: Course, found: Course, lengths: Mapping[int, int]) -> None:
    """Raise PlanError where what was `found` on rows of these lengths is not the course."""
    words = " and ".join(map(str, lengths.values()))
    for visit, mine in course.items():
        why = unlike(mine, found.get(visit, []), words)
        if why:
            fix = f"let it compute the same on {words} tokens as on fewer; or set mesh.cp = 1, and as many ranks for dp_shard"
            raise PlanError(f"a block cannot run on some of the tokens: {why}", fix=fix, where="model")


def _answer(asked: Asked) -> torch.Tensor:
    return asked.query.new_empty((*asked.query.shape[:-1], asked.value.shape[-1]))


def _beside(convolved: Convolved) -> torch.Tensor:
    own, weight = convolved.own, convolved.given.weight
    return own.new_empty((*own.shape[:-2], weight.shape[0], own.shape[-1]))


def _all(length: int) -> Share:
    return Share(length, ((0, length),))


def _some(deal: Deal, index: int, length: int) -> Share:
    return Share(length, deal.spans(length, index), partial(_brought, length))


def _brought(length: int, local: torch.Tensor, dim: int) -> torch.Tensor:
    """As many tokens as one device has."""
    return local.index_select(dim, torch.arange(length) % local.shape[dim])
