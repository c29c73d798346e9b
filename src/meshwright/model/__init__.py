"""Analysis of user models, and execution of their unmodified forward.

analysis             analyzes a model: blocks, parameters, costs, and what a plan needs to know
sequence_analysis    how each block call treats the tokens of a sequence
trial                one forward on fake tensors, and what it shows
pipeline             stages of a forward: recorded graph, live values, replay
rng                  dropout masks that do not depend on the plan
loading              model sources, deferred initialization, pretrained weights
tensor_parallel      which layers can be sharded, and how features flow between them
context_parallel     runs a forward on a shard of each sequence
loss                 losses, and what they take of a model's outputs
blocks               finds blocks, runs them with the graph cut between them
hf                   code for the Hugging Face libraries
recording            one recording of a forward, which analyses read
tensors              building blocks: modes, random numbers, nested containers
"""
