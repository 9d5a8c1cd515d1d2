"""
Faults in the ways of dividing the work, each as a replacement of text in a function: a forgotten reduction, a
wrong slice, a wrong divisor. isogpt/check/layout.py must see each of them.
"""

import importlib
import inspect
import sys
import textwrap
from contextlib import contextmanager

DATA, TENSOR = "isogpt.parallel.data_parallel", "isogpt.parallel.tensor"
SUMS, SHARES, PARTS = "isogpt.parallel.gradients", "isogpt.parallel.shares", "isogpt.parallel.local_parts"
CONTEXT, SEQUENCES = "isogpt.parallel.context", "isogpt.parallel.sequence_collectives"
PIPELINE, EXPERT = "isogpt.parallel.pipeline", "isogpt.parallel.expert"
EXACT, MESH = "isogpt.parallel.integer_sums", "isogpt.parallel.mesh"
ZERO1 = "torch.distributed.optim.zero_redundancy_optimizer"

NOT_REDUCED = (SUMS, "FloatSums.micro_batch", "is_last and self.plan", "False and self.plan")
DIVISOR = (SUMS, "FloatSums.__post_init__", "tokens / self.mesh.loss.size", "tokens")
SAME_ROWS = (SHARES, "Share.first", " + self.rows_before", "")
SHARD = "fully_shard(block, mp_policy=policy, **of_blocks)"
NOT_SCATTERED = (DATA, "shard", SHARD, f"{SHARD}.set_requires_gradient_sync(False)")
WRONG_ROWS = (
    PARTS,
    "local_part_of",
    "_, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)",
    "pass",
)

SCALED = (PIPELINE, "Pipeline.prepare", "scale_grads=False", "scale_grads=True")
PIPELINE_LOSS = (PIPELINE, "Pipeline.step", " * self.mesh.pp", "")

