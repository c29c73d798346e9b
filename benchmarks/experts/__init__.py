"""Benchmarks of expert parallelism.

mixtral_steps      training steps of a Mixtral on several ranks: ours and that of transformers
expert_vs_peers    seconds and bytes of a step, against transformers' expert parallelism
expert_parity      mixtures of experts of transformers under many plans equal one device
"""
