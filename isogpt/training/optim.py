"""
The optimizers for each layout, and their state by parameter name. No other module knows their groups or
state.
"""

import inspect
import math
import re
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw as update_adamw

from isogpt.launch.together import Gathered
from isogpt.parallel.local_parts import LocalPart, is_split, local, local_part_of, splits_of, whole_tensors
from isogpt.parallel.mesh import Mesh
from isogpt.training.step_numbers import StepNumbers

HIDDEN_MATRIX = re.compile(r"transformer\.h\.\d+\.(attn|mlp|mlp\.experts)\.c_\w+\.weight")


def make_optimizers(  # noqa: PLR0913  (train.py's settings)
    model: nn.Module,
    optimizer: str,
    zero: int,
    weight_decay: float,
    learning_rate: float,
    betas: tuple[float, float],
    muon_lr: float = 0.0,
    embedding_lr: float = 0.0,
    muon_dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
) -> list[torch.optim.Optimizer]:
    """
    Make the model's optimizers.

    AdamW is what `model.configure_optimizers` returns. With optimizer "muon", a Muon takes over the matrices
    of the blocks, and the parameters that stay with AdamW get no weight decay. With zero 1, each rank keeps
    the optimizer state of a share of the parameters, updates these and sends them to the other ranks. Experts
    that are only on some of the ranks get separate optimizers. Every group contains an `lr_scale`, see
    `set_rates`.

    Args:
        muon_lr: Muon's learning rate when AdamW's is `learning_rate`.
        embedding_lr: with Muon, AdamW's learning rate for token embeddings that are not tied to the head (0:
            `learning_rate`).
        muon_dtype: the dtype in which Muon orthogonalizes.
        mesh: the ranks over which parameters and optimizer state are divided. Default: a single process.
    """
    mesh = mesh or Mesh()
    device_type = next(model.parameters()).device.type  # cpu with cpu_offload
    if device_type == "cpu":
        # torch's optimizers import torch.compile when they are created and at their first step, only to
        # exclude themselves. This takes 1 of the 3.4 s to the first step on a CPU, where nothing is compiled.
        for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
            inspect.unwrap(method).__dict__.setdefault("__dynamo_disable", inspect.unwrap(method))
    adamw = model.configure_optimizers(weight_decay, learning_rate, betas, device_type)
    adamw_groups = [
        {k: group[k] for k in ("params", "weight_decay")} | {"lr_scale": 1.0} for group in adamw.param_groups
    ]
    adamw_options = {"lr": learning_rate, "betas": betas, "fused": adamw.param_groups[0]["fused"]}
    made = [(torch.optim.AdamW, adamw_groups, adamw_options)]
    if optimizer == "muon":
        muon_groups = take_matrices(model, adamw_groups, muon_lr / learning_rate)
        if embedding_lr and not model.config.tied and "wte" in model.transformer:
            wte = take(adamw_groups, [model.transformer.wte.weight])
            adamw_groups.append({"params": wte, "lr_scale": embedding_lr / learning_rate})
        for group in adamw_groups:
            group["weight_decay"] = 0.0
        muon_options = {"lr": muon_lr, "weight_decay": weight_decay, "dtype": muon_dtype}
        made.append((Muon, muon_groups, muon_options))
    optimizers = []
    for cls, groups, options in made:
        for are_experts, axes in ((False, ("dp_shard", "ep", "cp")), (True, ("dp_shard", "cp"))):
            own = select(groups, are_experts)
            if not own:
                continue
            if cls is Muon:
                options["group"] = mesh.group(*(axes if zero >= 2 else ()), "tp")
            optimizers.append(make_optimizer(cls, own, options, zero, mesh.group("dp_replicate", *axes)))
    return optimizers


def select(groups: list[dict], are_experts: bool) -> list[dict]:
    """Select from an optimizer's groups the parameters that are, or are not, experts divided over ranks."""
    found = [
        group | {"params": [p for p in group["params"] if is_split(p, "ep") == are_experts]}
        for group in groups
    ]
    return [group for group in found if group["params"]]


