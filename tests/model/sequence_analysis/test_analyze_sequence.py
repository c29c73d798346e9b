"""The sequence analysis of one forward: token dims of block arguments, attention calls, and gathers in
glue.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.model.recording.op_table import find_op
from meshwright.model.sequence_analysis import token_rules
from meshwright.plan.model_spec.sequence_info import (
    AttentionSpec,
    CapturedTokens,
    GlueGather,
    SequenceInfo,
)
from tests.model.sequence_analysis.test_token_rules import (
    ALONE,
    LENGTH,
    MIXING,
    WIDTH,
    WORDS,
    Layer,
    Layers,
    layer,
    tokens_of,
)
from tests.parallel.tensor.model_families import DECODER, ENDS, FAMILIES, GROUPED, TOKENS, batches, factory_of
from tests.parallel.tensor.model_families import WORDS as VOCABULARY

OPT = {name: value for name, value in DECODER.items() if name != "intermediate_size"} | {
    "word_embed_proj_dim": 24,
    "ffn_dim": 29,
}
STATES = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "use_cache": False}
EXPERTS = {"num_experts_per_tok": 2, "use_cache": False}
MORE: dict[str, Callable[..., nn.Module]] = {
    **FAMILIES,
    "mistral": factory_of("Mistral", "ForCausalLM", **GROUPED, sliding_window=4),
    "gemma2": factory_of("Gemma2", "ForCausalLM", **GROUPED, head_dim=4),
    "opt": factory_of("OPT", "ForCausalLM", **OPT, dropout=0.1, attention_dropout=0.1),
    "gpt2, dropout": factory_of(
        *("GPT2", "LMHeadModel"),
        **{
            "vocab_size": VOCABULARY,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 6,
            "n_positions": 16,
            "use_cache": False,
            **ENDS,
        },
    ),
    "phi": factory_of("Phi", "ForCausalLM", **DECODER),
    "mixtral": factory_of("Mixtral", "ForCausalLM", **{**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "mixtral, shown": factory_of(
        "Mixtral", "ForCausalLM", **{**GROUPED, **EXPERTS, "num_local_experts": 4}, output_router_logits=True
    ),
    "qwen3 moe": factory_of(
        "Qwen3Moe",
        "ForCausalLM",
        **{**GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4},
    ),
    "mamba": factory_of("Mamba", "ForCausalLM", **STATES, state_size=4),
    "rwkv": factory_of("Rwkv", "ForCausalLM", **STATES, attention_hidden_size=24),
}


def family(name: str, **more: torch.Tensor) -> SequenceInfo:
    batch = {**batches("t5" if name == "t5" else "llama", 1)[0], **more}
    tokens = analyze(MORE[name], batch).sequence_info
    assert tokens is not None
    return tokens


def reasons_not_sequence_parallel(tokens: SequenceInfo) -> list[str]:
    return [each.not_sequence_parallel for each in tokens.block_calls if each.not_sequence_parallel]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "phi",
        "phi3",
        "gpt-neox",
        "falcon",
        "persimmon",
        "opt",
        "mixtral",
        "qwen3 moe",
        "gpt2, dropout",
    ],
)
def test_decoders_may_run_on_a_token_shard_except_for_attention(name: str):
    tokens = family(name)
    assert reasons_not_sequence_parallel(tokens) == []
    assert (tokens.length, tokens.inputs, tokens.targets) == (TOKENS, ("input_ids",), ("labels",))
    assert [each.is_causal for each in tokens.attention_calls] == [True, True]
    assert all(
        (each.num_heads, each.query_len, each.key_len, each.needs_grad) == (6, TOKENS, TOKENS, True)
        for each in tokens.attention_calls
    )


def test_attention_calls_are_described_as_the_run_makes_them():
    assert family("llama").attention_calls[0] == AttentionSpec(
        "model.layers.0", 6, 3, 4, 4, TOKENS, TOKENS, is_causal=True
    )  # no mask was made
    windowed = family("mistral")
    assert reasons_not_sequence_parallel(windowed) == []
    first = windowed.attention_calls[0]
    assert (first.num_kv_heads, first.has_mask, first.is_causal) == (
        3,
        True,
        True,
    )  # beside a mask too, keys are as they are
    assert windowed.block_calls[1].input_token_dims[:2] == ((1,), (2, 3))
    assert [each.is_causal for each in family("bert").attention_calls] == [False, False]


def test_arguments_and_outputs_of_blocks_have_tokens_along_these_dims():
    tokens = family("gpt2")
    assert [
        (each.block_call, each.input_token_dims, each.output_token_dims) for each in tokens.block_calls[:3]
    ] == [
        ("transformer.wte", ((1,),), ((1,),)),
        ("transformer.wpe", ((1,),), ((1,),)),
        ("transformer.h.0", ((1,), (1,)), ((1,),)),
    ]


def test_glue_gathers_tensors_of_which_it_needs_all_tokens():
    class Summing(Layers):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.embed(input_ids))
            return self.head(x - x.mean(1, keepdim=True))

    tokens = tokens_of(lambda: Summing(ALONE["attention"]))
    assert tokens.gathers == (
        GlueGather("layers.0", WIDTH, backward_calls=("head",)),
    )  # a sum of all tokens will do
    assert reasons_not_sequence_parallel(tokens) == []
    assert tokens_of(lambda: Layers(ALONE["attention"])).gathers == ()
    assert (
        family("gpt2, dropout").gathers == ()
    )  # it looks into the ids for padding, which every rank has read


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gemma2",  # it caps its scores
            (
                "model: attention takes 'softcap', which F.scaled_dot_product_attention does not support "
                "(a model with attn_logit_softcapping = None in its config takes none)"
            ),
        ),
        ("mamba", "backbone.layers.0.mixer takes some of the tokens (indexing)"),
        ("rwkv", "rwkv.blocks.0.attention.time_shift pads tokens"),
    ],
)
def test_families_that_mix_tokens_are_named(name: str, message: str):
    assert reasons_not_sequence_parallel(family(name))[0].startswith(message)


class Reading(Layers):
    """A model whose glue reads values."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(input_ids))
        return self.head(x if x.sum() > 0 else x * 2)


