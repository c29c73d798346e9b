"""Models devices and networks: manufacturer data, measurements, and predictions of time.

Modules:

    cost_fit        time as a sum of features, corrected by measurements
    device_profile  what a device was measured to do
    device_specs    known devices and their peaks (devices.csv)
    network_model   the cost of messages, and measured clusters
    stragglers      how far the last of several devices is behind
"""
