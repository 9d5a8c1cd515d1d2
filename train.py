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

import time
from dataclasses import replace
from functools import partial

import torch

from configurator import configure, fail
from isogpt.checkpoint.folder import claim_folder, mark_preempted
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.start import find_start
from isogpt.checkpoint.state import TrainState
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.launch.launchers import adopt_launcher_variables, print_unapplied_settings, start_workers
from isogpt.launch.process_group import connect_ranks, join_process_group, leave_process_group
from isogpt.launch.start_checks import check_start
from isogpt.launch.together import do_together, exit_together, gather_numbers, gather_objects
from isogpt.monitor.banner import Banner
from isogpt.monitor.crashes import explain_crashes, watch_start
from isogpt.monitor.evaluation import evaluate
from isogpt.monitor.log import Logger, open_logger, start_services, start_sinks
from isogpt.monitor.not_finite import Action, NanPolicy
from isogpt.monitor.out_of_memory import MemoryUse
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.samples import how_to_sample, open_sampler
from isogpt.monitor.signals import watch_signals
from isogpt.parallel.compare_weights import check_equal_weights, weights_digest
from isogpt.parallel.data import allocate_gradients, replicate
from isogpt.parallel.exact import ExactSums
from isogpt.parallel.float_sums import FloatSums
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.parallelize import make_pipeline, parallelize, take_routing
from isogpt.parallel.plan import normalized
from isogpt.parallel.shares import about_unused_ranks, parse_shares
from isogpt.parallel.slow_network import make_slow_network
from isogpt.speed.clock import Clock, over_ranks
from isogpt.speed.devices import total_peak_flops
from isogpt.speed.planner import make_plan
from isogpt.speed.profiler import start_profiler
from isogpt.speed.rank_speeds import measured_speeds
from isogpt.speed.usage import memory_gb
from isogpt.training import optim, precision
from isogpt.training.exact_steps import make_steps_exact
from isogpt.training.schedule import make_schedule
from isogpt.training.settings import check_training, settings_of_model
from isogpt.training.step_numbers import StepNumbers
from model import GPT, GPTConfig

