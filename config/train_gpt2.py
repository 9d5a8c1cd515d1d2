# GPT-2 124M on OpenWebText: validation loss about 2.85 after 600,000 steps, which take about 4 days on 8 A100
# 40GB GPUs, as nanoGPT reports.
# $ python data/openwebtext/prepare.py
# $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-124M"

# 40 micro-batches over all GPUs x 12 sequences x 1024 tokens = 491,520 tokens per step, on any number of GPUs
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024

# about 300 billion tokens
max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