@pytest.mark.parametrize(
    ("build", "count"),
    [(MORE["gemma2"], 1), (lambda: Reading(ALONE["attention"]), 2)],
    ids=["attention of another kind", "values"],
)
def test_what_two_lengths_refuse_alike_is_not_tried_with_a_third(build: Callable[[], nn.Module], count: int):
    lengths: list[int] = []

    def counted() -> nn.Module:
        module = build()
        module.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        return module

    ids = {key: value % WORDS for key, value in batches("llama", 1)[0].items()}
    analyzed = analyze(counted, ids)
    lengths.clear()
    assert reasons_not_sequence_parallel(analyzed.sequence_info)
    assert len(set(lengths)) == len(lengths) == count


def test_a_model_without_sdpa_attends_by_the_same_interface_where_it_needs_no_more_than_torch_has():
    build = factory_of("Gemma2", "ForCausalLM", **GROUPED, head_dim=4, attn_logit_softcapping=None)
    tokens = analyze(build, batches("llama", 1)[0]).sequence_info
    assert reasons_not_sequence_parallel(tokens) == []
    assert len(tokens.attention_calls) == 2


@pytest.mark.parametrize("loss", [None, token_cross_entropy()], ids=["the model's own", "without them"])
def test_router_logits_that_are_captured_are_gathered_and_get_a_gradient_where_the_loss_reads_them(
    loss: Loss | None,
):
    tokens = analyze(MORE["mixtral, shown"], batches("mixtral, shown", 1)[0], loss=loss).sequence_info
    assert tokens is not None
    assert reasons_not_sequence_parallel(tokens) == []
    captured = {each.block_call: each.captured for each in tokens.block_calls if each.captured}
    router = CapturedTokens(0, TOKENS, is_merged=True, needs_grad=loss is None)
    assert captured == {f"model.layers.{layer}": (router,) for layer in range(2)}
    back = ("",) if loss is None else ()
    gathers = [each for each in tokens.gathers if each.block_call]
    assert gathers == [GlueGather(name, 4 * TOKENS, TOKENS, backward_calls=back) for name in captured]


