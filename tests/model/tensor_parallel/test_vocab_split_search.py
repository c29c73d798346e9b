"""Tables that are divided along the vocabulary are those of words, not of positions."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw

VOCAB_SIZE = 32
TOKENS = torch.randint(0, VOCAB_SIZE, (4, 5), generator=torch.Generator().manual_seed(0))


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_positions": VOCAB_SIZE, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes))


def test_a_table_of_positions_with_as_many_rows_as_the_vocabulary_stays_whole():
    batch = {"input_ids": TOKENS, "labels": TOKENS.roll(1, -1)}
    analyzed = mw.analyze(gpt2, batch)
    roles = {call.name: call.role for call in analyzed.model_spec.layer_calls}
    assert roles["transformer.wte"] == "embedding"
    assert roles["transformer.wpe"] == "embedding_unsharded"
    job = mw.Job(train=mw.TrainConfig(batch=4, steps=1))
    mw.verify(analyzed, mw.make_plan(analyzed, job, mw.Mesh(tp=2)), [batch]).raise_if_failed()
