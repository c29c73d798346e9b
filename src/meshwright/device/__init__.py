"""Devices: the one place that tells CUDA, ROCm, XPU, MPS and the CPU apart.

platforms        a table of them: type in torch, backend, environment variables, abilities; no torch
local_device     the devices of this process: which one trains, its number, its name, what it cannot do
device_streams   streams and events, and waiting for a device
device_memory    bytes that a device has, has allocated, reserved, and had at most

Elsewhere a device is a `torch.device`, whose type is compared with "cpu" alone.
"""
