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
from isogpt.check.layout import prove_layout
from isogpt.checkpoint.folder import claim_folder
from isogpt.checkpoint.mirror import open_mirror
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.start import find_start
from isogpt.checkpoint.state import Progress, TrainState
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.launch import launchers, process_group, start_checks, together
from isogpt.monitor import banner, code_version, evaluation, log, run_report, samples, signals, step_policy
from isogpt.monitor.statistics import LayerStatistics
from isogpt.monitor.watchdog import Watchdog
from isogpt.parallel import compare_weights, compilation, float_sums, integer_sums, parallelize
from isogpt.parallel.mesh import connect_mesh
from isogpt.parallel.slow_network import make_slow_network
from isogpt.speed import devices, dry_run, planner, profiling, rank_speeds
from isogpt.speed.clock import make_clock
from isogpt.training import budget, optim, precision, settings
from isogpt.training.schedule import make_schedule
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
init_from = "scratch"  # scratch, resume, auto (either), gpt2[-medium|-large|-xl], auto:gpt2, a path, a URL
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
dry_run_ranks = 0  # one process reports what a step of so many ranks takes and sends (0: train) [>= 0]
dry_run_rank = 0  # which of the dry_run_ranks this process is [>= 0]
dist_timeout_s = 600.0  # how long ranks wait for each other before they report which one is missing [> 0]
on_nan = "stop"  # if a loss or gradient is not finite: stop the run, or skip the step [stop | skip]
on_spike = "report"  # a loss or gradient norm of 6 sigma above the last 128: report, or skip [report | skip]
check_layout = True  # before training, compare a step of a small model on all ranks with one process's
check_ranks_interval = 0  # steps between comparisons of weights that should be equal (0: never) [>= 0]
alert_command = ""  # shell command that receives a JSON line for each event: NaN, resume, hang, end, ...
# -- checkpoints ---------------------------------------------------------------------------------------------
resume_step = -1  # the step to resume from, with init_from=resume (-1: the newest valid checkpoint)
save_checkpoint = True  # False: write no checkpoints
keep_last = 2  # newest checkpoints to keep, in addition to the best checkpoint (0: all) [>= 0]
mirror = ""  # URL of a folder to which checkpoints are copied in the background, such as s3://bucket/run
# -- logging -------------------------------------------------------------------------------------------------
eval_datasets = ""  # further validation sets, such as a,b: names or paths of folders with a val.bin
sample_interval = 0  # steps between samples of two lines; one is written at the end too (0: never) [>= 0]
stats_interval = 0  # steps between statistics of each layer: norms, activations, attention (0: never) [>= 0]
tensorboard_log = False  # log to <out_dir>/tensorboard too
print_result = False  # print result.json, which says how the run ended, as the last line
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
grad_compression = "none"  # between replicas: none, fp16, bf16, int8, powersgd:RANK or topk:FRACTION
ddp_bucket_mb = 25.0  # size of the buckets in which gradients are reduced (zero 0 and 1) [> 0]
fsdp_prefetch = 1  # blocks whose parameters are gathered in advance: more hides a slow network [>= 1]
cpu_offload = False  # keep parameters and optimizer state in CPU memory (zero 2 or 3)
islands = 1  # DiLoCo workers: groups of ranks that train alone, then average (0: one per machine) [>= 0]
local_steps = 1  # steps between two averages of the islands' weights [>= 1]
outer_lr = 0.7  # learning rate of the outer step on the mean change of the weights (1: Local SGD) [>= 0]
outer_momentum = 0.9  # Nesterov momentum of the outer step (0: Local SGD) [>= 0, < 1]
outer_compression = "none"  # how islands send the changes [none | fp16 | int8]
# -- model ---------------------------------------------------------------------------------------------------
n_kv_head = 0  # heads of keys and values, shared by groups of attention heads (0: as many as n_head) [>= 0]
n_hidden = 0  # width of the MLP (0: 4 * n_embd; llama: 8/3 * n_embd, a multiple of 64) [>= 0]
residual_dtype = "float32"  # dtype of the stream from block to block; bfloat16 is faster [float32 | bfloat16]
head = "auto"  # output layer, tied to the embedding or not (auto: only gpt2 ties it) [auto | tied | untied]
n_expert = 0  # mixture of experts: MLPs per block, each token uses n_expert_active (0: one MLP) [>= 0]
n_expert_active = 2  # experts for each token [>= 1]
balance_loss = 0.01  # coefficient of the loss that distributes tokens evenly over the experts [>= 0]
router_z_loss = 0.001  # coefficient of the loss that keeps the router's scores small [>= 0]
# -- optimizer -----------------------------------------------------------------------------------------------
max_tokens = 0.0  # tokens to train on, in place of max_iters and lr_decay_iters (0: these count) [>= 0]
max_epochs = 0.0  # the same as a number of passes over the training tokens (0: not used) [>= 0]
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
    # sets this process's device, meets the other ranks at a store, and numbers those of a machine one after
    # the other; no process group yet
    ranks = process_group.connect_ranks(device, backend, dist_timeout_s)
    progress = Progress(tokens_per_step=gradient_accumulation_steps * batch_size * block_size)
    logger = log.Logger(progress, log.start_sinks(ranks, config))  # prints, alerts
    watchdog = Watchdog(out_dir, ranks, dist_timeout_s, logger)
    # sets sys.excepthook and starts a thread; from here on, a rank that fails or does not respond is named
    watchdog.start()
    if exact:  # the bits of some CPU kernels depend on the number of threads
        precision.fix_threads(ranks.device)
    if ranks.has_launcher or config["zero"] > 0:  # ZeRO needs a group even for a single process
        torch.distributed.init_process_group(ranks.backend, **ranks.group_options(dist_timeout_s))
        sys.excepthook = watchdog.hook  # again, since init_process_group replaces it
