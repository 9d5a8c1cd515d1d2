"""
Train a GPT on one process or many, with the same script and the same loss curve.

Layouts differ by rounding, which training amplifies. With --exact=True, any number of processes has the same
bits. Dropout masks follow the micro-batch: they are the same on any layout that keeps micro-batches whole.

    python train.py config/train_stdlib_char.py             one process, on a GPU if there is one
    python train.py --batch_size=32 --init_from=resume      override settings; resume
    python train.py --nproc=4                               launch four processes on this machine
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST --master_port=PORT train.py ...
    srun, mpirun, accelerate launch, deepspeed: docs/launchers.md
"""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import gc
import sys

import torch

from configurator import configure, fail
from isogpt.checkpoint.state import TrainState
from isogpt.data.reader import Reader
from isogpt.launch import launchers, process_group, together
from isogpt.monitor import evaluation, run_report, samples, statistics, step_policy, watchdog
from isogpt.parallel import compression, data_parallel, local_sgd, parallelize
from isogpt.parallel.gradients import make_sums
from isogpt.run.folder import open_folder
from isogpt.run.resolve import resolve_run
from isogpt.speed import dry_run, rank_speeds
from isogpt.speed.clock import make_clock
from isogpt.training import optim, precision, settings
from model import GPT, GPTConfig