def test_attention_that_transformers_would_compute_itself_is_torch_s():
    tokens = analyze(
        lambda: FAMILIES["llama"](attn_implementation="eager"), batches("llama", 1)[0]
    ).sequence_info
    assert tokens is not None
    assert reasons_not_sequence_parallel(tokens) == []
    assert tokens.attention_calls == family("llama").attention_calls


def test_an_encoder_and_a_decoder_attend_with_biases_whose_gradient_is_needed():
    tokens = family("t5")
    assert reasons_not_sequence_parallel(tokens) == []
    masks = [each.mask for each in tokens.attention_calls]
    assert [
        mask is not None and (mask.per_head, mask.is_additive, mask.needs_grad) for mask in masks[:2]
    ] == [(True, True, True)] * 2
    assert not any(
        each.is_causal and each.mask is None for each in tokens.attention_calls
    )  # the bias of a decoder forbids by itself


def test_sequences_of_several_lengths_have_their_own_tokens():
    batch = batches("t5", 1)[0]
    short = {
        **batch,
        "decoder_input_ids": batch["decoder_input_ids"][:, :-2],
        "labels": batch["labels"][:, :-2],
    }
    tokens = analyze(MORE["t5"], short).sequence_info
    assert tokens is not None
    assert reasons_not_sequence_parallel(tokens) == []
    assert (tokens.length, tokens.lengths) == (TOKENS, (TOKENS, TOKENS - 2))
    assert tokens.other_lengths == (("decoder_input_ids", TOKENS - 2), ("labels", TOKENS - 2))
    pairs = [(TOKENS, TOKENS)] * 2 + [(TOKENS - 2, TOKENS - 2), (TOKENS - 2, TOKENS)] * 2
    assert [(each.query_len, each.key_len) for each in tokens.attention_calls] == pairs
    assert [tokens.num_sharded_tokens(each) for each in ("encoder.block.0", "decoder.block.1")] == [
        TOKENS,
        TOKENS - 2,
    ]


