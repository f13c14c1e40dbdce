"""
What a user may say. Pure.

    model       tables of a config file -> frozen models, one a section; their docstrings are the manual
    parse       TOML text and `--set` items -> Config, or all problems with key path and line
    rules       rule packs and `[[rules.add]]` -> specs of rules
    toml_lines  TOML text -> the line of each key
"""
