"""Runs the action list of one rank: forward and backward of blocks, collectives, loss, optimizer.

generation          tokens from the model as it is sharded, on all ranks of any plan
step                the executor of a plan's action list, its action handlers, and what looks at a whole step
forward_backward    the model's forward and backward on one rank, pipeline stages, sequence shards, evaluation
losses              losses that several ranks, or several chunks of tokens, compute together
optim               optimizers, their update, and their saved state
params              parameters that are sharded, sliced, or owned by one rank
runtime             the state of a rank: batch, loss, process groups, precision, guard and profiler
"""
