"""The page of benchmarks, from their results.

benchmark_page    every claim with its figures
gpu_table         what has run on one GPU
"""
