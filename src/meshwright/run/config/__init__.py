"""Config and plan files.

config_file    reads and writes a request as TOML; overrides from the command line
schema         converts TOML values to the dataclasses of `meshwright.plan.job`
"""
