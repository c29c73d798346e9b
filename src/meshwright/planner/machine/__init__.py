"""The machine that a plan is for: devices, links and the share of their peaks that they reach.

machine           Machine: the devices, the hosts and their rates
machine_rates     MachineRates: the fitted constants (rates.toml)
roofline          seconds of a matmul, of attention, of memory operations and of collectives
compression_gain  what sums of codes gain over exact ones, and below which link speed
device_profile    DeviceProfile: what a device was measured to do
cost_fit          time as a sum of features, corrected by measurements
from_benchmark    rates from `bench device` and `bench network`
run_calibration   rates corrected by a previous run
"""