# -- run -----------------------------------------------------------------------------------------------------
out_dir = "out"  # folder for checkpoints, metrics.jsonl and loss.png
seed = 1337  # determines the initial weights, the order of the data and the dropout masks [>= 0]
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto: the fastest that suits training [auto | float32 | tf32 | bfloat16 | float16]
backend = "auto"  # auto: nccl for GPUs, else gloo [auto | nccl | gloo]
nproc = 0  # processes to launch on this machine (0: one, or as many as the launcher started) [>= 0, <= 1024]
compile = True  # torch.compile; not used on a CPU, or if it does not work on this machine
exact = False  # the same bits on any number of processes on the same kind of device; implies deterministic
eval_only = False  # evaluate once, then exit
# -- checkpoints ---------------------------------------------------------------------------------------------
init_from = "scratch"  # scratch, resume[:STEP], auto (either), gpt2[-medium|-large|-xl], auto:gpt2, path, URL
always_save_checkpoint = True  # save at each evaluation; False: only at the best loss so far and at the end
save_interval = 0  # also save every this many steps (0: only at evaluations and at the end) [>= 0, fractions]
# -- logging -------------------------------------------------------------------------------------------------
eval_interval = 2000  # steps between evaluations; the final state is evaluated too [> 0, fractions]
eval_iters = 200  # fixed batches that an evaluation reads of a split (0: all of val, as much of train) [>= 0]
log_interval = 1  # steps between logged lines [> 0, fractions]
wandb_log = False  # log to Weights & Biases too
wandb_project = "owt"  # the project in Weights & Biases
wandb_run_name = "gpt2"  # the name of the run in the project
# -- data ----------------------------------------------------------------------------------------------------
dataset = "openwebtext"  # a folder in data/ in which prepare.py was run, a path, or a mixture: a:0.7,b:0.3
gradient_accumulation_steps = 5 * 8  # micro-batches per step, divided over all processes [>= 1]
batch_size = 12  # sequences per micro-batch; a step reads gradient_accumulation_steps times as many [>= 1]
block_size = 1024  # tokens per sequence [>= 1]
# -- distribution and memory ---------------------------------------------------------------------------------
layout = "manual"  # auto: the fastest plan that keeps those settings below that are set [manual | auto]
zero = 0  # sharded: 0 nothing (DDP), 1 optimizer state, 2 also gradients, 3 also parameters [0 | 1 | 2 | 3]
tp = 1  # tensor parallelism: ranks that divide each matrix, by heads, hidden features, vocabulary [>= 1]
pp = 1  # pipeline parallelism: ranks that divide the layers [>= 1]
cp = 1  # context parallelism: ranks that divide each sequence [>= 1]
activation_checkpointing = "none"  # recompute blocks in the backward pass: none, full, selective or every:K
# -- model ---------------------------------------------------------------------------------------------------
arch = "gpt2"  # gpt2, nanochat (rotary, RMSNorm, QK-norm, ReLU squared) or llama (rotary, RMSNorm, SwiGLU)
n_layer = 12  # number of blocks [>= 1]
n_head = 12  # attention heads per block [>= 1]
n_embd = 768  # width of the model [>= 1]
dropout = 0.0  # probability of dropout: 0 for pretraining, 0.1 or more for fine-tuning [>= 0, < 1]
bias = False  # gpt2: biases in Linear and LayerNorm; False is slightly better and faster
# -- optimizer -----------------------------------------------------------------------------------------------
optimizer = "adamw"  # adamw, muon (blocks' matrices; AdamW: the rest), FILE.py:CLASS or muon+FILE.py:CLASS
learning_rate = 6e-4  # maximum learning rate, after warm-up [>= 0]
max_iters = 600000  # the last step: max_iters + 1 steps are trained, as in nanoGPT [>= 0, fractions]
weight_decay = 1e-1  # weight decay of parameters with two or more dimensions [>= 0]
beta1 = 0.9  # AdamW's decay rate of the first moment [>= 0, < 1]
beta2 = 0.95  # AdamW's decay rate of the second moment [>= 0, < 1]
grad_clip = 1.0  # maximum norm of the gradient (0: no clipping) [>= 0]
decay_lr = True  # warm up, then decay; False: learning_rate throughout
warmup_iters = 2000  # steps of linear warm-up [>= 0, fractions]
lr_decay_iters = 600000  # the step at which min_lr is reached, usually max_iters [>= 0, fractions]
min_lr = 6e-5  # learning rate at lr_decay_iters, usually learning_rate / 10 [>= 0]
# == rarely set: --help=all prints these too =================================================================
# -- run -----------------------------------------------------------------------------------------------------
cuda_graphs = False  # with compile: record kernels and launch them together, for small models on one GPU
deterministic = False  # deterministic algorithms on a GPU: bitwise reproducible, slower (a CPU always is)
profile = False  # write a torch.profiler trace of 5 steps to <out_dir>/trace.json
time_limit_s = 0  # save and exit before this many seconds have passed since the launch (0: no limit) [>= 0]
dry_run_ranks = ""  # one process reports what a step of 8 ranks takes and sends; 3/8: as rank 3 of these
dist_timeout_s = 600.0  # how long ranks wait for each other before they report which one is missing [> 0]
skip_steps = "none"  # left out: not finite, or spikes (6 sigma) too; none: NaN ends it [none | nan | spikes]
check_layout = True  # before training, compare a step of a small model on all ranks with one process's
check_ranks_interval = 0  # steps between comparisons of weights that should be equal (0: never) [>= 0]
alert_command = ""  # shell command that receives a JSON line for each event: NaN, resume, hang, end, ...
# -- checkpoints ---------------------------------------------------------------------------------------------
save_checkpoint = True  # False: write no checkpoints
keep_last = 2  # newest checkpoints to keep, in addition to the best checkpoint (0: all) [>= 0]
mirror = ""  # URL of a folder to which checkpoints are copied in the background, such as s3://bucket/run
# -- logging -------------------------------------------------------------------------------------------------
eval_datasets = ""  # further validation sets, such as a,b: names or paths of folders with a val.bin
sample_interval = 0  # steps between samples of two lines; one is written at the end too (0: never) [>= 0]
stats_interval = 0  # steps between statistics of each layer: norms, activations, attention (0: never) [>= 0]
tensorboard_log = False  # log to <out_dir>/tensorboard too
# -- data ----------------------------------------------------------------------------------------------------
data_order = "random"  # windows anywhere, each once, or where documents begin [random | shuffle | documents]
vocab_size = 0  # number of token ids (0: from the data set's metadata) [>= 0]
# -- distribution and memory ---------------------------------------------------------------------------------
fsdp = False  # short for zero=3
dp_replicate = 1  # HSDP: number of groups of ranks, each of which shards the whole model (zero 2, 3) [>= 1]
pp_schedule = "1f1b"  # the last three: two stages on a rank [gpipe | 1f1b | interleaved | zero_bubble | zbv]
ep = 1  # expert parallelism: data-parallel ranks that divide the experts (with n_expert) [>= 1]
shares = "equal"  # shares of a step by data-parallel rank: equal, a list such as 2,1,1, or auto (measured)
grad_sync = "auto"  # micro-steps that reduce gradients; every takes less memory [auto | last | every | never]
grad_compression = "none"  # of what replicas or islands send: fp16, bf16, int8, powersgd:RANK, topk:FRACTION
cpu_offload = False  # keep parameters and optimizer state in CPU memory (zero 2 or 3)
islands = 1  # DiLoCo workers: groups of ranks that train alone, then average (0: one per machine) [>= 0]
local_steps = 1  # steps between two averages of the islands' weights [>= 1]
outer_lr = 0.7  # learning rate of the outer step on the mean change of the weights (1: Local SGD) [>= 0]
outer_momentum = 0.9  # Nesterov momentum of the outer step (0: Local SGD) [>= 0, < 1]
# -- model ---------------------------------------------------------------------------------------------------
n_kv_head = 0  # heads of keys and values, shared by groups of attention heads (0: as many as n_head) [>= 0]
n_hidden = 0  # width of the MLP (0: 4 * n_embd; llama: 8/3 * n_embd, a multiple of 64) [>= 0]
residual_dtype = "float32"  # dtype of the stream from block to block; bfloat16 is faster [float32 | bfloat16]
head = "auto"  # output layer, tied to the embedding or not (auto: only gpt2 ties it) [auto | tied | untied]
n_expert = 0  # mixture of experts: MLPs per block, each token uses n_expert_active (0: one MLP) [>= 0]
n_expert_active = 2  # experts for each token [>= 1]
# -- optimizer -----------------------------------------------------------------------------------------------
max_tokens = ""  # tokens or epochs (3e9, 2epochs) in place of max_iters and lr_decay_iters (empty: these)
lr_schedule = "cosine"  # wsd: constant, then linear over the last cooldown_iters [cosine | linear | wsd]
cooldown_iters = 0  # steps of wsd's decay to min_lr [>= 0, fractions]
muon_lr = 0.02  # maximum learning rate of Muon, which follows the same schedule [>= 0]
embedding_lr = 0.0  # with muon: maximum of token embeddings if the head is untied (0: learning_rate) [>= 0]
muon_momentum = 0.95  # Muon's momentum, after warming up from 0.85 over 300 steps [>= 0, < 1]
# ------------------------------------------------------------------------------------------------------------
# 1. settings and processes
try:
    launchers.adopt_launcher_variables()  # translates srun's and mpirun's variables to torchrun's
    # config/*.py and --key=value override the globals above; config is a copy of them, with zero=3 for fsdp
    config = settings.check_training(configure(globals()))
    dry_run.start(config, __file__)  # with dry_run_ranks: runs this script as one of them, reports, and exits
    launchers.start_workers(nproc, __file__)  # with nproc, torchrun replaces this process
    # sets this process's device, connects to the other ranks, and numbers those of a machine one after the
    # other; there is no process group yet
    ranks = process_group.connect_ranks(device, backend, dist_timeout_s)
    # opens the console and the alerts; from here on, a rank that fails or does not respond is named
    watch = watchdog.start_watch(config, ranks)
    if ranks.has_launcher or config["zero"] > 0:  # ZeRO needs a group even for a single process
        torch.distributed.init_process_group(ranks.backend, **ranks.group_options(dist_timeout_s))
        sys.excepthook = watch.hook  # again, since init_process_group replaces it
