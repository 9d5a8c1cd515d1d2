# A small character-level model of Shakespeare. The best validation loss is about 1.47; then the model
# overfits.
# $ python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_char.py
# For a CPU, use the smaller model under "Shakespeare" in docs/getting-started.md.

out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"

eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # the model overfits: save only if the validation loss has improved

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

learning_rate = 1e-3  # small models can use a higher rate than GPT-2's 6e-4
min_lr = 1e-4
max_iters = 5000
lr_decay_iters = 5000
warmup_iters = 100
beta2 = 0.99  # few tokens per step make the second moment noisy: average over more steps
