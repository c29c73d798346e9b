"""Benchmarks of sites that train apart, and of servers.

outer_links             steps of sites behind a slow link, and the bytes that cross it
outer_parity            random plans with rounds or servers, each compared with one device
outer_vs_peers          rounds of sites behind a slow link, beside those of torch, Accelerate and torchft
peer_sites              sites that meet as these peers let them
planted_outer_faults    faults planted in rounds and servers, and how each is found
server_draws            random plans with asynchronous servers, and with embedding hosts
stale_replay            the order of asynchronous servers, replayed on other timings
"""
