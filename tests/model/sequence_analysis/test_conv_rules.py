"""Convolutions over tokens as models write them: what the analysis finds, and which are refused by name."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.sequence_analysis import conv_rules
from meshwright.plan.model_spec.sequence_info import ConvSpec
from tests.model.sequence_analysis.test_token_rules import (
    LENGTH,
    WIDTH,
    Layer,
    Layers,
    Rule,
    layer,
    tokens_of,
)


def along(run: Rule) -> Rule:
    """A rule of a tensor whose tokens come last, [rows, width, tokens]."""
    return lambda self, x: run(self, x.transpose(1, 2)).transpose(1, 2)


def cut(run: Rule) -> Rule:
    """The same, of which the first tokens are kept."""
    return along(lambda self, x: run(self, x)[..., : x.shape[-1]])


def conv(self: Layer, x: torch.Tensor, **said: object) -> torch.Tensor:
    return F.conv1d(x, self.conv.weight, self.conv.bias, **said)


def depthwise(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x, weight=self.conv.weight[:, :1], bias=None, padding=2, groups=WIDTH)


def in_place(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return F.silu(conv(self, x, padding=2), inplace=True)


# the rule, then left, right, and the zeros before and after, and what is behind
KNOWN: dict[str, tuple[Rule, tuple[int, int, int, int, int]]] = {
    "even": (along(lambda self, x: self.conv(x)), (1, 1, 0, 0, 0)),
    "even, by its name": (along(lambda self, x: conv(self, x, padding="same")), (1, 1, 0, 0, 0)),
    "causal, cut": (cut(lambda self, x: conv(self, x, padding=2)), (2, 0, 0, 0, 2)),
    "cut from behind": (along(lambda self, x: conv(self, x, padding=(2,))[..., :-2]), (2, 0, 0, 0, 2)),
    "causal, padded": (along(lambda self, x: conv(self, F.pad(x, (2, 0)))), (2, 0, 2, 0, 0)),
    "padded before it is turned": (
        lambda self, x: conv(self, F.pad(x, (0, 0, 2, 0)).transpose(1, 2)).permute(0, 2, 1),
        (2, 0, 2, 0, 0),
    ),
    "padded twice": (cut(lambda self, x: conv(self, F.pad(x, (1, 0)), padding=1)), (2, 0, 1, 0, 1)),
    "ahead": (along(lambda self, x: conv(self, F.pad(x, (0, 2)))), (0, 2, 0, 2, 0)),
    "dilated": (along(lambda self, x: conv(self, x, padding=3, dilation=3)), (3, 3, 0, 0, 0)),
    "dilated by name": (along(lambda self, x: conv(self, x, padding="same", dilation=2)), (2, 2, 0, 0, 0)),
    "of two": (
        along(lambda self, x: F.conv1d(x, self.conv.weight[..., 1:], padding=1)[..., :-1]),
        (1, 0, 0, 0, 1),
    ),
    "of one": (along(lambda self, x: F.conv1d(x, self.conv.weight[..., :1])), (0, 0, 0, 0, 0)),
    "channel by channel": (cut(depthwise), (2, 0, 0, 0, 2)),
    "element by element, then cut": (
        cut(lambda self, x: F.silu(conv(self, x, padding=2) * 2 + self.linear.bias[:, None])),
        None,
    ),
    "in place, then cut": (cut(in_place), (2, 0, 0, 0, 2)),
    "turned, then cut": (
        lambda self, x: conv(self, x.mT, padding=2).transpose(1, 2).contiguous()[:, : x.shape[1]],
        (2, 0, 0, 0, 2),
    ),
    "with an empty mask": (
        cut(lambda self, x: conv(self, x, padding=2).masked_fill(self.linear.bias[0] > 9, 0)),
        (2, 0, 0, 0, 2),
    ),
}
REFUSED: dict[str, tuple[Rule, str]] = {
    "cut in front": (
        along(lambda self, x: conv(self, x, padding=2)[..., 2:]),
        "which are not cut at once: y[..., :tokens] (getitem)",
    ),
    "nothing around": (
        along(lambda self, x: F.pad(conv(self, x), (1, 1))),
        "into fewer: 2 zeros are missing around them",
    ),
    "more behind": (
        along(lambda self, x: conv(self, x, padding=3)[..., 2:-2]),
        "with more padding before them than its kernel reaches",
    ),
    "in steps": (
        along(
            lambda self, x: conv(self, x, padding=1, stride=2).repeat_interleave(2, -1)[..., : x.shape[-1]]
        ),
        "convolves tokens in steps of 2",
    ),
    "in a circle": (along(lambda self, x: conv(self, F.pad(x, (1, 1), mode="circular"))), "pads tokens"),
    "ones around": (along(lambda self, x: conv(self, F.pad(x, (1, 1), value=1.0))), "pads tokens"),
    "zeros no more": (along(lambda self, x: conv(self, F.pad(x, (2, 0)) + 1)), "pads tokens (conv1d)"),
    "written into": (
        along(lambda self, x: conv(self, F.pad(x, (2, 0)).transpose(1, 2).add_(1).transpose(1, 2))),
        "pads tokens (add)",
    ),
    "shifted": (lambda self, x: x - F.pad(x, (0, 0, 1, -1)), "pads tokens"),
    "padded and shifted": (lambda self, x: x - F.pad(x, (0, 0, 1, 0))[:, :-1], "pads tokens (getitem)"),
    "places": (
        cut(lambda self, x: (y := conv(self, x, padding=2)) * torch.arange(y.shape[-1])),
        "y[..., :tokens] (mul)",
    ),
    "draws": (cut(lambda self, x: F.dropout(conv(self, x, padding=2), 0.5)), "y[..., :tokens] (dropout)"),
    "a norm": (
        cut(lambda self, x: F.layer_norm(conv(self, x, padding=2).mT, (WIDTH,)).mT),
        "y[..., :tokens] (layer_norm)",
    ),
    "set": (
        cut(lambda self, x: torch.zeros_like(y := conv(self, x, padding=2)).copy_(y)),
        "y[..., :tokens] (zeros_like)",
    ),
    "a sum": (along(lambda self, x: x + conv(self, x, padding=2).sum()), "y[..., :tokens] (sum)"),
    "of their mean": (
        along(lambda self, x: F.conv1d(x, self.conv.weight * x.mean(), padding=1)),
        "takes mean over tokens",
    ),
    "by token": (
        along(lambda self, x: F.conv1d(x, x[0][:, None], padding=x.shape[-1] // 2, groups=WIDTH)),
        "convolves tokens with a kernel that is computed from them",
    ),
    "in two dims": (
        along(lambda self, x: F.conv2d(x[:, None], self.conv.weight[:1, :1, None], padding=(0, 1))[:, 0]),
        "'conv2d'",
    ),
    "back": (
        along(lambda self, x: F.conv_transpose1d(x, self.conv.weight, padding=1)),
        "computes 'conv_transpose1d' along tokens",
    ),
}


def found(rule: Rule) -> list[ConvSpec]:
    return list(tokens_of(lambda: Layers(rule)).conv_calls)


@pytest.mark.parametrize("rule", KNOWN)
def test_the_spec_of_a_convolution_is_found(rule: str):
    run, said = KNOWN[rule]
    passing = layer(run)
    assert (passing.not_sequence_parallel, passing.input_token_dims, passing.output_token_dims) == (
        "",
        ((1,),),
        ((1,),),
    )
    (convolve,) = found(run)
    told = (
        convolve.left_halo,
        convolve.right_halo,
        convolve.pad_before,
        convolve.pad_after,
        convolve.num_extra_outputs,
    )
    assert told == (said or (2, 0, 0, 0, 2))
    assert (convolve.block_call, convolve.num_tokens, convolve.token_numel, convolve.needs_grad) == (
        "layers.0",
        LENGTH,
        WIDTH,
        True,
    )


@pytest.mark.parametrize("rule", REFUSED)
def test_unsupported_convolutions_are_refused_by_name(rule: str):
    run, words = REFUSED[rule]
    why = layer(run).not_sequence_parallel
    assert why.startswith("layers.0")
    assert words in why


def test_a_block_that_does_not_crop_its_output_runs_on_all_tokens_on_every_rank():
    class Late(Layers):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](self.embed(input_ids))[:, : input_ids.shape[1]])

    tokens = tokens_of(lambda: Late(along(lambda self, x: conv(self, x, padding=2))))
    assert [(each.not_sequence_parallel, each.is_replicated) for each in tokens.block_calls] == [
        ("", False),
        ("", True),
        ("", False),
    ]
    assert tokens.conv_calls == ()


def test_tokens_moved_to_the_batch_dim_are_convolved_separately():
    def by_token(self: Layer, x: torch.Tensor) -> torch.Tensor:
        samples = x.reshape(-1, 1, WIDTH)
        return F.conv1d(samples, self.conv.weight[:1, :1], padding=1).reshape(x.shape)

    assert layer(by_token).not_sequence_parallel == ""
    assert [each.halo for each in found(by_token)] == [0]


def test_padding_by_the_number_of_tokens_is_refused():
    def even(self: Layer, x: torch.Tensor) -> torch.Tensor:
        return conv(self, F.pad(x, (2, -x.shape[-1] % 4)))[..., : x.shape[-1]]

    assert "convolves tokens, or pads them, by their number" in layer(along(even)).not_sequence_parallel


def test_convolutions_are_listed_in_call_order_with_attention():
    def rule(self: Layer, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.linear(x).mT).mT
        q = y[:, None]
        y = y + F.scaled_dot_product_attention(q, q, q)[:, 0]
        return conv(self, self.norm(y).mT, padding=1).mT

    one, two = found(rule)
    assert (one.module, one.num_prior_attention_calls, one.prior_layers) == (
        "layers.0.conv",
        0,
        ("layers.0.linear",),
    )
    assert (two.module, two.num_prior_attention_calls, two.prior_layers) == (
        "layers.0",
        1,
        ("layers.0.linear", "layers.0.conv", "layers.0.norm"),
    )


def test_a_first_block_that_runs_on_all_tokens_needs_no_halo():
    class Places(Layers):
        def __init__(self) -> None:
            super().__init__(along(lambda self, x: self.conv(x)))
            self.embed = First(lambda self, x: x)

    tokens = tokens_of(Places)
    assert [each.is_replicated for each in tokens.block_calls] == [True, False, False]
    assert [each.block_call for each in tokens.conv_calls] == ["layers.0"]


class First(Layer):
    """Positions of its own, and a convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv((self.table(x) + self.table(torch.arange(x.shape[1]))).mT).mT


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch):
    run, words = REFUSED["zeros no more"]
    monkeypatch.setattr(conv_rules, "_unsupported_convolution", lambda *given: "")
    assert words not in layer(run).not_sequence_parallel
