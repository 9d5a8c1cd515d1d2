"""
What a small model with the code of model.py computes, as facts that can be compared: on one process, and on
all ranks, as a plan divides it.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isogpt.common.console import error_text
from isogpt.launch.together import gather_number, gather_objects, is_connection_lost
from isogpt.nn.counts import make_model
from isogpt.nn.kernels import IGNORE
from isogpt.parallel import parallelize
from isogpt.parallel.changes import Changes
from isogpt.parallel.data_parallel import reshard, uses_ddp
from isogpt.parallel.gradients import make_sums
from isogpt.parallel.local_parts import Splits, local, local_part_of, splits_of
from isogpt.parallel.mesh import Mesh, stages_per_rank
from isogpt.parallel.pipeline import Pipeline, cause_of
from isogpt.parallel.plan import LayoutError, Plan
from isogpt.parallel.shares import multiple_up, parse_shares, share_of_plan
from isogpt.training import precision
from isogpt.training.optim import make_optimizers

LAYERS, LONG_LAYERS = 12, 2  # more if there are more stages
LENGTH, LONG_ON_CPU, LONG_ON_GPU = 32, 384, 1536  # tokens of a sequence, on each rank of cp
WIDTH, EMBEDDING = 256, 2**23  # features, and numbers of the token embedding, at most
FIRST, BETWEEN, LAST = 16, 16, 64  # token ids of a batch: GPT-2's last, 50256, is the 48th last of 50304
ROWS = 2  # sequences of a micro-batch
KINDS = 3  # different micro-batches, at most, which the batch repeats: the cost does not grow with the ranks
RATE = 1e-2  # of the optimizers' step: the run's may be too small or too large to see anything
# How much numbers may differ, relative to themselves, and gradients, relative to the norm of the whole
# gradient: a parameter's norm is no measure, since the gradient of the keys' bias is nothing but rounding
LIMIT = 1e-5
LOGITS_LIMIT = 1e-4  # relative to their norm
UPDATE_LIMIT = 1e-2  # relative to the norm of a parameter's update, besides the rounding of the weights
ROUNDING = 1e-6


class Fact(NamedTuple):
    """A result: a whole tensor or, where ranks divide the work, this rank's part of it."""

    value: Tensor
    limit: float = 0.0  # the largest norm of the difference that rounding makes
    splits: Splits = ()  # how tensor and expert parallelism have split the value


def fact(value: Tensor | float, relative: float = 0.0) -> Fact:
    """A whole result, which may differ by this fraction of its norm."""
    if not torch.is_tensor(value):
        value = torch.tensor(value, dtype=torch.float64)
    return Fact(value.detach(), relative * value.float().norm().item())


def first_difference(expected: dict[str, Fact], facts: dict[str, Fact]) -> str:
    """
    Compare facts of one process with this rank's (all ranks). Returns the first difference of any rank, in
    the order of the expected facts; "" if there is none.
    """
    problems = [(-1, f"one process has no {name}") for name in facts.keys() - expected.keys()]
    for place, name in enumerate(expected):
        if name in facts and (text := difference(facts[name], expected[name])):
            problems.append((place, f"{name} {text}"))
    gathered = gather_objects(({*facts}, problems))
    lost = expected.keys() - set.union(*(names for names, _ in gathered))
    problems = [problem for _, problems in gathered for problem in problems]
    problems += [([*expected].index(name), f"{name} is on no rank") for name in lost]
    return min(problems)[1] if problems else ""


def difference(result: Fact, whole: Fact) -> str:
    """How far a rank's part is from the same part of a whole result; "" if rounding explains it."""
    squares = torch.zeros(3, dtype=torch.float64)
    part = local_part_of(result.value, result.splits)
    for piece, values in part.cut(whole.value):
        piece, values = piece.cpu(), values.cpu()
        norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (piece - values, piece, values)]
        squares += torch.stack(norms).square()
    error, norm, expected = squares.sqrt().tolist()
    if error <= whole.limit:
        return ""
    if not part.shape:  # a number
        return f"is {norm:.6f} instead of {expected:.6f}"
    return f"differs by {error:.1e} (its norm is {norm:.4e} instead of {expected:.4e})"


