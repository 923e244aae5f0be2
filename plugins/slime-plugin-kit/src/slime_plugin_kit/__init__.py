"""The contract kit: a pytest plugin that proves the contract of every part that a distribution registers.

    pytest --slime-plugin acme-slime-algo

`plugin` is what pytest loads in every run, and loads nothing else unless it is asked for. `kinds` lists the properties;
`suites` holds a module of ordinary tests for each kind; the other modules are what the tests have in common.
"""
