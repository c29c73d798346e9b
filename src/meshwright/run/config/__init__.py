"""Config and plan files.

config_and_plan_files  reads and writes a request as TOML; overrides from the command line
plan_file              writes a request as a plan file
source_paths           the files that a config names, beside it or in the current folder
strategy_tables        the tables of strategies; loads techniques of a user's own
toml_validation        converts values of TOML and JSON to the dataclasses that are their schema
"""