# -- run -----------------------------------------------------------------------------------------------------
out_dir = "out"  # folder for checkpoints, metrics.jsonl and loss.png
seed = 1337  # determines the initial weights, the order of the data and the dropout masks
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto (the fastest that suits training), float32, tf32, bfloat16 or float16
backend = "auto"  # auto (nccl for GPUs, else gloo), nccl or gloo
nproc = 0  # processes to launch on this machine (0: one, or as many as the launcher started)
compile = True  # torch.compile; not used on a CPU, or if it does not work on this machine
cuda_graphs = False  # with compile: record kernels and launch them together, for small models on one GPU
deterministic = False  # deterministic algorithms on a GPU: bitwise reproducible, slower (a CPU always is)
exact = False  # the same bits on any number of processes on the same kind of device; implies deterministic
profile = False  # write a torch.profiler trace of 5 steps to <out_dir>/trace.json
eval_only = False  # evaluate once, then exit
time_limit_s = 0  # save and exit before this many seconds have passed since the launch (0: no limit)
# -- checkpoints ---------------------------------------------------------------------------------------------
init_from = "scratch"  # scratch, resume, auto (either), gpt2[-medium|-large|-xl], auto:gpt2, a folder or file
resume_step = -1  # the step to resume from, with init_from=resume (-1: the newest valid checkpoint)
save_checkpoint = True  # False: write no checkpoints
always_save_checkpoint = True  # save at each evaluation; False: only at the best loss so far and at the end
save_interval = 0  # also save every this many steps (0: only at evaluations and at the end)
keep_last = 2  # newest checkpoints to keep, in addition to the best checkpoint (0: all)
# -- logging -------------------------------------------------------------------------------------------------
eval_interval = 2000  # steps between evaluations; the state after the last step is evaluated too
eval_iters = 200  # an evaluation reads the same eval_iters * batch_size sequences of each split every time
log_interval = 1  # steps between logged lines
sample_interval = 0  # show two lines that the model writes every this many steps, and at the end (0: never)
wandb_log = False  # log to Weights & Biases too
wandb_project = "owt"  # the project in Weights & Biases
wandb_run_name = "gpt2"  # the name of the run in the project
tensorboard_log = False  # log to <out_dir>/tensorboard too
# -- data ----------------------------------------------------------------------------------------------------
dataset = "openwebtext"  # a folder in data/ in which prepare.py was run, or a path
data_order = "random"  # random (windows at any position, as in nanoGPT) or shuffle (each once per epoch)
gradient_accumulation_steps = 5 * 8  # micro-batches per step, over all processes: each runs a share
batch_size = 12  # sequences per micro-batch; a step reads gradient_accumulation_steps * batch_size sequences
block_size = 1024  # tokens per sequence
vocab_size = 0  # number of token ids (0: from the data set's metadata)
# -- distribution and memory ---------------------------------------------------------------------------------
layout = "manual"  # manual (the settings below), or auto (the fastest plan; settings that are set are kept)
zero = 0  # sharded over the ranks: 0 nothing (DDP), 1 optimizer state, 2 also gradients, 3 also parameters
fsdp = False  # short for zero=3
dp_replicate = 1  # HSDP: number of groups of ranks, each of which shards the whole model (zero 2 or 3)
tp = 1  # tensor parallelism: ranks that divide each matrix, by heads, hidden features and vocabulary
pp = 1  # pipeline parallelism: ranks that divide the layers
pp_schedule = "1f1b"  # gpipe, 1f1b, interleaved, zero_bubble or zbv (the last three: two stages on each rank)
cp = 1  # context parallelism: ranks that divide each sequence
shares = "equal"  # shares of a step by data-parallel rank: equal, a list such as 2,1,1, or auto (measured)
ep = 1  # expert parallelism: data-parallel ranks that divide the experts (with n_expert)
grad_sync = "auto"  # reduce gradients at the last micro-step, at every one (less memory), never, or auto
cpu_offload = False  # keep parameters and optimizer state in CPU memory (zero 2 or 3)
grad_compression = "none"  # between replicas: none, fp16, bf16, int8, sign, powersgd:RANK or topk:FRACTION
islands = 1  # DiLoCo workers: groups of ranks that take local_steps steps alone, then average (0: machines)
local_steps = 1  # steps between two averages of the islands' weights
outer_lr = 0.7  # learning rate of the outer step on the mean change of the weights (1: Local SGD)
outer_momentum = 0.9  # Nesterov momentum of the outer step (0: Local SGD)
outer_compression = "none"  # how islands send the changes: none, fp16 or int8
outer_parts = 1  # parts of the model that islands average at different steps, in the background
ddp_bucket_mb = 25.0  # size of the buckets in which gradients are reduced (zero 0 and 1)
fsdp_prefetch = 1  # blocks whose parameters are gathered in advance: more hides a slow network (zero 2 and 3)
activation_checkpointing = "none"  # recompute blocks in the backward pass: none, full, selective or every:K
# -- fault tolerance -----------------------------------------------------------------------------------------
on_nan = "stop"  # if a loss or gradient is not finite: stop the run, or skip the step
nan_patience = 3  # roll back after this many consecutive skipped steps and exclude their batches
max_rollbacks = 2  # stop after this many rollbacks
dist_timeout_s = 600.0  # how long ranks wait for each other before they report which one is missing
check_ranks_interval = 0  # compare the weights of ranks that should be equal every this many steps (0: never)
alert_command = ""  # shell command that receives a JSON line for each event: NaN, resume, hang, end, ...
# -- model ---------------------------------------------------------------------------------------------------
arch = "gpt2"  # gpt2, nanochat (rotary, RMSNorm, QK-norm, ReLU squared) or llama (rotary, RMSNorm, SwiGLU)
n_layer = 12  # number of blocks
n_head = 12  # attention heads per block
n_kv_head = 0  # heads of keys and values, shared by groups of attention heads (0: as many as n_head)
n_embd = 768  # width of the model
n_hidden = 0  # width of the MLP's hidden layer (0: 4 * n_embd; llama: 8/3 * n_embd, a multiple of 64)
head = "auto"  # the output layer: tied to the token embedding, untied, or auto (gpt2: tied, others: untied)
n_expert = 0  # mixture of experts: MLPs per block, of which a token uses n_expert_active (0: one MLP)
n_expert_active = 2  # experts for each token
balance_loss = 0.01  # coefficient of the loss that distributes tokens evenly over the experts
router_z_loss = 0.001  # coefficient of the loss that keeps the router's scores small
dropout = 0.0  # probability of dropout: 0 for pretraining, 0.1 or more for fine-tuning
bias = False  # gpt2: biases in Linear and LayerNorm; False is slightly better and faster
# -- optimizer -----------------------------------------------------------------------------------------------
optimizer = "adamw"  # adamw, or muon (for the matrices of the blocks, AdamW for the rest)
learning_rate = 6e-4  # maximum learning rate, after warm-up
muon_lr = 0.02  # maximum learning rate of Muon, which follows the same schedule
embedding_lr = 0.0  # with muon: maximum for the token embeddings, if the head is untied (0: learning_rate)
muon_momentum = 0.95  # Muon's momentum, reached after warming up from 0.85 over 300 steps
max_iters = 600000  # number of the last step, counted from 0: max_iters + 1 steps are trained, as in nanoGPT
weight_decay = 1e-1  # weight decay of parameters with two or more dimensions
beta1 = 0.9  # AdamW's decay rate of the first moment
beta2 = 0.95  # AdamW's decay rate of the second moment
grad_clip = 1.0  # maximum norm of the gradient (0: no clipping)
decay_lr = True  # warm up, then decay; False: learning_rate throughout
lr_schedule = "cosine"  # cosine, linear, or wsd (constant, then linear over the last cooldown_iters)
warmup_iters = 2000  # steps of linear warm-up
lr_decay_iters = 600000  # the step at which min_lr is reached, usually max_iters
cooldown_iters = 0  # steps of wsd's decay to min_lr
min_lr = 6e-5  # usually learning_rate / 10
lr_scaling = "none"  # scale rates and warm-up by sequences per step / base_batch: none, linear or sqrt
base_batch = 0  # with lr_scaling: the sequences per step for which learning_rate was chosen
# ------------------------------------------------------------------------------------------------------------
# settings, processes, data
try:
    adopt_launcher_variables()  # translates srun's and mpirun's variables to torchrun's
    config = configure(globals())
    check_training(config)
    config = normalized(config)  # zero=3 instead of fsdp
    sequences_per_step = gradient_accumulation_steps * batch_size  # independent of the number of processes
    eval_sequences = eval_iters * batch_size  # sequences of each split
    schedule = make_schedule(config, sequences_per_step)
    start_workers(nproc, __file__)  # with nproc, torchrun replaces this process, and the workers come here
    print_unapplied_settings(config)  # of accelerate launch (rank 0)
    ranks = connect_ranks(device, backend, dist_timeout_s)  # through a store, without collectives
    if exact:  # the bits of some CPU kernels depend on the number of threads
        precision.fix_threads(ranks.device)
    progress = Progress(tokens_per_step=sequences_per_step * block_size)
    start_logger = Logger(progress, start_sinks(ranks, out_dir, alert_command))  # prints and alerts on rank 0
    start_watchdog = watch_start(ranks, dist_timeout_s, progress, start_logger)  # names a rank that fails
    join_process_group(ranks, dist_timeout_s, even_alone=config["zero"] > 0)
