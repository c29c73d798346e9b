"""Tensor parallelism: bytes, parity, memory, and step time against DTensor.

tensor_bytes       bytes that tensor parallelism sends, against the formulas
tensor_families    the model families of the parity and byte benchmarks
tensor_byte_formulas        the formulas of the bytes that tensor parallelism sends
tensor_parity      tensor-parallel steps against one device, in float64
step_ours_and_dtensor       one tensor-parallel training step of ours and one of DTensor
tensor_vs_dtensor  step time of 1-D tensor parallelism against DTensor
tiled_memory       peak memory of a chunked loss and tiled MLPs
vocab_memory       peak memory of a vocabulary-parallel model
"""
