"""The command line: `slime run`, `eval`, `plugins`, `config`, `models`. Only what is asked for is imported."""
