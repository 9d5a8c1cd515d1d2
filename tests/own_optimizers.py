"""Classes as a user would write them, for --optimizer=own_optimizers.py:CLASS."""

import torch
from torch.optim import LBFGS, SGD, Adafactor  # noqa: F401


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675. Its state is allocated as a user would who knows no DTensor."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum"], state["count"] = torch.zeros(p.shape), 0
                state["count"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # tanh in place of sign, which amplifies rounding
                update = torch.lerp(p.grad, state["momentum"], beta1)
                p.sub_((300 * update).tanh(), alpha=group["lr"] * min(1.0, state["count"] / 5))
                state["momentum"].lerp_(p.grad, 1 - beta2)


class OnDevice(SGD):
    """It leaves out a step on the device, as PyTorch's fused optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9, fused=True)


class Free(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682): p is y, or x for evaluations."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        defaults = {"lr": lr, "momentum": momentum, "sum": 0, "lr_max": -1.0, "is_train": False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def move(self, weight_of, is_train):
        for group in self.param_groups:
            if group["is_train"] != is_train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight_of(group["momentum"]))
            group["is_train"] = is_train

    def train(self):
        self.move(lambda beta: 1 - beta, True)

    def eval(self):
        self.move(lambda beta: 1 - 1 / beta, False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["is_train"]
            lr, beta = 100 * group["lr"], group["momentum"]
            group["k"] = group.get("k", 0) + 1
            group["lr_max"] = max(group["lr_max"], lr)
            weight = group["k"] * group["lr_max"] ** 2
            group["sum"] += weight
            share = weight / group["sum"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], share).sub_(p.grad, alpha=lr * (1 - beta * (1 - share)))
                state["z"].sub_(p.grad, alpha=lr)
