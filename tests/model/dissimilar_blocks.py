"""Blocks with different backwards, and a model around one of them."""

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Twice(Residual):
    """One layer is called twice, another once."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.turn(torch.tanh(self.turn(x))))


class InPlace(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y[:, :2] += self.norm.weight[:2]
        y += self.up.weight.sum(1)
        return self.down(F.relu_(y)).mul_(2.0)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x[:, None])).amax(1)


class Double(torch.autograd.Function):
    """Written in Python: it computes all its gradients whenever it is asked for one."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.t(), 2 * x.t() @ grad


class Own(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(Double.apply(x, self.up.weight.t()))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = x[None]
        return self.attend(one, one, one, need_weights=False)[0][0]


class Normed(nn.Module):
    """Its weight is computed from two, once, and used by two products."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = parametrizations.weight_norm(nn.Linear(5, 5))
        self.once = parametrizations.weight_norm(nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.turn.weight
        return self.once(F.linear(F.linear(x, weight).tanh(), weight))


class Again(Residual):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant, preserve_rng_state=False)


class Hooked(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y.register_hook(lambda grad: 3 * grad)
        return self.down(y)


class Frozen(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class Spread(nn.Module):
    """Two outputs, one of them of weights alone, and one product whose parts go both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.alone = nn.Linear(5, 10), nn.Linear(5, 5), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.first(x).chunk(2, -1)
        return one + self.second(other), self.alone.exp()


class Chain(nn.Module):
    """An embedding, the block, a head; between them glue that takes a weight in."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed, self.scale, self.block, self.head = (
            nn.Embedding(11, 5),
            nn.Parameter(torch.ones(5)),
            block,
            nn.Linear(5, 3),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.block(self.embed(ids) * self.scale)
        one, other = out if isinstance(out, tuple) else (out, self.scale)
        return self.head(one * other)


BLOCKS = {
    "residual": Residual,
    "a layer called twice": Twice,
    "in place": InPlace,
    "convolution": Picture,
    "a function in Python": Own,
    "attention": Attending,
    "a weight made once for two": Normed,
    "checkpoint": lambda: Again(reentrant=False),
    "checkpoint that runs a graph of its own": lambda: Again(reentrant=True),
    "a hook on a tensor": Hooked,
    "frozen": Frozen,
    "outputs of weights alone": Spread,
}
ONCE = BLOCKS.keys() - {
    "checkpoint",
    "checkpoint that runs a graph of its own",
}  # where a backward runs forwards again
