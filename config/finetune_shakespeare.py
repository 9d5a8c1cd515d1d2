# Fine-tune GPT-2 XL on Shakespeare at a small, constant learning rate.
# $ python data/shakespeare/prepare.py && python train.py config/finetune_shakespeare.py
import time

out_dir = "out-shakespeare"
dataset = "shakespeare"
init_from = "gpt2-xl"  # for a smaller GPU: gpt2-large, gpt2-medium or gpt2

eval_interval = 5
eval_iters = 40
always_save_checkpoint = False  # save only if the validation loss has improved

wandb_log = False
wandb_project = "shakespeare"
wandb_run_name = "ft-" + str(time.time())

# 32 sequences of 1024 tokens per step; the text has 301,966 tokens, so an epoch is about 9 steps
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

learning_rate = 3e-5
decay_lr = False
