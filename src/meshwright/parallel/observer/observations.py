"""Shows the weights of workers to observers, calls the function of the user on them, and sends its answers.

    SHOW     worker j: elements j s to (j + 1) s of each group --> every observer   s: the slice of a worker
    OBSERVE  observer: parameters of the module = views of what has arrived; then it calls the function
    ANSWER   observer: version, dims and shape of each tensor --> all; then the bytes of all tensors

A worker copies its slices, since the next step writes into them. What observers say of their answers goes to
all ranks, so that a version or a size that is not as expected is named before anything is read with it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.collectives.route import Route, exchange_counts
from meshwright.model.tensors.counter_rng import derive_key
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.sharding.flat_param import FlatParamSpec
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Answer, Handler

if TYPE_CHECKING:  # no strategy imports the engine
    from meshwright.engine.runtime.rank_state import RankState

MAX_DIMS = 8
NUMBER_NBYTES = 8  # of a number of a header, int64
FUNCTION = "strategies.observer.function"
ObservingFunction = Callable[[nn.Module, int, torch.Generator], Mapping[str, torch.Tensor]]


def shown_specs(sharding: ShardingPlan) -> list[tuple[FlatParamSpec, ParamSpec]]:
    """Returns how the parameters of each group are cut into slices, one for each worker, with the first of
    them: as ZeRO cuts them, or likewise.
    """
    groups = [
        *sharding.param_groups,
        *sharding.group_params(sharding.param_shardings, sharding.model_spec, frozen=True),
    ]
    flat, axes = sharding.build_flat_params(groups), (sharding.server_axis,)
    return [
        (
            flat.get(each.name) or FlatParamSpec.build(each.name, each.params, axes, sharding.num_workers),
            each.params[0],
        )
        for each in groups
    ]


@dataclass(frozen=True)
class AnswerForm:
    """The tensors of an answer: their names, each with its dtype, in order."""

    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, answers: Sequence[str]) -> "AnswerForm":
        """Returns the form that `answers`, "name:dtype" each, describe."""
        pairs = (each.partition(":") for each in answers)
        return cls({name: getattr(torch, dtype) for name, _, dtype in pairs})

    @property
    def header_nbytes(self) -> int:
        """The bytes of the numbers that say which version an answer is of, and its shapes."""
        return NUMBER_NBYTES * self.num_numbers

    @property
    def num_numbers(self) -> int:
        """How many numbers these are."""
        return 1 + len(self.dtypes) * (1 + MAX_DIMS)

    def header(self, version: int, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """Returns the version, and of each tensor its dims, and its shape padded to MAX_DIMS."""
        found = [version]
        for name in self.dtypes:
            shape = tensors[name].shape
            found += [len(shape), *shape, *[0] * (MAX_DIMS - len(shape))]
        return found

    def shapes(self, header: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes that `header` says."""
        numbers = (header[at : at + 1 + MAX_DIMS] for at in range(1, len(header), 1 + MAX_DIMS))
        return {name: tuple(shape[:dims]) for name, (dims, *shape) in zip(self.dtypes, numbers, strict=True)}

    def nbytes(self, header: Sequence[int]) -> int:
        """Returns the bytes of the tensors that `header` is of."""
        return sum(prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes(header).items())

    def pack(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Returns the bytes of all `tensors` on `device`, uint8 [bytes]."""
        parts = [tensors[name].detach().to(device).reshape(-1) for name in self.dtypes]
        return torch.cat([each.contiguous().view(torch.uint8) for each in parts])

    def unpack(self, header: Sequence[int], data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors in the bytes `data`, each in memory of its own."""
        found, begin = dict[str, torch.Tensor](), 0
        for name, shape in self.shapes(header).items():
            dtype = self.dtypes[name]
            end = begin + prod(shape) * dtype.itemsize
            found[name], begin = data[begin:end].clone().view(dtype).view(shape), end
        return found


class _Exchange:
    """The ranks along `axis`: workers first, observers behind them."""

    def __init__(self, state: "RankState", axis: str, form: AnswerForm) -> None:
        self.state, self.form = state, form
        self.group, sharding = state.world.group((axis,)), state.plan.sharding
        self.num_workers, self.num_observers = sharding.num_workers, sharding.num_servers
        self.specs = {spec.name: spec for spec, _ in shown_specs(sharding)}
        self.example = state.trained_module.example_param.detach()  # on the device of all others
        self.is_fake = isinstance(self.example, FakeTensor)  # then nothing has values, and nobody is called

    @property
    def version(self) -> int:
        """The version of the weights behind the STEP of this step: how many steps have made them."""
        return self.state.step.number + 1

    def route(self, *, from_workers: int = 0, to_observers: int = 0) -> Route:
        """Returns the route of a rank that receives so much of each worker, or sends it to each observer."""
        sent = (0,) * self.num_workers + (to_observers,) * self.num_observers
        return Route(self.group, sent, (from_workers,) * self.num_workers + (0,) * self.num_observers)

    def exchange_headers(self, header: Sequence[int], action: str) -> list[list[int]]:
        """Returns the headers of all observers, in their order; that of this rank, if any, is `header`."""
        numbers = [[*header]] * self.num_workers if header else []
        numbers += [[0] * self.form.num_numbers] * (self.group.size - len(numbers))
        if self.is_fake:
            counts = self.example.new_zeros(self.group.size, self.form.num_numbers, dtype=torch.int64)
            self.group.all_to_all(torch.empty_like(counts), counts, action=action).wait()
            return numbers[self.num_workers :]
        counts = torch.tensor(numbers, dtype=torch.int64, device=self.state.world.device)
        return exchange_counts(self.group, counts, action)[1][self.num_workers :]


class WorkerRank:
    """What a worker shows, and the answers that it takes."""

    def __init__(self, state: "RankState", axis: str, form: AnswerForm) -> None:
        self._exchange = _Exchange(state, axis, form)
        self.handlers: dict[str, Handler] = {"SHOW": self.show, "ANSWER": self.take}

    @torch.no_grad()
    def show(self, action: Action) -> None:
        """Starts to send this worker's slice of a group to every observer."""
        exchange, parameters = self._exchange, self._exchange.state.trained_module.parameters
        spec = exchange.specs[action.subject]
        shards = spec.param_shards(exchange.group.index)
        like = parameters[spec.params[0][0]].detach()
        copies = like.new_zeros(exchange.num_observers, spec.shard_numel)
        for shard in shards:
            values = parameters[shard.name].detach().reshape(-1)[shard.begin : shard.end]
            copies[:, shard.in_shard] = values
        route = exchange.route(to_observers=spec.shard_numel)
        exchange.state.issue(action, route.start(copies.view(-1), action.name)[1])

    @torch.no_grad()
    def take(self, action: Action) -> None:
        """Receives the answers of all observers. Raises PlanError for one of another version."""
        exchange, state, form = self._exchange, self._exchange.state, self._exchange.form
        headers = exchange.exchange_headers((), action.name)
        sizes = [0 if exchange.is_fake else form.nbytes(header) for header in headers]
        route = Route(exchange.group, (0,) * exchange.group.size, (0,) * exchange.num_workers + tuple(sizes))
        data = route.send(exchange.example.new_empty(0, dtype=torch.uint8), action.name)
        if exchange.is_fake:
            return
        found = list[Answer]()
        for observer, (header, part) in enumerate(zip(headers, data.split(sizes), strict=True)):
            if header[0] != exchange.version:
                text = f"observer {observer} answers to version {header[0]}, and {exchange.version} was shown"
                fix = "report this: SHOW, OBSERVE and ANSWER of one step belong together"
                raise PlanError(text, fix=fix, location=action.name)
            found.append(Answer(header[0], observer, form.unpack(header, part)))
        state.answers = tuple(found)


class ObserverRank:
    """What an observer sees, and what it answers: at most `answer_nbytes` bytes that `function` returns."""

    def __init__(
        self,
        state: "RankState",
        axis: str,
        form: AnswerForm,
        function: ObservingFunction,
        answer_nbytes: int,
    ) -> None:
        self._exchange, self._function = _Exchange(state, axis, form), function
        self._answer_nbytes = answer_nbytes
        self._number = self._exchange.group.index - self._exchange.num_workers
        self._shown: dict[str, torch.Tensor] = {}  # by group, until it is observed
        self._answer: Mapping[str, torch.Tensor] = {}
        self.handlers: dict[str, Handler] = {"SHOW": self.see, "OBSERVE": self.observe, "ANSWER": self.answer}

    @torch.no_grad()
    def see(self, action: Action) -> None:
        """Starts to receive a group: the slices of all workers, one behind the other."""
        exchange = self._exchange
        spec = exchange.specs[action.subject]
        like = exchange.state.trained_module.module.get_parameter(spec.params[0][0]).detach()
        route = exchange.route(from_workers=spec.shard_numel)
        self._shown[action.subject], work = route.start(like.new_empty(0), action.name)
        exchange.state.issue(action, work)

    def observe(self, action: Action) -> None:
        """Calls the function with the weights that have arrived. Raises PlanError, with this rank and the
        version, if it raises, or returns what it has not declared.
        """
        state, module = self._exchange.state, self._exchange.state.trained_module.module
        missing = self._exchange.specs.keys() - self._shown.keys()
        if missing:
            raise self._error(f"has no {min(missing)} to observe", "let SHOW send every parameter group")
        views = dict(self._views())
        parameters = {name: module.get_parameter(name) for name in views}
        before = {name: each.data for name, each in parameters.items()}
        for name, view in views.items():
            parameters[name].data = view
        try:
            if not self._exchange.is_fake:
                if state.observed_weights is not None:
                    state.observed_weights = {name: view.clone() for name, view in views.items()}
                self._answer = self._call(module)
        finally:
            for name, data in before.items():
                parameters[name].data = data
            self._shown.clear()

    def answer(self, action: Action) -> None:
        """Sends what the function has returned to all workers."""
        exchange, form = self._exchange, self._exchange.form
        header, data = list[int](), exchange.example.new_empty(self._answer_nbytes, dtype=torch.uint8)
        if not exchange.is_fake:
            header = form.header(exchange.version, self._answer)
            data = form.pack(self._answer, exchange.state.world.device)
        exchange.exchange_headers(header, action.name)
        exchange.state.world.ledger.record_count("answer", len(data))
        sizes = (len(data),) * exchange.num_workers + (0,) * exchange.num_observers
        route = Route(exchange.group, sizes, (0,) * exchange.group.size)
        route.send(data.repeat(exchange.num_workers), action.name)
        self._answer = {}

    def _views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters in what has arrived."""
        module = self._exchange.state.trained_module.module
        for group, flat in self._shown.items():
            for name, numel, begin in self._exchange.specs[group].params:
                yield name, flat[begin : begin + numel].view(module.get_parameter(name).shape)

    @torch.no_grad()
    def _call(self, module: nn.Module) -> Mapping[str, torch.Tensor]:
        exchange = self._exchange
        key = derive_key(exchange.state.plan.job.train.seed, "observer", exchange.version, self._number)
        module.eval()
        try:
            found = self._function(module, exchange.version, torch.Generator().manual_seed(key))
        except Exception as error:
            raise self._error(f"raised {type(error).__name__}: {error}", "let it return tensors") from error
        problem = self._problem(found)
        if problem:
            declared = ", ".join(f"{name}:{dtype}" for name, dtype in exchange.form.dtypes.items())
            declared = declared.replace("torch.", "")
            fix = f"return a dict of tensors as answers says, {declared}, in {self._answer_nbytes} bytes"
            raise self._error(f"returned {problem}", f"{fix}; or change answers and answer_bytes")
        return {name: found[name].detach().clone() for name in exchange.form.dtypes}

    def _error(self, what: str, fix: str) -> PlanError:
        name, rank = self._function.__name__, self._exchange.state.world.rank
        text = f"{name} {what}; it observed version {self._exchange.version} on rank {rank}"
        return PlanError(text, fix=fix, location=FUNCTION)

    def _problem(self, found: object) -> str:
        """Returns how what the function has returned is not what `answers` declares, or ""."""
        dtypes = self._exchange.form.dtypes
        if not isinstance(found, Mapping):
            return f"a {type(found).__name__}"
        if found.keys() != dtypes.keys():
            return f"the names {', '.join(map(str, found)) or 'none'}"
        for name, tensor in found.items():
            if not isinstance(tensor, torch.Tensor):
                return f"a {type(tensor).__name__} as {name}"
            if tensor.dtype != dtypes[name]:
                return f"{name} in {str(tensor.dtype).removeprefix('torch.')}"
            if tensor.ndim > MAX_DIMS:
                return f"{name} of {tensor.ndim} dims, more than {MAX_DIMS}"
        nbytes = sum(each.nbytes for each in found.values())
        return f"{nbytes} bytes" if nbytes > self._answer_nbytes else ""
