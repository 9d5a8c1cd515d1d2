# A first run: a small character-level GPT on the source code of Python's standard library. Takes about three minutes on
# two CPU cores.
# $ python data/stdlib_char/prepare.py && python train.py config/train_stdlib_char.py

out_dir = "out-stdlib-char"
dataset = "stdlib_char"

eval_interval = 250
eval_iters = 20
log_interval = 10

gradient_accumulation_steps = 1
batch_size = 12
block_size = 128

n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0

learning_rate = 2e-3
min_lr = 2e-4
max_iters = 1500
lr_decay_iters = 1500
warmup_iters = 100
beta2 = 0.99
