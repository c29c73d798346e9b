"""Mistakes that a new user makes in the first hour, and what the product says.

first_hour_mistakes   runs every mistake, follows the printed repair, and writes the result
mistake               a mistake as data, read from the TOML files here
outcome               one attempt: a command or a script in a folder of its own, and what it printed
verdict               the verdict on a mistake, by its two attempts

The mistakes: config_mistakes.toml, file_mistakes.toml, model_mistakes.toml, script_mistakes.toml,
trainer_mistakes.toml. The folder that a user works in: first_folder.toml.
"""
