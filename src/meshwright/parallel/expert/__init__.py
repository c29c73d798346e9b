"""Expert parallelism: ranks hold different experts of a mixture of experts, or slices of each.

expert_parallel           each rank has some experts; tokens travel to them, and their results travel back
dense_experts             experts that are called on every token each, on the rows that are not zeros
dispatch                  runs one call of experts that lie on several ranks
chunked_experts           computes too many pairs in chunks, so that what experts save is bounded
expert_memory             memory of experts on a rank: what is expected, and the most
expert_pairs              rows of (token, expert) pairs, taken from two tensors and added up there
summed_experts            sums what ranks with the same tokens compute of experts
expert_tensor_parallel    each rank has a slice of the matrices of every expert; the results are summed
loss_free_balancing       biases of the choice of experts, stepped from the counts of the global batch
"""
