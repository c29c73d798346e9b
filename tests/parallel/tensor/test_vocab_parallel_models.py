"""Published models with vocabulary parallelism: odd sizes, scaled embeddings, tied biases, capped logits,
tied heads.
"""

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.tensor.exactness import assert_exact

NUM_SAMPLES, TOKENS = 4, 6
SMALL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "vocab_size": 67,
}


def gpt2() -> nn.Module:
    """With its own vocabulary of 50,257 words, tied."""
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """Its decoder is tied to the table, and the decoder's bias to one of another module."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **none))


def gemma2() -> nn.Module:
    """Rows of its table are scaled, its logits capped."""
    config = transformers.Gemma2Config(
        **SMALL, head_dim=4, num_key_value_heads=1, final_logit_softcapping=2.0, pad_token_id=40
    )
    return transformers.Gemma2ForCausalLM(config)


def t5() -> nn.Module:
    """One table for encoder and decoder, tied to the head, whose input is scaled."""
    config = transformers.T5Config(
        vocab_size=67, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return transformers.T5ForConditionalGeneration(config)


def cohere() -> nn.Module:
    """Its logits are scaled, its table is tied."""
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, logit_scale=0.3, pad_token_id=1))


MODELS = {"gpt2": gpt2, "bert": bert, "gemma2": gemma2, "t5": t5, "cohere": cohere}


def samples(words: int, *, decoder: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(words, (NUM_SAMPLES, 2 * TOKENS), generator=generator)
    labels = torch.randint(words, (NUM_SAMPLES, TOKENS), generator=generator)
    labels[1, 2:] = IGNORE_INDEX
    found = {"input_ids": ids[:, :TOKENS].contiguous(), "labels": labels}
    return found | ({"decoder_input_ids": ids[:, TOKENS:].contiguous()} if decoder else {})


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_it_equals_one_device(model: str, ranks: int):
    module = MODELS[model]()
    words = module.get_output_embeddings().weight.shape[0]
    data = [samples(words, decoder=model == "t5")] * 2
    job = Job(
        ModelConfig(model),
        DataConfig("example", sequence=TOKENS),
        TrainConfig(batch=NUM_SAMPLES, clip=0.5),
        OptimizerConfig(lr=0.1),
    )
    analyzed = analyze(module, data[0])
    logits = analyzed.model_spec.logits
    assert logits is not None
    assert logits.vocab_size == words
    plan = make_plan(analyzed, job, Mesh(tp=ranks), (VocabParallel(),), 2)
    assert_exact(analyzed, plan, data)
    whole = {weight.name: weight.numel for weight in analyzed.model_spec.params}
    words_of = [
        param_sharding.param
        for param_sharding in plan.rank_view(0).param_shardings
        if param_sharding.sliced_dims
    ]
    assert words_of
    assert all(weight.numel < 0.6 * whole[weight.name] for weight in words_of)
    table = module.get_input_embeddings().weight.numel()
    assert not any(
        param_sharding.param.numel == table for param_sharding in plan.rank_view(0).param_shardings
    ), "no rank has a whole table"
