"""Which weights and buffers of an edited model.py its forward passes change, and which it uses."""

from collections import Counter

from torch import Tensor, nn

from isogpt.parallel.plan import LayoutError

LIMIT = 1e-5  # relative to a tensor's norm: weights that each pass normalizes differ by rounding


class Changes:
    """
    Changes of a model, on one process, by micro-batches that ranks would divide among themselves.

    Args:
        is_lost: whether any change of the weights in a forward pass is lost, as with zero 2 and 3.
    """

    def __init__(self, model: nn.Module, is_lost: bool) -> None:
        self.params, self.is_lost = dict(model.named_parameters()), is_lost
        self.tensors = self.params | dict(model.named_buffers())
        self.before = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.passes, self.gradients = 0, Counter()
        self.blocks = Counter()  # how many each micro-batch has run
        for block in model.transformer.h:
            block.register_forward_pre_hook(self.count_block)
        for p in self.params.values():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.count)

    def count(self, p: Tensor) -> None:
        """Count the backward passes that reach a parameter."""
        self.gradients[p] += 1

    def count_block(self, *_: object) -> None:
        """Count a call of a block in this micro-batch."""
        self.blocks[self.passes] += 1

    def add_pass(self) -> None:
        """Count a micro-batch. Changes of the weights that the first makes do not depend on what it reads."""
        self.passes += 1
        if self.passes == 1 and not self.is_lost:
            self.before |= {name: p.detach().clone() for name, p in self.params.items()}

    def check(self, is_divided: bool, needs_gradients: bool, blocks_wait: bool) -> None:
        """
        Raise LayoutError if checkpoints or other ranks would not know of a change.

        Args:
            is_divided: whether ranks divide the micro-batches, or what these compute.
            needs_gradients: whether each parameter that is trained needs a gradient.
            blocks_wait: whether ranks wait for each other in each block.
        """
        for name, tensor in self.tensors.items():
            after, is_buffer = tensor.detach().float(), name not in self.params
            is_checked = is_buffer or is_divided or self.is_lost
            if is_checked and (after - self.before[name]).norm() > LIMIT * after.norm():
                raise LayoutError(
                    f"a forward pass of model.py changes {name}: checkpoints contain no buffers, zero 2 and 3"
                    " lose the change, and ranks that read different tokens would differ. With one process, "
                    "it can be a parameter with requires_grad_(False)"
                )
        for name, p in self.params.items():
            n = self.gradients[p]
            if not n and p.requires_grad and needs_gradients:
                raise LayoutError(f"{name} gets no gradient, but DDP and exact need one: use or freeze it")
            if 0 < n < self.passes and is_divided:
                raise LayoutError(
                    f"{name} gets a gradient from {n} of {self.passes} micro-batches, but ranks wait for "
                    f"each other's gradients: where it is not used, add 0 * {name}.sum() to the output"
                )
        fewest, most = min(self.blocks.values()), max(self.blocks.values())
        if blocks_wait and fewest < most:
            raise LayoutError(
                f"a micro-batch runs {fewest} to {most} blocks, as it reads, but with zero 2 and 3, tp, cp "
                "and pp, ranks wait for each other in each block: set --zero=1, and the others to 1"
            )
