"""A user's model as the rest of the house sees it: blueprint, blocks, and the anatomy that one trial forward shows.

Reading takes no parameter memory: the constructor runs on blank parameters, the trial on fake ones. Only a model whose
forward looks at values is made once, whole, on the CPU.

A model is run in training mode. One that comes in training mode keeps what it set itself: a part in eval mode stays so.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.core.anatomy import ROOT, Anatomy, Column, Weight, block_of
from meshwright.core.calls import Number
from meshwright.core.errors import PlanError
from meshwright.model.anatomy import WHOLE, find_blocks, owners
from meshwright.model.blueprint import Blueprint
from meshwright.model.configs import use_experts_on_trial, use_plain_experts
from meshwright.model.dice import Dice, Sites
from meshwright.model.dropout import trial
from meshwright.model.handed import Judge, columns, handed, kept
from meshwright.model.layers import Propose, layers, noted
from meshwright.model.linears import UNKNOWN
from meshwright.model.proposed import Proposal
from meshwright.model.sliced import between
from meshwright.model.sockets import find_sockets, hidden_matrices
from meshwright.model.sources import Loaded
from meshwright.model.streaming import followed
from meshwright.model.summands import Summands
from meshwright.model.trial import PROBE_BATCH, Findings, depends_on_values, fake_copy, observe, visits_of
from meshwright.model.trying import tried
from meshwright.model.wide import widen

Example = Mapping[str, torch.Tensor]
OTHER_BATCH = 5
Shown = tuple[Findings, Sites, tuple[Column, ...]]  # what a trial shows; the columns are what is handed to the loss
Look = Callable[[Any, Any], tuple[Column, ...]]


@dataclass(frozen=True)
class Reading:
    """A model that can be made: `blueprint` for its values, `block_names`, its `anatomy`, and its dropout `sites`.

    `example` is one row of every key of a batch, for ranks that have none. `stateful` are the buffers that a training
    forward writes, `attends` the visits that call torch's attention, `captured` how many tensors leave blocks by each side
    channel, `unused` the trained parameters that the trial did not use.
    """

    blueprint: Blueprint
    block_names: tuple[str, ...]
    anatomy: Anatomy
    sites: Sites
    example: dict[str, torch.Tensor]
    stateful: tuple[str, ...] = ()
    attends: tuple[str, ...] = ()
    captured: dict[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def make(
        self, device: torch.device | str, dtype: torch.dtype, fake: FakeTensorMode | None = None, blank: Container[str] = ()
    ) -> tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Parameter]]:
        """A module with initial values on `device`, in training mode; its blocks; its logical parameters by first name.

        With `fake` it has parameters and buffers of that mode instead: shapes on the CPU, without values or memory. Parameters
        in `blank` have neither, too; `blueprint.value` gives theirs.
        """
        module = self.blueprint.instance()
        if fake is not None:
            fake_copy(module, fake, lambda name: self.blueprint.made_in(name, dtype))
            use_experts_on_trial(module)
        else:
            self.blueprint.materialize(module, dtype=dtype, device=device, blank=blank)
        if dtype == torch.float64 and fake is None:
            use_plain_experts(module)
        if dtype == torch.float64:
            widen(module)
        return _training(module), _blocks(module, self.block_names), dict(module.named_parameters())


def read(loaded: Loaded, example: Example, targets: tuple[str, ...], judge: Judge | None = None) -> Reading:
    """The reading of the model that `loaded` builds, learnt from a forward on rows like those of `example`.

    `targets` are the keys of the batch that are not passed to the model; `judge` is the loss, by which the reading knows what
    it takes. Raises PlanError when the forward fails on the
    example, when a tensor goes round the border of a block, when gradients are taken between blocks, and when the model
    draws random numbers that cannot be replayed.
    """
    plan = loaded.blueprint
    _check_example(example)
    inputs = {key: value for key, value in example.items() if key not in targets}
    module = plan.instance()
    names = tuple(find_blocks(module, loaded.blocks or ()))
    judge = judge or Judge(_any_loss, targets)
    few = {key: _rows(value, PROBE_BATCH) for key, value in example.items()}
    look = partial(handed, judge, few)
    other = judge.whole_batch
    sockets = find_sockets(module, loaded.sockets)
    roles = noted(module, sockets, loaded.sockets)
    found, sites, outputs = _trial(plan, names, inputs, look, roles, other=other)
    _check_declared(loaded.blocks or (), found.visits)
    if not found.visits:  # the blocks' own forwards are never called: somebody calls into their parts
        names = (WHOLE,)
        found, sites, outputs = _trial(plan, names, inputs, look, roles, other=other)
    held = owners(module, _blocks(module, names))
    holders = {name: held.get(id(parameter), []) for name, parameter in module.named_parameters()}
    hidden = hidden_matrices(module)
    shown = layers(module, found, sockets, roles, judge, partial(_tried, plan, names, inputs))
    sites.inside = between(found.seen.uses, found.drawn, shown.calls)
    weights = tuple(
        Weight(
            name,
            entry.shape,
            visits_of(holders[name], found.users[name], found.visits),
            entry.requires_grad,
            entry.aliases,
            str(entry.dtype).removeprefix("torch.") if plan.keeps_dtype(name) else "",
            name in hidden,
            shown.parts.get(name, UNKNOWN).role,
            shown.parts.get(name, UNKNOWN).cuts,
            shown.whole.get(name, ""),
            shown.asked.get(name, ""),
        )
        for name, entry in plan.logical.items()
    )
    numel, flops = tuple(found.stream_numel), tuple(found.flops)
    notes = tuple(_notes(names == (WHOLE,) and not loaded.blocks, weights, found.stateful)) + shown.notes
    anatomy = Anatomy(loaded.name, tuple(found.visits), weights, numel, flops, bool(sites.allowed), found.in_place, notes)
    batch = columns(inputs), columns({key: value for key, value in example.items() if key in targets})
    anatomy = replace(anatomy, inputs=batch[0], targets=batch[1], outputs=outputs, whole_batch=other, origin=plan.origin)
    anatomy = replace(anatomy, inside_numel=tuple(found.inside_numel), calls=shown.calls, logits=shown.logits)
    anatomy = replace(anatomy, numbers=shown.numbers, portions=shown.portions)
    anatomy = replace(_streamed(anatomy, plan, names, inputs), loss_numel=kept(judge, few, found.outputs) // PROBE_BATCH)
    row = {key: value.detach()[:1].clone() for key, value in example.items()}
    unused = tuple(name for name, entry in plan.logical.items() if entry.requires_grad and not found.users[name])
    attends = tuple(dict.fromkeys(found.attends))
    return Reading(plan, names, anatomy, sites, row, tuple(found.stateful), attends, found.captured, unused)


def _blocks(module: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    return {WHOLE: module} if names == (WHOLE,) else {name: module.get_submodule(name) for name in names}


def _training(module: nn.Module) -> nn.Module:
    return module if module.training else module.train()


def _trial(
    plan: Blueprint, names: tuple[str, ...], inputs: Example, look: Look, layers: Mapping[str, str], *, other: bool
) -> Shown:
    rows = {batch: {key: _rows(value, batch) for key, value in inputs.items()} for batch in (PROBE_BATCH, OTHER_BATCH)}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = _on_trial(plan)
    fake_copy(module, mode)
    try:
        with mode:
            fakes = {batch: {key: mode.from_tensor(value) for key, value in some.items()} for batch, some in rows.items()}
            return _forwards(module, names, fakes, look, layers, other=other)
    except PlanError:
        raise
    except Exception as error:
        if not depends_on_values(error):
            raise _failed(error, inputs) from error
    module = _on_trial(plan)
    use_plain_experts(module)  # on real tensors, weights by token would take the memory of as many experts as tokens
    plan.materialize(module)
    try:
        return _forwards(module, names, rows, look, layers, other=other)
    except PlanError:
        raise
    except Exception as error:
        raise _failed(error, inputs) from error


def _tried(
    plan: Blueprint, names: tuple[str, ...], inputs: Example, propose: Propose
) -> tuple[Proposal, tuple[Number, ...], tuple[str, ...]]:
    """What runs on slices of what is proposed."""
    mode, dice = FakeTensorMode(allow_non_fake_inputs=True), Dice(seed=0)

    def made() -> nn.Module:
        module = _on_trial(plan)
        fake_copy(module, mode)
        return module

    @contextmanager
    def ready(module: nn.Module) -> Iterator[Callable[[], object]]:
        rows = {key: mode.from_tensor(_rows(value, PROBE_BATCH)) for key, value in inputs.items()}
        with mode, trial(dice, PROBE_BATCH):
            yield lambda: module(**rows)

    return tried(propose, made, ready, () if names == (WHOLE,) else names)


def _streamed(anatomy: Anatomy, plan: Blueprint, names: tuple[str, ...], inputs: Example) -> Anatomy:
    """`anatomy` with the way of the stream and the sums that layers end in, where there are pairs of layers on it.

    That is what a second trial shows that knows them.

    Of a model whose forward looks at values, nothing is found.
    """
    if not any(call.role == "columns" for call in anatomy.calls):
        return anatomy
    mode, dice, summands = FakeTensorMode(allow_non_fake_inputs=True), Dice(seed=0), Summands()
    module = _on_trial(plan)
    fake_copy(module, mode)
    try:
        rows = {key: mode.from_tensor(_rows(value, PROBE_BATCH)) for key, value in inputs.items()}
        with mode, trial(dice, PROBE_BATCH):
            blocks, forward = _blocks(module, names), lambda: module(**rows)
            summing = [call.name for call in anatomy.calls if call.role == "rows"]
            with summands.watching(module, blocks, summing):
                calls, passages = followed(module, blocks, anatomy.calls, dice.enter, forward, in_place=anatomy.in_place)
    except Exception as error:
        if not depends_on_values(error):
            raise
        return anatomy
    return replace(anatomy, calls=summands.marked(calls), passages=passages)


def _on_trial(plan: Blueprint) -> nn.Module:
    module = _training(plan.instance())
    use_experts_on_trial(module)  # the grouped product takes no fake float32, and says so on the terminal
    return module


def _forwards(
    module: nn.Module, names: tuple[str, ...], rows: Mapping[int, Example], look: Look, layers: Mapping[str, str], *, other: bool
) -> Shown:
    dice, blocks = Dice(seed=0), _blocks(module, names)

    def forward(batch: int) -> Findings:
        with trial(dice, batch):
            return observe(module, blocks, dice.enter, lambda: module(**rows[batch]), layers, lambda: dice.count)

    found = forward(PROBE_BATCH)
    wider = None
    if dice.sites.allowed or other:  # a second size tells the batch dim of what is drawn from other dims of the first size
        wider = forward(OTHER_BATCH).outputs
    return found, dice.sites, look(found.outputs, wider)


def _rows(value: torch.Tensor, batch: int) -> torch.Tensor:
    """`batch` rows like those of `value`."""
    repeats = -(-batch // len(value))
    rows = value.detach().repeat(repeats, *[1] * (value.ndim - 1))[:batch]
    return rows.requires_grad_(value.requires_grad)


def _check_example(example: Example) -> None:
    shapes = {key: tuple(value.shape) for key, value in example.items()}
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or 0 in rows:
        given = ", ".join(f"{key} of shape {list(shape)}" for key, shape in shapes.items()) or "no tensors"
        text = f"the example batch holds {given}; needed are the same rows along dim 0 of every tensor, at least one"
        raise PlanError(
            text, fix="give one batch as the loader makes it, by the names of the forward's arguments", where="example"
        )


def _check_declared(declared: Iterable[str], visits: Iterable[str]) -> None:
    called = {block_of(visit) for visit in visits}
    idle = [name for name in declared if name not in called]
    if idle:
        text = f"the declared blocks {', '.join(idle)} are not called in the trial run, or only without gradients"
        fix = "declare modules whose forward the model calls on every batch; one that is used by its parts alone is no block"
        raise PlanError(text, fix=fix, where="model.blocks")


def _failed(error: Exception, inputs: Example) -> PlanError:
    given = ", ".join(f"{key} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}" for key, value in inputs.items())
    text = f"the forward fails in a trial run on rows like {given or 'no arguments'}: {type(error).__name__}: {error}"
    fix = "repair the forward (the traceback above is its own), or the example: its keys, less the targets, are the arguments"
    fix = f"{fix}; a model that takes something else than text returns one: meshwright.Model(module, example={{...}})"
    return PlanError(text, fix=fix, where="model")


def _notes(unbroken: bool, weights: tuple[Weight, ...], stateful: list[str]) -> Iterator[str]:
    if unbroken:
        yield "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward"
    in_glue = [weight.name for weight in weights if ROOT in weight.visits]
    if in_glue:
        yield f"{len(in_glue)} parameters are used outside blocks ({in_glue[0]}...): complete after the last backward"
    if stateful:
        yield f"{len(stateful)} buffers are written by the forward ({stateful[0]}...): every rank writes its own"


def _any_loss(outputs: Any, batch: Example) -> torch.Tensor:
    raise NotImplementedError("no loss was given to the reading: it takes all outputs to be used; pass judge=Judge(...)")
