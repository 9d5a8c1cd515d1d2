# Shakespeare by characters on a CPU. The validation loss of nanoGPT's recipe for a CPU after 2,000 steps
# (1.89) is reached in a sixteenth of the time. The recipe uses nanochat's architecture, Muon and a linear
# decay: see docs/recipes.md.
# $ python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_char_fast.py

out_dir = "out-shakespeare-char-fast"
dataset = "shakespeare_char"
dtype = "float32"  # in a model this small, casts to bfloat16 take longer than they save

eval_interval = 165
eval_iters = 72  # the whole validation split
log_interval = 8

gradient_accumulation_steps = 1
batch_size = 24
block_size = 64

arch = "nanochat"
n_layer = 2
n_head = 2
n_kv_head = 1
n_embd = 96

optimizer = "muon"
muon_lr = 0.07
muon_momentum = 0.9
learning_rate = 1e-2
embedding_lr = 0.3
beta1 = 0.8
beta2 = 0.99
weight_decay = 0.03
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 5
max_iters = 164
lr_decay_iters = 165
