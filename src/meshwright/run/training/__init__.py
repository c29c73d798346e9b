"""Training: the loop over steps, and one rank for loops of your own.

trainer               Trainer: one rank of a plan
gathered_predictions  outputs of the model, and metrics of the user, gathered from all ranks
sample_text           generates text with a trained model
deterministic_kernels kernels that give the same bits each time
same_batch_check      compares the batch that each rank passes to an evaluation
evaluations           what is evaluated: samples, tasks, a text that the model writes
train_loop            feed, step, log, evaluate, save
"""
