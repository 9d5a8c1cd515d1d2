"""
Prove a layout before a run trains with it: a small model, with the code of model.py, computes on all ranks
together what it computes on one process.

The ways of dividing the work rely on the model: only attention mixes positions, nothing but the residual
stream goes from block to block, and certain matrices can be divided. After an edit of model.py, this may no
longer be true, and nothing else would say so.
"""

import gc
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isogpt.launch.together import gather_number, gather_objects, is_connection_lost
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.kernels import IGNORE
from isogpt.parallel import parallelize
from isogpt.parallel.data_parallel import reshard, shard, uses_ddp
from isogpt.parallel.gradients import make_sums
from isogpt.parallel.local_parts import LocalPart, local_part_of, splits_of
from isogpt.parallel.mesh import Mesh, connect_mesh, stages_per_rank
from isogpt.parallel.pipeline import Pipeline, cause_of
from isogpt.parallel.plan import LayoutError, Plan
from isogpt.parallel.recompute import recompute
from isogpt.parallel.shares import multiple_up, parse_shares, share_of_plan
from isogpt.training import precision
from isogpt.training.optim import make_optimizers

LAYERS, WIDTH = 12, 64  # of the small model; more if there are more stages or heads
LONGEST_ON_CPU, LONGEST_ON_GPU = 256, 1024  # tokens of a sequence; 1024 would take a CPU 2 s
ROWS = 2  # sequences of a micro-batch
KINDS = 3  # different micro-batches, which the batch repeats: the cost does not grow with the ranks
# how much a parameter's gradient may differ, relative to the norm of the whole gradient: the parameter's norm
# is no measure, since the gradient of the keys' bias is nothing but rounding
GRADIENT_LIMIT = 1e-5
NUMBER_LIMIT = 1e-5  # of the loss and of the gradient's norm, relative
LOGITS_LIMIT = 1e-4  # relative to their norm
# relative to the norm of a parameter's update, besides the rounding of the weights
UPDATE_LIMIT = 1e-2
RATE = 1e-2  # of the compared step: the run's may be too small or too large to see anything
ROUNDING = 1e-6


@dataclass(frozen=True)
class Difference:
    """Where this rank and one process differ: at `place` in the order of the model's parameters."""

    place: int
    text: str


def prove_layout(
    model_class: Callable[[GPTConfig], nn.Module], plan: Plan, mesh: Mesh, device: torch.device, config: dict
) -> list[str]:
    """
    Compare one step of a small model on all ranks with the step of one process, in float32: the loss, each
    gradient and its norm, the loss of an evaluation, and each weight after the step (all ranks). Returns a
    line for the user; none if nothing is divided, and with check_layout=False.

    Args:
        model_class: GPT, from the model.py of the run.
        mesh: of the plan, connected.
        config: train.py's settings.

    Raises:
        LayoutError: on every rank: the results differ, the small model cannot be computed, or a buffer
            changes, although checkpoints contain no buffers.
    """
    is_divided = plan.world_size > 1 or plan.zero >= 2 or plan.exact
    is_divided = is_divided or plan.activation_checkpointing != "none"
    if not config["check_layout"]:
        return []
    try:
        # not on the meta device, so that GPT refuses what its __init__ writes in vain
        small_model = model_class(GPTConfig(**small_plan(plan).model_args))
    except ValueError as e:
        raise LayoutError(str(e)) from e
    if not is_divided and not [*small_model.buffers()]:
        return []
    try:
        problem = first_problem(model_class, plan, mesh, device, config)
    except LayoutError:
        raise
    except Exception as e:  # whatever an edited model raises
        raise LayoutError(crash_line(plan, e)) from e
    if not problem:
        args = small_plan(plan).model_args
        line = (
            f"layout:  {layout_name(plan)} computes the same as one process: checked with a small model "
            f"(n_layer {args['n_layer']}, block_size {args['block_size']})"
        )
        return [line] if is_divided else []
    others = {"dp": UNSHARDED, "zero=3": UNSHARDED | {"zero": 3}}
    same = []
    for name, changes in others.items():
        other = replace(plan, **changes)
        if layout_name(other) != layout_name(plan):
            other_mesh = connect_mesh(mesh.rank, other, mesh.timeout_s)
            with suppress(Exception):  # it cannot be computed
                if not first_problem(model_class, other, other_mesh, device, config):
                    same.append(name)
    advice = f"; {' and '.join(same)} compute the same" if same else ""
    raise LayoutError(
        f"{layout_name(plan)} does not compute what one process computes with this model.py: {problem}"
        f"{advice}. See docs/changing-the-model.md; --check_layout=False trains without this check"
    )