def make_optimizer(
    cls: type, groups: list[dict], options: dict, zero: int, replicas: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """Make an optimizer for groups of parameters. With zero 1, the ranks of `replicas` share the state."""
    if zero == 1 and replicas:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # as_bucket_view: a rank sends its share in one piece, not each parameter separately
        return ZeroRedundancyOptimizer(
            groups, cls, process_group=replicas, parameters_as_bucket_view=True, **options
        )
    made = cls(groups, **options)
    if groups[0]["params"][0].device.type == "cpu":
        made.step = partial(torch.no_grad()(inspect.unwrap(cls.step)), made)
    if zero >= 2 and cls is torch.optim.AdamW:
        made.step = partial(step_shards, made)
    return made


@torch.no_grad()
def step_shards(adamw: torch.optim.AdamW) -> None:
    """
    Take AdamW's step for parameters that are DTensors, on this rank's shards. The arithmetic is the same,
    without DTensor's dispatch (a step of 148 small parameters takes 1.5 ms instead of 4 on a CPU, torch
    2.13).
    """
    create_state(adamw)
    amp = {name: getattr(adamw, name, None) for name in ("grad_scale", "found_inf")}  # set by GradScaler.step
    for group in adamw.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        states = [adamw.state[p] for p in params]
        dtensors = (
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
        )
        shards = [[local(t) for t in tensors] for tensors in dtensors]
        settings = {
            name: group[name] for name in ("lr", "weight_decay", "eps", "fused", "amsgrad", "maximize")
        }
        beta1, beta2 = group["betas"]
        update_adamw(*shards, [], [s["step"] for s in states], beta1=beta1, beta2=beta2, **settings, **amp)


def take_matrices(model: nn.Module, adamw_groups: list[dict], lr_scale: float) -> list[dict]:
    """
    Move the matrices of the blocks from AdamW's groups into groups for Muon, one group for each shape.
    Biases, norms, embeddings and the head stay with AdamW. `rows` are the heights of the matrices that are
    stacked in a parameter.
    """
    groups = {}
    for name, p in model.named_parameters():
        if HIDDEN_MATRIX.fullmatch(name):
            shape = matrix_part(p, p).shape
            height = model.config.n_embd if name.endswith("c_proj.weight") else model.config.n_hidden
            rows = (
                model.config.qkv_rows if name.endswith("c_attn.weight") else (height,) * (shape[0] // height)
            )
            groups.setdefault((shape, rows), []).append(p)
    return [
        {"params": take(adamw_groups, params), "rows": rows, "lr_scale": lr_scale}
        for (_, rows), params in groups.items()
    ]


def matrix_part(tensor: Tensor, p: nn.Parameter) -> LocalPart:
    """Return what this rank holds of matrices, each of which expert parallelism leaves whole."""
    return local_part_of(tensor, tuple(split for split in splits_of(p) if split.axis != "ep"))


def take(groups: list[dict], params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Remove parameters from an optimizer's groups; returns them."""
    for group in groups:
        group["params"] = [p for p in group["params"] if all(p is not q for q in params)]
    return params


class Muon(torch.optim.Muon):
    """
    torch.optim.Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), with three differences.

    Matrices that are stacked in a parameter (q, k and v) are orthogonalized separately. Matrices of equal
    shape are orthogonalized together, in `dtype`, since torch's bfloat16 would make the result depend on the
    layout. Matrices whose parts are on the ranks of `group` are gathered first.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(groups, lr, weight_decay)
        self.dtype, self.group = dtype, group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            params, grads, buffers = [], [], []
            self._init_group(group, params, grads, buffers)
            if not params:
                continue
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, buffers, group["momentum"])  # Nesterov momentum
            parts = [matrix_part(u, p) for u, p in zip(updates, params, strict=True)]
            wholes = whole_tensors(parts, self.group, params[0].device)  # (parameters, rows, columns)
            for part in stacked_matrices(wholes, group["rows"]):
                scale = math.sqrt(max(1, part.size(1) / part.size(2)))
                part.copy_(orthogonalize(part, self.dtype)).mul_(scale)
            for part, whole in zip(parts, wholes, strict=True):
                part.put(whole)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])


def stacked_matrices(wholes: Tensor, rows: tuple[int, ...]) -> list[Tensor]:
    """Views (matrices, rows, columns) of parameters in which matrices of these heights are stacked."""
    if len(set(rows)) == 1:
        return [wholes.view(-1, rows[0], wholes.size(-1))]
    return list(wholes.split(rows, dim=1))


# a, b, c of the polynomials a s + b s^3 + c s^5 that are applied in succession to each singular value s. Four
# of these bring s as close to 1 as five of torch.optim.Muon's. From Amsel et al. 2025 (arXiv:2505.16932), for
# values down to 0.001.
COEFFICIENTS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)
# a little slower, so that rounding errors above 1 do not grow
POLYNOMIALS = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in COEFFICIENTS]


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring the singular values of each matrix close to 1, computed in `dtype`: (matrices, rows, columns)."""
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT, dtype).mT
    # converted last: most gradients are below 6e-5, where float16 has fewer digits, and those below 3e-8
    # would become 0
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp_(min=1e-7)).to(dtype)
    if x.dtype != torch.float32:  # half precision has too few digits for products of the polynomials
        for a, b, c in POLYNOMIALS:
            gram = x @ x.mT  # the eigenvalues are s^2
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x
    # the same polynomials, multiplied with each other before they are applied to x: fewer operations for long
    # rows
    gram, factor, product = x @ x.mT, None, None
    for a, b, c in POLYNOMIALS:
        if factor is not None:
            gram = factor @ gram @ factor
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
    return product @ x


def set_rates(optimizers: list[torch.optim.Optimizer], step: int, lr: float, muon_momentum: float) -> None:
    """
    Set each group's learning rate to `lr` times its lr_scale, and Muon's momentum: linear warm-up from 0.85
    to muon_momentum over 300 steps, as nanochat and modded-nanogpt do.
    """
    momentum = 0.85 + min(1.0, step / 300) * (muon_momentum - 0.85)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            if "momentum" in group:
                group["momentum"] = momentum


def step(
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    gathered: Gathered[StepNumbers],
    max_norm: float,
) -> None:
    """
    Clip the gradients and update the parameters, or skip the update if a loss or a gradient is not finite on
    any rank. In both cases, update float16's loss scale. A fused AdamW clips and skips on the device, so that
    a GPU does not wait for the host between the backward pass and the optimizer.

    Args:
        scaler: the loss scaler, whose `unscale_` was called.
        max_norm: maximum norm of the gradient (0: no clipping).
    """
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        # ZeroRedundancyOptimizer's optimizer for this rank's share
        inner = getattr(optimizer, "optim", optimizer)
        # before torch 2.13, fused AdamW ignores grad_scale and found_inf on MPS
        on_device = inner.defaults.get("fused") and params[0].device.type != "mps"
        numbers = gathered.on(params[0].device) if on_device else gathered.read()
        divisor = (numbers.grad_norm + 1e-6) / (max_norm or math.inf)  # as in clip_grad_norm_
        divisor = divisor.clamp(1.0, torch.finfo(torch.float32).max).float()
        if on_device:
            inner.grad_scale, inner.found_inf = divisor, (~numbers.is_finite).float()
            optimizer.step()
        elif numbers.is_finite:
            if divisor > 1:
                torch._foreach_div_([local(p.grad) for p in params if p.grad is not None], divisor.item())
            optimizer.step()
        if scaler.is_enabled():  # the scaler knows only of this rank's gradients
            for overflowed in scaler._found_inf_per_device(optimizer).values():
                # computed on the GPU, also for an optimizer that decides on the CPU: copying would wait for
                # the GPU
                overflowed.copy_(~gathered.on(overflowed.device).is_finite)
    scaler.update()


def kind_of(optimizers: list[torch.optim.Optimizer]) -> str:
    """The setting `optimizer` for which `make_optimizers` made the optimizers."""
    return "muon" if any("momentum" in group for o in optimizers for group in o.param_groups) else "adamw"


def state_by_name(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """
    Return {parameter name: the optimizer's tensors} of what this rank holds: with ZeRO-1 some of the
    parameters, with ZeRO-2 and 3 a shard of each. State that does not exist before the first step is created
    as the optimizer would create it.
    """
    names, found = {p: name for name, p in model.named_parameters()}, {}
    for optimizer in optimizers:
        # ZeroRedundancyOptimizer's optimizer for this rank's share
        inner = getattr(optimizer, "optim", optimizer)
        create_state(inner)
        found |= {names[p]: inner.state[p] for group in inner.param_groups for p in group["params"]}
    return found


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that does not exist before the first step, as the optimizer would create it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                optimizer.state[p] = new_state(p, group)


def new_state(p: Tensor, group: dict) -> dict[str, Tensor]:
    """
    Return an optimizer's state for a parameter before the first step: Muon's, whose groups contain a
    momentum, or AdamW's.
    """
    if "momentum" in group:
        return {"momentum_buffer": torch.zeros_like(p)}
    step = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def saved_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Return the state for ckpt.pt: for AdamW alone as nanoGPT stores it, by number, in two groups; else by
    parameter name.
    """
    state = state_by_name(model, optimizers)  # creates the state before the first step
    if len(optimizers) > 1 or model.config.arch != "gpt2":
        return {"state": state}
    state = optimizers[0].state_dict()
    for group in state["param_groups"]:
        group.pop("lr_scale", None)
    return state


def by_name(weights: dict[str, Tensor], saved: object) -> dict[str, dict]:
    """
    Return the state of `saved_state` by parameter name. It is empty if there is no state, or not AdamW's, as
    in checkpoints of forks. nanoGPT's numbers count the parameters of two or more dimensions first, then the
    rest, both in the order of `weights`.
    """
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(state, dict) or not all(isinstance(moments, dict) for moments in state.values()):
        return {}
    if all(isinstance(key, str) for key in state):
        return state
    if not all({"exp_avg", "exp_avg_sq", "step"} <= moments.keys() for moments in state.values()):
        return {}
    names = sorted((n for n in weights if n != "lm_head.weight"), key=lambda n: weights[n].dim() < 2)
    return {name: state[i] for i, name in enumerate(names) if i in state}
