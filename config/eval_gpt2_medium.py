# The loss of OpenAI's gpt2-medium (350M parameters) on this data set, without training.
# $ python train.py config/eval_gpt2_medium.py

init_from = "gpt2-medium"
eval_only = True
eval_iters = 500  # more than in training, for a more precise estimate
batch_size = 8
wandb_log = False
