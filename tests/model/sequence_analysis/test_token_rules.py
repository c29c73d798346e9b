"""Operations inside a block: which process each token by itself, and how the others are named."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo, SequenceInfo

WORDS, WIDTH, LENGTH = 12, 8, 11
Rule = Callable[["Layer", torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """One block that is a rule, with weights for it."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.linear, self.table, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Embedding(32, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(self, x)


class Layers(nn.Module):
    """Embedding, one layer, head."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList([Layer(rule)]),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.embed(input_ids)))


def tokens_of(make: Callable[[], nn.Module], length: int = LENGTH) -> SequenceInfo:
    """The sequence analysis of a model."""
    ids = torch.arange(2 * length).view(2, length) % WORDS
    tokens = analyze(lambda: Model(make()), {"input_ids": ids, "labels": ids.roll(1, -1)}).sequence_info
    assert tokens is not None
    return tokens


def layer(rule: Rule) -> BlockSequenceInfo:
    """Returns how tokens go through a block that does what `rule` says."""
    return next(each for each in tokens_of(lambda: Layers(rule)).block_calls if each.block_call == "layers.0")


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 2, 4).transpose(1, 2)


def one_by_one(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, i] for i in range(x.shape[1])], 1)


def eager(self: Layer, x: torch.Tensor) -> torch.Tensor:
    q = heads(self.linear(x))
    return x + (torch.softmax(q @ q.transpose(-2, -1), -1) @ q).transpose(1, 2).reshape(x.shape)


def attended(self: Layer, x: torch.Tensor) -> torch.Tensor:
    q = heads(self.linear(x))
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)


def masked_inside(self: Layer, x: torch.Tensor) -> torch.Tensor:
    q, mask = heads(self.linear(x)), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).reshape(x.shape)


def samples_and_tokens_merged(self: Layer, x: torch.Tensor) -> torch.Tensor:
    flat = self.norm(x).reshape(-1, WIDTH)
    weights, chosen = torch.topk(flat.softmax(-1), 2, dim=-1)
    spread = torch.zeros(flat.shape[0], WIDTH).scatter(1, chosen, weights)
    return (spread * flat).view(x.shape)


def written(self: Layer, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[..., ::2] = x[..., 1::2]
    out[:, :, 1::2] += x[..., ::2] * 2
    return out


ALONE: dict[str, Rule] = {
    "arithmetic": lambda self, x: x * 2 + self.norm(x).pow(2).mean(-1, keepdim=True) + self.linear(x),
    "halves": lambda self, x: torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], dim=-1),
    "chunks": lambda self, x: torch.cat(list(self.linear(x).chunk(2, dim=-1))[::-1], -1),
    "split": lambda self, x: torch.stack(x.split(4, -1), -2).flatten(-2),
    "heads": lambda self, x: heads(x).transpose(1, 2).reshape(x.shape),
    "samples and tokens merged": samples_and_tokens_merged,
    "heads behind tokens": lambda self, x: x.reshape(x.shape[0], -1, 4).relu().reshape(x.shape),
    "attention": attended,
    "an embedding table": lambda self, x: x + self.table(x.argmax(-1)) + self.table.weight[x.argmax(-1)],
    "one of several": lambda self, x: x * F.one_hot(x.argmax(-1), WIDTH),
    "in place": lambda self, x: (x * 1).mul_(2).add_(x),
    "written": written,
    "padded": lambda self, x: F.pad(x, (1, 1))[..., 1:-1],
    "a product by token": lambda self, x: (
        (x.view(*x.shape[:2], 2, 4) @ x.view(*x.shape[:2], 4, 2)).flatten(2).repeat(1, 1, 2)
    ),
    "letters": lambda self, x: torch.einsum("btd,ed->bte", x, self.linear.weight),
    "letters by token": lambda self, x: x * torch.einsum("...d,...d->...", x, x)[..., None],
    "whole": lambda self, x: x[:, : x.shape[1]] + torch.ones(1, x.shape[1], 1),
    "expanded": lambda self, x: x + self.linear.bias.expand(x.shape[1], -1),
    "sorted": lambda self, x: x.sort(-1).values.cumsum(-1).flip(-1),
    "gathered": lambda self, x: x.gather(-1, x.argsort(-1)),
    "masked": lambda self, x: x.masked_fill(x > 0, 0.0),
    "the mean of ones": lambda self, x: x * torch.ones(x.shape[:2]).mean(),
}
MIXING: dict[str, tuple[Rule, str]] = {
    "eager attention": (
        eager,
        "computes attention scores itself (matmul): call F.scaled_dot_product_attention",
    ),
    "letters": (
        lambda self, x: torch.einsum("btd,bsd->bts", x, x) @ x,
        "computes attention scores itself (einsum)",
    ),
    "summed": (lambda self, x: x + torch.einsum("btd->bd", x)[:, None], "sums over tokens (einsum)"),
    "a product over tokens": (lambda self, x: x @ (x.transpose(1, 2) @ x), "sums over tokens (matmul)"),
    "a mask from a length": (masked_inside, "makes positions or a mask inside of the block (tril)"),
    "positions": (
        lambda self, x: x + self.table(torch.arange(x.shape[1])),
        "makes positions or a mask inside of the block (arange): give them to it, or declare smaller blocks",
    ),
    "a slice of a table": (lambda self, x: x + self.table.weight[: x.shape[1]], "(getitem)"),
    "a cumulative sum": (lambda self, x: x.cumsum(1), "takes cumsum over tokens"),
    "a mean": (lambda self, x: x - x.mean(1, keepdim=True), "takes mean over tokens"),
    "a sum of all": (lambda self, x: x * x.sum(), "takes sum over tokens"),
    "softmax": (lambda self, x: x.softmax(dim=1), "takes softmax over tokens"),
    "the best": (lambda self, x: x + x.topk(3, 1).values.sum(1, keepdim=True), "takes topk over tokens"),
    "a norm": (lambda self, x: F.layer_norm(x, x.shape[1:]), "takes layer_norm over tokens"),
    "a pool": (
        lambda self, x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
        "layers.0 computes 'avg_pool1d' along tokens",
    ),
    "statistics": (
        lambda self, x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
        "'instance_norm' along tokens",
    ),
    "recurrence": (lambda self, x: self.rnn(x)[0], "layers.0.rnn carries a state from token to token (gru)"),
    "turned": (lambda self, x: x.flip(1), "takes flip over tokens"),
    "rolled": (lambda self, x: x.roll(1, 1), "takes roll over tokens"),
    "shifted": (lambda self, x: torch.cat([x[:, 1:], x[:, :1]], 1), "takes some of the tokens (indexing)"),
    "the first": (lambda self, x: x + x[:, :1], "takes some of the tokens (indexing)"),
    "one by one": (one_by_one, "takes some of the tokens (indexing)"),
    "cut": (lambda self, x: torch.cat(x.split(1, 1), 1), "splits along the tokens"),
    "by an index": (
        lambda self, x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
        "inside of the block (arange)",
    ),
    "by what they say": (
        lambda self, x: x.gather(1, x.argmax(-1, keepdim=True) + 0 * x.long()),
        "takes gather over tokens",
    ),
    "moved": (
        lambda self, x: x.view(x.shape[0], 2, x.shape[1], 4).transpose(1, 2).reshape(x.shape),
        "moves elements between tokens (view)",
    ),
    "paired": (lambda self, x: x + (x[:, :, None] * x[:, None]).sum(2), "pairs tokens with tokens (mul)"),
    "padded": (lambda self, x: F.pad(x, (0, 0, 1, 0))[:, :-1], "pads tokens"),
    "repeated": (lambda self, x: x.repeat(1, 2, 1)[:, : x.shape[1]], "repeats tokens"),
    "squeezed": (lambda self, x: x[None].squeeze(), "squeezes whatever has size 1"),
    "by their number": (lambda self, x: x / x.shape[1], "computes with the number of tokens (div)"),
    "by ones added up": (
        lambda self, x: x / torch.ones(x.shape[:2]).sum(1)[:, None, None],
        "inside of the block (sum)",
    ),
    "by the last position": (
        lambda self, x: x * torch.arange(x.shape[1]).max(),
        "inside of the block (arange)",
    ),
    "into a table": (
        lambda self, x: x + torch.zeros(WIDTH).scatter_add(0, x.argmax(-1).flatten(), x[..., 0].flatten()),
        "sums tokens in a table (scatter_add)",
    ),
    "a variance of all": (lambda self, x: x / x.var(False), "takes var over tokens"),
    "a sum over no dims": (lambda self, x: x * x.sum(()), "takes sum over tokens"),
    "by the root of it": (lambda self, x: x * x.shape[1] ** -0.5, "computes with the number of tokens (mul)"),
    "unknown": (
        lambda self, x: torch.fft.fft(x, dim=1).real,
        "computes 'fft_fft' with tokens, which has no rule",
    ),
    "MultiheadAttention": (lambda self, x: self.attend(x, x, x)[0], "computes attention scores itself"),
}


@pytest.mark.parametrize("rule", ALONE)
def test_tokenwise_operations_may_run_on_a_token_shard(rule: str):
    found = layer(ALONE[rule])
    assert (found.not_sequence_parallel, found.input_token_dims, found.output_token_dims) == (
        "",
        ((1,),),
        ((1,),),
    )


@pytest.mark.parametrize("rule", MIXING)
def test_operations_that_mix_tokens_are_named(rule: str):
    run, words = MIXING[rule]
    why = layer(run).not_sequence_parallel
    assert why.startswith("layers.0")
    assert words in why


def test_an_autograd_function_is_followed():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    assert layer(lambda self, x: Twice.apply(x) + x).not_sequence_parallel == ""


def test_tokens_that_are_no_block_input_are_refused():
    class Behind(Layers):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            self.layers[0].positions = torch.linspace(0, 1, input_ids.shape[1])[:, None].expand(-1, WIDTH)
            return super().forward(input_ids).expand(len(input_ids), -1, -1)

    def found(rule: Rule) -> str:
        return tokens_of(lambda: Behind(rule)).block_calls[1].not_sequence_parallel

    assert "'mul' with tokens that were not among its inputs" in found(lambda self, x: x * self.positions)
    assert "returns tokens that were not among its inputs" in found(lambda self, x: self.positions)


def test_tokens_that_a_block_returns_inside_an_object_are_refused_by_name():
    """They would reach the next block as they are, on each rank with other tokens."""

    class Boxed(Layers):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](self.embed(input_ids)).hidden)

    tokens = tokens_of(lambda: Boxed(lambda self, x: SimpleNamespace(hidden=self.linear(x))))
    assert tokens.block_calls[1].not_sequence_parallel == (
        "layers.0 returns tokens inside a SimpleNamespace: return a tensor, tuple, dict or dataclass"
    )


def test_tensors_that_glue_takes_from_inside_a_block_are_refused():
    class Reaching(Layers):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.embed(input_ids))
            return self.head(x + self.layers[0].kept)

    def keeping(self: Layer, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear(x).detach()
        return x * self.kept

    assert (
        "passes tokens on outside its outputs"
        in tokens_of(lambda: Reaching(keeping)).block_calls[1].not_sequence_parallel
    )


class Masked(Layer):
    """Attention with a mask that is given, and changed by the rule."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = heads(self.linear(x))
        return (
            F.scaled_dot_product_attention(q, q, q, attn_mask=self.rule(self, mask))
            .transpose(1, 2)
            .reshape(x.shape)
        )


