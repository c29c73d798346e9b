"""A verdict shows the loss of the plan beside the one that the model computes itself."""

import torch
import transformers as tf

import meshwright as mw
from meshwright.model.loss.loss_definition import Batch, Loss

TOKENS = torch.randint(3, 60, (6, 10), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": TOKENS, "labels": TOKENS.clone()}


def llama() -> tf.LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_attention_heads=2))


def verdict_of(batch: Batch, loss: Loss | None = None) -> mw.Verdict:
    analyzed = mw.analyze(llama(), batch, loss=loss)
    job = mw.Job(train=mw.TrainConfig(batch=6, steps=1), optimizer=mw.OptimizerConfig("sgd", lr=0.1))
    return mw.verify(analyzed, mw.make_plan(analyzed, job, mw.Mesh(cp=2)), [batch], loss=loss)


def test_a_standard_batch_under_the_default_loss_has_the_models_own_loss():
    verdict = verdict_of(BATCH)
    assert verdict.passed
    assert abs(verdict.loss - llama()(**BATCH).loss.item()) < 1e-6
    assert "the same" in str(verdict)


def test_a_loss_that_is_not_the_models_is_seen():
    halved = mw.token_cross_entropy(shift_labels=True)
    halved = halved.wrap_total(lambda total: lambda *args: total(*args) / 2)
    verdict = verdict_of(BATCH, halved)
    assert verdict.passed  # the plan does equal one device
    assert abs(verdict.model_loss - 2 * verdict.loss) < 1e-5
    assert "NOT the same: check the loss and its labels" in str(verdict)


def test_aligned_labels_are_compared_without_the_last_one():
    aligned = {"input_ids": TOKENS, "labels": torch.cat([TOKENS[:, 1:], TOKENS[:, :1]], dim=1)}
    assert "the same" in str(verdict_of(aligned, mw.token_cross_entropy()))


def test_start_and_end_positions_have_a_loss_of_the_model_too():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = tf.BertForQuestionAnswering(tf.BertConfig(**sizes, num_attention_heads=2))
    places = torch.arange(6)
    batch = {"input_ids": TOKENS, "start_positions": places, "end_positions": places + 2}
    analyzed = mw.analyze(model, batch)
    job = mw.Job(train=mw.TrainConfig(batch=6, steps=1))
    verdict = mw.verify(analyzed, mw.make_plan(analyzed, job, mw.Mesh(dp_replicate=2)), [batch])
    assert verdict.has_model_loss
    assert abs(verdict.loss - model.eval()(**batch).loss.item()) < 1e-6
