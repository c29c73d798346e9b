"""Techniques that let tensors rest in other memory than the device's.

offload                model states rest in host memory; the device or the host steps them
disk_offload           optimizer states and weights rest in a file for each rank
offload_actions        actions and refusals that both share
activation_offload     what blocks keep for their backward rests in host memory meanwhile
kept_tensor_copies     the copies of what blocks keep, to the host and back
kept_tensor_file       and from the host to a file and back
"""
