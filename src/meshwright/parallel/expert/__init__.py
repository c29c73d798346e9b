"""Expert parallelism: ranks hold different experts of a mixture of experts.

expert_parallel    each rank has some experts; tokens travel to them, and what they compute travels back
dense_experts      experts that are called on every token each, on the rows that are not zeros
dispatch           runs one call of experts that lie on several ranks
"""