except ValueError as e:
    fail(str(e))

# from here on, all ranks call the same functions; an error on any rank ends all ranks, with one message
data = do_together(partial(open_dataset, dataset, block_size, vocab_size))
facts = {"the data's digest": data.digest, "the data's vocabulary size": data.vocab_size}
# before anything that depends on settings: exits if settings, data, code or torch differ between ranks
check_start(ranks, config | facts)
stop = watch_signals(time_limit_s)
# opens a checkpoint, or loads weights of transformers; start.load, below, fills the model with them
start = find_start(init_from, out_dir, resume_step, ranks, GPT.from_pretrained)
plan = make_plan(config, ranks, data, start)  # layout, shape, dtype, micro-batch
mesh = make_mesh(ranks.rank, plan, dist_timeout_s)
mesh.connect(ranks.device.type, uses_fsdp=plan.zero >= 2, offloads=cpu_offload)  # creates process groups
precision.set_numerics(ranks.device, plan.dtype, deterministic or exact)
# what checkpoints and logs record: the settings, and what the plan decided
recorded = config | plan.layout_settings() | settings_of_model(plan.model_args)

# model: build it on the meta device, distribute and allocate it, then fill it with weights
with torch.device("meta"):  # no memory yet: the model may be too large for one rank
    raw_model = GPT(GPTConfig(**plan.model_args))
