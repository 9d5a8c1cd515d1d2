# A first training run: a small character-level GPT on the source code of Python's standard library, with a
# modern recipe (docs/recipes.md). It takes two minutes on two CPU cores. The validation split
# contains other files than the training split: the validation loss is higher, also without overfitting.
# $ python data/stdlib_char/prepare.py && python train.py config/train_stdlib_char.py

out_dir = "out-stdlib-char"
dataset = "stdlib_char"
dtype = "float32"  # in a model this small, casts to bfloat16 take longer than they save

eval_interval = 410
eval_iters = 60
log_interval = 100  # 21 lines
sample_interval = 500  # two lines that the model writes

gradient_accumulation_steps = 1
batch_size = 12
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
max_iters = 2050
lr_decay_iters = 2050
