# A first training run: a small character-level GPT on the source code of Python's standard library, with a
# modern recipe (docs/recipes.md). It takes a minute on two CPU cores with AVX512_BF16. The validation split
# contains other files than the training split, so its loss is higher even without overfitting.
# $ python data/stdlib_char/prepare.py && python train.py config/train_stdlib_char.py

out_dir = "out-stdlib-char"
dataset = "stdlib_char"

eval_interval = 215
eval_iters = 30
log_interval = 43  # 20 lines
sample_interval = 215  # two lines that the model writes

gradient_accumulation_steps = 1
batch_size = 24
block_size = 128

arch = "nanochat"
n_layer = 2
n_head = 4
n_kv_head = 2
n_embd = 128
dropout = 0.0

optimizer = "muon"
muon_lr = 0.04
learning_rate = 1e-2
embedding_lr = 0.3
beta1 = 0.8
beta2 = 0.99
weight_decay = 0.03
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 5
max_iters = 859
lr_decay_iters = 860
