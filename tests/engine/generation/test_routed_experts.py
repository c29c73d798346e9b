"""Routes of experts are those of one device on every plan, and forwards replay what is given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.generation.cached_forward import CachedForward
from meshwright.engine.generation.routed_experts import RouteRecorder
from meshwright.engine.generation.sampling_params import GeneratedAnswer
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import check_loss
from meshwright.model.recording import router_replay
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.engine.generation.test_generate import (
    COMBINED,
    DRAWN,
    EXPERTS,
    FAMILIES,
    GREEDY,
    LAYOUTS,
    NEW,
    PROMPTS,
    Layout,
    answers_of,
    planned,
    reference_model,
)
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import tiny_job

SAMPLES, TOKENS, LAYERS, K = 12, 10, 2, EXPERTS["num_experts_per_tok"]
ROUTED: dict[str, Layout] = {
    **LAYOUTS,
    "experts": (Mesh(ep=2), None),
    "stages and experts": (Mesh(pp=2, ep=2), None),
}


def recorded_in(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The experts that routers of transformers choose in a forward on `ids`, (tokens, layers, k)."""
    found = list[torch.Tensor]()
    routers = [module for module in model.modules() if isinstance(module, MixtralTopKRouter)]
    hooks = [each.register_forward_hook(lambda module, args, out: found.append(out[2])) for each in routers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


@pytest.mark.parametrize("layout", ROUTED)
def test_recorded_routes_are_those_of_a_forward_on_one_device(layout: str):
    for answers in answers_of(
        "mixtral", ROUTED[layout], replace(DRAWN, n=2), max_num_seqs=2, return_routed_experts=True
    ):
        assert len({each.tokens for each in answers}) > len(PROMPTS)
        for number, answer in enumerate(answers):
            ids = torch.tensor([[*PROMPTS[number // 2], *answer.tokens][:-1]])
            assert torch.equal(answer.routed_experts, recorded_in(reference_model("mixtral"), ids).int())


def test_a_model_without_a_cache_has_a_route_of_each_token_once(monkeypatch: pytest.MonkeyPatch):
    expected = answers_of("mixtral", LAYOUTS["one device"], return_routed_experts=True)[0]
    own = CachedForward.__init__

    def without_cache(self: Any, *given: Any, keeps_cache: bool = True) -> None:
        own(self, *given, keeps_cache=False)

    monkeypatch.setattr(CachedForward, "__init__", without_cache)
    for found, answer in zip(
        answers_of("mixtral", LAYOUTS["one device"], return_routed_experts=True)[0], expected, strict=True
    ):
        assert torch.equal(found.routed_experts, answer.routed_experts)


def given_routes(*size: int) -> torch.Tensor:
    """Routes that no router has chosen: two of three experts, in any order."""
    scores = torch.rand(*size, LAYERS, 3, generator=torch.Generator().manual_seed(3))
    return scores.argsort(-1)[..., :K]


@contextmanager
def forced_routes(routes: torch.Tensor) -> Iterator[None]:
    """Makes routers of transformers choose `routes`, (samples, tokens, layers, k), in their own words."""
    numbers = iter(range(10**6))

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        index = routes[:, :, next(numbers) % LAYERS].flatten(0, 1)
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        scores = logits.softmax(-1).gather(-1, index)
        return logits, scores / scores.sum(-1, keepdim=True), index

    own = MixtralTopKRouter.forward
    MixtralTopKRouter.forward = forward
    try:
        yield
    finally:
        MixtralTopKRouter.forward = own


@pytest.mark.parametrize("layout", ["one device", "shards", "tensor", "pipeline", "stages and experts"])
def test_log_probabilities_with_given_routes_are_those_of_one_device(layout: str):
    answers = [[1, 2, 3], [65], [7, 7], [0, 66, 12, 13, 14], [4, 9]]
    pairs = list(zip(PROMPTS, answers, strict=True))
    routes = [given_routes(len(prompt) + len(answer) - 1) for prompt, answer in pairs]

    def use(trainer: Any, _: object) -> Any:
        return [
            trainer.logprobs(PROMPTS, answers, batch_size=2, routed_experts=given) for given in (routes, None)
        ]

    truth = []
    for (prompt, answer), given in zip(pairs, routes, strict=True):
        ids = torch.tensor([[*prompt, *answer][:-1]])
        with forced_routes(given[None]), torch.no_grad():
            logits = reference_model("mixtral")(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        truth.append(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
    for found, without in answers_of("mixtral", ROUTED[layout], use=use, micro_batch=1):
        for one, other, expected in zip(found, without, truth, strict=True):
            assert one.logprobs == pytest.approx(expected, rel=0, abs=1e-10)
            assert one.logprobs != pytest.approx(other.logprobs, rel=0, abs=1e-6)


def loss_of_routes() -> mw.Loss:
    """The cross-entropy, with routes in the batch."""

    def total(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    def count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] != -100).sum()

    return mw.Loss(total, count, ("labels", "routed_experts"), is_token_sum=True)


def batch_with_routes() -> dict[str, torch.Tensor]:
    """A global batch; some tokens of it have no route."""
    routes = given_routes(SAMPLES, TOKENS)
    routes[:, 7:] = -1
    return batches(1, SAMPLES, TOKENS)[0] | {"routed_experts": routes}


@cache
def analyzed() -> AnalyzedModel:
    """The analyzed model with that loss; experts one by one, as grouped products refuse odd sizes."""
    torch.manual_seed(0)
    model: Any = FAMILIES["mixtral"]()
    model.set_experts_implementation("eager")
    return mw.analyze(model, batch_with_routes(), loss=loss_of_routes())


@cache
def step_on_one_device() -> tuple[float, float]:
    """The loss and the norm of its gradient, by transformers and autograd."""
    model, batch = reference_model("mixtral"), batch_with_routes()
    # the routes of the last tokens depend on those of the first: one after the other
    routes = batch["routed_experts"].clamp(min=0)
    for layer in range(LAYERS):
        with forced_routes(routes), capture_logits() as logits:
            model(batch["input_ids"], use_cache=False)
        chosen = logits[layer].topk(K).indices.unflatten(0, (SAMPLES, TOKENS))
        routes[:, 7:, layer] = chosen[:, 7:]
    model.zero_grad()
    with forced_routes(routes):
        outputs = model(batch["input_ids"], use_cache=False)
    loss = loss_of_routes().total(outputs, batch) / batch["labels"].numel()
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm().item()
    model.zero_grad()
    return loss.item(), norm


@contextmanager
def capture_logits() -> Iterator[list[torch.Tensor]]:
    """Yields the scores of all routers, as a forward makes them."""
    found, forced = list[torch.Tensor](), MixtralTopKRouter.forward

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        returned = forced(self, hidden_states)
        found.append(returned[0].detach())
        return returned

    MixtralTopKRouter.forward = forward
    try:
        yield found
    finally:
        MixtralTopKRouter.forward = forced


def steps_of(layout: Layout, use: Callable[[Any], Any], more: tuple[Any, ...] = ()) -> list[Any]:
    """What `use` returns of the trainer of each rank, as threads."""
    mesh, strategies = layout
    if more:
        strategies = (*mw.make_plan(analyzed(), tiny_job(), mesh, None, 1).strategies, *more)
    plan = mw.make_plan(analyzed(), tiny_job(), mesh, strategies, 1)

    def body(world: World) -> Any:
        with mw.parallelize(analyzed(), plan, world=world) as trainer:
            return use(trainer)

    return run_on_threads(body, mesh)


def one_step(trainer: Any) -> tuple[float, float, float]:
    """The loss of an evaluation, and the loss and the gradient norm of a step."""
    batch = batch_with_routes()
    evaluated = trainer.evaluate(batch).loss
    metrics = trainer.step(trainer.local_batch(batch))
    return evaluated, metrics.loss, metrics.grad_norm


@pytest.mark.parametrize("more", [(), (ActivationCheckpointing(),)], ids=["once", "recomputed"])
@pytest.mark.parametrize("layout", ROUTED)
def test_a_step_with_given_routes_is_that_of_one_device(layout: str, more: tuple[Any, ...]):
    loss, norm = step_on_one_device()
    for found in steps_of(ROUTED[layout], one_step, more):
        assert found == pytest.approx((loss, loss, norm), rel=1e-10)


@pytest.mark.parametrize("layout", ["one device", "stages and experts", "context"])
def test_verify_replays_and_finds_equal_routes_in_all_tokens(layout: str):
    plan = mw.make_plan(analyzed(), tiny_job(), *ROUTED[layout], 1)
    verdict = mw.verify(analyzed(), plan, [batch_with_routes()] * 2)
    assert verdict.passed, str(verdict)


def test_routes_of_the_token_before_are_noticed(monkeypatch: pytest.MonkeyPatch):
    own = router_replay._LayerReplay._recorded

    def shifted(self: Any) -> torch.Tensor | None:
        index = own(self)
        return None if index is None else index.roll(1, 0)

    monkeypatch.setattr(router_replay._LayerReplay, "_recorded", shifted)
    with pytest.raises(AssertionError):
        test_a_step_with_given_routes_is_that_of_one_device("one device", ())


def test_routes_of_columns_that_have_routes_already_are_noticed(monkeypatch: pytest.MonkeyPatch):
    own = RouteRecorder.add_routes

    def first_columns(self: Any, sequences: Any) -> None:
        own(self, sequences)
        for sequence in sequences:
            sequence.routes[-1] = sequence.routes[-1].roll(1, 0)

    monkeypatch.setattr(RouteRecorder, "add_routes", first_columns)
    with pytest.raises(AssertionError):
        test_recorded_routes_are_those_of_a_forward_on_one_device("one device")


def told(trainer: Any, found: list[GeneratedAnswer]) -> float:
    """What this rank has sent."""
    return trainer.world.ledger.sent_nbytes["GENERATE"]


def test_ranks_tell_each_other_four_bytes_per_expert_of_a_token():
    pairs = [
        answers_of("mixtral", LAYOUTS["copies"], use=told, return_routed_experts=asked)
        for asked in (False, True)
    ]
    longest, rows = max(map(len, PROMPTS)) + NEW - 1, 2
    for without, with_routes in zip(*pairs, strict=True):
        assert with_routes - without == 2 * rows * longest * LAYERS * K * 4


def test_what_has_no_routes_is_refused_by_name():
    with pytest.raises(PlanError, match="the model has no experts that are called with the choice"):
        answers_of("llama", LAYOUTS["copies"], return_routed_experts=True)
    plan = planned("llama", COMBINED["sharded tokens"], 1)  # a mixture is refused before
    with pytest.raises(PlanError, match=r"routers see slices of the residual stream(?s:.*)along tp"):
        check_loss(plan, loss_of_routes())
    batch = batch_with_routes()

    def wrong_shape(trainer: Any) -> None:
        other = {**batch, "routed_experts": batch["routed_experts"][:, :, :1]}
        trainer.step(trainer.local_batch(other))

    with pytest.raises(PlanError, match=r"has the shape(?s:.*)2 layers with experts, 2 experts"):
        steps_of(LAYOUTS["one device"], wrong_shape)

    def absent_expert(trainer: Any) -> None:
        trainer.step(trainer.local_batch({**batch, "routed_experts": batch["routed_experts"] + 1}))

    with pytest.raises(PlanError, match=r"names experts from \d to 3 for layer '.*', which has 3, numbered"):
        steps_of(LAYOUTS["one device"], absent_expert)

    def wrong_answers(trainer: Any, _: object) -> None:
        trainer.logprobs([[1, 2]], [[3]], routed_experts=[given_routes(3)])

    with pytest.raises(PlanError, match=r"answer 0 have the shape \(3, 2, 2\); needed is \(2, 2, 2\)"):
        answers_of("mixtral", LAYOUTS["copies"], GREEDY, use=wrong_answers)
