"""All-reduce, hosts and transports: measurements on this machine, and published ones.

allreduce_model      all-reduce times, predicted against measured, and whether `auto` takes the fastest
                     algorithm
allreduce_published  the fit of a piecewise model to published all-reduce times
hierarchical_hosts   hierarchical all-reduce against a flat ring, on hosts that share their links
shared_memory        shared memory against gloo between CPU ranks of one host
start_up_1024        splits, store requests and metadata of nine plans on 1,024 ranks, counted without them
"""
