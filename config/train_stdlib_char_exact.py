# A model of the size of config/train_stdlib_char.py, with the same bits on any number of processes
# (docs/reproducibility.md): a step is 4 micro-batches of 3 sequences. The run ends with the digest of the
# weights, which is the same with --nproc=2, 3 and 4 on the same kind of CPU. It takes a minute on two cores.
# $ python data/stdlib_char/prepare.py && python train.py config/train_stdlib_char_exact.py

exact = True

out_dir = "out-stdlib-char-exact"
dataset = "stdlib_char"
device = "cpu"
dtype = "float32"

eval_interval = 250
eval_iters = 240
log_interval = 25

gradient_accumulation_steps = 4
batch_size = 3
block_size = 128

arch = "nanochat"
n_layer = 2
n_head = 2
n_embd = 128
dropout = 0.0

optimizer = "muon"
muon_lr = 0.025
learning_rate = 1e-2
embedding_lr = 0.3
beta1 = 0.8
beta2 = 0.99
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 5
max_iters = 500
lr_decay_iters = 500