except ValueError as e:
    fail(str(e))

# 2. data, what the run starts from, and the resolved settings: the plan
# from here on, all ranks call the same functions; an error on any rank ends all ranks, with one message
# do_together calls a function in a thread of each rank, and waits for all of them: disks may be slow
data = together.do_together(open_dataset, dataset, block_size, vocab_size, eval_datasets, data_order)
limits = budget.limits_of(config, len(data.train))  # max_iters and lr_decay_iters, as set or from a budget
config.update(limits.settings())
schedule = make_schedule(config)
# exits if ranks differ in settings, data or code
code = start_checks.check_start(ranks, config | data.facts())  # digest of the code that trains
stop = signals.watch_signals(time_limit_s)  # all ranks agree on stop.agreed, once per step
start = find_start(config, ranks, GPT.from_pretrained)  # opens a checkpoint
plan = planner.make_plan(config, ranks, data, start, GPT)  # layout, shape, dtype, micro-batch
mesh = connect_mesh(ranks.rank, plan, dist_timeout_s)  # creates process groups
# compares a step of a small model on all ranks with the step of one process; exits if they differ
checked = prove_layout(GPT, plan, mesh, ranks.device, config) if check_layout else []
precision.set_numerics(ranks.device, plan.dtype, deterministic or exact)  # TF32, deterministic algorithms
logger.notes += precision.use_flash_attention_3(ranks.device, plan, deterministic or exact)
# what checkpoints and logs record: the settings, and what the plan decided
recorded = config | plan.layout_settings() | settings.settings_of_model(plan.model_args, config)
recorded = settings.without_secrets(recorded)  # no tokens, since checkpoints and logs are passed on
# with exact, the bits depend on the kind of device
kinds = together.gather_objects(precision.kind_of_device(ranks.device, batch_size) if exact else {})
# continues at the checkpoint's step, if resumed; the best loss is kept if evaluations are comparable. Returns
# sentences for the user, as the next functions do
not_continued = progress.begin(config, data, start.resumed)
vocabulary, differences = start.vocabulary(config, data, plan.model_args["vocab_size"])
logger.notes += precision.notes_about_dtype(plan.dtype, ranks.device, start.previous_dtype)
logger.notes += precision.differences_of_devices(kinds) + not_continued + differences
logger.notes += limits.notes + schedule.notes(config)
reader = Reader(data, data_order, seed, plan, mesh, ranks.device)
# for the message after an out-of-memory error, and a smaller micro-batch at the next start
watchdog.reader = reader

