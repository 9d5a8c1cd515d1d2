"""
Muon for matrices that are stacked in a parameter, divided over ranks, or both.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.common.torch_versions import all_gather_single
from isogpt.nn.experts import ExpertLinear
from isogpt.parallel.local_parts import LocalPart, like, local, local_part_of, splits_of, whole_tensors
from isogpt.training.optimizer_class import params_of


def stack_of(name: str, p: nn.Parameter, model: nn.Module) -> tuple:
    """
    Describe the weight of a linear layer of a block: those with equal descriptions are updated together. q, k
    and v are stacked, and so are experts; the weight of any other layer is one matrix.

    Returns:
        The shape of the parameter, that of this rank's part, which differs if tensor parallelism divides one
        of two matrices of the same shape, and the heights of the matrices that are stacked.
    """
    config, shape = model.config, matrix_part(p, p).shape
    rows = shape[:1]
    if name.endswith(".c_attn.weight") and shape[0] == sum(config.qkv_rows):
        rows = config.qkv_rows
    elif isinstance(model.get_submodule(name.removesuffix(".weight")), ExpertLinear):
        height = local_part_of(p, splits_of(p)).shape[0] // config.n_expert
        rows = (height,) * (shape[0] // height)  # with expert parallelism, of some experts
    return shape, local(p).shape, tuple(rows)


def matrix_part(tensor: Tensor, p: nn.Parameter) -> LocalPart:
    """Return what this rank holds of matrices, each of which expert parallelism leaves whole."""
    whole = getattr(p, "whole", p)  # see OnShards
    splits = tuple(split for split in splits_of(whole) if split.axis != "ep")
    return local_part_of(like(whole, tensor), splits)


class Muon(torch.optim.Muon):
    """
    torch.optim.Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), with four differences.

    Matrices that are stacked in a parameter (q, k and v) are orthogonalized separately. Matrices of equal
    shape are orthogonalized together, in `dtype`, since torch's bfloat16 would make the result depend on the
    layout. Matrices whose parts are on the ranks of `group` are gathered first. The ranks of `workers`, which
    then know the same matrices, divide the orthogonalization.

    Args:
        compiles: whether the computations between the collectives are compiled, once for each shape.
        exact: let the bits of a step not depend on the layout.
    """

    # the interface of PyTorch's fused optimizers to a GradScaler, see optim.clip_and_step: gradients are
    # divided by grad_scale, at least 1, and a step with a found_inf other than 0 changes nothing
    _step_supports_amp_scaling = True
    grad_scale: Tensor | float = 1.0
    found_inf: Tensor | float = 0.0

    def __init__(
        self,
        groups: list[dict],
        lr: float = 1e-3,
        dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        workers: dist.ProcessGroup | None = None,
        compiles: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__(groups, lr)
        self.dtype, self.group, self.workers, self.exact = dtype, group, workers, exact
        # with exact, one: kernels that fuse operators may round differently for the shapes of another layout
        functions = [orthogonalize] if exact else [orthogonalize, move_momentum, update]
        self.compiled = {f: torch.compile(f, dynamic=False) for f in functions if compiles}
        for p in params_of(self):  # a checkpoint can be saved before the first step
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters with a gradient. On a GPU, the host does not wait."""
        for group in self.param_groups:
            params, grads, buffers = [], [], []
            self._init_group(group, params, grads, buffers)
            if not params:
                continue
            device = params[0].device
            uses_numbers = device.type == "cpu" and not self.compiled
            if uses_numbers and self.found_inf:
                continue
            momentum, lr, decay = group["momentum"], group["lr"], 1 - group["lr"] * group["weight_decay"]
            if uses_numbers:
                divisor, is_update = float(self.grad_scale), True
            else:  # as numbers, they would be constants in compiled code, and a GPU would wait
                numbers = (momentum, lr, decay)
                momentum, lr, decay = (torch.full((), number, device=device) for number in numbers)
                divisor = torch.as_tensor(self.grad_scale, device=device)
                is_update = torch.as_tensor(self.found_inf, device=device) == 0
                lr, decay = lr * is_update, decay.where(is_update, 1.0)
            move = self.compiled.get(move_momentum, move_momentum)
            updates = move(buffers, grads, divisor, momentum, is_update)
            wholes = updates
            if self.group:
                parts = [matrix_part(u, p) for p, u in zip(params, updates, strict=True)]
                wholes = whole_tensors(parts, self.group, updates.device)
            rows = group.get("rows", wholes.shape[1:2])  # without "rows", each parameter is one matrix
            wholes, scales = self.orthogonalize_together(wholes, rows), scales_of(rows, wholes)
            if self.group:
                for part, whole in zip(parts, wholes * scales, strict=True):
                    part.put(whole)
                wholes, scales = updates, torch.ones_like(scales[:1])
            self.compiled.get(update, update)(params, wholes, scales, lr, decay)

    def orthogonalize_together(self, wholes: Tensor, rows: tuple[int, ...]) -> Tensor:
        """
        Orthogonalize the matrices of heights `rows` in whole parameters, (parameters, rows, columns) -> the
        same in `dtype` (all ranks of `workers`). Each rank does this for some of the parameters.
        """
        if not self.workers:
            return self.orthogonalize_all(wholes, rows)
        size = math.ceil(len(wholes) / self.workers.size())  # parameters of a rank
        start = size * self.workers.rank()
        share = wholes[start : start + size]
        results = wholes.new_empty(size, *wholes.shape[1:], dtype=self.dtype)
        if len(share):
            results[: len(share)] = self.orthogonalize_all(share, rows)
        gathered = results.new_empty(size * self.workers.size(), *wholes.shape[1:])
        # as bytes, since gloo lacks bfloat16
        all_gather_single(gathered.view(torch.uint8), results.view(torch.uint8), group=self.workers)
        return gathered[: len(wholes)]

    def orthogonalize_all(self, wholes: Tensor, rows: tuple[int, ...]) -> Tensor:
        """
        Orthogonalize the matrices of heights `rows` in parameters, (parameters, rows, columns) -> the same in
        `dtype`.

        Only here do bits depend on the layout: the parameters that a rank updates determine how many matrices
        a matmul multiplies together. And a matrix that several ranks hold whole is added several times, which
        changes its norm, by which `orthogonalize` divides.
        """
        results = []
        compute = self.compiled.get(orthogonalize, orthogonalize)
        is_even = len(set(rows)) == 1
        stacks = [wholes.view(-1, rows[0], wholes.size(-1))] if is_even else wholes.split(rows, dim=1)
        for matrices in stacks:
            batches = matrices.split(1) if self.exact else [matrices]
            results.append(joined([compute(batch, self.dtype) for batch in batches], 0))
        return joined(results, 1).view(wholes.shape)


