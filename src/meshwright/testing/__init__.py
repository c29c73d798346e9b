"""Public fixtures for tests of parallel code: ranks as threads, ranks as processes.

parity_on_threads    compares a plan with one device, all ranks as threads
ranks          `run_on_threads` and `ProcessPool`, which run a function on every rank
rank_worker    the process of one rank of a `ProcessPool`
"""
