# A small character-level model of Shakespeare: best val loss about 1.47, after which it overfits.
# $ python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_char.py
# On a CPU take a smaller one: README.md, "On a laptop".

out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"

eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # the data set is small: only what is better on val is worth keeping

wandb_log = False
wandb_project = "shakespeare-char"
wandb_run_name = "mini-gpt"

gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3  # a small model takes more than GPT-2's 6e-4
min_lr = 1e-4
max_iters = 5000
lr_decay_iters = 5000
warmup_iters = 100
beta2 = 0.99  # few tokens a step make a noisy second moment: average over more steps
