"""Tensor parallelism: weight matrices are sharded.

megatron_1d            1-D (Megatron): pairs of colwise and rowwise layers
optimus_2d             2-D (Optimus, SUMMA): a square of ranks
tesseract_25d          2.5-D (Tesseract): several squares, each with its own samples
cube_3d                3-D: a cube of ranks
sequence_parallel      Megatron sequence parallelism: norms and dropout on slices of the sequence
vocab_parallel         embedding, head and logits sharded by vocabulary
sharded_layer          how one sharded layer computes: LayerSharding, Redistribution
local_attention_heads  heads on a rank: local sizes, per-head inputs, shared key/value heads
comm_overlap           collectives overlapped with matmuls
joint_sum              several layers whose outputs end in one sum
collective_insertion   planned collectives of sharded layers in the program
layer_split_checks     diagnostics shared by the strategies of this family
"""
