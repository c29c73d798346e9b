"""Function mode in which torch's dropout draws stateless masks, which are the same under every plan.

While `StatelessDropout` is active on a thread, these functions draw from a `StatelessRNG`, and nothing else
may draw:

    F.dropout, torch.dropout               y = x * keep / (1 - p)
    F.scaled_dot_product_attention         (softmax(q k' * scale + mask) * keep / (1 - p)) v, if dropout_p > 0
    F.multi_head_attention_forward         its own code, with the mode on inside
    torch.rand, torch.rand_like            numbers of the site: stochastic depth and layer drop
    torch.bernoulli, bernoulli_, uniform_  the same numbers, compared with p or scaled
    exponential_                           minus their logarithm (Gumbel noise, to sample an expert)

With p = 0, or outside training, the ordinary functions run. Every other source of randomness is refused, with
its name and a fix: a mask that depends on the plan would make two plans train two models. During the
first trial a dispatch mode, which is slower, also looks below torch's Python functions, so that randomness
inside a C++ function (an LSTM's dropout) is found.

While torch compiles, the functions pass into the graph as they are (model/rng/compiled_draws.py).

Cost: attention with dropout keeps its probabilities, (B, heads, T, S), which fused kernels avoid; set the
attention dropout to 0 where that is too much. The mode costs about a microsecond per torch call; it is off
without dropout.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.blocks.user_checkpointing import USER_CHECKPOINT_FIX
from meshwright.model.context_parallel.attention_call import SDPAArguments
from meshwright.model.rng.sharded_draws import DrawRegion
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.call_description import CHECKPOINT_MODULE, in_user_checkpoint
from meshwright.model.tensors.fake_tensor_limits import asks_for_device
from meshwright.plan.job.errors import PlanError

RANDOM_FIX = "use F.dropout or torch.rand, which draw by sample, or draw when the data is prepared"
_UNSUPPORTED_FIX = "use F.dropout, or set its probability to 0"
REFUSED_FUNCTIONS: dict[Any, str] = {
    F.dropout1d: _UNSUPPORTED_FIX,
    F.dropout2d: _UNSUPPORTED_FIX,
    F.dropout3d: _UNSUPPORTED_FIX,
    F.alpha_dropout: _UNSUPPORTED_FIX,
    F.feature_alpha_dropout: _UNSUPPORTED_FIX,
    F.rrelu: "use F.leaky_relu",
    torch.rrelu: "use F.leaky_relu",
    F.gumbel_softmax: "build it from torch.rand: -log(-log(u)) is Gumbel noise",
    torch.randn: "build it from torch.rand: sqrt(2) * erfinv(2 u - 1) is normal noise",
    torch.randn_like: "build it from torch.rand_like: sqrt(2) * erfinv(2 u - 1) is normal noise",
    torch.normal: "build it from torch.rand: sqrt(2) * erfinv(2 u - 1) is normal noise",
    **dict.fromkeys(
        (torch.randint, torch.randint_like, torch.randperm, torch.multinomial, torch.poisson), RANDOM_FIX
    ),
    **dict.fromkeys(
        (torch.Tensor.multinomial, torch.Tensor.random_, torch.Tensor.normal_),
        RANDOM_FIX,
    ),
    **dict.fromkeys((torch.Tensor.geometric_, torch.Tensor.cauchy_, torch.Tensor.log_normal_), RANDOM_FIX),
}
INACTIVE_IN_EVAL = (
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    torch.rrelu,
)


def keep_mask(like: torch.Tensor, region: DrawRegion, p: float) -> torch.Tensor:
    """Returns a bool mask for `region`, on the device of `like`; False with probability `p`.

    While `StatelessDropout` is active, it is that region of what one device draws at once.
    """
    if has_torch_function_unary(like):
        return handle_torch_function(keep_mask, (like,), like, region, p)
    return torch.rand(region.region_shape, device=like.device) >= p


@contextmanager
def record_draw_sites(rng: StatelessRNG, batch: int) -> Iterator[None]:
    """Records the draw sites of the forward that runs inside, on `batch` samples in training mode.

    Dropout keeps every element meanwhile. Raises PlanError (from the forward) for every source of randomness
    that has no stateless form.
    """
    with _RefuseOtherDraws(rng), repeat_draw_sites(rng, batch):
        yield


@contextmanager
def repeat_draw_sites(rng: StatelessRNG, batch: int) -> Iterator[None]:
    """Records the draw sites of the forward that runs inside, like `record_draw_sites`, in a further trial,
    which does not look below torch's Python functions.
    """
    rng.begin_trial(batch)
    try:
        with StatelessDropout(rng):
            yield
    finally:
        rng.begin_trial(None)


class Draws(Protocol):
    """What random functions draw from: a StatelessRNG, or what a compiled graph was given."""

    @property
    def in_trial(self) -> bool: ...

    @property
    def location(self) -> str: ...

    def keep_mask(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor: ...

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def keep_mask_region(self, region: DrawRegion, p: float, device: torch.device) -> torch.Tensor: ...


class StatelessDropout(TorchFunctionMode):
    """While active (`with`), random functions of torch on this thread draw from `rng`, or are refused."""

    def __init__(self, rng: Draws) -> None:
        super().__init__()
        self._rng = rng
        self._replacements: dict[Any, Callable[..., torch.Tensor]] = {
            F.dropout: self._dropout,
            torch.dropout: self._torch_dropout,
            torch.dropout_: self._dropout_,
            F.scaled_dot_product_attention: self._attention,
            keep_mask: self._keep_mask,
            torch.rand: self._rand,
            torch.rand_like: self._rand_like,
            torch.bernoulli: self._bernoulli,
            torch.Tensor.bernoulli: self._bernoulli,
            torch.Tensor.bernoulli_: self._bernoulli_,
            torch.Tensor.uniform_: self._uniform_,
            torch.Tensor.exponential_: self._exponential_,
            F.multi_head_attention_forward: self._with_mode(F.multi_head_attention_forward),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # its graph draws
            return func(*args, **kwargs)
        if func in self._replacements:
            return self._replacements[func](*args, **kwargs)
        if func in REFUSED_FUNCTIONS and not _is_inactive(func, args, kwargs):
            what = f"{func.__name__} draws random numbers in training, and they would depend on the plan"
            raise PlanError(what, fix=REFUSED_FUNCTIONS[func], location=self._rng.location)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not 0 <= p <= 1:
            raise ValueError(
                f"the dropout probability is {p}; it must be between 0 and 1; change the module's p"
            )
        if not training or p == 0:
            return input
        self._refuse_checkpointed()
        dropped = ~self._rng.keep_mask(input.shape, p, input.device)
        scale = 1 / (1 - p) if p < 1 else 0.0
        # masked_fill keeps the bool mask for the backward; a product would keep a mask of the input's dtype
        return (
            input.masked_fill_(dropped, 0).mul_(scale) if inplace else input.masked_fill(dropped, 0) * scale
        )

    def _refuse_checkpointed(self) -> None:
        if self._rng.in_trial and in_user_checkpoint():
            text = (
                f"random numbers are drawn inside {CHECKPOINT_MODULE}, and would be drawn again in its "
                "recomputation"
            )
            raise PlanError(text, fix=USER_CHECKPOINT_FIX, location=self._rng.location)

    def _torch_dropout(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return self._dropout(input, p, train)

    def _dropout_(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return self._dropout(input, p, train, inplace=True)

    def _keep_mask(self, like: torch.Tensor, part: DrawRegion, p: float) -> torch.Tensor:
        return self._rng.keep_mask_region(part, p, like.device)

    def _rand(self, *size: Any, generator: object = None, **kwargs: Any) -> torch.Tensor:
        self._refuse_checkpointed()
        size = kwargs.pop("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        device = torch.device(kwargs.pop("device", None) or torch.get_default_device())
        drawn = self._rng.uniform(size, kwargs.pop("dtype", None) or torch.get_default_dtype(), device)
        return drawn.requires_grad_(kwargs.pop("requires_grad", False))

    def _rand_like(
        self, input: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        return self._rand(input.shape, dtype=dtype or input.dtype, device=device or input.device, **kwargs)

    def _compare(self, shape: torch.Size, p: Any, device: torch.device) -> torch.Tensor:
        self._refuse_checkpointed()
        return self._rng.uniform(shape, torch.float32, device) < p

    def _bernoulli(
        self,
        input: torch.Tensor,
        p: float | None = None,
        *,
        out: torch.Tensor | None = None,
        generator: object = None,
    ) -> torch.Tensor:
        drawn = self._compare(input.shape, input if p is None else p, input.device).to(input.dtype)
        return drawn if out is None else out.copy_(drawn)

    def _bernoulli_(self, input: torch.Tensor, p: Any = 0.5, *, generator: object = None) -> torch.Tensor:
        return input.copy_(self._compare(input.shape, p, input.device))

    def _uniform_(
        self, input: torch.Tensor, *bounds: float, generator: object = None, **named: float
    ) -> torch.Tensor:
        self._refuse_checkpointed()
        low = bounds[0] if bounds else named.get("from", 0.0)
        high = bounds[1] if len(bounds) > 1 else named.get("to", 1.0)
        return input.copy_(self._rng.uniform(input.shape, input.dtype, input.device) * (high - low) + low)

    def _exponential_(
        self, input: torch.Tensor, lambd: float = 1, *, generator: object = None
    ) -> torch.Tensor:
        self._refuse_checkpointed()
        numbers = self._rng.uniform(input.shape, input.dtype, input.device)
        # never 0, as torch's: its logarithm is finite
        return input.copy_(numbers.neg().log1p().neg().clamp(min=torch.finfo(input.dtype).tiny) / lambd)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = SDPAArguments(*args, **kwargs)
        if arguments.dropout_p == 0:
            return F.scaled_dot_product_attention(*args, **kwargs)
        key, value = arguments.key, arguments.value
        if arguments.enable_gqa:
            key = key.repeat_interleave(arguments.query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(arguments.query.size(-3) // value.size(-3), -3)
        scores = arguments.query @ key.transpose(-2, -1) * arguments.score_scale
        probabilities = _softmax(scores, _bias(scores, arguments.attn_mask, arguments.is_causal))
        return (self._dropout(probabilities, arguments.dropout_p) @ value).to(value.dtype)

    def _with_mode(self, func: Callable[..., Any]) -> Callable[..., Any]:
        # torch turns the mode off for the calls that a function makes itself; here it stays on
        function_globals = {**func.__globals__, "has_torch_function": lambda tensors: False}
        function = FunctionType(
            func.__code__, function_globals, func.__name__, func.__defaults__, func.__closure__
        )
        function.__kwdefaults__ = func.__kwdefaults__

        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


@cache
def drawing_functions() -> Mapping[str, Callable[..., Any]]:
    """Returns the functions of torch that draw, or are refused, by name; methods as "Tensor.bernoulli_"."""
    functions = (*StatelessDropout(StatelessRNG(0))._replacements, *REFUSED_FUNCTIONS)
    return {_qualified_name(function): function for function in functions if function is not keep_mask}


def _qualified_name(function: Any) -> str:
    name = function.__name__
    is_method = inspect.getattr_static(torch.Tensor, name, None) is function
    return f"Tensor.{name}" if is_method else f"{function.__module__}.{name}"


class _RefuseOtherDraws(TorchDispatchMode):
    def __init__(self, rng: StatelessRNG) -> None:
        super().__init__()
        self._rng = rng

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks_for_device(func, args):
            return args[0].device
        if (
            _may_draw(func)
            and _argument(func, "dropout_p", args, kwargs) != 0
            and _argument(func, "training", args, kwargs) is not False
        ):
            what = f"{func} draws random numbers in training, and they would depend on the plan"
            raise PlanError(
                what, fix=f"set the dropout of the layer to 0, or {RANDOM_FIX}", location=self._rng.location
            )
        return func(*args, **kwargs)


@lru_cache(maxsize=4096)
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket is torch.ops.aten.random_


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def _is_inactive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func not in INACTIVE_IN_EVAL:
        return False
    names = (
        ("input", "lower", "upper", "training") if "rrelu" in func.__name__ else ("input", "p", "training")
    )
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    default = func in (F.dropout1d, F.dropout2d, F.dropout3d)
    return not arguments.get("training", default) or arguments.get("p", 0.5) == 0


def _bias(scores: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor | None:
    if is_causal:
        if mask is not None:
            raise ValueError(
                "both attn_mask and is_causal=True were given; only one is allowed; drop is_causal and "
                "mask the future"
            )
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).masked_fill(~mask, -math.inf)


def _softmax(scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return scores.softmax(-1)
    # a query without any allowed key gets 0, as in torch, and no NaN in the backward
    empty = (bias == -math.inf).all(-1, keepdim=True)
    return (scores + bias.masked_fill(empty, 0)).softmax(-1).masked_fill(empty, 0)
