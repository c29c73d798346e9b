"""Configs for people who write one: the commands `init` and `config`, and `--hardware list`.

device_list     the known devices with their figures
key_reference   every key of a config with type, default and meaning, from the schema
starter_config  a commented config for a model and data
"""
