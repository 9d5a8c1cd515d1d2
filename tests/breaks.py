"""
Faults in the ways of dividing the work, each as a replacement of text in a function: a forgotten reduction, a
wrong slice, a wrong divisor. isogpt/check/layout.py must see each of them.
"""

import importlib
import importlib.util
import inspect
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import CodeType

DIVISOR = ("tokens / self.mesh.loss.size", "tokens")
NOT_REDUCED = ("is_last and self.plan", "False and self.plan")
SHARD = "fully_shard(block, mp_policy=policy, **of_blocks)"
NOT_SCATTERED = (SHARD, f"{SHARD}.set_requires_gradient_sync(False)")
OFFSETS = "_, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)"
SCALED = ("scale_grads=False", "scale_grads=True")
PIPELINE_LOSS = ("torch.stack(terms).sum() * self.mesh.pp", "torch.stack(terms).sum()")
SCATTERED = "return total\n\n\nclass"
LOSS_AXES = '("dp_replicate", "dp_shard", "ep", "cp")'
# these are seen only by a rare id, an id that a rank lacks, a length or a second micro-batch
ALL_REDUCED = "dist.all_reduce(self.total, group=self.mesh.replicas.group)"
IS_MINE = "(row >= 0) & (row < n)"
LAST_ALONE = (
    'reduces = is_last and self.plan.grad_sync != "never"',
    'reduces = is_last and self.plan.grad_sync != "never"\n        self.start_step()',
)
EXACT_DIVISOR = ("float(plan.sequences", "float(2 * plan.sequences")

# way -> {what is broken: (text, its replacement)}
BREAKS = {
    "ddp": {
        "not reduced": NOT_REDUCED,
        "divisor": DIVISOR,
        "all ranks read the same": (" + self.rows_before", ""),
        "only the last micro-batch": LAST_ALONE,
        "the first micro-batch again": ("micro_step * self.island_rows", "0 * self.island_rows"),
    },
    "zero 1": {"not reduced": NOT_REDUCED, "weights not sent": ("self._sync_params()", "pass")},
    "zero 2": {"not scattered": NOT_SCATTERED},
    "zero 3": {
        "not scattered": NOT_SCATTERED,
        "divisor": DIVISOR,
        "wrong rows": (OFFSETS, "pass"),
        "only the last micro-batch": LAST_ALONE,
    },
    "tp 2": {
        "norms not reduced": ("if mesh.tp > 1:\n            whole", "if False:\n            whole"),
        "q, k, v mixed": ("stacked * (n // sum(stacked))", "(n,)"),
        "norm": (".square().sum() / n", ".square().sum()"),
        "bias twice": ("F.linear(x, self.weight)", "F.linear(x, self.weight, self.bias)"),
        "no embedding of the last id": (IS_MINE, f"{IS_MINE} & (idx < self.ranks.vocab_size - 1)"),
        "no embedding of the first id": (IS_MINE, f"{IS_MINE} & (idx > 0)"),
        "vocabulary not reduced": ('if op == "max" else dist.ReduceOp.SUM', ""),
    },
    "cp 2": {
        "keys' gradient not reduced": (SCATTERED, SCATTERED.replace("total", "parts[dist.get_rank(group)]")),
        "order of the chunks": ("torch.tensor(in_ranks).argsort()", "torch.tensor(in_ranks).sort()[0]"),
        "sees the next position": ("tril(S - T)", "tril(S - T + 1)"),
        "sees the next of many positions": ("tril(S - T)", "tril(S - T + (S > 256))"),
        "sees at most 256 positions": ("end = (c + 1) * size", "end = min((c + 1) * size, 256)"),
        "divisor": DIVISOR,
    },
    "pp 2, 1f1b": {
        "tied head not reduced": ("if tied is not None and", "if False and"),
        "divided by the micro-batches": SCALED,
        "loss": PIPELINE_LOSS,
        "evaluation": ("loss.float() * self.mesh.pp", "loss.float()"),
        "a block left out": ("for i in blocks})", "for i in blocks[:-1] or blocks})"),
    },
    "pp 2, zbv": {
        "tied head added twice": (
            "params = [p for p in self.params",
            "head = self.raw_model.lm_head\n        head and head.weight.grad.mul_(2)\n"
            "        params = [p for p in self.params",
        ),
        "divided by the micro-batches": SCALED,
        "loss": PIPELINE_LOSS,
    },
    "ep 2": {
        "divisor": ("for p in experts], mesh.ep)", "for p in experts], 1)"),
        "rows in another order": ("place = order.argsort()", "place = order"),
        "rows for other experts": (".repeat(ranks)", ".repeat_interleave(ranks)"),
    },
    "islands 2": {
        "gradients averaged": (LOSS_AXES, LOSS_AXES.replace("(", '("islands", ')),
        "divisor": ("tokens = self.share.island_sequences", "tokens = plan.sequences"),
        "loss": ("self.share.island_sequences * self.mesh.islands", "self.share.island_sequences"),
    },
    "exact": {
        "first micro-batch twice": ("for p in params:\n                    p.grad = None", "pass"),
        "divisor": EXACT_DIVISOR,
        "rows of ids that a rank lacks": (
            ALL_REDUCED,
            f"read = self.total != 0\n            {ALL_REDUCED}\n            self.total *= read",
        ),
        "maximum": (
            "(self.total, group=self.mesh.replicas.group",
            "(self.total, dist.ReduceOp.MAX, group=self.mesh.replicas.group",
        ),
    },
    "exact, zero 3": {
        "earlier micro-batches forgotten": (".add_(shard)", ".copy_(shard)"),
        "divisor": EXACT_DIVISOR,
    },
    "recompute full": {
        "input changed": ("checkpoint(compute, *args,", "checkpoint(compute, args[0] * 1.01, *args[1:],")
    },
}
# {what is broken: settings of a model that shows it}
SHOWN_BY = {
    "rows of ids that a rank lacks": {"arch": "llama"},
    "sees the next of many positions": {"block_size": 1024},
    "sees at most 256 positions": {"block_size": 1024},
}


def functions_in(code):
    """{qualified name: code} of the functions and methods of a module or a class."""
    found = {}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            is_class = not part.co_flags & inspect.CO_OPTIMIZED
            found |= functions_in(part) if is_class else {part.co_qualname: part}
    return found


@contextmanager
def broken(old, new):
    """In the block, the function in isogpt/parallel/ or torch that contains a text contains another."""
    package, other = "isogpt.parallel", "torch.distributed.optim.zero_redundancy_optimizer"
    folder = Path(importlib.util.find_spec(package).origin).parent
    modules = {path: f"{package}.{path.stem}" for path in folder.glob("*.py")}
    modules[Path(importlib.util.find_spec(other).origin)] = other
    sources = {path: path.read_text() for path in modules}
    assert sum(source.count(old) for source in sources.values()) == 1, f"not once: {old}"
    (path,) = (path for path, source in sources.items() if old in source)
    source = sources[path]
    before, after = (functions_in(compile(text, path, "exec")) for text in (source, source.replace(old, new)))
    line = source[: source.index(old)].count("\n") + 1
    _, name = max((code.co_firstlineno, name) for name, code in before.items() if code.co_firstlineno <= line)
    module = importlib.import_module(modules[path])
    function = inspect.unwrap(reduce(inspect.getattr_static, name.split("."), module))
    original, function.__code__ = function.__code__, after[name]
    try:
        yield
    finally:
        function.__code__ = original
