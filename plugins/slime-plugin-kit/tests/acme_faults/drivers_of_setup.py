"""Launchers and optimizers with one thing wrong."""

from slime_core.contracts.launcher import LauncherDriver
from slime_core.contracts.optimizer import OptimizerDriver


class FaultyOptimizer(OptimizerDriver):
    """`name`: which class of acme_faults.optimizer_classes steps."""

    name = "Signs"

    @classmethod
    def build(cls, config):
        from acme_faults import optimizer_classes

        return getattr(optimizer_classes, cls.name)


def optimizer(class_name, **more):
    return type(class_name, (FaultyOptimizer,), {"name": class_name, "__doc__": class_name, **more})


SIGNS = optimizer("Signs", moments=("momentum",))
FIXED_RATE = optimizer("FixedRate")
NOISY_STEPS = optimizer("Noisy")
HIDES_MOMENTUM = optimizer("Hides")
DECLARES_NO_MOMENT = optimizer("Signs", moments=())
WIDENS = optimizer("Widens", rounds_state=True)


class Idle:
    async def start_trainers(self, specs):
        return list(specs)

    async def start_engines(self, specs):
        return list(specs), list(specs)

    async def stop(self):
        pass


class EagerRank(Idle):
    async def start_trainers(self, specs):
        return ["rank"]


class StopsOnce(Idle):
    stopped = False

    async def stop(self):
        assert not self.stopped, "stopped already"
        self.stopped = True


def launcher(built):
    def build_launcher(cls, config, setup):
        return built()

    return type(
        built.__name__, (LauncherDriver,), {"build_launcher": classmethod(build_launcher), "__doc__": built.__name__}
    )


STARTS_NOTHING = launcher(Idle)
STARTS_ANYWAY = launcher(EagerRank)
STOPS_ONCE = launcher(StopsOnce)
