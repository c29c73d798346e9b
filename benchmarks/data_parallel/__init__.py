"""DDP and ZeRO against torch and DeepSpeed: time, memory and bytes.

ddp_memory         peak memory of DDP against torch DDP
ddp_vs_torch       step time of DDP against torch DDP
small_llamas       small Llamas under ZeRO plans, for the benchmarks of this folder
zero_bytes         bytes that ZeRO sends, against the formula
zero_overlap       the share of ZeRO's communication that computation hides
zero_states        bytes of weights, gradients and optimizer states under ZeRO, against the paper's table
zero_vs_deepspeed  step time of ZeRO against DeepSpeed
zero_vs_torch      step time of ZeRO against FSDP2 and torch DDP
"""
