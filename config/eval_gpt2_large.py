# The loss of OpenAI's gpt2-large (774M parameters) on this data set, without training.
# $ python train.py config/eval_gpt2_large.py

init_from = "gpt2-large"
eval_only = True
eval_iters = 500  # more than in training, for a more precise estimate
batch_size = 8
wandb_log = False
