"""How benchmarks measure, and what they write.

case_store          keeps the finished cases of a long benchmark, so that a later run goes on
interleaved_timing  times configurations in turn and judges ratios within a round
live_bytes          bytes of all live tensors that Python can reach
machine_load        how many cores other processes use
peak_bytes          peak bytes of tensor storages on one thread
rank_processes      processes that wait for their turn to run a step
result              the JSON file of a benchmark
side_by_side        compares two training steps on several workloads
"""
