"""Dropout mode: exact where torch is exact, split as the batch is split, refused where it cannot be."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.rng.stateless_dropout import StatelessDropout, record_draw_sites
from meshwright.model.rng.stateless_rng import DrawSites, StatelessRNG
from meshwright.plan.job.errors import PlanError

F64 = torch.float64


def trial_sites(forward: Callable[[int], object], *batches: int) -> DrawSites:
    """The sites of `forward(batch)`, from one trial per batch size."""
    stateless_rng = StatelessRNG(0)
    for batch in batches or (7,):
        with record_draw_sites(stateless_rng, batch):
            forward(batch)
    return stateless_rng.sites


def run(
    sites: DrawSites, ids: torch.Tensor, forward: Callable[[], torch.Tensor], step: int = 0
) -> torch.Tensor:
    stateless_rng = StatelessRNG(0, sites)
    stateless_rng.begin_forward(step, ids)
    with StatelessDropout(stateless_rng):
        return forward()


def on(*sites: str) -> DrawSites:
    return DrawSites(dict.fromkeys(sites, ("dim0",)))


def test_what_is_kept_is_scaled_and_gradients_flow_through_it_alone():
    x = torch.randn(4, 50, dtype=F64, requires_grad=True)
    y = run(on("/0"), torch.arange(4), lambda: F.dropout(x, 0.2))
    kept = y != 0
    assert 0.6 < kept.double().mean().item() < 0.95
    assert torch.allclose(y[kept], x[kept] / 0.8, rtol=1e-15)
    y.sum().backward()
    assert torch.equal(x.grad, kept.double() * (1 / (1 - 0.2)))


def test_every_way_to_call_dropout_draws_the_same():
    x = torch.randn(3, 9)
    expected = run(on("/0"), torch.arange(3), lambda: F.dropout(x, 0.5))
    assert torch.equal(run(on("/0"), torch.arange(3), lambda: torch.dropout(x, 0.5, True)), expected)
    assert torch.equal(run(on("/0"), torch.arange(3), lambda: torch.dropout(x, p=0.5, train=True)), expected)
    assert torch.dropout(x, p=0.5, train=False) is x
    assert torch.equal(run(on("/0"), torch.arange(3), lambda: nn.Dropout(0.5)(x)), expected)
    assert run(on("/0"), torch.arange(3), lambda: F.dropout(x, 0.5, inplace=True)) is x
    assert torch.equal(x, expected)


def test_dropping_everything_gives_zeros():
    x = torch.randn(3, 9)
    assert not run(on("/0"), torch.arange(3), lambda: F.dropout(x, 1.0)).any()


def test_without_probability_or_training_nothing_is_drawn():
    x = torch.randn(3, 4, 5, 6)
    calls = [
        lambda: F.dropout(x, 0.0),
        lambda: nn.Dropout(0.5).eval()(x),
        lambda: F.alpha_dropout(x, 0.5),
        lambda: F.dropout2d(x, 0.0),
        lambda: F.dropout2d(x, 0.3, False),
    ]
    for call in calls:
        assert torch.equal(run(DrawSites(), torch.arange(3), call), x)


def test_a_probability_beyond_one_is_refused():
    with pytest.raises(ValueError, match=r"the dropout probability is 1\.5"):
        run(on("/0"), torch.arange(3), lambda: F.dropout(torch.ones(3), 1.5))


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.6},
    "float": {"attn_mask": torch.randn(2, 1, 5, 7, dtype=F64, generator=torch.Generator().manual_seed(0))},
    "empty row": {"attn_mask": torch.arange(5)[:, None].expand(5, 7) != 2},
    "scale": {"scale": 0.3},
    "few key heads": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_exact_but_for_the_mask(name: str, monkeypatch: pytest.MonkeyPatch):
    heads = 2 if name == "few key heads" else 4
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 5, 8, dtype=F64, generator=generator).requires_grad_()
    k, v = (torch.randn(2, heads, 7, 8, dtype=F64, generator=generator).requires_grad_() for _ in range(2))
    monkeypatch.setattr(
        StatelessRNG, "keep_mask", lambda self, shape, p, device: torch.ones(shape, dtype=torch.bool)
    )
    found = run(
        DrawSites(),
        torch.arange(2),
        lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, **MASKS[name]),
    )
    expected = F.scaled_dot_product_attention(q, k, v, **MASKS[name]) / 0.75
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    for one, other in zip(
        torch.autograd.grad(found.sum(), (q, k, v)),
        torch.autograd.grad(expected.sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


def test_attention_drops_probabilities_by_the_mask_of_their_site():
    q, k = (torch.randn(2, 3, 5, 5, dtype=F64) for _ in range(2))
    eye = torch.eye(5, dtype=F64).expand(2, 3, 5, 5)
    dropped = run(on("/0"), torch.arange(2), lambda: F.scaled_dot_product_attention(q, k, eye, dropout_p=0.5))
    stateless_rng = StatelessRNG(0, on("/0"))
    stateless_rng.begin_forward(0, torch.arange(2))
    mask = stateless_rng.keep_mask((2, 3, 5, 5), 0.5, q.device)
    plain = (q @ k.transpose(-2, -1) / math.sqrt(5)).softmax(-1)
    assert torch.allclose(dropped, plain * mask * 2, rtol=1e-12)


def test_attention_refuses_two_masks_as_torch_does():
    q = torch.randn(2, 3, 5, 5)
    with pytest.raises(ValueError, match="both attn_mask and is_causal"):
        run(
            on("/0"),
            torch.arange(2),
            lambda: F.scaled_dot_product_attention(q, q, q, torch.ones(5, 5), 0.5, True),
        )


class Layers(nn.Module):
    """Samples along dim 1, attention over (batch x heads): the layout of torch's own transformer."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=batch_first) for _ in range(2)
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("parts", [(3, 3), (2, 2, 2), (1,) * 6])
def test_a_transformer_of_torch_is_the_same_however_the_batch_is_divided(
    batch_first: bool, parts: tuple[int, ...]
):
    torch.manual_seed(0)
    model, dim = Layers(batch_first).train(), 0 if batch_first else 1
    x = torch.randn((6, 5, 8) if batch_first else (5, 6, 8), dtype=F64)
    ids = torch.tensor([4, 5, 6, 17, 18, 19])
    sites = trial_sites(lambda batch: model(x.narrow(dim, 0, 1).repeat_interleave(batch, dim)), 7, 11)
    assert len(sites.layouts) == 2 * 4
    whole = run(sites, ids, lambda: model(x))
    pieces = [
        run(sites, i, lambda part=part: model(part))
        for i, part in zip(ids.split(parts), x.split(parts, dim), strict=True)
    ]
    assert torch.allclose(torch.cat(pieces, dim), whole, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(run(sites, ids, lambda: model(x), step=1), whole)


GPT2 = transformers.GPT2Config(
    n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16, bos_token_id=1, eos_token_id=2,
    use_cache=False,
    embd_pdrop=0.2, resid_pdrop=0.2, attn_pdrop=0.2,
)  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_has_the_same_loss_and_gradients_in_one_batch_and_in_two(attention: str):
    torch.manual_seed(0)
    model = (
        transformers.GPT2LMHeadModel._from_config(copy.deepcopy(GPT2), attn_implementation=attention)
        .double()
        .train()
    )
    tokens, ids = torch.randint(0, 40, (4, 9)), torch.tensor([10, 11, 30, 31])
    sites = trial_sites(lambda batch: model(input_ids=tokens[:1].expand(batch, -1)))
    assert len(sites.layouts) == 1 + 2 * 3
    assert set(map(sites.layout, sites.layouts)) == {"dim0"}

    def summed(samples: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=samples).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten(), reduction="sum")

    whole = run(sites, ids, lambda: summed(tokens))
    gradients = torch.autograd.grad(whole, tuple(model.parameters()))
    halves = [run(sites, ids[i : i + 2], lambda i=i: summed(tokens[i : i + 2])) for i in (0, 2)]
    assert sum(halves).item() == pytest.approx(whole.item(), rel=1e-12)
    for one, other in zip(
        torch.autograd.grad(sum(halves), tuple(model.parameters())), gradients, strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    swapped = run(sites, ids.flip(0), lambda: summed(tokens))
    assert abs(swapped.item() - whole.item()) > 1e-3


def test_sdpa_and_eager_attention_drop_the_same_probabilities():
    torch.manual_seed(0)
    model = (
        transformers.GPT2LMHeadModel._from_config(copy.deepcopy(GPT2), attn_implementation="eager")
        .double()
        .train()
    )
    tokens, logits = torch.randint(0, 40, (3, 9)), []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        sites = trial_sites(lambda batch: model(input_ids=tokens[:1].expand(batch, -1)))
        logits.append(run(sites, torch.arange(3), lambda: model(input_ids=tokens).logits))
    assert torch.allclose(*logits, rtol=1e-10, atol=1e-12)


def test_bart_trains_although_it_draws_for_layer_drop():
    config = transformers.BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=30, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).double().train()
    tokens = torch.randint(3, 30, (4, 6))

    def forward(samples: torch.Tensor) -> torch.Tensor:
        return model(input_ids=samples, decoder_input_ids=samples).logits

    sites = trial_sites(lambda batch: forward(tokens[:1].expand(batch, -1)))
    whole = run(sites, torch.arange(4), lambda: forward(tokens))
    halves = [run(sites, torch.arange(i, i + 2), lambda i=i: forward(tokens[i : i + 2])) for i in (0, 2)]
    assert torch.allclose(torch.cat(halves), whole, rtol=1e-11, atol=1e-12)