# 3. the model: it is made on the meta device, divided, then allocated
with torch.device("meta"):  # no memory yet: the model may be too large for one rank
    raw_model = GPT(GPTConfig(**plan.model_args))
start.check(raw_model)  # exits if a checkpoint's weights do not fit, before memory is allocated
parameter_count = raw_model.get_num_params()  # over all ranks
flops_per_token = raw_model.flops_per_token()
# pp, ep, tp, cp, recomputation, torch.compile, FSDP2 with zero >= 2; splits: how parameters were cut
splits = parallelize.divide_model(raw_model, plan, mesh, ranks.device)
dry_run.begin(raw_model, plan, mesh, progress)  # in a dry run: from here on, only counts memory
parallelize.materialize(raw_model, torch.device("cpu") if plan.cpu_offload else ranks.device, splits)
pipeline = parallelize.make_pipeline(raw_model, mesh, ranks.device, plan)  # None with pp 1
autocast = torch.autocast(ranks.device.type, plan.torch_dtype, enabled=plan.uses_autocast)

# 4. optimizers, and the state that a checkpoint holds
with together.exit_together():
    optimizers = optim.make_optimizers(raw_model, config, plan.zero, plan.torch_dtype, mesh)
# a GradScaler, which does nothing without float16; its scale is on the gradients' device
scaler = precision.make_scaler(plan.dtype, next(raw_model.parameters()).device)
slow_network = make_slow_network(raw_model, mesh, plan)  # compressed gradients, islands, or a no-op
state = TrainState(raw_model, optimizers, scaler, progress, slow_network)
start.load(state, seed)  # from a checkpoint, pretrained or initial weights
if shares == "auto":
    reader = rank_speeds.with_measured_shares(reader, state, autocast)  # before DDP, whose hooks communicate
    watchdog.reader = reader
model = raw_model
if plan.zero < 2 and not pipeline and mesh.replicas.size > 1:
    model = torch.nn.parallel.DistributedDataParallel(
        raw_model,
        process_group=mesh.replicas.group,
        bucket_cap_mb=plan.ddp_bucket_mb,
        gradient_as_bucket_view=True,
    )
share = reader.share  # this rank's part of a step: micro-batches and their rows
if exact:  # gradients are summed as int64, so that the result does not depend on the order of reduction
    gradients = integer_sums.ExactSums(model, raw_model, mesh, plan, share, scaler)
else:
    gradients = float_sums.FloatSums(model, raw_model, mesh, plan, share, slow_network.compression)

# 5. the run's folder, saving and logging (rank 0 writes)
# before the folder is changed: what may lack a package, a network or a login
sampler = samples.open_sampler(config, vocabulary, plan, ranks)  # None without samples
logger.start_services(recorded)  # wandb
remote = open_mirror(config, start.resumed)  # copies checkpoints to a URL; None without one
run_folder = claim_folder(config, start.resumed, ranks, plan, mesh)  # a new run moves an earlier one aside
logger.open_files(recorded, run_folder.owner, data)
# step: the state that the run starts from is not saved
saver = Saver(run_folder, plan, mesh, recorded, vocabulary, logger, step=state.step, mirror=remote)
profiler = profiling.start_profiler(out_dir, limits.max_iters - state.step + 1, ranks) if profile else None
clock = make_clock(ranks, plan, raw_model, profile, profiler)
watchdog.clock, watchdog.saver = clock, saver
if pipeline:
    pipeline.prepare(share, scaler, gradients, clock.part, autocast)  # clock.part times its stages
