"""Benchmarks of mixtures of experts, and of expert parallelism.

expert_routing     every routing of the layer against the loops of its paper
routing_loops      the algorithms of the papers, token by token
mixtral_steps      training steps of a Mixtral on several ranks: ours and that of transformers
expert_vs_peers    seconds and bytes of a step, against transformers' expert parallelism
expert_bytes       bytes between ranks: the law, the ledger, and transformers
expert_memory      peaks of live bytes, against what plan expects, and against its most
expert_resume      checkpoints cross from plan to plan and back, bit by bit
layer_steps        forward and backward of one layer: ours, transformers' and DeepSpeed's
expert_layer_vs_peers   their seconds
expert_parity      mixtures of experts of transformers under many plans equal one device
expert_plans       random plans with distributed experts equal one device
mixture_models     models of every family, and of every routing, for them
"""
