"""
Remove one thing at a time from the code and check that tests fail: python measure/mutations.py [NAME ...]

Each mutation is made in a copy of the repository in a temporary folder. A line shows which test failed. The
exit status is 1 if the tests passed with any of the mutations.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PARITY, RESUME, SURVIVE = "tests/test_parity.py", "tests/test_resume.py", "tests/test_survive.py"
SAMPLE, PARALLEL = "tests/test_sample.py", "tests/test_parallel.py"
LAUNCH, LAUNCHERS = "tests/test_launch.py", "tests/test_launchers.py"
NETWORKS = "tests/test_slow_networks.py"
EP = "tests/test_experts.py::test_every_layout_has_the_curve_of_one_process"
MOE = "tests/test_moe.py"
EXACT = "tests/test_exact.py"
EXACT_RUNS = f"{EXACT}::test_three_layouts_have_the_bits_of_one_process"
CONSOLE = "tests/test_console.py"
KILLED = f"{RESUME}::test_killed_twice_and_resumed_has_the_same_bits"

# name: (file, original text, its replacement, the tests that must fail)
MUTATIONS = {
    "all-reduce: of the gradients": (
        "train.py",
        "if replicas and plan.zero < 2 and not pipeline:",
        "if False:",
        PARITY,
    ),
    "all-reduce: of the last micro-step": (
        "isogpt/parallel/float_sums.py",
        'if self.reduces_always or (is_last and self.plan.grad_sync != "never"):',
        "if self.reduces_always:",
        PARITY,
    ),
    "all-reduce: of the step's loss": (
        "isogpt/launch/together.py",
        "columns = rows.view(-1, len(mine)).T",
        "columns = mine[:, None].expand(-1, len(rows) // len(mine))",
        PARITY,
    ),
    "all-reduce: of the evaluation": (
        "isogpt/monitor/evaluation.py",
        "over_ranks.sum().item() / sharing for",
        "over_ranks[0].item() for",
        PARITY,
    ),
    "the last checkpoint is waited for": (
        "train.py",
        "logger.saved(saver.wait_together()) if report.steps_taken:",
        "if report.steps_taken:\n    logger.saved(saver.wait_together())",
        "tests/test_bad_input.py::test_the_final_checkpoint_of_a_run_that_took_no_step_is_waited_for",
    ),
    "share: its weight in the gradient": (
        "isogpt/parallel/float_sums.py",
        'self.loss_divisor = share.island_sequences * plan.model_args["block_size"] / copies',
        'self.loss_divisor = share.micro_steps * share.rows * plan.model_args["block_size"]',
        PARITY,
    ),
    "share: padding rows count": (
        "isogpt/data/reader.py",
        "x[padding], y[padding] = 0, -1",
        "x[padding], y[padding] = 0, 0",
        PARITY,
    ),
    "share: all ranks read the same rows": (
        "isogpt/parallel/shares.py",
        "micro_step * sum(rows_of) + sum(rows_of[:rank])",
        "micro_step * sum(rows_of)",
        PARITY,
    ),
    "data: depends on the rank": (
        "isogpt/data/reader.py",
        "self.seed, TRAIN, step",
        "self.seed + self.mesh.data_rank, TRAIN, step",
        PARITY,
    ),
    "evaluation: other sequences each time": (
        "isogpt/monitor/evaluation.py",
        "reader.evaluation(split,",
        '__import__("dataclasses")'
        ".replace(reader, seed=seed + progress.step + ranks.world_size).evaluation(split,",
        PARITY,
    ),
    "init: depends on the order of parameters": (
        "model.py",
        'f"{seed} {name}"',
        'f"{seed} {id(shape)}"',
        "tests/test_model.py",
    ),
    "tp: gradients of what is on every rank": (
        "isogpt/parallel/gradients.py",
        "if mesh.tp > 1:",
        "if False:",
        PARALLEL,
    ),
    "tp: rows of q, k and v": (
        "isogpt/parallel/tensor.py",
        "dim=0, sections=heads_of_qkv",
        "dim=0",
        PARALLEL,
    ),
    "pp: the gradient of the tied embedding": (
        "isogpt/parallel/gradients.py",
        "        grad += theirs",
        "        pass",
        PARALLEL,
    ),
    "cp: order of the chunks": (
        "isogpt/parallel/context.py",
        "torch.cat([chunks[place] for place in ranks.order], 1)",
        "torch.cat(chunks, 1)",
        PARALLEL,
    ),
    "compression: without error feedback": (
        "isogpt/parallel/compression.py",
        "flat += torch.cat([error.flatten() for error in errors])",
        "pass",
        NETWORKS,
    ),
    "compression: errors are not saved": (
        "isogpt/parallel/compression.py",
        "found[name] = {key: local_part_of",
        "found[name] = {} and {key: local_part_of",
        NETWORKS,
    ),
    "compression: PowerSGD's factors are not saved": (
        "isogpt/parallel/compression.py",
        "{self.own_name(): factors} if factors else {}",
        "{}",
        NETWORKS,
    ),
    "compression: PowerSGD with tall matrices": (
        "isogpt/parallel/compression.py",
        "grad.size(0) % grad.size(1) == 0",
        "False",
        NETWORKS,
    ),
    "compression: replicas of shards are not averaged": (
        "isogpt/parallel/gradients.py",
        "if zero >= 2 and compression and reduces_data:",
        "if False:",
        f"{NETWORKS}::test_compression_is_near_the_exact_curve",
    ),
    "islands: no momentum in the outer step": (
        "isogpt/parallel/local_sgd.py",
        ".mul_(self.plan.outer_momentum).add_(change)",
        ".mul_(0)",
        NETWORKS,
    ),
    "islands: what was learned meanwhile is lost": (
        "isogpt/parallel/local_sgd.py",
        "p.sub_(local(sent)).add_(weight)",
        "p.copy_(weight)",
        NETWORKS,
    ),
    "islands: what is being sent is not saved": (
        "isogpt/parallel/local_sgd.py",
        "if name in self.sent:",
        "if False:",
        NETWORKS,
    ),
    "islands: evaluated with their own weights": (
        "isogpt/parallel/slow_network.py",
        "self.islands.outer_weights() if self.islands else nullcontext()",
        "nullcontext()",
        f"{NETWORKS}::test_an_evaluation_on_any_number_of_islands_has_the_same_loss",
    ),
    "norm: copies count": (
        "isogpt/parallel/gradients.py",
        '["islands", "tp", "dp_replicate"]',
        '["islands", "dp_replicate"]',
        PARALLEL,
    ),
    "norm: each expert counts as often as it has ranks": (
        "isogpt/parallel/gradients.py",
        " for axis in copied_over if not is_split(p, axis)))",
        " for axis in copied_over))",
        EP,
    ),
    "ep: gradients come from all ranks of ep": (
        "isogpt/parallel/gradients.py",
        "torch._foreach_div_([local(p.grad) for p in experts], mesh.ep)",
        "pass",
        EP,
    ),
    "ep: gradients of the same experts on other ranks": (
        "isogpt/parallel/gradients.py",
        'average(experts, mesh, compression, "dp_replicate", "cp")',
        "average(experts, mesh, compression)",
        EP,
    ),
    "ep: order of the rows at the experts": (
        "isogpt/parallel/expert.py",
        "Reorder.apply(rows, order, place)",
        "rows",
        EP,
    ),
    "ep: order of the results": ("isogpt/parallel/expert.py", "Reorder.apply(y, place, order)", "y", EP),
    "ep: ranks read the same rows": (
        "isogpt/parallel/mesh.py",
        '("islands", "dp_replicate", "dp_shard", "ep")',
        '("islands", "dp_replicate", "dp_shard")',
        EP,
    ),
    "ep: optimizer state of experts over all ranks": (
        "isogpt/training/optim.py",
        '(True, ("dp_shard", "cp"))',
        '(True, ("dp_shard", "ep", "cp"))',
        EP,
    ),
    "muon: the rate of the token embedding": (
        "isogpt/training/optim.py",
        'AdamW, "embedding_lr", None)',
        'AdamW, "learning_rate", None)',
        "tests/test_arch.py::test_the_optimizer_rate_and_weight_decay_of_each_parameter",
    ),
    "muon: the bound of the singular values": (
        "isogpt/training/muon.py",
        ".clamp_(1e-4, 1)  # (matrices, 1, 1)",
        ".clamp_(1, 1)",
        "tests/test_arch.py::test_muon_also_enlarges_the_smallest_singular_values",
    ),
    "muon: a bound that is too small": (
        "isogpt/training/muon.py",
        "sum(2, keepdim=True).amax(1, keepdim=True)",
        "sum(2, keepdim=True).mean(1, keepdim=True)",
        "tests/test_arch.py::test_muon_brings_singular_values_close_to_1",
    ),
    "adamw: weight decay of vectors": (
        "isogpt/training/optim.py",
        'Rule("adamw", (VECTOR,), AdamW, "learning_rate", None)',
        'Rule("adamw", (VECTOR,), AdamW, "learning_rate", "weight_decay")',
        "tests/test_model.py::test_adamw_is_what_nanogpts_interface_makes",
    ),
    "ep: numbers of one rank's routers": (
        "isogpt/parallel/parallelize.py",
        "        dist.all_reduce(sums)\n",
        "        pass\n",
        EP,
    ),
    "ep: a different router on each rank": (
        "isogpt/checkpoint/restore.py",
        "target.put(model.initial_weight(name, target.shape, seed))",
        "target.put(model.initial_weight(name, target.shape, seed + int(os.environ.get('RANK', 0))))",
        "tests/test_experts.py::test_a_dense_model_is_upcycled",
    ),
    "tp: the auxiliary loss counts on each rank": (
        "isogpt/parallel/tensor.py",
        "type(moe).routing_of(moe, *numbers) / ranks.count",
        "type(moe).routing_of(moe, *numbers)",
        EP,
    ),
    "tp: rows of experts": (
        "isogpt/parallel/tensor.py",
        "(config.n_hidden,) * (length // config.n_hidden)",
        "(length,)",
        EP,
    ),
    "experts: padding rows count": (
        "model.py",
        "routing = routing * valid.any(1)[:, None]",
        "routing = routing * 1.0",
        MOE,
    ),
    "experts: the auxiliary loss is in the loss": (
        "model.py",
        "loss + (auxiliary - auxiliary.detach())",
        "loss + auxiliary",
        MOE,
    ),
    "experts: the auxiliary loss has no gradient": (
        "model.py",
        "loss + (auxiliary - auxiliary.detach())",
        "loss",
        MOE,
    ),
    "experts: FLOPs of unused ones": (
        "model.py",
        "self.get_num_params() - c.unused_count",
        "self.get_num_params()",
        MOE,
    ),
    "experts: their weights do not sum to 1": (
        "isogpt/nn/experts.py",
        "weights = weights / weights.sum(-1, keepdim=True)",
        "weights = weights * 1",
        MOE,
    ),
    "experts: balance over the batch": (
        "isogpt/nn/experts.py",
        "shares = totals / totals.sum(-1, keepdim=True)",
        "shares = totals.sum(0, keepdim=True) / totals.sum()",
        MOE,
    ),
    "experts: rows are not sorted": (
        "isogpt/nn/experts.py",
        "order = chosen.flatten().argsort(stable=True)",
        "order = torch.arange(chosen.numel(), device=x.device)",
        MOE,
    ),
    "experts: a row with a different token's weight": (
        "isogpt/nn/experts.py",
        "(rows * weights[..., None])",
        "(rows * weights.flip(-1)[..., None])",
        MOE,
    ),
    "experts: widths that the kernel does not take": (
        "isogpt/nn/experts.py",
        "if is_aligned and (on_cpu",
        "if (on_cpu",
        MOE,
    ),
    "experts: router in bfloat16": (
        "isogpt/nn/experts.py",
        "with torch.autocast(x.device.type, enabled=False):",
        "with torch.enable_grad():",
        MOE,
    ),
    "upcycling: routers do not depend on the seed": (
        "isogpt/checkpoint/restore.py",
        "model.initial_weight(name, target.shape, seed))",
        "model.initial_weight(name, target.shape, 0))",
        MOE,
    ),
    "random state: of a micro-batch": (
        "train.py",
        'precision.seed_generators(seed, step, share.first(micro_step), *mesh.rank_and_size("cp", "tp"))',
        "pass",
        "tests/test_exact.py::test_without_exact_dropout_follows_whole_micro_batches",
    ),
    "random state: of a step in a pipeline": (
        "train.py",
        "precision.seed_step(seed, step, ranks.rank)",
        "pass",
        f"{PARALLEL}::test_a_resume_on_the_same_layout_has_the_same_bits[pp2]",
    ),
    "random state: of the rank": (
        "isogpt/training/precision.py",
        "seed_generators(seed, step, rank)",
        "seed_generators(seed, step, 0)",
        RESUME,
    ),
    "order of the reduction after a start": (
        "isogpt/parallel/data.py",
        "        loss.backward()\n        model.zero_grad",
        "        model.zero_grad",
        KILLED,
    ),
    "resume: position in the data": (
        "isogpt/data/reader.py",
        "for number in count(step) if",
        "for number in count(0) if",
        KILLED,
    ),
    "resume: optimizer state": (
        "isogpt/checkpoint/restore.py",
        "state = state_parts(model, optimizers, island) if optimizers else {}",
        "state = {}",
        KILLED,
    ),
    "resume: scaler state": (
        "isogpt/checkpoint/restore.py",
        'scaler.load_state_dict(source.run["isogpt"]["scaler"])',
        "pass",
        f"{RESUME}::test_float16_scaler_is_saved_and_restored",
    ),
    "resume: best loss so far": (
        "isogpt/checkpoint/progress.py",
        'self.best_val_loss = run["best_val_loss"]',
        "self.best_val_loss = math.inf",
        f"{RESUME}::test_without_always_save_checkpoint_only_the_best_evaluation_saves",
    ),
    "resume: metrics are cut back": (
        "isogpt/monitor/sink_metrics.py",
        'r.get("iter", 0) < step]',
        "True]",
        KILLED,
    ),
    "checkpoint: checksum is not compared": (
        "isogpt/checkpoint/manifest.py",
        'if actual == manifest["files"][path.name]["sha256"]',
        "if True",
        f"{RESUME}::test_damaged_checkpoints_are_reported_and_skipped",
    ),
    "checkpoint: incomplete when it appears": (
        "isogpt/checkpoint/save.py",
        "unfinished = unfinished_folder(self.run_folder.path, self.run_folder.owner, self.step)",
        'unfinished = self.run_folder.path / f"step_{self.step:08d}"',
        f"{RESUME}::test_sigint_and_sigterm_leave_valid_checkpoints",
    ),
    "checkpoint: weights that are not finite": (
        "isogpt/checkpoint/save.py",
        "if bad := names_of_not_finite(model):\n",
        "if False:\n",
        f"{RESUME}::test_no_checkpoint_has_weights_that_are_not_finite",
    ),
    "samples: each rank draws the first rank's": (
        "sample.py",
        "first_sample=first",
        "first_sample=0",
        SAMPLE,
    ),
    "samples: random numbers of the batch": (
        "isogpt/nn/generation.py",
        "random_bits(seed, SAMPLING, sample, n)",
        "random_bits(seed, SAMPLING, len(samples) * sample, n)",
        SAMPLE,
    ),
    "samples: the oldest position stays": (
        "isogpt/nn/kernels.py",
        "start = self.length % self.size",
        "start = min(self.length, self.size - 1)",
        "tests/test_model.py::test_rotary_models_attend_to_the_last_block_size_positions",
    ),
    "samples: the prompt of the first row": (
        "isogpt/nn/generation.py",
        "if end == first and bool((new == new[:1]).all()):",
        "if end == first:",
        "tests/test_model.py::test_a_sample_depends_on_its_number_and_not_on_its_batch",
    ),
    "samples: fixed caches without a mask": (
        "isogpt/nn/kernels.py",
        "device=self.k.device)[None] <= self.position",
        "device=self.k.device)[None] >= 0",
        "tests/test_model.py::test_steps_of_one_shape_have_the_tokens_of_growing_caches",
    ),
    "start: torch.compile is imported": (
        "isogpt/nn/experts.py",
        "has_grouped_kernel._dynamo_marked_constant = True",
        "has_grouped_kernel = torch.compiler.assume_constant_result(has_grouped_kernel)",
        "tests/test_project.py::test_a_run_and_its_samples_need_no_part_of_torch_that_takes_a_second_to_import",
    ),
    "samples: padded ids": (
        "sample.py",
        "vocab_size=words.n_ids",
        "vocab_size=None",
        f"{SAMPLE}::test_a_folder_is_sampled_with_its_own_tokenizer",
    ),
    "stop: one rank alone": (
        "train.py",
        "if stop.decide(numbers.stop):",
        "if stop.decide(torch.tensor([stop.code()])):",
        SURVIVE,
    ),
    "not finite: the step is taken": (
        "isogpt/training/optim.py",
        ", (~numbers.is_finite).float()",
        ", None",
        f"{SURVIVE}::test_a_step_that_is_not_finite_leaves_weights_and_state_as_they_are",
    ),
    "stop: no checkpoint": (
        "train.py",
        "if stop.agreed and save_checkpoint and progress.step != saver.step:\n    save()\n",
        "",
        SURVIVE,
    ),
    "skip: the step is taken": (
        "isogpt/monitor/not_finite.py",
        "        if numbers.is_finite or has_overflowed:\n",
        "        if True:\n",
        SURVIVE,
    ),
    "hang: no rank is named": (
        "isogpt/monitor/watchdog.py",
        "before[r] == after[r] and not has_left[r]",
        "False",
        SURVIVE,
    ),
    "two runs in a folder": (
        "isogpt/checkpoint/owner.py",
        "    if owner and now != owner:\n",
        "    if False:\n",
        SURVIVE,
    ),
    "restart: the store of the previous attempt": (
        "isogpt/launch/network.py",
        "mine, began, pause = uuid.uuid4().hex,",
        'mine, began, pause = f"again{rank}",',
        LAUNCH,
    ),
    "ranks: not numbered by machine": (
        "isogpt/launch/network.py",
        "key=lambda r: (machines.index(machines[r]), r))",
        "key=lambda r: r)",
        LAUNCHERS,
    ),
    "interface: the first one": (
        "isogpt/launch/network.py",
        "names = [name for way in ways for name in names if addresses[name] == way][:1] or names",
        "names = names[:1]",
        LAUNCHERS,
    ),
    "cores: every rank uses all": (
        "isogpt/launch/network.py",
        "len(cores) // sharing",
        "len(cores)",
        LAUNCHERS,
    ),
    "exact: float sums": (
        "isogpt/parallel/exact.py",
        "total += (part * factor).round_().to(torch.int64)",
        "total.copy_((total.float() + part * factor).to(torch.int64))",
        f"{EXACT}::test_integer_sums_have_no_order_and_round_once",
    ),
    "exact: the order of the norm": (
        "isogpt/parallel/exact.py",
        "coarse, fine = sum_of_squares([grad for grad in grads if grad.numel()], self.device)",
        "coarse, fine = torch.cat(grads).square().sum().double(), 0.0",
        EXACT_RUNS,
    ),
    "exact: the fine part of the norm": (
        "isogpt/parallel/exact.py",
        "fine.append(rounded(square.sub_(high), FINE_UNIT).sum())",
        "fine.append(square.sub_(high).sum())",
        f"{EXACT}::test_the_squared_norm_does_not_depend_on_how_elements_are_divided",
    ),
    "exact: rows of a micro-batch": (
        "isogpt/data/reader.py",
        "if self.plan.exact: return share_of_whole",
        "if False: return share_of_whole",
        EXACT_RUNS,
    ),
    "exact: rows of an evaluation": (
        "isogpt/data/reader.py",
        "if self.plan.exact: share = share_of_whole",
        "if False: share = share_of_whole",
        EXACT_RUNS,
    ),
    "exact: dropout depends on the rank": (
        "train.py",
        "precision.seed_generators(seed, step, share.first(micro_step),",
        "precision.seed_generators(seed, step, ranks.rank,",
        EXACT_RUNS,
    ),
    "exact: Muon's batches": (
        "isogpt/training/exact_steps.py",
        "inner.separately = True",
        "inner.separately = False",
        f"{EXACT}::test_muon_does_not_depend_on_the_matrices_beside_it",
    ),
    "exact: AdamW's vectors": (
        "isogpt/training/optim.py",
        "-tensors[0].numel() % multiple",
        "0",
        f"{EXACT}::test_a_fused_step_on_a_shard_has_the_bits_of_the_whole",
    ),
    "exact: threads": (
        "isogpt/training/precision.py",
        "torch.set_num_threads(threads_of_exact())",
        "pass",
        f"{EXACT}::test_every_layout_has_the_bits_of_one_process[gpt2]",
    ),
    "exact: what is too large": (
        "isogpt/parallel/exact.py",
        "fit = (low >= -self.largest) & (high <= self.largest)",
        "fit = (low + high).isfinite()",
        f"{EXACT}::test_what_does_not_fit_counts_as_not_finite",
    ),
    "exact: padding is added": (
        "isogpt/parallel/exact.py",
        "if self.is_padding: if is_first:",
        "if False:\n            if is_first:",
        f"{EXACT}::test_padding_adds_nothing_even_if_it_is_not_finite",
    ),
    "exact: replicas of shards": (
        "isogpt/parallel/exact.py",
        "if sums.group: dist.all_reduce(sums.totals[self], group=sums.group)",
        "",
        f"{EXACT}::test_every_layout_has_the_bits_of_one_process[llama-gqa]",
    ),
    "exact: FSDP casts": (
        "isogpt/parallel/data.py",
        "plan.torch_dtype != torch.float32 and not plan.exact",
        "plan.torch_dtype != torch.float32",
        f"{EXACT}::test_every_layout_has_the_bits_of_one_process[bfloat16]",
    ),
    "attention: later keys are seen": (
        "isogpt/nn/kernels.py",
        ".triu(1 + i)",
        ".triu(2 + i)",
        "tests/test_model.py",
    ),
    "console: a line above the status line erases it": (
        "isogpt/monitor/status_line.py",
        'console.print_line(f"{console.ERASE}{lines}{line}", end="")',
        'console.print_line(f"{lines}{line}", end="")',
        f"{CONSOLE}::test_one_line_is_drawn_in_place_and_others_above_it",
    ),
    "console: an error erases the status line": (
        "isogpt/common/console.py",
        'print(f"{erase_line(sys.stderr)}{text}", file=sys.stderr, flush=True)',
        "print(text, file=sys.stderr, flush=True)",
        f"{CONSOLE}::test_one_line_is_drawn_in_place_and_others_above_it",
    ),
    "console: the status line leaves the last column free": (
        "isogpt/monitor/status_line.py",
        "columns() - 1",
        "columns()",
        f"{CONSOLE}::test_the_line_fits_a_terminal_that_was_resized",
    ),
    "samples: the training's random numbers": (
        "isogpt/monitor/samples.py",
        "seed=self.seed)",
        "seed=None)",
        f"{CONSOLE}::test_a_sample_is_what_the_model_writes",
    ),
    "samples: the model stays in training": (
        "isogpt/monitor/samples.py",
        "twin.eval()",
        "twin.train()",
        f"{CONSOLE}::test_a_sample_is_what_the_model_writes",
    ),
    "waiting: the end of the backward pass": (
        "isogpt/speed/clock.py",
        'for name in (WAITING, "reduce", "agree"))',
        'for name in ("reduce", "agree"))',
        f"{CONSOLE}::test_the_share_of_a_step_in_which_a_rank_waits",
    ),
    "time left: the first evaluation": (
        "isogpt/monitor/pace.py",
        "self.evaluations_s[1:] or self.evaluations_s or [0.0]",
        "self.evaluations_s or [0.0]",
        f"{CONSOLE}::test_the_time_left_leaves_out_the_first_steps_and_counts_evaluations",
    ),
}


def places(old, text):
    """Where `old` stands in a source text, as (start, end): wherever its lines end."""
    tokens = re.findall(r"\w+|[^\w\s]", old)
    comma = [",?" if token in ")]}" else "" for token in tokens]  # the formatter adds it at the end of a line
    pattern = "".join(rf"{c}\s*{re.escape(token)}" for c, token in zip(comma, tokens, strict=True))
    found = [match.span() for match in re.finditer(pattern, text)]
    return [(start + len(text[start:end]) - len(text[start:end].lstrip()), end) for start, end in found]


def copy_repository(folder):
    """Copy the files that git knows or would add: without a file of isogpt/, every test would fail."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in names:
        if (REPO / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def main():
    wanted = sys.argv[1:] or list(MUTATIONS)
    green = []
    for name in wanted:
        file, old, new, tests = MUTATIONS[name]
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "repo"
            copy_repository(copy)
            text = (copy / file).read_text()
            assert len(places(old, text)) == 1, f"{name}: {len(places(old, text))} places in {file}"
            ((start, end),) = places(old, text)
            (copy / file).write_text(text[:start] + new.strip() + text[end:])
            start = time.monotonic()
            env = {"ISOGPT_SHARED": str(REPO.parent / "shared"), **os.environ}
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "--no-header",
                "--tb=no",
                "-p",
                "no:cacheprovider",
            ]
            command += ["-m", "slow or not slow", tests] if "::" in tests else [tests]
            run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
            red = [
                line.split(" ")[1].split("::")[-1]
                for line in run.stdout.splitlines()
                if line.startswith(("FAILED", "ERROR"))
            ]
            is_red = run.returncode == 1 and bool(red)
            verdict = f"red: {red[0]}" if is_red else f"GREEN (exit status {run.returncode})"
            if not is_red:
                green.append(name)
            print(f"| {name} | {verdict} | {time.monotonic() - start:.0f} s |", flush=True)
    sys.exit(bool(green))


if __name__ == "__main__":
    main()