peak = devices.find_peak(ranks.device, plan.dtype)
flops_per_step = flops_per_token * progress.tokens_per_step
logger.print(*banner.about_model(data, plan, parameter_count, start.description))
compile_note = compilation.compile_note(raw_model, ranks.device, plan)
logger.print(*banner.about_ranks(ranks, plan, mesh, compile_note), *checked)
logger.print(f"optim:   {optim.describe_updates(raw_model, optimizers, mesh)}")
logger.print(*banner.about_step(config, reader), *banner.about_machine(ranks, plan, peak))
logger.print(*(f"note:    {note}" for note in logger.notes))
logger.event(
    "resume" if start.is_resume else "start",
    config=recorded,
    world_size=ranks.world_size,
    dtype=plan.dtype,
    micro_batch=plan.micro_batch,
    parameters=parameter_count,
    peak_flops=peak.flops,
    flops_per_step=flops_per_step,
    tokens_per_step=progress.tokens_per_step,
    measures=progress.measures,
    **data.validation(),
    code=code,
    **code_version.code_version(ranks),
)
statistics = LayerStatistics(
    stats_interval, pipeline or raw_model, raw_model, reader, batch_size, autocast, logger
)
report = run_report.RunReport(
    logger, config, raw_model, scaler, clock, stop, saver, reader, flops_per_step, peak
)
evaluator = evaluation.Evaluator(
    pipeline or raw_model, state, reader, eval_iters * batch_size, autocast, clock, stop, saver, report
)
policy = step_policy.StepPolicy(on_nan, on_spike, state, reader, saver, logger)
del start  # frees the memory of the loaded tensors

# 6. the loop (all ranks; what only rank 0 does is inside logger and sampler)
is_complete = not (eval_only or progress.is_unfinished(limits.max_iters))
if is_complete:  # a complete run was resumed: nothing is left to do
    advice = f"to continue, set {schedule.to_continue(state.step)} or so"
    logger.print(f"{out_dir} is at step {state.step}, which is beyond max_iters: {advice}")
else:
    # with DDP, a discarded forward and backward pass, after which the order of its buckets is final: without
    # it, a resumed run would add gradients in a different order
    gradients.allocate(*reader.padding_batch(), autocast)