# way -> {what is broken: (module, function, text, its replacement)}
BREAKS = {
    "ddp": {"not reduced": NOT_REDUCED, "divisor": DIVISOR, "all ranks read the same": SAME_ROWS},
    "zero 1": {
        "not reduced": NOT_REDUCED,
        "divisor": DIVISOR,
        "weights not sent": (ZERO1, "ZeroRedundancyOptimizer.step", "self._sync_params()", "pass"),
    },
    "zero 2": {"not scattered": NOT_SCATTERED, "divisor": DIVISOR, "wrong rows": WRONG_ROWS},
    "zero 3": {"not scattered": NOT_SCATTERED, "divisor": DIVISOR, "wrong rows": WRONG_ROWS},
    "tp 2": {
        "norms not reduced": (SUMS, "FloatSums.finish", "if mesh.tp > 1:", "if False:"),
        "q, k, v mixed": (
            "isogpt.parallel.attach",
            "divide_parameters",
            "stacked * (n // sum(stacked))",
            "(n,)",
        ),
        "norm": (SUMS, "FloatSums.norm_share", ".sum() / n", ".sum()"),
        "bias twice": (
            TENSOR,
            "RowParallelLinear.forward",
            "F.linear(x, self.weight)",
            "F.linear(x, self.weight, self.bias)",
        ),
        "vocabulary not reduced": (
            TENSOR,
            "vocabulary_parallel_loss",
            'if op == "max" else dist.ReduceOp.SUM',
            "",
        ),
    },
    "cp 2": {
        "keys' gradient not reduced": (
            SEQUENCES,
            "Gather.backward",
            "scattered(grad, ctx.group)",
            "grad.chunk(2, 1)[dist.get_rank(ctx.group)]",
        ),
        "order of the chunks": (CONTEXT, "parallelize_context", ".argsort()", ".sort()[0]"),
        "sees the next position": (CONTEXT, "attend_chunk", "tril(S - T)", "tril(S - T + 1)"),
        "divisor": DIVISOR,
    },
    "pp 2, 1f1b": {
        "tied head not reduced": (SUMS, "FloatSums.finish", "if tied is not None and", "if False and"),
        "divided by the micro-batches": SCALED,
        "loss": PIPELINE_LOSS,
        "evaluation": (PIPELINE, "Pipeline.forward", "loss.float() * self.mesh.pp", "loss.float()"),
        "a block left out": (
            PIPELINE,
            "split_layers",
            "runs = cut_evenly(costs, n)",
            "runs = [run[:-1] or run for run in cut_evenly(costs, n)]",
        ),
    },
    "pp 2, zbv": {
        "tied head added twice": (
            SUMS,
            "FloatSums.finish",
            "params = [",
            "head = self.raw_model.lm_head\n    head and head.weight.grad.mul_(2)\n    params = [",
        ),
        "divided by the micro-batches": SCALED,
        "loss": PIPELINE_LOSS,
    },
    "ep 2": {
        "divisor": (
            SUMS,
            "FloatSums.finish",
            "torch._foreach_div_([local(p.grad) for p in experts], mesh.ep)",
            "pass",
        ),
        "rows in another order": (EXPERT, "exchange_tokens", "place = order.argsort()", "place = order"),
        "rows for other experts": (EXPERT, "exchange_tokens", ".repeat(ranks)", ".repeat_interleave(ranks)"),
    },
    "islands 2": {
        "gradients averaged": (
            MESH,
            "Mesh.__post_init__",
            'self.loss = Role(self, ("dp_replicate",',
            'self.loss = Role(self, ("islands", "dp_replicate",',
        ),
        "divisor": (
            SUMS,
            "FloatSums.__post_init__",
            "tokens = self.share.island_sequences",
            "tokens = plan.sequences",
        ),
        "loss": (SUMS, "FloatSums.mean_loss", " * self.mesh.islands", ""),
    },
    "exact": {
        "first micro-batch twice": (EXACT, "ExactSums.add_gradients", "p.grad = None", "pass"),
        "divisor": (EXACT, "ExactSums.__post_init__", "float(plan.sequences", "float(2 * plan.sequences"),
        "maximum": (EXACT, "ExactSums.finish", "(self.total, ", "(self.total, dist.ReduceOp.MAX, "),
    },
    "exact, zero 3": {
        "earlier micro-batches forgotten": (
            EXACT,
            "IntegerReduceScatter.__call__",
            ".add_(shard)",
            ".copy_(shard)",
        ),
        "divisor": (EXACT, "ExactSums.__post_init__", "float(plan.sequences", "float(2 * plan.sequences"),
        "wrong rows": WRONG_ROWS,
    },
    "recompute full": {
        "input changed": (
            "isogpt.parallel.recompute",
            "recompute",
            "checkpoint(compute, *args,",
            "checkpoint(compute, args[0] * 1.01, *args[1:],",
        )
    },
}


@contextmanager
def broken(module_name, name, old, new):
    """In the block, a function contains the replacement, in its module and wherever it was imported."""
    module = importlib.import_module(module_name)
    owner, _, last = name.rpartition(".")
    if last == "fget":  # a property
        owner, _, last = owner.rpartition(".")
    holder = getattr(module, owner) if owner else module
    original = inspect.getattr_static(holder, last)
    source = textwrap.dedent(
        inspect.getsource(original.fget if isinstance(original, property) else getattr(holder, last))
    )
    assert source.count(old) == 1, f"{source.count(old)} times in {name}: {old}"
    space = dict(vars(module))
    exec(compile(source.replace(old, new), module.__file__, "exec"), space)
    changed = space[last]
    places = [(holder, last)]
    if not owner:
        places += [
            (m, n) for m in list(sys.modules.values()) for n in list(vars(m)) if vars(m)[n] is original
        ]
    for place, attribute in places:
        setattr(place, attribute, changed)
    try:
        yield
    finally:
        for place, attribute in places:
            setattr(place, attribute, original)
