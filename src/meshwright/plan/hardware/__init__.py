"""Models devices and networks: manufacturer data and measurements.

Modules:

    device_specs       known devices and their peaks (devices.csv)
    network_model      the cost of messages, and measured clusters
    straggler_delay    how far the last of several devices is behind
"""
