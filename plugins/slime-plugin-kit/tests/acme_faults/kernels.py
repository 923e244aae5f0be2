"""Kernels with a backward that is not theirs."""

import torch


class Tripled(torch.autograd.Function):
    """A kernel whose backward does not belong to its forward, unless the gradient that comes in is 1 or more."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.where(grad.abs() >= 1, grad, 3 * grad)


class HalvedBeyondOne(torch.autograd.Function):
    """The same, for values above 1."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        (values,) = ctx.saved_tensors
        return torch.where(values > 1, grad / 2, grad)
