# A model of the size of GPT-2 124M: nanochat's architecture, Muon, and a constant learning rate that decays
# at the end. The model contains 162M parameters, because the head is not tied to the embeddings; a token
# costs as many FLOPs as in GPT-2 124M. The learning rates are those of nanochat. This config has not been run
# to the end. See docs/recipes.md.
# $ python data/openwebtext/prepare.py
# $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_fast.py

out_dir = "out-gpt2-fast"

# 491,520 tokens per step, on any number of GPUs; 10 billion tokens
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024
max_iters = 20000

arch = "nanochat"
n_layer = 12
n_head = 6  # heads of 128 features each
n_embd = 768
residual_dtype = "bfloat16"  # no effect on a GPU that computes in float16

optimizer = "muon"
muon_lr = 0.02
learning_rate = 4e-3  # learning rate of the head
embedding_lr = 0.2
beta1 = 0.8
lr_schedule = "wsd"
warmup_iters = 40
cooldown_iters = 8000
lr_decay_iters = 20000
min_lr = 0.0

eval_interval = 1000
eval_iters = 200
log_interval = 10
