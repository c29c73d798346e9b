"""Expert parallelism: ranks hold different experts of a mixture of experts, or slices of each.

expert_parallel           each rank has some experts; tokens travel to them, and their results travel back
dispatch                  runs one call of experts that lie on several ranks
expert_tensor_parallel    each rank has a slice of the matrices of every expert; the results are summed
loss_free_balancing       biases of the choice of experts, stepped from the counts of the global batch
"""
