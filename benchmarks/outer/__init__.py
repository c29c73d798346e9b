"""Benchmarks of sites that train apart, and of servers.

outer_links             steps of sites behind a slow link, and the bytes that cross it
outer_parity            random plans with rounds or servers, each compared with one device
planted_outer_faults    faults planted in rounds and servers, and how each is found
stale_replay            the order of asynchronous servers, replayed on other timings
"""
