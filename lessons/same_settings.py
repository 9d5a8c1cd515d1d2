# The settings of lessons/minimal.py, with which train.py prints the same losses.
# $ python train.py lessons/same_settings.py

out_dir = "out-same"
dataset = "stdlib_char"
dtype = "float32"

max_iters = 50
eval_interval = 25
eval_iters = 5
log_interval = 1

gradient_accumulation_steps = 4
batch_size = 3
block_size = 64
n_layer = 2
n_head = 2
n_embd = 64

learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 10
lr_decay_iters = 50
beta2 = 0.99
