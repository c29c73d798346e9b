"""Benchmarks of the techniques that need less memory.

gist                     what autograd saves of ReLU and max pooling, encoded
offload_parity           random plans with offload, beside the same plans without it
planted_offload_faults   faults that the comparison or the static checks must find
offload_bytes            copies and memory of both tiers, against the formulas
offload_vs_peers         step time against DeepSpeed and FSDP2
streamed_step            a step with states on disk, against its parts alone
bounded_host             optimizer states on disk, within the memory that the plan says
memory_budget            choices for a number of bytes, beside trying everything
memory_budget_speed      their steps, beside those of greedy and of torch's memory budget
random_chains            random chains of block calls, and every choice for them
"""
