"""Random plans, each compared with one device or refused.

combinations   the allowed refusals, and how often each pair of techniques must match
compared_rows  compares drawn plans on all cores and keeps the rows
compression_draws  compresses gradients or activations in a random plan
expert_draws   distributes experts in a random plan
hpz_draws      gathers weights within hosts in a random plan
offload_draws  offloads model states or activations in a random plan
parity_of_draws  random plans that have a technique: those of a command line, and their result
strategy_draws draws the strategies of a random plan
random_draws   draws a model, a mesh and strategies from a seed
random_models  the models of the random plans
random_plans   runs the random plans and compares them with one device
zero_plus_plus_draws  gives a random plan more shards, and techniques of ZeRO++
"""
