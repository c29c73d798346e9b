"""Dropout whose masks are the same under every plan: a mode in which torch's dropout asks the dice.

While `StatelessDropout` is active on a thread, these draw from `Dice`, and nothing else may draw at all:

    F.dropout, torch.dropout               y = x * keep / (1 - p)
    F.scaled_dot_product_attention         y = (softmax(q k' * scale + mask) * keep / (1 - p)) v,   if dropout_p > 0
    F.multi_head_attention_forward         its own code, with the mode still on inside
    torch.rand, torch.rand_like            numbers of the site: stochastic depth draws one per sample, layer drop one
    torch.bernoulli, bernoulli_, uniform_  the same numbers, compared with p or stretched

With p = 0, or outside training, the ordinary functions run. All other sources of randomness are refused with their name
and the repair: a mask that depends on the plan would make two plans train two models. During a trial a second, slower
mode looks below all of torch's Python, so that randomness inside a C++ function (an LSTM's dropout) is found too.

Cost: attention with dropout holds its probabilities, (B, heads, T, S), which fused kernels avoid; set the attention
dropout to 0 where that is too much. The mode costs about a microsecond per torch call; without dropout, leave it off.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.blocks.user_checkpointing import CHECKPOINT_MODULE, in_user_checkpoint
from meshwright.model.blocks.user_checkpointing import USER_CHECKPOINT_FIX as REDRAWN
from meshwright.model.rng.sharded_draws import DrawRegion
from meshwright.model.rng.sites import StatelessRNG
from meshwright.model.sequence_parallel.attention_call import SDPAArguments
from meshwright.plan.job.errors import PlanError

RANDOM_FIX = "use F.dropout or torch.rand, which draw by sample, or draw when the data is made"
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
        (torch.Tensor.multinomial, torch.Tensor.random_, torch.Tensor.normal_, torch.Tensor.exponential_),
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
    """What dropout with probability `p` keeps of `part`, a bool mask on the device of `like`; False with probability `p`.

    While `StatelessDropout` is active, it is that part of what one device draws at once.
    """
    if has_torch_function_unary(like):
        return handle_torch_function(keep_mask, (like,), like, region, p)
    return torch.rand(region.region_shape, device=like.device) >= p


@contextmanager
def record_draw_sites(rng: StatelessRNG, batch: int) -> Iterator[None]:
    """Learn the sites of the forward that runs inside on `batch` samples, in training mode; dropout keeps everything.

    Raises PlanError (from the forward) for every source of randomness that has no stateless form.
    """
    rng.begin_trial(batch)
    try:
        with _RefuseOtherDraws(rng), StatelessDropout(rng):
            yield
    finally:
        rng.begin_trial(None)


class StatelessDropout(TorchFunctionMode):
    """While active (`with`), random functions of torch on this thread draw from `dice`, or are refused."""

    def __init__(self, rng: StatelessRNG) -> None:
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
            F.multi_head_attention_forward: self._with_mode(F.multi_head_attention_forward),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._replacements:
            return self._replacements[func](*args, **kwargs)
        if func in REFUSED_FUNCTIONS and not _is_inactive(func, args, kwargs):
            what = (
                f"{func.__name__} draws random numbers in training, and its numbers would depend on the plan"
            )
            raise PlanError(what, fix=REFUSED_FUNCTIONS[func], location=self._rng.location)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not 0 <= p <= 1:
            raise ValueError(
                f"a dropout probability of {p}; needed is a number from 0 to 1; repair the module's p"
            )
        if not training or p == 0:
            return input
        self._refuse_checkpointed()
        gone = ~self._rng.keep_mask(input.shape, p, input.device)
        scale = 1 / (1 - p) if p < 1 else 0.0
        # masked_fill keeps the bool mask for the backward; a product would keep a mask of the input's dtype
        return input.masked_fill_(gone, 0).mul_(scale) if inplace else input.masked_fill(gone, 0) * scale

    def _refuse_checkpointed(self) -> None:
        """Raise PlanError, in a trial, where what draws runs again in backward."""
        if self._rng.in_trial and in_user_checkpoint():
            text = f"random numbers are drawn within {CHECKPOINT_MODULE}, and would be drawn anew when backward runs that again"
            raise PlanError(text, fix=REDRAWN, location=self._rng.location)

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
        made = self._compare(input.shape, input if p is None else p, input.device).to(input.dtype)
        return made if out is None else out.copy_(made)

    def _bernoulli_(self, input: torch.Tensor, p: Any = 0.5, *, generator: object = None) -> torch.Tensor:
        return input.copy_(self._compare(input.shape, p, input.device))

    def _uniform_(
        self, input: torch.Tensor, *bounds: float, generator: object = None, **named: float
    ) -> torch.Tensor:
        self._refuse_checkpointed()
        low = bounds[0] if bounds else named.get("from", 0.0)
        high = bounds[1] if len(bounds) > 1 else named.get("to", 1.0)
        return input.copy_(self._rng.uniform(input.shape, input.dtype, input.device) * (high - low) + low)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = SDPAArguments(*args, **kwargs)
        if given.dropout_p == 0:
            return F.scaled_dot_product_attention(*args, **kwargs)
        key, value = given.key, given.value
        if given.enable_gqa:
            key = key.repeat_interleave(given.query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(given.query.size(-3) // value.size(-3), -3)
        scores = given.query @ key.transpose(-2, -1) * given.score_scale
        probabilities = _softmax(scores, _bias(scores, given.attn_mask, given.is_causal))
        return (self._dropout(probabilities, given.dropout_p) @ value).to(value.dtype)

    def _with_mode(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """`func` with this mode on for the calls that it makes itself; torch turns the mode off for those otherwise."""
        within = {**func.__globals__, "has_torch_function": lambda tensors: False}
        opened = FunctionType(func.__code__, within, func.__name__, func.__defaults__, func.__closure__)
        opened.__kwdefaults__ = func.__kwdefaults__

        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return opened(*args, **kwargs)

        return call


class _RefuseOtherDraws(TorchDispatchMode):
    """Refuses every random operation that reaches torch's dispatcher, however it was called."""

    def __init__(self, dice: StatelessRNG) -> None:
        super().__init__()
        self._rng = dice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = (
            torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket is torch.ops.aten.random_
        )
        if (
            draws
            and _argument(func, "dropout_p", args, kwargs) != 0
            and _argument(func, "training", args, kwargs) is not False
        ):
            what = f"{func} draws random numbers in training, and its numbers would depend on the plan"
            raise PlanError(
                what, fix=f"set the dropout of the layer to 0, or {RANDOM_FIX}", location=self._rng.location
            )
        return func(*args, **kwargs)


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def _is_inactive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of `MAY_BE_OFF` was called outside training, or with a probability of 0."""
    if func not in INACTIVE_IN_EVAL:
        return False
    names = (
        ("input", "lower", "upper", "training") if "rrelu" in func.__name__ else ("input", "p", "training")
    )
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    default = func in (F.dropout1d, F.dropout2d, F.dropout3d)
    return not given.get("training", default) or given.get("p", 0.5) == 0


def _bias(scores: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor | None:
    """What is added to the scores: -inf where attention is not allowed."""
    if is_causal:
        if mask is not None:
            raise ValueError(
                "both attn_mask and is_causal=True were given; needed is one of them; drop is_causal and mask the future"
            )
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).masked_fill(~mask, -math.inf)


def _softmax(scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Probabilities; a row in which nothing is allowed is 0, as in torch, and gives no NaN to the backward."""
    if bias is None:
        return scores.softmax(-1)
    empty = (bias == -math.inf).all(-1, keepdim=True)
    return (scores + bias.masked_fill(empty, 0)).softmax(-1).masked_fill(empty, 0)
