"""A user's model as the rest of the house sees it: blueprint, blocks, and the anatomy that one trial forward shows.

Reading takes no parameter memory: the constructor runs on blank parameters, the trial on fake ones. Only a model whose
forward looks at values is made once, whole, on the CPU.

A model is run in training mode. One that comes in training mode keeps what it set itself: a part in eval mode stays so.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.extra_trials import blocks_of, dealt, in_training, on_trial, ready_on, rows_of, streamed, tried_on
from meshwright.model.analysis.memory_trial import Trial, weigh
from meshwright.model.blocks.batch_coupling import Looked
from meshwright.model.blocks.discovery import WHOLE, find_blocks, owners
from meshwright.model.blocks.loss_inputs import Judge, columns, handed, kept
from meshwright.model.hf.config import use_experts_on_trial, use_plain_experts
from meshwright.model.loading.loader import Loaded
from meshwright.model.loading.meta_init import Blueprint
from meshwright.model.rng.dropout_mode import trial
from meshwright.model.rng.sharded_draws import between
from meshwright.model.rng.sites import Dice, Sites
from meshwright.model.sequence_analysis.runtime_check import Alike
from meshwright.model.tensor_parallel.layer_pairs import UNKNOWN
from meshwright.model.tensor_parallel.layer_roles import find_sockets, hidden_matrices
from meshwright.model.tensors.fake_cache import forget_fakes
from meshwright.model.tensors.float64_mode import widen
from meshwright.model.trial.divisible_layers import layers, noted
from meshwright.model.trial.trial import PROBE_BATCH, Findings, depends_on_values, fake_copy, observe, visits_of
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ROOT, Anatomy, Column, Weight, block_of
from meshwright.plan.model_spec.op_costs import Weighed
from meshwright.plan.model_spec.sequence_info import Tokens

if TYPE_CHECKING:
    from meshwright.model.analysis.pipeline_trial import Courses

Example = Mapping[str, torch.Tensor]
OTHER_BATCH = 5
Shown = tuple[Findings, Sites, tuple[Column, ...]]  # what a trial shows; the columns are what is handed to the loss
NUMPYS = "the forward draws numbers with numpy.random: where they reach its outputs, another plan trains another model; draw with"
NUMPYS += " torch.rand, or turn off what draws (in transformers' models of speech apply_spec_augment, or a layer drop)"
Look = Callable[[Any, Any], tuple[Column, ...]]


@dataclass(frozen=True)
class Reading:
    """A model that can be made: `blueprint` for its values, `block_names`, its `anatomy`, and its dropout `sites`.

    It was read from `loaded`. `example` is one row of every key of a batch, for ranks that have none; `few` are some. `stateful`
    are the buffers that a training forward writes, `attends` the visits that call torch's attention, `captured` how many tensors
    leave blocks by each side channel, `unused` the trained parameters that the trial did not use, `tables` those that look at all
    rows of a batch, and `unseen` the lines of code in which glue writes with nobody told.
    """

    blueprint: Blueprint
    block_names: tuple[str, ...]
    anatomy: Anatomy
    sites: Sites
    example: dict[str, torch.Tensor]
    loaded: Loaded = field(repr=False, compare=False)
    stateful: tuple[str, ...] = ()
    attends: tuple[str, ...] = ()
    captured: dict[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    few: Example = field(default_factory=dict, repr=False, compare=False)
    judge: Judge | None = field(default=None, repr=False, compare=False)
    tables: tuple[Looked, ...] = ()
    unseen: tuple[str, ...] = ()

    def on(self, example: Example) -> "Reading":
        """The reading of the same model on rows like those of `example`, a batch that has them of another length."""
        return read(self.loaded, example, tuple(each.name for each in self.anatomy.targets), self.judge)

    @cached_property
    def tokens(self) -> Tokens | None:
        """What the model does with tokens, learnt by a trial of its own when it is first asked; None where it takes in none."""
        inputs, targets = ({each.name: self.few[each.name] for each in of} for of in (self.anatomy.inputs, self.anatomy.targets))
        return dealt(self.anatomy.visits, self.blueprint, self.block_names, inputs, targets, self.judge)

    @cached_property
    def alike(self) -> Alike:
        """Whether its blocks compute alike on as many tokens as a run has, and on as few as a rank has (model/alike.py)."""
        inputs = {each.name: self.few[each.name] for each in self.anatomy.inputs}
        return Alike(inputs, ready_on(self.blueprint, self.block_names))

    @cached_property
    def courses(self) -> dict[torch.dtype, "Courses"]:
        """The courses of its forward by the dtype of parameters, as far as somebody has asked for them (model/courses.py)."""
        return {}

    def weighed(self, parameters: torch.dtype, compute: torch.dtype) -> Weighed | None:
        """What the model holds in memory in these dtypes, weighed when it is first asked; None where nobody can tell."""
        if (parameters, compute) not in self._weighed:
            self._weighed[parameters, compute] = self._weigh(parameters, compute)
        return self._weighed[parameters, compute]

    @cached_property
    def _weighed(self) -> dict[tuple[torch.dtype, torch.dtype], Weighed | None]:
        return {}

    def _weigh(self, parameters: torch.dtype, compute: torch.dtype) -> Weighed | None:
        if self.judge is None or self.judge.whole_batch:
            return None

        def make(mode: FakeTensorMode) -> tuple[nn.Module, dict[str, nn.Module]]:
            return self.make("cpu", parameters, mode)[:2]

        casts = None if compute == parameters else compute
        return weigh(Trial(make, self.few, self.judge, self.anatomy.in_place, casts))

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
        return in_training(module), blocks_of(module, self.block_names), dict(module.named_parameters())


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
    few = {key: rows_of(value, PROBE_BATCH) for key, value in example.items()}
    look = partial(handed, judge, few)
    other = judge.whole_batch
    sockets = find_sockets(module, loaded.sockets)
    roles = noted(module, sockets, loaded.sockets)
    found, sites, outputs = _trial(plan, names, inputs, look, roles, other=other)
    _check_declared(loaded.blocks or (), found.visits)
    if not found.visits:  # the blocks' own forwards are never called: somebody calls into their parts
        names = (WHOLE,)
        found, sites, outputs = _trial(plan, names, inputs, look, roles, other=other)
    held = owners(module, blocks_of(module, names))
    holders = {name: held.get(id(parameter), []) for name, parameter in module.named_parameters()}
    hidden = hidden_matrices(module)
    shown = layers(module, found, sockets, roles, judge, partial(tried_on, plan, names, inputs))
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
    notes = tuple(_notes(names == (WHOLE,) and not loaded.blocks, weights, found)) + shown.notes
    anatomy = Anatomy(loaded.name, tuple(found.visits), weights, numel, flops, bool(sites.allowed), found.in_place, notes)
    targeted = {key: value for key, value in example.items() if key in targets}
    batch = columns(inputs), columns(targeted)
    anatomy = replace(anatomy, inputs=batch[0], targets=batch[1], outputs=outputs, whole_batch=other, origin=plan.origin)
    anatomy = replace(anatomy, inside_numel=tuple(found.inside_numel), calls=shown.calls, logits=shown.logits)
    anatomy = replace(anatomy, numbers=shown.numbers, portions=shown.portions, reruns=tuple(dict.fromkeys(found.reruns)))
    anatomy = replace(streamed(anatomy, plan, names, inputs), loss_numel=kept(judge, few, found.outputs) // PROBE_BATCH)
    row = {key: value.detach()[:1].clone() for key, value in example.items()}
    unused = tuple(name for name, entry in plan.logical.items() if entry.requires_grad and not found.users[name])
    few = {key: value.detach() for key, value in few.items()}
    forget_fakes(module)
    told = tuple(found.stateful), tuple(dict.fromkeys(found.attends)), found.captured, unused
    return Reading(plan, names, anatomy, sites, row, loaded, *told, few, judge, tuple(found.tables), tuple(found.unseen))


def _trial(
    plan: Blueprint, names: tuple[str, ...], inputs: Example, look: Look, layers: Mapping[str, str], *, other: bool
) -> Shown:
    rows = {batch: {key: rows_of(value, batch) for key, value in inputs.items()} for batch in (PROBE_BATCH, OTHER_BATCH)}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = on_trial(plan)
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
    module = on_trial(plan)
    use_plain_experts(module)  # on real tensors, weights by token would take the memory of as many experts as tokens
    plan.materialize(module)
    try:
        return _forwards(module, names, rows, look, layers, other=other)
    except PlanError:
        raise
    except Exception as error:
        raise _failed(error, inputs) from error


def _forwards(
    module: nn.Module, names: tuple[str, ...], rows: Mapping[int, Example], look: Look, layers: Mapping[str, str], *, other: bool
) -> Shown:
    dice, blocks = Dice(seed=0), blocks_of(module, names)

    def forward(batch: int) -> Findings:
        before = repr(np.random.get_state(legacy=False))
        with trial(dice, batch):
            found = observe(module, blocks, dice.enter, lambda: module(**rows[batch]), layers, lambda: dice.count)
        found.elsewhere = repr(np.random.get_state(legacy=False)) != before
        return found

    found = forward(PROBE_BATCH)
    wider = None
    if dice.sites.allowed or other:  # a second size tells the batch dim of what is drawn from other dims of the first size
        wider = forward(OTHER_BATCH).outputs
    return found, dice.sites, look(found.outputs, wider)


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


def _notes(unbroken: bool, weights: tuple[Weight, ...], found: Findings) -> Iterator[str]:
    if unbroken:
        yield "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward"
    in_glue = [weight.name for weight in weights if ROOT in weight.visits]
    if in_glue:
        yield f"{len(in_glue)} parameters are used outside blocks ({in_glue[0]}...): complete after the last backward"
    if found.stateful:
        yield f"{len(found.stateful)} buffers are written by the forward ({found.stateful[0]}...): every rank writes its own"
    if found.elsewhere:
        yield NUMPYS


def _any_loss(outputs: Any, batch: Example) -> torch.Tensor:
    raise NotImplementedError("no loss was given to the reading: it takes all outputs to be used; pass judge=Judge(...)")