start.check(raw_model)  # exits if a checkpoint's weights do not fit, before memory is allocated
# counted before the model is divided over the ranks
parameter_count, flops_per_token = raw_model.get_num_params(), raw_model.flops_per_token()
# notes: sentences for the banner, about what the user may not expect
device_kinds = gather_objects(precision.kind_of_device(ranks.device, batch_size) if exact else {})
notes = precision.differences_of_devices(device_kinds)
notes += precision.notes_about_dtype(plan.dtype, ranks.device)
# continues at the checkpoint's step; its best loss counts only if evaluations still measure the same
notes += progress.begin(config, data.digest, start.resumed, device_kinds[0])
# differences: settings and data that are not the checkpoint's
vocabulary, differences = start.vocabulary(config, data, plan.model_args["vocab_size"])
notes += differences + schedule.notes(config)
reader = Reader(data, data_order, seed, plan, mesh, ranks.device, parse_shares(shares))
# until the watchdog of the run takes over, running out of memory is explained as the model's allocation
explain_crashes(start_watchdog, MemoryUse(out_dir, reader, first_step=progress.step))
# pp, ep, tp, cp, activation checkpointing, torch.compile and, with zero 2 and 3, FSDP (fully_shard)
compile_note = parallelize(raw_model, mesh, ranks.device, plan)
optimizers = optim.make_optimizers(
    raw_model, optim.OptimizerSettings.of(config), plan.zero, plan.torch_dtype, mesh
)
scaler = precision.make_scaler(plan.dtype, next(raw_model.parameters()).device)
if exact:  # how AdamW and Muon round an element must not depend on its shard
    make_steps_exact(optimizers)
# FSDP casts to the dtype itself, by a mixed-precision policy; with exact, autocast does
is_cast = (plan.zero < 2 or exact) and plan.torch_dtype.itemsize == 2
autocast = torch.autocast(ranks.device.type, plan.torch_dtype, enabled=is_cast)
# gradient compression and islands; without either, an object that does nothing
slow_network = make_slow_network(raw_model, mesh, plan)
state = TrainState(raw_model, optimizers, scaler, progress, slow_network)  # what a checkpoint stores
start.load(state, seed)  # from a checkpoint, pretrained or initial weights

# who reads, communicates, saves and logs
if shares == "auto":  # before DDP, whose hooks communicate
    if len(progress.shares) != mesh.data_size:  # a resumed run keeps the shares that it began with
        progress.shares = measured_speeds(raw_model, reader.padding_batch(), autocast, ranks.device)
    reader = replace(reader, speeds=progress.shares)
share = reader.share  # this rank's part of a step: micro-batches and their rows
pipeline = make_pipeline(raw_model, mesh, ranks.device, plan)
model = raw_model
# ranks that hold the same parameters (except experts) and read different tokens; None: this rank is alone.
# DDP averages their gradients, fully_shard does with zero 2 and 3, and the part "reduce" of a step with pp
replicas = mesh.group("dp_replicate", "ep", "cp")
if replicas and plan.zero < 2 and not pipeline:
    model = replicate(raw_model, ddp_bucket_mb, replicas)
services = start_services(recorded, progress)  # wandb (rank 0); before the folder is changed
run_folder = claim_folder(config, start.resumed, ranks, plan, mesh)
logger = open_logger(recorded, progress, run_folder.owner, services)
# what the run starts with need not be saved
saver = Saver(run_folder, plan, mesh, recorded, vocabulary, logger, step=state.step)
clock = Clock(ranks.device, nvtx=profile)
# not known for layouts that also communicate inside the forward and backward passes
if ranks.world_size > 1 and plan.zero < 2 and max(plan.tp, plan.cp, plan.ep) == 1:
    # the gradient of wte is the last that the backward pass computes: then only communication is left
    clock.find_waiting(None if pipeline else raw_model.transformer.wte.weight)
watchdog = start_watchdog.hand_over(clock, logger, saver)
explain_crashes(watchdog, MemoryUse(out_dir, reader, first_step=progress.step))
sampler = open_sampler(config, vocabulary, plan, ranks)  # None unless rank 0 has to write samples
peak_flops, peak_source = total_peak_flops(ranks.device, plan.dtype)
banner = Banner(
    config=config,
    ranks=ranks,
    data=data,
    plan=plan,
    parameter_count=parameter_count,
    origin=start.description,
    compile_note=compile_note,
    reader=reader,
    schedule=schedule,
    peak_flops=peak_flops,
    peak_source=peak_source,
    notes=notes,
)
logger.print(str(banner))
if unused := about_unused_ranks(share, plan.batch_size, plan.pp):
    logger.print(f"warning: {unused}")
