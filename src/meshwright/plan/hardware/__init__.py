"""Models devices, networks and the streams of a rank: manufacturer data and measurements.

Modules:

    device_specs       known devices and their peaks (devices.csv)
    network_model      the cost of messages, by bands of size
    measured_cluster   the measurements of a cluster, and the network model fitted to them
    streams            what the actions of a rank occupy, and in which order they run
    memory_tiers       where tensors rest: device memory, host memory, disk
    straggler_delay    how far the last of several devices is behind
"""