except ValueError as e:
    fail(str(e))

# 2. what the run computes
# from here on, all ranks call the same functions; an error on any rank ends all ranks, with one message.
# resolve_run opens the data and the checkpoint or weights to start from, decides on the schedule, the layout,
# the dtype and the micro-batch, and compares a step of a small model on all ranks with that of one process
run = resolve_run(config, ranks, watch.logger.progress, GPT)
plan, mesh = run.plan, run.mesh
reader = Reader(run.data, data_order, seed, plan, mesh, ranks.device)
watch.reader = reader  # to explain an out-of-memory error

# 3. the model: it is made on the meta device, divided, then allocated
with torch.device("meta"):  # no memory yet: the model may be too large for one rank
    raw_model = GPT(GPTConfig(**plan.model_args))
run.start.check(raw_model)  # exits if a checkpoint's weights do not fit, before memory is allocated
# pp, ep, tp, cp; activation checkpointing; torch.compile, at the first call; FSDP2: fully_shard on each block
splits = parallelize.divide_model(raw_model, plan, mesh, ranks.device)
dry_run.begin(raw_model, plan, mesh, watch.logger.progress)  # in a dry run: from here on, only counts memory
parallelize.materialize(raw_model, torch.device("cpu") if plan.cpu_offload else ranks.device, splits)
pipeline = parallelize.make_pipeline(raw_model, mesh, ranks.device, plan)  # None with pp 1
autocast = torch.autocast(ranks.device.type, plan.torch_dtype, enabled=plan.uses_autocast)

