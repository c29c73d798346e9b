"""Router replay: a forward sends each token to the experts that an earlier forward has chosen for it.

Why it works: two scores of a router nearly tie now and then. Rounded otherwise, they change places, and all
that follows differs. The forward that draws an answer adds in another order than that of a step: a token at a
time, with a cache. So in low precision some of its tokens take other experts, and their log-probabilities are
not those of the step. What was chosen is no function with a gradient: it is data. It is recorded when an
answer is drawn, and a step reads it as a column of the batch. The router computes its scores as before, and
these weight the experts, so it learns.

    generate   scores  .1 .6 .3 .0  -->  experts 1 2              routed_experts, (tokens, layers, k)
    step       scores  .1 .4 .2 .3  -->  experts 1 3 without it;  experts 1 2, with the scores .4 .2

    g_e = s_e / sum of s over the replayed experts      s: scores of this forward (or as the model weights)

The choice is found in the forward of the module around the experts: `topk` of the scores of all experts (in
`meshwright.nn`, a stable sort) returns the recorded experts and their scores of this forward. What the
experts are given is compared with the record: a router that chooses in another way is refused, not ignored.

Cost: no message; a batch has tokens x layers x k integers more, and an answer is told to other ranks with
these. On a GPU the host reads one comparison per layer and forward.
Limits: each token chooses k experts of its layer by their scores. Routings with capacity, experts that choose
tokens, the dense form (Llama 4), and experts that are called twice in a forward are refused. So are steps
whose ranks have slices of the residual stream (sequence_parallel; 2-D and 3-D tensor parallelism): a router
there sees other tokens than the batch has.
Paper: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370 (rollout routing replay, R3). Megatron-LM calls it router replay
(`moe_enable_routing_replay`); vLLM and SGLang return `routed_experts`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.sharding.sharding_plan import ShardingPlan

ROUTED_EXPERTS = "routed_experts"  # the column of a batch, (samples, tokens, layers, k)
NOT_RECORDED = -1  # in place of an expert: the token takes what its router chooses
WITHOUT_FIX = f"leave {ROUTED_EXPERTS} out: each forward then takes the experts that its router chooses"

Wrap = Callable[[str, Callable[..., Any]], None]  # makes a module compute wrapper(its forward, *arguments)
Routes = Callable[[], torch.Tensor | None]  # those of the forward that runs; None: its routers choose


def route_diagnostics(calls: Sequence[ExpertsCall], location: str) -> Iterator[Diagnostic]:
    """Yields why routes through the experts of `calls`, all of a model, can be neither recorded nor replayed;
    nothing if they can.
    """
    if not calls:
        text = "the model has no experts that are called with the choice of a router, and so no routes"
        yield Diagnostic(text, WITHOUT_FIX, location)
    for call in (call for call in calls if call.form != "choice"):
        text = f"the experts '{call.name}' compute on every token, and get no choice that could be recorded"
        yield Diagnostic(text, WITHOUT_FIX, location)
        break
    names = [call.name for call in calls]
    for name in sorted({name for name in names if names.count(name) > 1}):
        text = f"the experts '{name}' are called {names.count(name)} times in a forward, with a choice each"
        yield Diagnostic(text, WITHOUT_FIX, location)
    numbers = sorted({call.top_k for call in calls})
    if len(numbers) > 1:
        text = f"layers choose {' and '.join(map(str, numbers))} experts for a token, and a record has one k"
        yield Diagnostic(text, WITHOUT_FIX, location)


def replay_diagnostics(sharding: ShardingPlan) -> Iterator[Diagnostic]:
    """Yields why a step under `sharding` cannot replay routes."""
    yield from route_diagnostics(sharding.model_spec.experts_calls, "loss")
    if axes := sharding.residual_layout.axes_with("S"):
        text = f"routers see slices of the residual stream, which is sharded along {' and '.join(axes)}, and "
        text += f"{ROUTED_EXPERTS} are those of whole tokens"
        fix = "use tensor_parallel in mode 1d, without sequence_parallel; or leave the column out"
        yield Diagnostic(text, fix, "loss")


def replay_routes(
    wrap: Wrap, calls: Sequence[ExpertsCall], all_calls: Sequence[ExpertsCall], routes: Routes
) -> None:
    """Makes the layers of `calls`, those of this rank among `all_calls` of the model, take what `routes`
    returns: experts (samples, tokens, layers, k), NOT_RECORDED where a token takes those of its router.
    """
    for call in calls:
        replay = _LayerReplay(call, all_calls.index(call), len(all_calls), routes)
        wrap(call.name.rpartition(".")[0], replay.run_router)
        wrap(call.name, replay.run_experts)


class _LayerReplay:
    """Replays the choice of one layer."""

    def __init__(self, call: ExpertsCall, number: int, num_layers: int, routes: Routes) -> None:
        self._call, self._number, self._num_layers, self._routes = call, number, num_layers, routes

    def run_router(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the module around the experts."""
        index = self._recorded()
        if index is None:
            return forward(*args, **kwargs)
        with _ReplayedChoice(index, self._call.num_experts):
            return forward(*args, **kwargs)

    def run_experts(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the experts, if they are given what was recorded."""
        index = self._recorded()
        if index is not None:
            given = [each for each in tree_tensors((args, kwargs)) if not each.is_floating_point()]
            is_same = len(given) == 1 and given[0].shape == index.shape
            if not (is_same and bool(((given[0] == index) | (index == NOT_RECORDED)).all())):
                raise self._refusal(index)
        return forward(*args, **kwargs)

    def _refusal(self, index: torch.Tensor) -> PlanError:
        """Returns why the experts were not given the recorded `index`."""
        name, num_experts = self._call.name, self._call.num_experts
        lowest, highest = int(index.min()), int(index.max())
        if lowest < NOT_RECORDED or highest >= num_experts:
            text = f"{ROUTED_EXPERTS} names experts from {lowest} to {highest} for layer '{name}', which has "
            text += f"{num_experts}, numbered from 0"
            fix = "replay what was recorded with this model, and in the order of its layers"
            return PlanError(text, fix=fix, location="batch")
        text = f"the experts '{name}' are given another choice than the recorded one: "
        text += "their router does not choose by the highest scores of each token alone"
        return PlanError(text, fix=WITHOUT_FIX, location="model")

    def _recorded(self) -> torch.Tensor | None:
        """Returns the recorded experts of this layer, (samples x tokens, k)."""
        routes = self._routes()
        if routes is None:
            return None
        if routes.ndim != 4 or routes.shape[2:] != (self._num_layers, self._call.top_k):
            text = f"{ROUTED_EXPERTS} has the shape {list(routes.shape)}; needed is [samples, tokens, "
            text += f"{self._num_layers} layers with experts, {self._call.top_k} experts of a token]"
            fix = f"pass what generate(return_routed_experts=True) returned, padded by {NOT_RECORDED}"
            raise PlanError(text, fix=fix, location="batch")
        return routes[:, :, self._number].flatten(0, 1).long()


class _ReplayedChoice(TorchFunctionMode):
    """While active, the highest of the scores of all `num_experts` experts are those of `index` (tokens, k).

    Where `index` is NOT_RECORDED they are what they are.
    """

    def __init__(self, index: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self._index, self._num_experts = index, num_experts
        self._replayed = {
            torch.topk: partial(self._highest, torch.return_types.topk),
            torch.Tensor.topk: partial(self._highest, torch.return_types.topk),
            torch.sort: partial(self._highest, torch.return_types.sort),
            torch.Tensor.sort: partial(self._highest, torch.return_types.sort),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found, replayed = func(*args, **(kwargs or {})), self._replayed.get(func)
        return found if replayed is None else replayed(args[0], found)

    def _highest(self, make: Any, scores: torch.Tensor, found: Any) -> Any:
        """Returns `found`, values and indices of `scores`, with the recorded experts in front."""
        num_tokens, k = self._index.shape
        are_all = scores.shape[-1] == self._num_experts and scores.numel() == num_tokens * self._num_experts
        if not are_all or found.indices.shape[-1] not in (k, self._num_experts):
            return found
        index, chosen = self._index.view(*scores.shape[:-1], k), found.indices[..., :k]
        # an expert that the layer does not have is refused where the experts compare what they are given
        first = torch.where(index < 0, chosen, index.clamp(max=self._num_experts - 1))
        indices = torch.cat([first, found.indices[..., k:]], -1)
        return make((scores.gather(-1, indices), indices))