logger.event(
    "resume" if start.is_resume else "start",
    config=recorded,
    world_size=ranks.world_size,
    dtype=plan.dtype,
    micro_batch=plan.micro_batch,
    parameters=parameter_count,
    peak_flops=peak_flops,
)


# ------------------------------------------------------------------------------------------------------------
# the loop (all ranks; rank-0-only work is inside logger)
nan_policy = NanPolicy(on_nan, nan_patience, max_rollbacks)
if exact:  # gradients are added as integers, which has no order
    sums = ExactSums(model, raw_model, mesh, plan, share, scaler)
else:
    sums = FloatSums(model, raw_model, mesh, plan, share, slow_network.compression)
padding = reader.padding_batch()
# DDP reorders its buckets after the first pass: without discarded passes, a resume would have other bits.
# DDP's communication hook, for compressed or exact gradients, is attached after that
keeps_gradients = allocate_gradients(model, cuda_graphs, *padding, sums.loss_divisor, autocast, sums.passes)
slow_network.attach(model)
sums.attach()
start = None  # frees the memory of the loaded tensors
if pipeline:
    pipeline.prepare(share, scaler, sums, clock, autocast)
batches = reader.train(progress.step, progress.position, progress.skipped)
profiler = None
if profile and ranks.is_main:
    profiler = start_profiler(out_dir, max_iters - progress.step + 1)
flops_per_step = flops_per_token * progress.tokens_per_step
report = RunReport(logger, ranks, max_iters, eval_interval, log_interval, flops_per_step, peak_flops)
step_began = time.perf_counter()

is_complete = progress.step > max_iters and not eval_only  # a complete run was resumed: nothing is left to do
if is_complete:
    advice = f"to continue, set {schedule.to_continue(progress.step)} or so"
    logger.print(f"{out_dir} is at step {progress.step}, which is beyond max_iters: {advice}")