# 4. the state that a checkpoint holds, and the sums of gradients
with together.exit_together():
    optimizers = optim.make_optimizers(raw_model, run.config, plan.zero, plan.torch_dtype, mesh)
# a GradScaler, which does nothing without float16; its scale is on the gradients' device
scaler = precision.make_scaler(plan.dtype, next(raw_model.parameters()).device)
state = TrainState(
    raw_model,
    optimizers,
    scaler,
    watch.logger.progress,
    compression.make_compression(raw_model, mesh, plan),  # of gradients; None without
    local_sgd.make_islands(raw_model, mesh, plan),  # which train alone, then average; None without
)
run.start.load(state, seed)  # from a checkpoint, pretrained or initial weights
reader = rank_speeds.with_measured_shares(reader, state, autocast)  # before DDP, whose hooks communicate
model = raw_model
if data_parallel.uses_ddp(plan, mesh):
    # bucket_cap_mb is torch's default, but without it, the first bucket has 1 MiB, and the sums other bits
    model = torch.nn.parallel.DistributedDataParallel(
        raw_model, process_group=mesh.replicas.group, bucket_cap_mb=25, gradient_as_bucket_view=True
    )
# sums of gradients in floating point; with exact as int64, which do not depend on the order of reduction
gradients = make_sums(model, raw_model, mesh, plan, reader.share, scaler, state.compression)

# 5. what the run writes: its folder, checkpoints and lines (rank 0 writes)
sampler = samples.open_sampler(config, run.vocabulary, plan, ranks)  # does nothing without sample_interval
clock = make_clock(run.config, ranks, plan, raw_model, state.step)
saver = open_folder(run, ranks, state, watch.logger, clock)  # a new run moves an earlier one aside
watch.reader, watch.clock, watch.saver = reader, clock, saver  # to explain failures
report = run_report.open_report(run, ranks, state, reader, saver, clock, watch.logger)  # the first lines
layer_statistics = statistics.LayerStatistics(
    stats_interval, pipeline or raw_model, raw_model, reader, batch_size, autocast, watch.logger
)
evaluator = evaluation.Evaluator(
    pipeline or raw_model, state, reader, eval_iters * batch_size, autocast, report
)
policy = step_policy.StepPolicy(skip_steps, state, reader, report, gradients)
del run.start  # frees the memory of the loaded tensors

# 6. the loop (all ranks; what only rank 0 does is inside the logger and the sampler)
if pipeline:
    pipeline.prepare(reader.share, scaler, gradients, clock.part)  # clock.part times its stages
is_complete = report.is_complete()  # a complete run was resumed: says what to set
if not is_complete:
    # with DDP, a discarded forward and backward pass, after which the order of its buckets is final: without
    # it, a resumed run would add gradients in a different order
    gradients.allocate(*reader.padding_batch(), autocast)
