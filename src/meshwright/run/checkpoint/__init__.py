"""Checkpoints: written by all ranks together, verified before use, loadable under another plan.

all_ranks_or_none         actions of all ranks that succeed or fail together
directories               names of checkpoint folders; publishing, pruning, the best checkpoint
distributed_verification  verifies a checkpoint on all ranks; each rank reads a share of the files
manifest                  manifest.json: tensors, slices, files and checksums
sizes_and_checksums       checks the files of a checkpoint against its manifest
resume                    chooses the checkpoint from which a run continues
distributed_checkpoint    writes and opens checkpoints
shard_io                  reads and writes one safetensors file of a checkpoint
write_plan                which rank writes which part of which tensor
"""
