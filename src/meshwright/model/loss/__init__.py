"""Defines losses, and finds out what a loss takes of the outputs of a model.

loss_definition               a loss: a sum over what counts, and the count that divides it
token_cross_entropy           cross-entropy summed over tokens: of language models and classifiers
vocab_parallel_cross_entropy  the same of logits that are sharded along the vocabulary
model_loss                    the loss that a model computes itself, read from a forward with labels
load_balancing_loss           the auxiliary loss of a mixture of experts, over the global batch
as_batch                      from what a data loader yields to tensors by name
as_loss                       from what a user passes to a loss; checks that it is a sum
loss_inputs                   the outputs of a model that a loss takes
"""
