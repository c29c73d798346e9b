"""Page makers of the documentation: each turns one source (essays, results, schema, commands) into Markdown.

essay             a module's docstring, and its form as Markdown
technique_pages   one page per technique, and their index
algorithm_pages   one page per all-reduce algorithm, and their index
action_page       the table of action kinds
combination_page  which techniques were tried together
model_page        which model families train
benchmarks        every claim with its figures, and what has run on one GPU
config_page       every key of a config file
cli_page          every command and option
api_pages         the public names of the package
rst               docstrings as reStructuredText, for autodoc
"""