def test_stochastic_depth_draws_one_number_per_sample():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 + torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device)).floor()

    x = torch.ones(8, 2, 3)
    sites = trial_sites(lambda batch: forward(torch.ones(batch, 2, 3)))
    whole = run(sites, torch.arange(8), lambda: forward(x))
    ones = torch.cat([run(sites, torch.tensor([i]), lambda i=i: forward(x[i : i + 1])) for i in range(8)])
    assert torch.equal(whole, ones)
    assert 0 < whole.sum() < x.numel()


def test_rand_takes_its_arguments_as_torch_does():
    sites = DrawSites({f"/{i}": ("shared",) for i in range(4)})
    stateless_rng = StatelessRNG(0, sites)
    stateless_rng.begin_forward(0, torch.arange(1))
    with StatelessDropout(stateless_rng):
        found = [
            torch.rand(2, 3),
            torch.rand([]),
            torch.rand(size=(2,), dtype=F64),
            torch.rand_like(torch.ones(3, dtype=F64)),
        ]
    assert [tuple(u.shape) for u in found] == [(2, 3), (), (2,), (3,)]
    assert [u.dtype for u in found] == [torch.float32, torch.float32, F64, F64]


def test_a_trial_on_fake_tensors_learns_the_same_sites():
    model = transformers.GPT2LMHeadModel(copy.deepcopy(GPT2)).train()
    real = trial_sites(lambda batch: model(input_ids=torch.zeros(batch, 9, dtype=torch.int64)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = trial_sites(lambda batch: model(input_ids=torch.zeros(batch, 9, dtype=torch.int64)))
    assert fake == real


def test_a_trial_keeps_everything_and_ends():
    stateless_rng, x = StatelessRNG(0), torch.randn(7, 3)
    with record_draw_sites(stateless_rng, 7):
        assert torch.equal(F.dropout(x, 0.5), x * 2)
    stateless_rng.begin_forward(0, torch.arange(7))
    with StatelessDropout(stateless_rng):
        assert (F.dropout(x, 0.5) == 0).any()


X = torch.rand(3, 4, 8)


@pytest.mark.parametrize(
    ("draw", "name", "fix"),
    [
        (lambda: F.dropout1d(X, 0.5), "dropout1d", "use F.dropout"),
        (lambda: nn.Dropout2d(0.5)(X[None]), "dropout2d", "use F.dropout"),
        (lambda: nn.AlphaDropout(0.5)(X), "alpha_dropout", "use F.dropout"),
        (lambda: nn.RReLU()(X), "rrelu", "leaky_relu"),
        (lambda: F.gumbel_softmax(X), "gumbel_softmax", "torch.rand"),
        (lambda: torch.randn(3), "randn", "torch.rand"),
        (lambda: torch.randn_like(X), "randn_like", "torch.rand_like"),
        (lambda: torch.randint(3, (2,)), "randint", "F.dropout or torch.rand"),
        (lambda: torch.randperm(3), "randperm", "F.dropout or torch.rand"),
        (lambda: torch.multinomial(X[0], 1), "multinomial", "F.dropout or torch.rand"),
        (lambda: torch.normal(X, 1.0), "normal", "torch.rand"),
        (lambda: torch.empty(3).normal_(), "normal_", "F.dropout or torch.rand"),
        (lambda: torch.empty(3).random_(), "random_", "F.dropout or torch.rand"),
        (lambda: torch.empty(3).log_normal_(), "log_normal_", "F.dropout or torch.rand"),
    ],
)
def test_other_randomness_is_refused_by_name_with_the_repair(draw: Callable[[], object], name: str, fix: str):
    stateless_rng = StatelessRNG(0)
    stateless_rng.enter_block("layers.2")
    with pytest.raises(PlanError) as caught, StatelessDropout(stateless_rng):
        draw()
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.problem.startswith(f"{name} draws random numbers in training")
    assert fix in diagnostic.fix
    assert diagnostic.location == "layers.2"


def test_randomness_below_the_functions_of_torch_is_found_by_the_trial():
    model = nn.LSTM(4, 4, num_layers=2, dropout=0.5).train()
    with pytest.raises(PlanError, match="draws random numbers in training"):
        trial_sites(lambda batch: model(torch.ones(3, batch, 4)))
    with pytest.raises(PlanError, match="draws random numbers in training"):
        trial_sites(lambda batch: nn.FractionalMaxPool2d(2, output_size=2)(torch.ones(batch, 3, 8, 8)))


def test_fused_attention_without_dropout_passes_the_trial():
    q = torch.randn(7, 2, 5, 8)
    assert not trial_sites(lambda batch: F.scaled_dot_product_attention(q, q, q)).layouts
