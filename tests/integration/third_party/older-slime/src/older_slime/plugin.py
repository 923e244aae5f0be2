"""Written for 0.1, with names that 0.2 has too."""

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.middleware import MiddlewareDriver, RouterMiddleware
from slime_fsdp.plugin import Fsdp


def digits(sample):
    """The share of digits in the response."""
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))


def keep(group):
    """Every group."""
    return True


class Count(RouterMiddleware):
    def __init__(self):
        self._requests = 0

    async def __call__(self, request, call_next):
        self._requests += 1
        return await call_next(request)

    def metrics(self):
        return {"requests": self._requests}


class CountDriver(MiddlewareDriver):
    """Counts requests."""

    Config = DriverConfig

    @classmethod
    def build(cls, config):
        return Count()


class NamedFsdp(Fsdp):
    """The FSDP backend under another name."""
