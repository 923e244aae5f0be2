"""Prefers some engines."""

from dataclasses import replace

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.middleware import MiddlewareDriver, RouterMiddleware


class PreferConfig(DriverConfig):
    engine: int = 0
    """Index of the engine that gets the requests while it exists."""


class Preference(RouterMiddleware):
    def __init__(self, engine):
        self.engine, self.preferred = engine, 0

    async def __call__(self, request, call_next):
        if self.engine in request.engines:
            self.preferred += 1
            request = replace(request, engines=(self.engine,))
        return await call_next(request)

    def metrics(self):
        return {"preferred": self.preferred}


class Prefer(MiddlewareDriver):
    """Sends requests to one engine."""

    Config = PreferConfig

    @classmethod
    def build(cls, config):
        return Preference(config.engine)
