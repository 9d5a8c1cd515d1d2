# A small model that writes stories for small children, with the recipe of train_stdlib_char.py: 8:20 minutes
# on two CPU cores (AMD EPYC without AVX512, commit da3eade).
# $ python data/tinystories/prepare.py && python train.py config/train_tinystories.py
# $ python sample.py --out_dir=out-tinystories --start="Once upon a time" --num_samples=3

out_dir = "out-tinystories"
dataset = "tinystories"
dtype = "float32"  # in a model this small, casts to bfloat16 take longer than they save

eval_interval = 100
eval_iters = 10
log_interval = 20
sample_interval = 100  # two lines that the model writes

gradient_accumulation_steps = 1
batch_size = 12
block_size = 256  # a story has about 200 tokens

arch = "nanochat"
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 128

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
max_iters = 599
lr_decay_iters = 600
