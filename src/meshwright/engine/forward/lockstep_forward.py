"""Whole forwards of a model whose parts lie on several ranks, outside of steps: all ranks run them abreast.

    rank 0    embed  -->  layer 0  -->  (layer 1)  -->  (head)        its own blocks, and (those of others) on fake tensors
    rank 1   (embed) --> (layer 0) -->   layer 1   -->   head
              0 tells      0 tells       1 tells         1 tells      what a block gives out goes to all who play it on fakes

Each block runs where its weights are. On the other ranks it is played on tensors without numbers, which shows what it gives out
and does what it does to things that it is given: a cache of keys and values grows there too, and is as long as where the numbers
are. Then the numbers come. So glue runs on all ranks, on the same numbers, and every rank has the outputs; whatever calls the
model, `generate` with or without a cache, is run by all of them alike, and nothing needs to be known of the forward beforehand.

    bytes = sum over blocks of what they give out, and 88 more per tensor, broadcast along the pipeline

Cost: ranks work one after the other, as they must where each token needs the last one; a block on fake tensors takes of the
order of ten milliseconds, while its owner computes. Limits: a block that looks at numbers within (experts that gather the tokens
they get), or that takes in slices of the stream, cannot be played so. What it gives out is then known from the trial run, what it
does to a cache is not: that is refused by name.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.driver import ForwardDriver
from meshwright.model.hf.output_capture import capture_marks
from meshwright.model.pipeline.forward_graph import ValueRef
from meshwright.model.tensors.fake_cache import clear_caches_with_fakes, lru_caches
from meshwright.model.tensors.function_modes import is_constant
from meshwright.model.tensors.pytree import map_leaves, replace_tensors, tree_tensors, value_leaves
from meshwright.model.trial.trial import depends_on_values
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.plan import Plan

BROADCAST_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MAX_DIMS = 9  # of a tensor, at most


class LockstepForward:
    """One rank, whose drive calls blocks as said above while `forwards` lasts; where it has the whole model, as ever."""

    def __init__(self, plan: Plan, state: RankState, driver: ForwardDriver) -> None:
        self._state, self._drive = state, driver
        self._sliced = any(plan.mesh.size(axis) > 1 for axis in plan.sharding.residual_layout.axes_with("S"))
        self._owners: dict[str, int] = {}
        for index, stage in reversed(
            list(enumerate(plan.sharding.block_calls_by_pp_rank))
        ):  # of several that have a block the first one runs it
            self._owners |= {block_of(visit): index for visit in stage}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)  # one for good: a cache may live on
        self._caches = lru_caches(state.trained_module.module)
        self._blanks: dict[str, list[dict[str, Any]]] = {}
        self._cut = {
            name: home.param.shape
            for home in plan.sharding.logical_param_shardings
            if home.sliced_dims
            for name in home.param.names
        }
        self._divided = {
            state.trained_module.module.get_submodule(call.name)
            for call in plan.sharding.model_spec.layer_calls
        }

    @contextmanager
    def run_in_lockstep(self, action: str) -> Iterator[None]:
        """Meanwhile forwards of the module are run by all ranks of the pipeline; what is sent is for `action`."""
        if not self._owners:
            yield
            return
        with self._drive.use_interceptor(partial(self._block, action)):
            yield

    def _block(self, action: str, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called: the drive's guide."""
        group, owner = self._state.world.group(("pp",)), self._owners.get(name)
        if owner is None:  # no part of the forward that is trained: every rank has it as it was made
            return run(*args, **kwargs)
        capturing, given = capture_marks(), tree_tensors((args, kwargs))
        mine = owner == group.index
        outputs = run(*args, **kwargs) if mine else self._shown(name, run, args, kwargs)
        added = [mark.added_tensors for mark in capturing]
        found = tree_tensors([outputs, *added])
        named = f"{action}({name})"
        header = (
            _described(name, found, given)
            if mine
            else torch.empty(len(found), 2 + MAX_DIMS, dtype=torch.int64)
        )
        header = header.to(self._state.world.device)
        if not found:
            return outputs
        group.broadcast(header, source=owner, action=named).wait()
        new: dict[int, torch.Tensor] = {}
        for tensor, (kind, ndim, *dims) in zip(found, header.tolist(), strict=True):
            real = tensor
            if kind >= 0:
                real = (
                    tensor.contiguous()
                    if mine
                    else torch.empty(dims[:ndim], dtype=BROADCAST_DTYPES[kind], device=header.device)
                )
                group.broadcast(real, source=owner, action=named).wait()
            elif not mine:
                real = given[-1 - kind]
            new[id(tensor)] = real
        if mine:
            return outputs
        for mark, each in zip(capturing, added, strict=True):
            mark.replace(replace_tensors(each, new))
        return replace_tensors(outputs, new)

    def _shown(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block of another rank gives out, without numbers."""
        if self._sliced:
            return self._foretold(name, (args, kwargs), "takes in slices of the stream", None)
        reals = {
            id(tensor): tensor
            for tensor in tree_tensors((args, kwargs))
            if not isinstance(tensor, FakeTensor)
        }
        fakes = {key: self._mode.from_tensor(tensor) for key, tensor in reals.items()}
        back = {id(fake): reals[key] for key, fake in fakes.items()}
        before = [(mark, mark.captured[:]) for mark in capture_marks()]
        given = replace_tensors(
            (args, kwargs), fakes
        )  # in place: what the block writes into lists and dicts stays
        try:
            with self._mode, self._blank(name):
                return run(*given[0], **given[1])
        except Exception as error:
            if not depends_on_values(error):
                raise
            for mark, found in before:
                mark.captured[:] = found
            why = f"looks at numbers that another rank has ({type(error).__name__})"
            return self._foretold(name, replace_tensors(given, back), why, error)
        finally:
            replace_tensors(given, back)
            clear_caches_with_fakes(self._caches)

    @contextmanager
    def _blank(self, name: str) -> Iterator[None]:
        """Have a block's weights without numbers meanwhile: other ranks have them, and here they may have no memory.

        They are whole, as what the modules hold is that of the model; but for modules that blocks of this rank have too.
        """
        modules = list(self._state.trained_module.blocks[name].named_modules(prefix=name))
        places = [place for _, module in modules for place in (module._parameters, module._buffers)]
        if name not in self._blanks:
            named = [
                (at, {} if module in self._divided else self._cut) for at, module in modules for _ in range(2)
            ]
            with self._mode:
                self._blanks[name] = [
                    {key: self._like(each, whole.get(f"{at}.{key}")) for key, each in place.items()}
                    for place, (at, whole) in zip(places, named, strict=True)
                ]
        kept = [dict(place) for place in places]
        for place, blanks in zip(places, self._blanks[name], strict=True):
            place |= blanks
        try:
            yield
        finally:
            for place, entries in zip(places, kept, strict=True):
                place |= entries

    def _like(self, tensor: torch.Tensor | None, shape: tuple[int, ...] | None) -> Any:
        if tensor is None:
            return None
        return torch.empty(shape or tensor.shape, dtype=tensor.dtype, device=self._state.world.device)

    def _foretold(self, name: str, given: Any, why: str, error: Exception | None) -> Any:
        """What a block gives out, by the trial run. Raises PlanError where it is given things that it may change."""
        odd = [
            type(leaf).__name__
            for leaf in value_leaves(given)
            if not is_constant(leaf) and not isinstance(leaf, torch.Tensor)
        ]
        if odd or self._state.trained_module.forward_graphs is None:
            what = f"and is given a {odd[0]}" if odd else "and nothing is known of its outputs"
            text = f"the block '{name}' {why}, {what}"
            raise PlanError(
                text,
                fix="pass use_cache=False, or call the model under a plan without a pipeline",
                location="model",
            ) from error
        inputs = self._state.loss.model_inputs(self._state.trained_module.dummy_batch)
        with ThreadPoolExecutor(
            1
        ) as elsewhere:  # a forward is under way in this thread, with modes and collectors of its own
            course = elsewhere.submit(
                partial(self._state.trained_module.forward_graphs.get, inputs, training=False)
            ).result()
        stub = course.stubs[name]
        for mark in capture_marks():
            mark.captured.extend(
                map_leaves(added, _placed)
                for channel, listed in stub.captured
                if channel == mark.channel
                for added in listed
            )
        return map_leaves(stub.outputs, _placed)


def _placed(leaf: Any) -> Any:
    return torch.empty(0) if type(leaf) is ValueRef else leaf


def _described(name: str, found: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> torch.Tensor:
    """A row per tensor: its dtype and shape; or, of one that the block was given, which of those."""
    places = {id(tensor): -1 - place for place, tensor in enumerate(given)}
    rows = []
    for tensor in found:
        if isinstance(tensor, FakeTensor):
            text = f"the block '{name}' computes with tensors that another rank has: they came to it by way of an object"
            raise PlanError(
                text,
                fix="hand them over as arguments of the block, bare or in tuples and lists",
                location="model",
            )
        rows.append(
            [
                places.get(id(tensor), BROADCAST_DTYPES.index(tensor.dtype)),
                tensor.ndim,
                *tensor.shape,
                *[0] * (MAX_DIMS - tensor.ndim),
            ]
        )
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2 + MAX_DIMS)