def test_inputs_without_tokens_may_have_another_length():
    class Marked(Layers):
        def forward(self, input_ids: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
            first, second, third = marks.unbind(1)
            return super().forward(input_ids) + (first * second + third)[:, None, None]

    batch = {key: torch.ones(2, LENGTH, dtype=torch.int64) for key in ("input_ids", "labels")}
    tokens = analyze(
        lambda: Model(Marked(ALONE["attention"])), {**batch, "marks": torch.ones(2, 3, dtype=torch.int64)}
    ).sequence_info
    assert tokens is not None
    assert reasons_not_sequence_parallel(tokens) == []
    assert (tokens.lengths, tokens.inputs) == ((LENGTH,), ("input_ids",))


def test_a_row_of_keys_is_passed_whole_to_a_block():
    class Padded(Layers):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            return self.head(self.layers[0](x, (1.0 - attention_mask[:, None, None, :]) * -1e9))

    class Masked(Layer):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q = self.linear(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).reshape(x.shape)

    def make() -> nn.Module:
        model = Padded(ALONE["whole"])
        model.layers[0] = Masked(ALONE["whole"])
        return model

    ids = torch.ones(2, LENGTH, dtype=torch.int64)
    tokens = analyze(
        lambda: Model(make()), {"input_ids": ids, "attention_mask": ids, "labels": ids.roll(1, -1)}
    ).sequence_info
    assert tokens is not None
    assert reasons_not_sequence_parallel(tokens) == []
    assert tokens.inputs == ("input_ids", "attention_mask")
    assert tokens.block_calls[1].input_token_dims == ((1,), ())
    assert tokens.gathers == ()  # rows are read whole
    assert tokens.attention_calls[0].has_mask


def test_a_first_block_that_makes_positions_inside_runs_on_all_tokens_of_every_rank():
    tokens = family("bert")
    assert reasons_not_sequence_parallel(tokens) == []
    assert [each.block_call for each in tokens.block_calls if each.is_replicated] == ["bert.embeddings"]
    assert tokens.block_calls[0].output_token_dims == ((1,),)


class Small(nn.Module):
    """A decoder as people write it: positions in the forward of the whole, blocks that attend."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Layer(ALONE["attention"]) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        _, length = input_ids.size()
        if length > 32:
            raise ValueError(f"rows of {length} tokens; there are 32 places")
        x = self.drop(self.words(input_ids) + self.places(torch.arange(0, length)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_small_decoder_may_run_on_a_token_shard():
    tokens = tokens_of(Small)
    assert reasons_not_sequence_parallel(tokens) == []
    assert [each.block_call for each in tokens.attention_calls] == ["blocks.0", "blocks.1"]
    assert tokens.block_calls[1].input_token_dims == ((0,),)  # the places, of all rows
    assert tokens.gathers == ()


def test_a_model_in_one_block_makes_its_positions_inside():
    ids = torch.ones(2, LENGTH, dtype=torch.int64)
    tokens = analyze(
        lambda: Model(Small(), blocks=["(model)"]), {"input_ids": ids, "labels": ids.roll(1, -1)}
    ).sequence_info
    assert tokens is not None
    assert reasons_not_sequence_parallel(tokens) == [
        (
            "(model) makes positions or a mask inside of the block (arange): give them to it, or "
            "declare smaller blocks"
        )
    ]


@pytest.mark.parametrize("length", [1, 4, 8, 16, 31])
def test_any_sequence_length_is_analyzed(length: int):
    tokens = tokens_of(Small, length)
    assert reasons_not_sequence_parallel(tokens) == []
    assert tokens.length == length
    assert tokens.attention_calls[0].query_len == length


def test_a_model_of_one_fixed_sequence_length_is_reported():
    class Fixed(Small):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] != 16:
                raise ValueError("16 tokens, please")
            return super().forward(input_ids)

    tokens = tokens_of(Fixed, 16)
    assert len(reasons_not_sequence_parallel(tokens)) == 5
    assert reasons_not_sequence_parallel(tokens)[0].startswith("it does not run on sequences of 1")
    assert reasons_not_sequence_parallel(tokens)[0].endswith("ValueError: 16 tokens, please")


def test_a_forward_that_reads_token_values_is_reported():
    tokens = tokens_of(lambda: Reading(ALONE["attention"]))
    assert set(reasons_not_sequence_parallel(tokens)) == {
        "its forward reads tensor values, so its operations on tokens cannot be determined in advance"
    }


def gap(rule: str) -> float:
    """Returns how far a rule on parts of the tokens is from the rule on all."""
    x = torch.linspace(-1, 1, 2 * LENGTH * WIDTH).view(2, LENGTH, WIDTH).sin()
    torch.manual_seed(0)
    block = Layer(MIXING[rule][0])
    return float((torch.cat([block(x[:, :5]), block(x[:, 5:])], 1) - block(x)).detach().abs().max())


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch):
    wrong = {"cumsum": find_op("relu")}
    monkeypatch.setattr(token_rules, "find_op", lambda name: wrong.get(name) or find_op(name))
    assert layer(MIXING["a cumulative sum"][0]).not_sequence_parallel == ""
    assert gap("a cumulative sum") > 0.1  # what is allowed is compared so, in test_bytoken


@pytest.mark.parametrize(
    "rule", ["eager attention", "a mask from a length", "positions", "a mean", "a pool", "turned", "moved"]
)
def test_what_is_refused_would_be_wrong(rule: str):
    assert gap(rule) > 1e-3
