# The loss of OpenAI's gpt2-xl (1558M parameters) on this data set, without training.
# $ python train.py config/eval_gpt2_xl.py

init_from = "gpt2-xl"
eval_only = True
eval_iters = 500  # more than in training, for a more precise estimate
batch_size = 8
wandb_log = False
