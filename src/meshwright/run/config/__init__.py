"""Config and plan files.

config_and_plan_files  reads and writes a request as TOML; overrides from the command line
toml_validation        converts values of TOML and JSON to the dataclasses that are their schema
"""