batches = reader.train(state.step, state.progress.position, state.progress.excluded)
batches = clock.laps("data", batches)  # times how long the rank waits for each of them
# of each micro-batch in a step, the number of its first sequence
first_sequences = [reader.share.first(micro_step) for micro_step in range(reader.share.micro_steps)]
gc.disable()  # a GPU would wait for it; policy.launched and evaluations collect
while not is_complete:
    step = state.next_step  # the numbers of the step before, state.step, are often not known yet
    raw_model.set_step(step)  # for modules that have an attribute `step`
    lr = run.schedule.lr(step)
    optim.set_rates(optimizers, step, lr, muon_momentum)
    precision.seed_step(seed, step, ranks.rank)  # for dropout in a pipeline; without one, see below

    # between steps: evaluate, save and sample the state before the step; after the last step, the final state
    is_complete = eval_only or step > run.max_iters
    if is_complete or step % eval_interval == 0:
        evaluator.run()
        gc.collect()  # also what policy.launched, which collects new objects only, has left
        if run.stop.agreed:  # a stop was requested during the evaluation
            break
    if saver.is_due(state, is_complete):
        saver.save(state)  # asynchronous
    policy.check_ranks(check_ranks_interval)  # exits if weights differ that should be equal
    sampler.report(state, is_complete, autocast, watch.logger)  # rank 0 writes; the other ranks wait
    if is_complete:
        break
    if step in state.progress.excluded:  # `batches` already omits what the step would have read
        state.skip()
        continue

    # -- a step: forward and backward passes of this rank's micro-batches. The model returns the loss summed
    # over tokens, divided by loss_divisor: the tokens of the whole step, divided by the number of ranks over
    # which gradients are averaged. For example, a step of 4 micro-batches of 1,000 tokens on 2 ranks: each
    # rank divides its 2 losses by 4,000 / 2 = 2,000, and the mean of the ranks' gradients is that of the loss
    # per token. With exact, gradients are added, and loss_divisor is 4,000
    clock.start()
    gradients.start_step()  # zero_grad
    if pipeline:
        loss_sum = pipeline.step([next(batches) for _ in first_sequences])  # 0 on ranks without the last
        clock.lap("pipeline")
    else:
        loss_sum = 0.0
        for first in first_sequences:
            x, y = next(batches)  # (rows, block_size / cp) each
            precision.seed_micro_batch(seed, step, first, mesh)
            # no_sync, except in the last micro-batch; FSDP reduces in each unless grad_sync says otherwise
            with gradients.micro_batch(is_last=first == first_sequences[-1]):
                with autocast:
                    _, loss = model(x, y, gradients.loss_divisor)
                clock.lap("forward")
                scaler.scale(loss).backward()
                clock.lap("backward")
            loss_sum += gradients.loss_term(loss)
    gradients.finish()  # reduces what DDP and FSDP do not: with tp, ep, pp, exact and compression
    clock.lap("reduce")
    optim.unscale(optimizers, scaler)
    square_share = gradients.norm_share()  # this rank's share of the gradient's squared norm
    # the one small collective of a step: losses, whose mean over the ranks is that of the batch, shares of
    # the norm, times, and requests to stop
    gathered = report.gather(gradients.mean_loss(loss_sum), square_share)
    with layer_statistics.of_update(step):  # every stats_interval steps
        # no update if loss or norm is not finite, or a spike that is skipped
        optim.clip_and_step(optimizers, scaler, gathered, grad_clip, skip_steps == "spikes")
    # -- after the launch. While a GPU computes this step, the host waits for the numbers of the step before:
    # that step is reported (console, metrics.jsonl, wandb, TensorBoard) or left out, or ends the run, and all
    # ranks decide the same. If float16 overflows, the step counts, and its loss scale is halved. If something
    # is due before the next step, this step's numbers are read too, so that `state` contains it
    policy.launched(gathered, lr)
    if run.stop.agreed:  # by a signal or the time limit
        break

# 7. the end (all ranks)
status = report.end()  # the last checkpoint, if the run was stopped; the summary, result.json, the plot
watch.leave()
# a model that still refers to the process group can keep it from being destroyed
del model, raw_model, state, optimizers, gradients, pipeline, batches
del report, layer_statistics, evaluator, saver, sampler, watch, policy
process_group.leave_process_group()
if status:
    raise SystemExit(status)
