"""Models devices and networks: manufacturer data and measurements.

Modules:

    device_specs   known devices and their peaks (devices.csv)
    network_model  the cost of messages, and measured clusters
    stragglers     how far the last of several devices is behind
"""
