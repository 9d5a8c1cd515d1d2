# A small model for any data set, with the recipe of train_stdlib_char.py. A step takes less than a second on
# two CPU cores, even with the 50,304 ids of GPT-2.
# $ python data/mine/prepare.py --data_files='texts/*.txt'
# $ python train.py config/train_small.py --dataset=mine --out_dir=out-mine

out_dir = "out-small"
dtype = "float32"  # in a model this small, casts to bfloat16 take longer than they save

eval_interval = 250
eval_iters = 10
log_interval = 50

gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

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
max_iters = 1000
lr_decay_iters = 1000