def crash_of(error: Exception) -> str:
    """The error that was raised first, and the last line of our code that led to it."""
    error = cause_of(error)
    if is_connection_lost(error):
        reason = "a different rank has failed, or communicates differently"
        error = RuntimeError(reason).with_traceback(error.__traceback__)
    return error_text(error)


def small_plan(plan: Plan, is_long: bool = False) -> Plan:
    """
    The plan with a small model of the same kind and a small batch, without what is lossy on purpose: with the
    real vocabulary and short sequences, or with long sequences in few layers.
    """
    args, tp = plan.model_args, plan.tp
    vocab_size, layers, length = args["vocab_size"], LAYERS, LENGTH
    if is_long:
        vocab_size, layers = min(vocab_size, 16 * tp + 32 + vocab_size % tp), LONG_LAYERS
        length = LONG_ON_CPU if plan.device_type == "cpu" else LONG_ON_GPU
    stages = plan.pp * stages_per_rank(plan.pp_schedule) if plan.pp > 1 else 1
    head_size, queries = args["n_embd"] // args["n_head"], min(args["n_head"] // args["n_kv_head"], 2)
    kv_heads, widest = min(args["n_kv_head"], 2 * tp), min(WIDTH, EMBEDDING // vocab_size)
    if kv_heads * queries * head_size > widest:
        kv_heads = min(kv_heads, tp)
    heads = kv_heads * queries
    width = heads * min(head_size, max(4, widest // heads // 2 * 2))
    parts = tp * (2 * plan.cp if plan.cp > 1 else 1)  # of a sequence
    small = {
        "n_layer": min(args["n_layer"], max(layers, stages)),
        "n_head": heads,
        "n_kv_head": kv_heads,
        "n_embd": width,
        # as uneven as the real sizes
        "n_hidden": 2 * width + args["n_hidden"] % tp,
        "vocab_size": vocab_size,
        "block_size": min(args["block_size"], multiple_up(length * plan.cp, parts)),
        "n_expert": min(args["n_expert"], multiple_up(args["n_expert_active"] + 1, plan.ep)),
        "dropout": 0.0,
    }
    data_size = plan.world_size // (plan.pp * plan.cp * plan.tp)
    return replace(
        plan,
        dtype="float32",
        model_args=args | small,
        batch_size=ROWS,
        micro_batch=ROWS,
        gradient_accumulation_steps=data_size * multiple_up(2, plan.pp),
        shares="equal",
        grad_sync="auto" if plan.grad_sync == "never" else plan.grad_sync,
        grad_compression="none",
        compile=False,
        cuda_graphs=False,
    )


@dataclass
class Trial:
    """
    A small model of the kind of a run's, whole and divided.

    Args:
        run_plan: of the run. If it has no batch_size, the model only generates.
        draw: seed of the weights and tokens.
        is_long: see `small_plan`.
    """

    model_class: type[nn.Module]
    run_plan: Plan
    mesh: Mesh
    device: torch.device
    config: dict
    draw: int = 0
    is_long: bool = False

    def __post_init__(self) -> None:
        self.plan = plan = small_plan(self.run_plan, self.is_long)
        self.share = share_of_plan(plan, self.mesh)
        self.length = plan.model_args["block_size"]
        self.kinds = min(KINDS, plan.gradient_accumulation_steps)  # all of which are read
        self.trains = bool(self.run_plan.batch_size)
        run = self.run_plan if self.trains else plan
        share = share_of_plan(run, self.mesh, parse_shares(run.shares))
        # ranks may read fewer rows than batch_size, and padding rows, which one process does not
        self.rows = ROWS if {*share.rows_of} == {run.batch_size} else 1
        self.pads = share.padding() > 0 and not plan.exact

    def batches(self, mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
        """
        The different micro-batches, inputs and targets of the positions that a rank of a mesh reads, (ROWS, T
        / cp) each. Each kind reads token ids that the others lack, and reads all of them before it repeats
        one. Some targets do not count.
        """
        generator = torch.Generator().manual_seed(self.draw)
        last = self.plan.model_args["vocab_size"] - 1
        between = torch.linspace(0, last, BETWEEN).long()
        ids = torch.cat([torch.arange(FIRST), between, last - torch.arange(LAST)]).clamp(0, last).unique()
        kinds, n = [], ROWS * (self.length + 1)
        for kind in range(self.kinds):
            of_kind = ids[kind % len(ids) :: self.kinds]
            order = torch.rand(n // len(of_kind) + 1, len(of_kind), generator=generator).argsort()
            kinds.append(of_kind[order.flatten()[:n]].view(-1, ROWS).T)
        tokens = torch.stack(kinds)
        x, y = tokens[..., :-1].clone(), tokens[..., 1:].clone()
        y[torch.rand(y.shape, generator=generator) < 0.1] = IGNORE
        if self.pads:
            x[-1, -1], y[-1, -1] = 0, IGNORE
        positions = mesh.positions(self.length)
        x, y = x[..., positions], y[..., positions]
        return list(zip(x.to(self.device), y.to(self.device), strict=True))

    def kind_of(self, sequence: int) -> int:
        """Which of the micro-batches begins at this place of the batch."""
        return sequence // ROWS % self.kinds

    def new_model(self) -> nn.Module:
        """
        The whole model, with weights that are all different from 0 and from each other: an initial weight of
        0 would hide what comes before it.
        """
        model = make_model(self.model_class, self.plan.model_args, "cpu", self.draw)
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
        shape = tuple(x.shape[1:])
        if shape != (self.length, self.plan.model_args["n_embd"]):
            raise LayoutError(f"pp sends (T, n_embd) between blocks, but one returns {shape}: set --pp=1")

    def divided_model(self, weights: dict[str, Tensor]) -> tuple[nn.Module, Pipeline | None]:
        """This rank's parts of the model, with these weights of the whole model, as train.py makes them."""
        plan, mesh, device = self.plan, self.mesh, self.device
        model = make_model(self.model_class, plan.model_args)
        splits = parallelize.divide_model(model, plan, mesh, device, splits_sequence=self.trains)
        parallelize.materialize(model, torch.device("cpu") if plan.cpu_offload else device, splits)
        for name, p in model.named_parameters():
            if name in weights:
                try:
                    local_part_of(p.detach(), splits_of(p)).put(weights[name])
                except RuntimeError as e:
                    raise RuntimeError(f"{name}: {e}") from None
        return model, parallelize.make_pipeline(model, mesh, device, plan, splits_sequence=self.trains)

    def step_of_one_process(self, model: nn.Module) -> tuple[float, float]:
        """
        Compute the gradients of this rank's island with one process. Returns the loss of the batch, and the
        norm of the gradient (all ranks).

        Raises:
            LayoutError: checkpoints, or ranks that read different micro-batches, do not support what an edit
                does.
        """
        changes = Changes(model, is_lost=self.plan.zero >= 2)
        places = self.share.island
        counts = Counter(self.kind_of(place) for place in places[::ROWS])
        tokens = float(len(places) * self.length)
        island_loss = 0.0
        for kind, (x, y) in enumerate(self.batches(Mesh())):
            self.begin_micro_batch(model, kind, Mesh())
            if self.pads:
                is_read = (y != IGNORE).any(1)
                x, y = x[is_read], y[is_read]
            for xs, ys in zip(x.split(self.rows), y.split(self.rows), strict=True):
                loss = counts[kind] * model(xs, ys, tokens)[1]
                loss.backward()
                island_loss += loss.detach()
                changes.add_pass()
        plan = self.plan
        blocks_wait = plan.zero >= 2 or plan.tp * plan.cp * plan.pp > 1
        needs_gradients = plan.exact or uses_ddp(plan, self.mesh)
        changes.check(plan.exact or plan.world_size > 1, needs_gradients, blocks_wait)
        norm = nn.utils.get_total_norm(p.grad.double() for p in model.parameters() if p.grad is not None)
        return gather_number(island_loss, self.device).mean().item(), norm.item()

    def begin_micro_batch(self, model: nn.Module, kind: int, mesh: Mesh) -> None:
        """Set the seed and, except in a pipeline, the training step, which differ between micro-batches."""
        precision.seed_micro_batch(self.draw, 0, kind, mesh)
        model.set_step(kind if self.plan.pp == 1 else 0)

    def step(self, model: nn.Module, pipeline: Pipeline | None) -> tuple[float, float]:
        """The same as `step_of_one_process` on all ranks together, with train.py's step (all ranks)."""
        plan, mesh, share = self.plan, self.mesh, self.share
        wrapped = model
        if uses_ddp(plan, mesh):
            group = mesh.replicas.group
            wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        gradients = make_sums(wrapped, model, mesh, plan, share, scaler)
        batches = self.batches(mesh)
        kinds = [self.kind_of(share.first(number)) for number in range(share.micro_steps)]
        micro_batches = [batches[kind] for kind in kinds]
        gradients.allocate(*micro_batches[0], nullcontext())
        gradients.start_step()
        if pipeline:
            pipeline.prepare(share, scaler, gradients, nullcontext)
            loss_sum = pipeline.step(micro_batches)
        else:
            loss_sum = 0.0
            for number, (x, y) in enumerate(micro_batches):
                self.begin_micro_batch(model, kinds[number], mesh)
                with gradients.micro_batch(is_last=number == share.micro_steps - 1):
                    _, loss = wrapped(x, y, gradients.loss_divisor)
                    loss.backward()
                loss_sum += gradients.loss_term(loss)
        gradients.finish()
        loss = gather_number(gradients.mean_loss(loss_sum), self.device).mean()
        square = gather_number(sum(gradients.norm_share()), self.device).sum()
        return loss.item(), square.sqrt().item()

    def facts(
        self, model: nn.Module, pipeline: Pipeline | None = None, is_divided: bool = False
    ) -> dict[str, Fact]:
        """
        What a whole or a divided model computes (all ranks): the logits if it only generates. Else the loss,
        the gradients and their norm, the loss of an evaluation, and the weights after a step with gradients
        that are equal, since Muon would amplify their rounding.
        """
        mesh, zero = (self.mesh, self.plan.zero) if is_divided else (Mesh(), 0)
        called = pipeline or model
        x, y = self.batches(mesh)[0]
        if not self.trains:
            with torch.no_grad():
                logits, _ = called.eval()(x)
            return {"the tensor of logits": fact(logits, LOGITS_LIMIT)}
        optimizers = make_optimizers(model, self.config, zero, torch.float32, mesh)
        loss, norm = self.step(model, pipeline) if is_divided else self.step_of_one_process(model)
        params = dict(model.named_parameters())
        facts = {"the loss": fact(loss, LIMIT)}
        for name, p in params.items():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            facts[f"the gradient of {name}"] = Fact(grad.detach(), LIMIT * norm, splits_of(p))
        if self.plan.islands == 1:  # islands have separate gradients
            facts["the gradient's norm"] = fact(norm, LIMIT)
        model.set_step(self.config["max_iters"])  # schedules have ended
        with torch.no_grad():
            _, loss = called.eval()(x, y, 1.0)
        reshard(model)
        loss = gather_number(loss, self.device).mean() * mesh.cp
        facts["the loss of an evaluation"] = fact(loss, LIMIT)
        before = {name: local(p.detach()).clone() for name, p in params.items()}
        for p in params.values():
            if p.grad is not None:
                p.grad = p.detach().clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE
            optimizer.step()
        for name, p in params.items():
            part = local(p.detach())
            change, size = (part - before[name]).norm().item(), part.norm().item()
            limit = UPDATE_LIMIT * change + ROUNDING * size
            facts[f"{name} after an optimizer's step"] = Fact(p.detach(), limit, splits_of(p))
        return facts

    def problem(self) -> str:
        """
        The first difference between the whole model and the divided one; "" if there is none (all ranks).

        Raises:
            LayoutError: one process cannot compute the model, or see `step_of_one_process` and `check_block`.
        """
        whole = self.new_model()
        try:
            weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
            expected = self.facts(whole)
        except LayoutError:
            raise
        except Exception as e:  # whatever an edited model raises, on all ranks
            text = f"a small model cannot be computed on one process: {crash_of(e)}"
            raise LayoutError(f"{text}. --check_layout=False trains without this check") from e
        model, pipeline = self.divided_model(weights)
        return first_difference(expected, self.facts(model, pipeline, is_divided=True))