def move_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    divisor: float | Tensor,
    momentum: float | Tensor,
    is_update: bool | Tensor,
) -> Tensor:
    """
    Move the momentum toward the gradients, divided by `divisor`, in place. Returns Nesterov's momentum,
    (parameters, ...). With tensors, the momentum stays as it is unless `is_update`.
    """
    if torch.is_tensor(momentum):  # _foreach_lerp takes only a number
        grads = torch._foreach_div(grads, divisor)
        pairs = zip(grads, buffers, strict=True)
        grads = [grad.where(is_update, buffer) for grad, buffer in pairs]  # these may be NaN
        changes = torch._foreach_mul(torch._foreach_sub(grads, buffers), 1 - momentum)
        torch._foreach_add_(buffers, changes)
        changes = torch._foreach_mul(torch._foreach_sub(grads, buffers), 1 - momentum)
        return torch.stack(torch._foreach_add(buffers, changes))
    if divisor > 1:
        torch._foreach_div_(grads, divisor)
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    return torch.stack(torch._foreach_lerp(grads, buffers, momentum))


def update(
    params: list[Tensor], updates: Tensor, scales: Tensor, lr: float | Tensor, decay: float | Tensor
) -> None:
    """Move parameters by `updates` (parameters, ...) times -lr and the rows' `scales`, in place."""
    updates = (updates * scales).unbind()
    torch._foreach_mul_(params, decay)
    if torch.is_tensor(lr):  # alpha is a number
        torch._foreach_sub_(params, torch._foreach_mul(updates, lr))
    else:
        torch._foreach_add_(params, updates, alpha=-lr)


def scales_of(rows: tuple[int, ...], wholes: Tensor) -> Tensor:
    """The factors of the updates of matrices of these heights: (rows, 1), or (1, 1) for equal heights."""
    lengths = rows if len(set(rows)) > 1 else (1,)
    columns = wholes.size(-1)
    scales = [math.sqrt(max(1, height / columns)) for height in rows]
    # filled, since a GPU would wait for a copy
    filled = [torch.full((n, 1), s, device=wholes.device) for n, s in zip(lengths, scales, strict=False)]
    return joined(filled, 0)


def joined(tensors: list[Tensor], dim: int) -> Tensor:
    """Tensors, concatenated; a single tensor is not copied."""
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]


# a, b, c of the polynomials a s + b s^3 + c s^5 that are applied in succession to each singular value s. Each
# polynomial is the closest to 1 over the interval to which the polynomials before it map the interval from
# 0.003 to 1 (Amsel et al. 2025, arXiv:2505.16932). The last interval ends at 1.65.
COEFFICIENTS = (
    (8.38367387811402, -24.76590653282787, 18.357082301758982),
    (4.0434204386149215, -3.0114050003050528, 0.5695121518621704),
    (3.5055706057721077, -2.6266538337451224, 0.525719406014519),
)
# a little slower, so that rounding errors above 1 do not grow
POLYNOMIALS = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in COEFFICIENTS]


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring the singular values of each matrix close to 1, computed in `dtype`: (matrices, rows, columns)."""
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT, dtype).mT.contiguous()
    # converted last: most gradients are below 6e-5, where float16 keeps fewer digits, and those below 3e-8
    # would become 0
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp_(min=1e-7)).to(dtype)
    gram = x @ x.mT  # the eigenvalues are s^2
    # Most s are far below 1 now. The largest sum of absolute values in a row is at least the largest s^2, and
    # usually far below 1. Dividing by this bound saves one polynomial. The bound is at least 1 / rows.
    bound = gram.float().abs().sum(2, keepdim=True).amax(1, keepdim=True).clamp_(1e-4, 1)  # (matrices, 1, 1)
    x, gram = x * bound.rsqrt().to(dtype), gram * bound.reciprocal().to(dtype)
    if x.dtype != torch.float32:  # half precision keeps too few digits for products of the polynomials
        for step, (a, b, c) in enumerate(POLYNOMIALS):
            if step > 0:
                gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x
    # the same polynomials, multiplied with each other before they are applied to x: fewer operations for long
    # rows
    factor, product = None, None
    for a, b, c in POLYNOMIALS:
        if factor is not None:
            gram = factor @ gram @ factor
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
    return product @ x
