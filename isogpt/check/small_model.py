"""
A small model with the code of model.py, computed on one process, and by all ranks as a plan divides it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isogpt.check.facts import Fact, crash_of, fact, first_difference
from isogpt.launch.together import gather_number
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.kernels import IGNORE
from isogpt.parallel import parallelize
from isogpt.parallel.data_parallel import reshard, uses_ddp
from isogpt.parallel.float_sums import make_sums
from isogpt.parallel.local_parts import local, local_part_of, splits_of
from isogpt.parallel.mesh import Mesh, stages_per_rank
from isogpt.parallel.pipeline import Pipeline
from isogpt.parallel.plan import LayoutError, Plan
from isogpt.parallel.shares import multiple_up, share_of_plan
from isogpt.training import precision
from isogpt.training.optim import make_optimizers

LAYERS, WIDTH = 12, 64  # more if there are more stages or heads
LONGEST_ON_CPU, LONGEST_ON_GPU = 256, 1024  # tokens of a sequence; 1024 would take a CPU 2 s
ROWS = 2  # sequences of a micro-batch
KINDS = 3  # different micro-batches, which the batch repeats: the cost does not grow with the ranks
# How much numbers may differ, relative to themselves, and gradients, relative to the norm of the whole
# gradient: a parameter's norm is no measure, since the gradient of the keys' bias is nothing but rounding
LIMIT = 1e-5
UPDATE_LIMIT = 1e-2  # relative to the norm of a parameter's update, besides the rounding of the weights
ROUNDING = 1e-6
RATE = 1e-2  # of the compared step: the run's may be too small or too large to see anything


def small_plan(plan: Plan) -> Plan:
    """The plan with a small model of the same kind and a small batch, without what is lossy on purpose."""
    args = plan.model_args
    stages = plan.pp * stages_per_rank(plan.pp_schedule) if plan.pp > 1 else 1
    heads, tp = args["n_head"], plan.tp
    head_size = min(args["n_embd"] // heads, max(4, WIDTH // heads // 2 * 2))
    width = heads * head_size
    parts = tp * (2 * plan.cp if plan.cp > 1 else 1)  # of a sequence
    longest = LONGEST_ON_CPU if plan.device_type == "cpu" else LONGEST_ON_GPU
    small = {
        "n_layer": min(args["n_layer"], max(LAYERS, stages)),
        "n_embd": width,
        # as uneven as the real sizes
        "n_hidden": 2 * width + args["n_hidden"] % tp,
        "vocab_size": min(args["vocab_size"], 16 * tp + 32 + args["vocab_size"] % tp),
        "block_size": min(args["block_size"], longest // parts * parts),
        "dropout": 0.0,
    }
    if args["n_expert"]:
        experts = multiple_up(args["n_expert_active"] + 1, plan.ep)
        small["n_expert"] = min(args["n_expert"], experts)
    data_size = plan.world_size // (plan.pp * plan.cp * plan.tp)
    micro_steps = multiple_up(2, plan.pp)
    return replace(
        plan,
        dtype="float32",
        model_args=args | small,
        batch_size=ROWS,
        micro_batch=ROWS,
        gradient_accumulation_steps=data_size * micro_steps,
        shares="equal",
        grad_sync="auto" if plan.grad_sync == "never" else plan.grad_sync,
        grad_compression="none",
        compile=False,
        cuda_graphs=False,
    )


@dataclass
class Trial:
    """
    A step of a small model.

    Args:
        plan: see `small_plan`.
        draw: seed of the weights and tokens.
        pads: whether ranks of the run read padding rows, which one process does not.
        rows: of a micro-batch on one process, fewer if ranks read fewer than batch_size.
    """

    model_class: Callable[[GPTConfig], nn.Module]
    plan: Plan
    mesh: Mesh
    device: torch.device
    config: dict
    draw: int = 0
    pads: bool = False
    rows: int = ROWS

    def __post_init__(self) -> None:
        self.share = share_of_plan(self.plan, self.mesh)
        self.length = self.plan.model_args["block_size"]
        # the different micro-batches, (ROWS, T) inputs and targets each; some targets do not count
        generator = torch.Generator().manual_seed(self.draw)
        shape = (KINDS, ROWS, self.length + 1)
        tokens = torch.randint(self.plan.model_args["vocab_size"], shape, generator=generator)
        x, y = tokens[..., :-1].clone(), tokens[..., 1:].clone()
        y[torch.rand(y.shape, generator=generator) < 0.1] = IGNORE
        if self.pads:
            x[-1, -1], y[-1, -1] = 0, IGNORE
        self.batches = list(zip(x.to(self.device), y.to(self.device), strict=True))

    def kind(self, sequence: int) -> int:
        """Which of the micro-batches begins at this place of the batch."""
        return sequence // ROWS % KINDS

    def new_model(self) -> nn.Module:
        """
        The whole model, with weights that are all different from 0 and from each other: an initial weight of
        0 would hide what comes before it.
        """
        model = self.model_class(GPTConfig(**self.plan.model_args), self.draw)
        generator = torch.Generator().manual_seed(self.draw)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.add_(noise, alpha=p.size(-1) ** -0.5 if p.dim() > 1 else 0.3)
        model.to(self.device)
        model.tie_weights()
        for block in {*model.transformer.h} if self.plan.pp > 1 else ():
            block.register_forward_hook(self.check_block)
        return model

    def check_block(self, block: nn.Module, inputs: tuple, output: Tensor | tuple[Tensor, Tensor]) -> None:
        """Raise LayoutError if a block returns something that stages of a pipeline do not send."""
        x = output[0] if isinstance(output, tuple) else output
        expected = (self.length, self.plan.model_args["n_embd"])
        if x.shape[1:] != expected:
            raise LayoutError(
                f"pp sends (sequences, tokens, n_embd) from block to block, {expected} of each sequence in a "
                f"small model, but a block of model.py returns {tuple(x.shape[1:])}: set --pp=1"
            )

    def divided_model(
        self, weights: dict[str, Tensor], splits_sequence: bool = True
    ) -> tuple[nn.Module, Pipeline | None]:
        """This rank's parts of the model, as in train.py, with these weights of the whole model."""
        plan, mesh = self.plan, self.mesh
        with torch.device("meta"):
            model = self.model_class(GPTConfig(**plan.model_args))
        splits = parallelize.divide_model(model, plan, mesh, self.device, splits_sequence)
        parallelize.materialize(model, torch.device("cpu") if plan.cpu_offload else self.device, splits)
        for name, p in model.named_parameters():
            if name in weights:
                local_part_of(p.detach(), splits_of(p)).put(weights[name].detach())
        return model, parallelize.make_pipeline(model, mesh, self.device, plan, splits_sequence)

    def step_of_one_process(self, model: nn.Module) -> tuple[float, float]:
        """
        Compute the gradients of this rank's island with one process. Returns the loss of the batch, and the
        norm of the gradient.

        Raises:
            LayoutError: after an edit with which checkpoints, zero 2 and 3, or DDP compute something else.
        """
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        before = {name: tensor.detach().clone() for name, tensor in named.items()}
        island, sequences = self.share.island.places, self.share.sequences
        kinds = {place: self.kind(place) for place in range(0, sequences, ROWS)}
        kinds_of_island = [kind for place, kind in kinds.items() if place in island]
        loss = 0.0
        for kind, (x, y) in enumerate(self.batches):
            precision.seed_micro_batch(self.draw, 0, kind, Mesh())
            if self.pads:
                is_read = (y != IGNORE).any(1)
                x, y = x[is_read], y[is_read]
            for xs, ys in zip(x.split(self.rows), y.split(self.rows), strict=True):
                _, term = model(xs, ys, float(len(island) * self.length))
                (term * kinds_of_island.count(kind)).backward()
                loss += term.item() * [*kinds.values()].count(kind) * len(island) / sequences
        self.check_changes(model, before)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return loss, torch.stack(torch._foreach_norm(grads)).norm().item()

    def check_changes(self, model: nn.Module, before: dict[str, Tensor]) -> None:
        """Raise LayoutError for edits after which a run, zero 2 and 3, or DDP cannot compute any step."""
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise LayoutError(
                    f"the buffer {name} changes in training, but checkpoints contain no buffers: make it a "
                    "parameter with requires_grad_(False)"
                )
        for name, p in model.named_parameters():
            if self.plan.zero >= 2 and not torch.equal(p, before[name]):
                raise LayoutError(
                    f"model.py changes {name} in a forward pass, which is lost with zero 2 and 3, since they "
                    "compute with gathered copies: set --zero=1"
                )
            if uses_ddp(self.plan, self.mesh) and p.requires_grad and p.grad is None:
                raise LayoutError(
                    f"{name} gets no gradient from the loss, but DDP waits for all gradients: use it in each "
                    "forward pass, freeze it with requires_grad_(False), or set --zero=2"
                )

    def step(self, model: nn.Module, pipeline: Pipeline | None) -> tuple[float, float]:
        """The same as all ranks compute it together, with train.py's step (all ranks)."""
        plan, mesh, share = self.plan, self.mesh, self.share
        wrapped = model
        if uses_ddp(plan, mesh):
            wrapped = DistributedDataParallel(
                model, process_group=mesh.replicas.group, gradient_as_bucket_view=True
            )
        scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        gradients = make_sums(wrapped, model, mesh, plan, share, scaler)
        kinds = [self.kind(share.first(micro_step)) for micro_step in range(share.micro_steps)]
        micro_batches = [self.positions_read(self.batches[kind], mesh) for kind in kinds]
        gradients.allocate(*micro_batches[0], nullcontext())
        gradients.start_step()
        if pipeline:
            pipeline.prepare(share, scaler, gradients, no_timer, nullcontext())
            loss_sum = pipeline.step(micro_batches)
        else:
            loss_sum = 0.0
            for micro_step, (x, y) in enumerate(micro_batches):
                precision.seed_micro_batch(self.draw, 0, kinds[micro_step], mesh)
                with gradients.micro_batch(micro_step):
                    _, loss = wrapped(x, y, gradients.loss_divisor)
                    loss.backward()
                loss_sum += gradients.loss_term(loss)
        gradients.finish()
        loss = gather_number(loss_sum * gradients.loss_weight, self.device).mean()
        square = gather_number(sum(gradients.norm_share()), self.device).sum()
        return loss.item(), square.sqrt().item()

    def positions_read(self, batch: tuple[Tensor, Tensor], mesh: Mesh) -> tuple[Tensor, Tensor]:
        """The positions of a micro-batch that a rank reads, (ROWS, T / cp) inputs and targets."""
        positions = mesh.own_positions(self.length)
        x, y = batch
        return (x, y) if positions is None else (x[:, positions], y[:, positions])

    def problem(self) -> str:
        """
        The first difference between the whole model and the divided one; "" if there is none (all ranks).

        Raises:
            LayoutError: one process cannot compute the model, or see `check_changes`.
        """
        try:
            whole = self.new_model()
            weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
            expected = self.facts(whole)
        except LayoutError:
            raise
        except Exception as e:  # whatever an edited model raises, on all ranks
            args = self.plan.model_args
            raise LayoutError(
                f"the small model with which layouts are checked (n_layer {args['n_layer']}, n_embd "
                f"{args['n_embd']}) cannot be computed on one process: {crash_of(e)}. --check_layout=False "
                "trains without this check"
            ) from e
        model, pipeline = self.divided_model(weights)
        return first_difference(expected, self.facts(model, pipeline, is_divided=True))

    def facts(
        self, model: nn.Module, pipeline: Pipeline | None = None, is_divided: bool = False
    ) -> dict[str, Fact]:
        """
        Take a step with a whole model, or a divided one (all ranks). Returns the loss, the gradients and
        their norm, the loss of an evaluation, and the weights that the optimizers' step leaves if the
        gradients are equal: Muon amplifies the rounding of gradients.
        """
        mesh, zero = (self.mesh, self.plan.zero) if is_divided else (Mesh(), 0)
        optimizers = make_optimizers(model, self.config, zero, torch.float32, mesh)
        loss, norm = self.step(model, pipeline) if is_divided else self.step_of_one_process(model)
        params = dict(model.named_parameters())
        facts = {"the loss": fact(loss, LIMIT)}
        for name, p in params.items():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            facts[f"the gradient of {name}"] = Fact(grad.detach(), LIMIT * norm, splits_of(p))
        if self.plan.islands == 1:  # islands have separate gradients
            facts["the gradient's norm"] = fact(norm, LIMIT)
        with torch.no_grad():
            loss = (pipeline or model).eval()(*self.positions_read(self.batches[0], mesh), 1.0)[1]
            reshard(model)
            loss = gather_number(loss, self.device).mean() * mesh.cp
            facts["the loss of an evaluation"] = fact(loss, LIMIT)
            before = {name: local(p).clone() for name, p in params.items()}
            for p in params.values():
                if p.grad is not None:  # equal ones, which need no communication
                    p.grad = p.detach().clone()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = RATE
                optimizer.step()
            for name, p in params.items():
                change, size = (local(p) - before[name]).norm().item(), local(p).norm().item()
                limit = UPDATE_LIMIT * change + ROUNDING * size
                facts[f"{name} after an optimizer's step"] = Fact(p.detach(), limit, splits_of(p))
        return facts


def no_timer(part: str) -> nullcontext:
    """In place of Clock.part, which times a pipeline's stages."""
    return nullcontext()