batches = reader.train(state.step, progress.position, progress.excluded)
gc.disable()  # a GPU would wait for it; see gc.collect
while not is_complete:
    step = state.step
    lr = schedule.lr(step)
    optim.set_rates(optimizers, step, lr, muon_momentum)
    precision.seed_step(seed, step, ranks.rank)  # for dropout in a pipeline; else see seed_micro_batch

    # evaluate, save and sample the state before the step; after the last step, the final state
    clock.pause()  # until clock.start(): not a part of a step
    is_complete = eval_only or step > limits.max_iters
    if is_complete or step % eval_interval == 0:
        evaluator.run()
        gc.collect()  # also what has become garbage after a collection in the loop
        if stop.agreed:  # a stop was requested during the evaluation
            break
    if saver.is_due(state, is_complete):
        with clock.part("save"):
            saver.save(state)  # asynchronous
    if check_ranks_interval and step % check_ranks_interval == 0:
        compare_weights.check_equal_weights(raw_model, mesh, step, logger.failed)
    if sampler and (is_complete or step % sample_interval == 0):  # rank 0 writes; the other ranks wait
        sampler.report(state, autocast, logger)
    if is_complete:
        break
    if step in progress.excluded:  # `batches` already omits what the step would have read
        progress.skip()
        continue

    # -- a step: forward and backward passes of this rank's micro-batches. The model returns the loss summed
    # over tokens, divided by loss_divisor: the tokens of the whole step, divided by the number of ranks over
    # which gradients are averaged. With exact they are added, and loss_divisor is the tokens of the step
    clock.start()
    gradients.start_step()  # zero_grad
    if pipeline:
        micro_batches = [next(batches) for _ in range(share.micro_steps)]
        clock.lap("data")
        loss_sum = pipeline.step(micro_batches)  # 0 on ranks without the last stage
        clock.lap("pipeline")
    else:
        loss_sum = 0.0
        for micro_step in range(share.micro_steps):
            x, y = next(batches)  # (rows, block_size / cp) each
            clock.lap("data")
            precision.seed_micro_batch(seed, step, share.first(micro_step), mesh)
            # no_sync, except in the last micro-batch; FSDP reduces in each unless grad_sync says otherwise
            with gradients.micro_batch(micro_step):
                with autocast:
                    _, loss = model(x, y, gradients.loss_divisor)
                clock.lap("forward")
                scaler.scale(loss).backward()
                clock.lap("backward")
            loss_sum += gradients.loss_term(loss)
            clock.lap("sum")
    gradients.finish()  # reduces what DDP and FSDP do not: with tp, ep, pp, exact and compression
    clock.lap("reduce")
    for one_optimizer in optimizers:
        scaler.unscale_(one_optimizer)
    square_share = gradients.norm_share()  # of the gradient's squared norm
    clock.lap("norm")
    # all-gathers loss, norm, times and requests to stop. The mean over ranks of the weighted loss is that of
    # the batch
    gathered = report.gather(loss_sum * gradients.loss_weight, square_share)
    clock.lap("agree")
    with statistics.of_update(step):  # every stats_interval steps
        # no update if loss or norm is not finite, or a spike that is skipped
        optim.clip_and_step(optimizers, scaler, gathered, grad_clip, on_spike == "skip")
    clock.lap("optimizer")
    gc.collect(1)  # what was allocated since the step before; the GPU is still busy
    numbers = gathered.read()  # synchronizes: waits for the GPU, unless clip_and_step has done so
    clock.lap("agree")
    # -- after the step

    if not policy.takes(numbers):  # all ranks decide the same; a float16 overflow counts as taken
        clock.discard()  # the watchdog expects no progress: the end of the run waits for the disk
        policy.skip(numbers)  # reports the step, or exits
        continue
    slow_network.after_step(step)  # averages the weights of islands, if that is due
    clock.step()
    # if the step is logged: the console's line, metrics.jsonl, wandb and TensorBoard
    report.step(numbers, lr)
    saver.poll()  # reports a checkpoint that was written in the background, or could not be
    progress.advance()
    if stop.decide(numbers.stop):
        break

# 7. the end: the last checkpoint, if the run was stopped, and the final plot (all ranks)
is_preempted = report.is_stopped()  # before its end
if stop.agreed:
    with clock.part("save"):
        saver.save(state)
saver.wait()
report.done(samples.how_to_sample(out_dir, vocabulary))  # the summary
# writes PREEMPTED if the run was stopped, before report.end draws the plot: mpirun leaves a second. Exits if
# the last save failed
saver.end(state, stop.reason() if is_preempted else "", report.steps_taken)
weights = compare_weights.weights_digest(raw_model, mesh) if exact else None
if exact:
    logger.print(f"weights: SHA-256 {weights} before step {state.step}")
report.end(weights)  # closes the sinks: the plot, result.json
saver.wait_for_mirror(stop.seconds_left())  # last: whoever stopped the run may not wait for it
watchdog.leave()
# a model that still refers to the process group can keep it from being destroyed
del model, raw_model, state, optimizers, slow_network, gradients, pipeline, batches
del report, statistics, evaluator, saver, watchdog, policy
process_group.leave_process_group()
# 128 + the signal, unless there is a launcher, which would restart the run after an error. After the time
# limit, stop.agreed is negative, and the exit status is 0
if is_preempted and stop.agreed > 0 and not ranks.has_launcher:
    raise SystemExit(128 + stop.agreed)
