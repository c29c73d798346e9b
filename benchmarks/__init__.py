"""One runnable per claim: `python -m benchmarks.NAME` (or `make bench NAME=...`) writes
`benchmarks/results/NAME.json`.
"""