class WithMask(nn.Module):
    """Embedding, attention with a mask of glue, head."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList([Masked(rule)]),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        mask = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.head(self.layers[0](x, mask))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda self, mask: mask, ""),
        (lambda self, mask: torch.zeros(mask.shape).masked_fill(~mask, -1e9), ""),
        (lambda self, mask: mask[0].expand(1, 2, -1, -1), ""),
        (lambda self, mask: mask.expand(1, 2, *mask.shape[2:])[:, :1, :, :], ""),
        (lambda self, mask: mask[..., : mask.shape[-2]], "cuts its mask to the number of its own tokens"),
        (lambda self, mask: mask.transpose(-1, -2), "computes 'transpose' with a mask"),
        (
            lambda self, mask: mask & torch.ones(mask.shape[-2:], dtype=torch.bool).triu(-3),
            "inside of the block (triu)",
        ),
        (lambda self, mask: mask.flip(-1), "computes 'flip' with a mask"),
        (lambda self, mask: mask[:, :, :, :1], "cuts its mask"),
    ],
)
def test_a_mask_has_its_own_rows_and_all_columns(rule: Rule, message: str):
    found = tokens_of(lambda: WithMask(rule))
    assert found.block_calls[1].input_token_dims == ((1,), (2, 3))
    assert message in found.block_calls[1].not_sequence_parallel
    assert bool(message) == bool(found.block_calls[1].not_sequence_parallel)
    assert found.attention_calls[0].has_mask if not message else True


def test_a_block_that_gets_the_sequence_length_is_refused():
    class Told(Layers):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            self.layers[0].rule = lambda layer, given: given[0].view(-1, given[1], WIDTH)
            return self.head(self.layers[0]((self.embed(input_ids), input_ids.shape[1])))

    assert (
        "gets the number of tokens as an argument"
        in tokens_of(lambda: Told(ALONE["whole"])).block_calls[1].not_sequence_parallel
    )


def test_a_single_token_gives_the_same_result_as_the_whole_sequence():
    """What is allowed holds on any part of the tokens: a layer without attention gives for a part what it
    gives for all.
    """
    x = torch.linspace(-1, 1, 2 * LENGTH * WIDTH).view(2, LENGTH, WIDTH).sin()
    for name, rule in ALONE.items():
        if name != "attention":
            torch.manual_seed(0)
            block = Layer(rule)
            whole, parts = block(x), [block(x[:, :1]), block(x[:, 1:4]), block(x[:, 4:])]
            torch.testing.assert_close(torch.cat(parts, 1), whole, msg=name)
