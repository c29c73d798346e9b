"""Measurement methods of the benchmarks, and the format of their results.

case_store          stores the finished cases of a long benchmark, so that a later run continues there
cuda_guard          runs Python with a CUDA device that does nothing, in a CPU build of torch
fake_device         a CUDA device without values, which counts what is asked of it
interleaved_timing  times configurations in turn and judges ratios within a round
live_bytes          bytes of all live tensors that Python can reach, during a step
machine_load        how many cores other processes use
peer_environment    runs a benchmark where packages of peers are installed
peak_bytes          peak bytes of tensor storages on one thread
rank_processes      processes that run a step when it is their turn
result              the JSON file of a benchmark
side_by_side        compares two training steps on several workloads
"""