def crash_line(plan: Plan, error: Exception) -> str:
    """What to say about a layout that cannot be computed."""
    advice = "To see which layouts can, run: python bench.py --check"
    if plan.tp > 1:
        advice = f"ATTACHMENTS in isogpt/parallel/tensor.py says which matrices tp divides. {advice}"
    return (
        f"{layout_name(plan)} cannot compute what one process computes with this model.py: {crash_of(error)}"
        f". {advice}"
    )


UNSHARDED = {"zero": 0, "dp_replicate": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "islands": 1, "exact": False}
UNSHARDED |= {"cpu_offload": False, "grad_sync": "auto"}


def small_model(model_class: Callable[[GPTConfig], nn.Module], plan: Plan, device: torch.device) -> nn.Module:
    """A small model of the plan's kind, whole, with weights that are all different from 0."""
    return Trial(model_class, small_plan(plan), Mesh(), device, {}, draw=0).new_model()


@torch.no_grad()
def problem_of_sampling(
    model_class: Callable[[GPTConfig], nn.Module], plan: Plan, mesh: Mesh, device: torch.device
) -> str:
    """
    Compare the logits of a small model that tp and pp divide for sampling with those of one process (all
    ranks). Returns a sentence for the user; "" if they are equal.

    Raises:
        LayoutError: the logits cannot be computed. With pp, perhaps not on every rank.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    trial = Trial(model_class, small_plan(plan), mesh, device, {}, draw=0)
    try:
        whole = trial.new_model().eval()
        if plan.pp > 1:
            trial.check_what_blocks_return(whole, trial.micro_batches())
        model, pipeline = trial.divided_model(whole, splits_sequence=False)
        model.eval()
        tokens, _ = trial.micro_batches()[0]  # (ROWS, T)
        expected, logits = whole(tokens)[0], (pipeline or model)(tokens)[0]
    except LayoutError:
        raise
    except Exception as e:  # whatever an edited model raises
        raise LayoutError(f"{crash_line(plan, e)}, or set --tp=1 --pp=1") from e
    torch.set_float32_matmul_precision(before)
    error = ((logits - expected).norm() / expected.norm()).item()
    if not first_of_ranks(None if error <= LOGITS_LIMIT else Difference(0, "logits")):
        return ""
    return (
        f"{layout_name(plan)} does not compute the logits of one process with this model.py: they differ by "
        f"{error:.1e} of their norm: set --tp=1 --pp=1"
    )


def layout_name(plan: Plan) -> str:
    """The settings that divide the work, as they are typed."""
    names = ("islands", "pp", "dp_replicate", "ep", "cp", "tp")
    degrees = [f"{name}={getattr(plan, name)}" for name in names if getattr(plan, name) > 1]
    degrees += [f"zero={plan.zero}"] if plan.zero else []
    degrees += [f"pp_schedule={plan.pp_schedule}"] if plan.pp > 1 and plan.pp_schedule != "1f1b" else []
    degrees += ["exact"] if plan.exact else []
    degrees += [f"dp on {plan.world_size} processes"] if plan.world_size > 1 and not degrees else []
    mode = plan.activation_checkpointing
    return " ".join(degrees + ([f"activation_checkpointing={mode}"] if mode != "none" else []))


def crash_of(error: Exception) -> str:
    """The error that was raised first, and the last line of our code that led to it."""
    error = cause_of(error)
    root = Path(__file__).resolve().parents[2]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(root)]
    last = frames[-1] if frames else None
    place = f" ({Path(last.filename).relative_to(root)}, line {last.lineno})" if last else ""
    reason = " ".join(str(error).split())[:300]
    if is_connection_lost(error):
        reason = "a different rank has failed, or communicates differently"
    return f"{type(error).__name__}: {reason}".removesuffix(": ") + place


def first_problem(
    model_class: Callable[[GPTConfig], nn.Module], plan: Plan, mesh: Mesh, device: torch.device, config: dict
) -> str:
    """
    Return the first difference of any rank; "" if there is none (all ranks). Since rounding can flip a token
    from one expert to another, there must be a difference with a second draw of weights and tokens, too.
    """
    precision.set_numerics(device, "float32", deterministic=False)  # without TF32
    problem = ""
    for draw in range(2):
        share = share_of_plan(plan, mesh, parse_shares(plan.shares))
        pads = not plan.exact and share.padding() > 0
        rows = 1 if {*share.rows_of} != {plan.batch_size} else ROWS
        trial = Trial(model_class, small_plan(plan), mesh, device, config, draw, pads, rows)
        problem = trial.problem()
        gc.collect()  # what the small model has allocated; its hooks refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if not problem:
            return ""
    return problem


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
    """A step of a small model, whole and divided."""

    model_class: Callable[[GPTConfig], nn.Module]
    plan: Plan  # see small_plan
    mesh: Mesh
    device: torch.device
    config: dict
    draw: int  # seed of the weights and tokens
    pads: bool = False  # whether ranks of the run read padding rows, which one process does not
    rows: int = ROWS  # of a micro-batch on one process: fewer if ranks read fewer than batch_size

    def __post_init__(self) -> None:
        self.share = share_of_plan(self.plan, self.mesh)
        self.length = self.plan.model_args["block_size"]
        # DDP waits for all gradients, and exact takes those that are missing for 0
        self.needs_gradients = self.plan.zero < 2 and self.plan.pp == 1 and self.mesh.replicas.size > 1

    def problem(self) -> str:
        """Return the first difference of any rank; "" if there is none (all ranks)."""
        batches = self.micro_batches()
        try:
            whole = self.new_model()
            buffers = {name: buffer.clone() for name, buffer in whole.named_buffers()}
            weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
            loss = self.whole_step(whole, batches)
        except Exception as e:  # whatever an edited model raises, on all ranks
            args = self.plan.model_args
            raise LayoutError(
                f"the small model with which layouts are checked (n_layer {args['n_layer']}, n_embd "
                f"{args['n_embd']}) cannot be computed on one process: {crash_of(e)}. --check_layout=False "
                "trains without this check"
            ) from e
        for name, buffer in whole.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                raise LayoutError(
                    f"the buffer {name} changes in training, but checkpoints contain no buffers: make it a "
                    "parameter with requires_grad_(False)"
                )
        self.check_weights_and_gradients(whole, weights)
        if self.plan.pp > 1:
            self.check_what_blocks_return(whole, batches)
        model, pipeline = self.divided_model(whole)
        try:
            optimizers = make_optimizers(model, self.config, self.plan.zero, torch.float32, self.mesh)
        except ValueError as e:  # on all ranks
            raise LayoutError(str(e)) from e
        divided_loss, norm = self.divided_step(model, pipeline, batches)
        # all ranks go on or stop together, since the next comparison may communicate
        return (
            first_of_ranks(difference_of("the loss", loss.item(), divided_loss))
            or first_of_ranks(self.difference_of_names(whole, model))
            or first_of_ranks(self.difference_of_gradients(whole, model))
            or first_of_ranks(self.difference_of_norm(whole, norm))
            or first_of_ranks(self.difference_of_evaluation(whole, pipeline or model, batches))
            or first_of_ranks(self.difference_of_updates(whole, model, optimizers))
        )

    def check_weights_and_gradients(self, whole: nn.Module, before: dict[str, Tensor]) -> None:
        """Raise LayoutError for edits after which zero 2 and 3, or DDP, cannot compute any step."""
        for name, p in whole.named_parameters():
            if self.plan.zero >= 2 and not torch.equal(p, before[name]):
                raise LayoutError(
                    f"model.py changes {name} in a forward pass, which is lost with zero 2 and 3, since they "
                    "compute with gathered copies: set --zero=1"
                )
            if self.needs_gradients and p.requires_grad and p.grad is None:
                raise LayoutError(
                    f"{name} gets no gradient from the loss, but DDP waits for all gradients: use it in each "
                    "forward pass, freeze it with requires_grad_(False), or set --zero=2"
                )

    @torch.no_grad()
    def check_what_blocks_return(self, whole: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Raise LayoutError if a block returns something that stages of a pipeline do not send."""
        x, _ = batches[0]
        expected = (*x.shape, self.plan.model_args["n_embd"])

        def check(block: nn.Module, inputs: tuple, output: Tensor | tuple[Tensor, Tensor]) -> None:
            shape = tuple((output[0] if isinstance(output, tuple) else output).shape)
            if shape != expected:
                raise LayoutError(
                    f"pp sends (sequences, tokens, n_embd) from block to block, {expected} in a small model, "
                    f"but a block of model.py returns {shape}: set --pp=1"
                )

        hooks = [block.register_forward_hook(check) for block in {*whole.transformer.h}]
        whole(x)
        for hook in hooks:
            hook.remove()

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
        return model

    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """The different micro-batches, (ROWS, T) inputs and targets each. Some targets do not count."""
        generator = torch.Generator().manual_seed(self.draw)
        shape = (KINDS, ROWS, self.length + 1)
        tokens = torch.randint(self.plan.model_args["vocab_size"], shape, generator=generator)
        x, y = tokens[..., :-1].clone(), tokens[..., 1:].clone()
        y[torch.rand(y.shape, generator=generator) < 0.1] = IGNORE
        if self.pads:
            x[-1, -1], y[-1, -1] = 0, IGNORE
        return list(zip(x.to(self.device), y.to(self.device), strict=True))

    def kind(self, sequence: int) -> int:
        """Which of the micro-batches begins at this place of the batch."""
        return sequence // ROWS % KINDS

    def whole_step(self, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """
        Return the loss of the batch, and leave the gradients of this rank's island, as one process would
        compute them with the same micro-batches.
        """
        places = range(0, self.share.sequences, ROWS)
        island = self.share.island
        total = torch.zeros((), device=self.device)
        for kind, (x, y) in enumerate(batches):
            precision.seed_micro_batch(self.draw, 0, kind, Mesh())
            count = sum(self.kind(place) == kind for place in places)
            island_count = sum(self.kind(place) == kind for place in places if place in island)
            if self.pads:
                is_read = (y != IGNORE).any(1)
                x, y = x[is_read], y[is_read]
            for xs, ys in zip(x.split(self.rows), y.split(self.rows), strict=True):
                _, loss = model(xs, ys, float(len(island) * self.length))
                (island_count * loss).backward()
                total += count * loss.detach() * len(island) / self.share.sequences
        return total

    def divided_model(
        self, whole: nn.Module, splits_sequence: bool = True
    ) -> tuple[nn.Module, Pipeline | None]:
        """What train.py makes of the same model: this rank's parts, with the weights of the whole model."""
        plan, mesh = self.plan, self.mesh
        with torch.device("meta"):
            model = self.model_class(GPTConfig(**plan.model_args))
        splits = parallelize.split_model(model, mesh, plan.pp_schedule, self.device, splits_sequence)
        recompute(model, plan.activation_checkpointing)
        if plan.zero >= 2:
            shard(model, mesh, self.device, plan)
        parallelize.materialize(model, torch.device("cpu") if plan.cpu_offload else self.device, splits)
        weights = dict(whole.named_parameters())
        for name, p in model.named_parameters():
            if name in weights:
                try:
                    part_of(p, p).put(weights[name].detach())
                except RuntimeError as e:
                    raise RuntimeError(f"{name}: {e}") from None
        return model, parallelize.make_pipeline(model, mesh, self.device, plan, splits_sequence)

    def divided_step(
        self, model: nn.Module, pipeline: Pipeline | None, batches: list[tuple[Tensor, Tensor]]
    ) -> tuple[float, float]:
        """
        Return the loss of the batch and the gradient's norm, and leave this rank's gradients, as train.py's
        step does (all ranks).
        """
        plan, mesh, share = self.plan, self.mesh, self.share
        wrapped = model
        if uses_ddp(plan, mesh):
            wrapped = DistributedDataParallel(
                model, process_group=mesh.replicas.group, gradient_as_bucket_view=True
            )
        scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        gradients = make_sums(wrapped, model, mesh, plan, share, scaler)
        kinds = [self.kind(share.first(micro_step)) for micro_step in range(share.micro_steps)]
        micro_batches = [self.own_positions(batches[kind]) for kind in kinds]
        if pipeline:
            pipeline.prepare(share, scaler, gradients, no_timer)
        gradients.allocate(*micro_batches[0], nullcontext())
        gradients.start_step()
        if pipeline:
            loss_sum = pipeline.step(micro_batches)
        else:
            loss_sum = 0.0
            for micro_step, (x, y) in enumerate(micro_batches):
                precision.seed_micro_batch(self.draw, 0, kinds[micro_step], mesh)
                with gradients.micro_batch(is_last=micro_step == share.micro_steps - 1):
                    _, loss = wrapped(x, y, gradients.loss_divisor)
                    loss.backward()
                loss_sum += gradients.loss_term(loss)
        gradients.finish()
        loss = gather_number(gradients.mean_loss(loss_sum), self.device).mean()
        square = gather_number(sum(gradients.norm_share()), self.device).sum()
        return loss.item(), square.sqrt().item()

    def own_positions(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The positions of a micro-batch that this rank reads, (ROWS, T / cp) inputs and targets."""
        positions = self.mesh.positions(self.length)
        x, y = batch
        return (x, y) if positions is None else (x[:, positions], y[:, positions])

    def difference_of_norm(self, whole: nn.Module, norm: float) -> Difference | None:
        """Whether the norm by which the gradient is clipped differs. Islands have separate gradients."""
        return None if self.mesh.islands > 1 else difference_of("the gradient's norm", norm_of(whole), norm)

    @torch.no_grad()
    def difference_of_evaluation(
        self, whole: nn.Module, model: nn.Module, batches: list[tuple[Tensor, Tensor]]
    ) -> Difference | None:
        """Whether the loss of a micro-batch differs in an evaluation (all ranks)."""
        whole.eval()
        model.eval()
        expected = whole(*batches[0], 1.0)[1].item()
        losses = gather_number(model(*self.own_positions(batches[0]), 1.0)[1], self.device)
        reshard(model)
        # the readers have read the same, and so have the ranks that know the loss of the same tokens
        copies = self.mesh.readers.size * self.mesh.same_tokens.size
        return difference_of("the loss of an evaluation", expected, losses.sum().item() / copies)

    def difference_of_names(self, whole: nn.Module, model: nn.Module) -> Difference | None:
        """Whether a parameter is on no rank, or a rank holds one that is not the model's (all ranks)."""
        names = [name for name, _ in whole.named_parameters()]
        held = [name for name, _ in model.named_parameters()]
        is_held = torch.tensor([float(name in held) for name in names], device=self.device)
        if dist.is_initialized():
            dist.all_reduce(is_held, dist.ReduceOp.MAX)
        missing = [name for name, count in zip(names, is_held.tolist(), strict=True) if not count]
        unknown = [name for name in held if name not in names]
        if missing:
            return Difference(0, f"no rank holds {missing[0]}")
        if unknown:
            return Difference(0, f"{unknown[0]}, which is shared, is a separate parameter here")
        return None

    def difference_of_gradients(self, whole: nn.Module, model: nn.Module) -> Difference | None:
        """Whether a gradient differs in this rank's part."""
        grads = {name: p.grad for name, p in whole.named_parameters()}
        norm = norm_of(whole)
        for place, (name, p) in enumerate(model.named_parameters()):
            if (p.grad is None) != (grads[name] is None):
                with_gradient, without = "one process", "this layout"
                if grads[name] is None:
                    with_gradient, without = without, with_gradient
                return Difference(place, f"{name} gets a gradient on {with_gradient}, but none on {without}")
            if p.grad is None:
                continue
            error, whole_norm, part_norm = distance(part_of(p.grad, p), grads[name])
            if not error <= GRADIENT_LIMIT * norm:
                return Difference(
                    place,
                    f"the gradient of {name} differs by {error / norm:.1e} of the whole gradient's norm "
                    f"(its norm is {part_norm:.4e} instead of {whole_norm:.4e})",
                )
        return None

    def difference_of_updates(
        self, whole: nn.Module, model: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> Difference | None:
        """
        Whether a weight differs after the optimizers' step, if both get the same gradients (all ranks).
        """
        before = {name: p.detach().clone() for name, p in whole.named_parameters()}
        grads = {name: p.grad for name, p in whole.named_parameters()}
        for name, p in model.named_parameters():
            if p.grad is not None:
                part_of(p.grad, p).put(grads[name])
        for optimizer in make_optimizers(whole, self.config) + optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE
            optimizer.step()
        after = {name: p.detach() for name, p in whole.named_parameters()}
        for place, (name, p) in enumerate(model.named_parameters()):
            error, *_ = distance(part_of(p, p), after[name])
            change = (after[name] - before[name]).norm().item()
            if not error <= UPDATE_LIMIT * change + ROUNDING * after[name].norm().item():
                return Difference(
                    place,
                    f"with equal gradients, the optimizer's change of {name}, {change:.2e} on one process, "
                    f"differs by {error:.2e}",
                )
        return None


def first_of_ranks(difference: Difference | None) -> str:
    """The first of the ranks' differences; "" if there is none (all ranks)."""
    differences = [other for other in gather_objects(difference) if other]
    return min(differences, key=lambda other: other.place).text if differences else ""


def difference_of(name: str, whole: float, divided: float) -> Difference | None:
    """Whether a number, which is equal on all ranks, differs from that of one process."""
    if abs(divided - whole) <= NUMBER_LIMIT * abs(whole):
        return None
    return Difference(0, f"{name} is {divided:.6f} instead of {whole:.6f}")


def norm_of(model: nn.Module) -> float:
    """The norm of a whole model's gradient."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.stack(torch._foreach_norm(grads)).norm().item()


def part_of(tensor: Tensor, p: nn.Parameter) -> LocalPart:
    """This rank's part of a parameter or of its gradient."""
    return local_part_of(tensor.detach(), splits_of(p))


def distance(part: LocalPart, whole: Tensor) -> tuple[float, float, float]:
    """The norms of (a part minus the same part of the whole tensor, that part of the tensor, the part)."""
    squares = torch.zeros(3, dtype=torch.float64)
    for piece, values in part.cut(whole.detach()):
        piece, values = piece.double().cpu(), values.double().cpu()
        squares += torch.stack([t.square().sum() for t in (piece - values, values, piece)])
    return tuple(squares.sqrt().tolist())


def no_timer(part: str) -> nullcontext:
    """In place of Clock.part, which times a pipeline's stages."""
    return nullcontext()