while not is_complete:
    step, val_loss = progress.step, None
    is_logged = step % log_interval == 0
    # a resumed pipeline draws the same dropout masks; without a pipeline, each micro-batch is seeded below
    precision.seed_step(seed, step, ranks.rank)
    lr = schedule.lr(step)
    optim.set_rates(optimizers, step, lr, muon_momentum)

    # evaluate and save the state before this step; after the last step, the final state
    pause_began = time.perf_counter()
    is_complete = eval_only or step > max_iters
    if is_complete or step % eval_interval == 0:
        watchdog.armed = False  # the first evaluation compiles a separate graph
        with (
            exit_together(partial(saver.save_and_fail, state)),
            slow_network.evaluated_weights(),
            report.traffic.paused(),
        ):
            losses = evaluate(raw_model, reader, eval_sequences, autocast, stop, clock, saver.seconds)
        if stop.agreed:  # during the evaluation, which returned None
            break
        train_loss, val_loss = losses
        report.evaluation(train_loss, val_loss, lr, weights_digest(raw_model, mesh) if exact else "")
    if eval_only:
        break
    is_best = val_loss is not None and val_loss < progress.best_val_loss
    if is_best:
        progress.best_val_loss, progress.best_step = val_loss, step
    is_due = is_best or is_complete or (val_loss is not None and always_save_checkpoint)
    if is_due or (save_interval and step % save_interval == 0):
        watchdog.armed = False  # waiting for a slow disk is not a hang
        with clock("save"):
            saver.save(state, val_loss)
    if check_ranks_interval and step % check_ranks_interval == 0:
        check_equal_weights(raw_model, step, logger.failed, mesh.index("islands"))
    if sampler and (is_complete or step % sample_interval == 0):  # on rank 0; the other ranks wait
        sampler.report(raw_model, autocast, logger)
    if is_complete:
        break
    step_began += time.perf_counter() - pause_began
    if step in progress.skipped:  # excluded by a rollback; reader.train leaves out the batches of the step
        state.skip()
        continue

    # forward and backward passes of this rank's micro-batches; by default only the last backward pass reduces
    loss_sum = torch.zeros((), device=ranks.device)
    sums.start_step()
    if pipeline:  # forward and backward passes of all micro-batches, each through all stages
        loss_sum = loss_sum + pipeline.step(batches)  # 0 on ranks without the last stage
    for micro_step in range(0 if pipeline else share.micro_steps):
        with clock.on_cpu("data"):
            x, y = next(batches)  # (rows, block_size / cp) each
        if plan.model_args["dropout"]:  # masks of whole micro-batches are the same on any number of processes
            precision.seed_generators(seed, step, share.first(micro_step), *mesh.rank_and_size("cp", "tp"))
        with sums.micro_batch(micro_step):  # DDP's no_sync but for the last micro-batch
            with clock("forward"), autocast:
                _, loss = model(x, y, sums.loss_divisor)
            with clock("backward"):
                scaler.scale(loss).backward()
        loss_sum = loss_sum + sums.loss_term(loss)

    with clock("reduce"):  # what the backward pass leaves to do with tp, ep and pp
        sums.finish()
    with clock("clip"):
        for opt in optimizers:
            scaler.unscale_(opt)
        # with exact, two parts, each a sum without rounding; otherwise the second is 0
        grad_square, grad_square_fine = sums.norm_share()

    # all ranks decide from the same numbers: the one small collective of a step (with experts, two if logged)
    step_s, step_began = time.perf_counter() - step_began, time.perf_counter()
    with clock("agree"):
        routing = take_routing(raw_model, is_logged, ranks.device)  # arrives with the numbers
        gathered = gather_numbers(
            StepNumbers(
                loss=loss_sum * sums.loss_weight,
                grad_square=grad_square,
                grad_square_fine=grad_square_fine,
                step_ms=step_s * 1e3,
                data_ms=clock.cpu_ms("data"),
                memory_gb=memory_gb(ranks.device),
                forward_ms=clock.last("forward"),
                stop=stop.code(step_s, saver.seconds),  # 0, a signal, or the time limit
                bytes_sent=report.traffic.per_step(is_logged),
                # get_scale would wait for the GPU
                loss_scale=scaler.scale(torch.ones((), device=ranks.device)),
                waiting=clock.waiting_share(),
            ),
            ranks.device,
        )
    with clock("optimizer"):  # changes nothing if a loss or gradient is not finite on any rank
        optim.step(optimizers, scaler, gathered, grad_clip)
    with clock("agree"):
        numbers = gathered.read()  # waits until the GPU has finished the backward pass

    verdict = nan_policy.judge(numbers, step)  # the same on all ranks
    if verdict.action is not Action.TAKE:
        watchdog.armed = False  # a report and a rollback may take long
        clock.discard()
        nan_policy.recover(verdict, numbers, state, reader, saver, logger)  # skips, rolls back, or exits
        model.zero_grad(set_to_none=not keeps_gradients)
        batches = reader.train(progress.step, progress.position, progress.skipped)
        step_began = time.perf_counter()  # the next step does not include the report and the rollback
        continue
    model.zero_grad(set_to_none=not keeps_gradients)
    slow_network.after_step(step)  # averages the weights of islands, if that is due
    clock.step()
    if profiler:  # on rank 0
        profiler.step()

    report.step(numbers, lr, routing)
    saver.poll()  # reports a checkpoint in the background that is complete or has failed
    watchdog.armed = True
    state.advance()
    if stop.decide(numbers.stop):
        break

# ------------------------------------------------------------------------------------------------------------
# the end: the last checkpoint, if the run was stopped, and the final plot (all ranks)
is_preempted = stop.agreed != 0 and progress.step <= max_iters
step_parts = over_ranks(gather_objects(clock.medians()))
if stop.agreed:
    watchdog.armed = False
    with clock("save"):
        saver.save(state)
saver.wait()
if report.steps_taken:
    report.done()  # the summary and the plot
    if ranks.is_main and (command := how_to_sample(out_dir, dataset, vocabulary)):
        logger.print(command)
with exit_together(logger.failed):
    if saver.problem:
        raise ValueError(f"the final checkpoint could not be written to {out_dir}")
    if is_preempted and ranks.is_main and not eval_only:
        mark_preempted(run_folder, progress.step, stop.reason())
slow_network.wait()  # an average in the background still uses the process group
if exact:
    logger.print(f"weights: SHA-256 {weights_digest(raw_model, mesh)} before step {progress.step}")
report.end(out_dir, stop if is_preempted else None, step_parts)
watchdog.stop()
saver = state = slow_network = sums = None
# the process group can be destroyed only after the last reference to it is dropped
model = raw_model = optimizers = batches = pipeline = None
leave_process_group()
# 128 + the signal, unless a launcher started this process (ranks.store): it would restart the run after an
# error. The code of the time limit is negative, and the exit status is 0
if is_preempted and stop.agreed > 0 and not ranks.store:
    raise SystemExit(128 + stop.agreed)
