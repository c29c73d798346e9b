"""Expert parallelism: ranks hold different experts of a mixture of experts.

expert_parallel    each rank has some experts; tokens travel to them, and what they compute travels back
loss_free_balancing  biases of the choice of experts, stepped from the counts of the global batch
dispatch           runs one call of experts that lie on several ranks
"""
