"""All-reduce, hosts and transports: measured on this machine, and as others published.

allreduce_model      all-reduce times, predicted against measured, and whether `auto` takes the fastest
                     algorithm
allreduce_published  how well a piecewise model fits all-reduce times that others published
hierarchical_hosts   hierarchical all-reduce against a flat ring, on hosts that share their links
shared_memory        shared memory against gloo between CPU ranks of one host
"""
