"""torch, imported when it is used."""


class Later:
    def __getattr__(self, name):
        import torch

        return getattr(torch, name)


torch = Later()
