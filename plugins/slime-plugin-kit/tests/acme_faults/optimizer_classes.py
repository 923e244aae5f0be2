"""torch optimizers with one thing wrong."""

import torch


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a momentum."""

    def __init__(self, groups, config, rounded=None):
        super().__init__(groups, {"lr": config.lr})

    def momentum(self, weight):
        return self.state[weight].setdefault("momentum", torch.zeros_like(weight))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.momentum(weight)
                momentum.lerp_(weight.grad, 0.1)
                weight.sub_(self.change(momentum), alpha=self.rate(group))

    def change(self, momentum):
        return momentum.sign()

    def rate(self, group):
        return group["lr"]


class FixedRate(Signs):
    def rate(self, group):
        return 0.01


class Noisy(Signs):
    def change(self, momentum):
        return momentum.sign() + 0.1 * torch.randn_like(momentum)


class Hides(Signs):
    """Its momentum is no part of its state."""

    def momentum(self, weight):
        self.hidden = getattr(self, "hidden", {})
        return self.hidden.setdefault(id(weight), torch.zeros_like(weight))


class Widens(Signs):
    def momentum(self, weight):
        return self.state[weight].setdefault("momentum", torch.zeros_like(weight, dtype=torch.float32))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.momentum(weight)
                momentum.lerp_(weight.grad.float(), 0.1)
                weight.sub_(momentum.sign().to(weight.dtype), alpha=group["lr"])
