"""
What settings of other tools are called here: accelerate, transformers' TrainingArguments, DeepSpeed,
torchtitan, litgpt, Megatron-LM, Lightning and torchrun. configurator.py looks here before it compares
spellings.
"""

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

OFF = ("false", "0", "no", "none", "off")
ON = ("true", "yes", "on")
EVALUATION = ("eval", "evaluation", "val", "valid", "validation", "test")  # in the names of sections
UNSET = ("", "auto", "none", "null", "-1")  # values with which other tools leave a setting open


@dataclass(frozen=True)
class Advice:
    """
    What to type here for a setting of a different tool.

    Args:
        typed: the options; `{}` stands for the value of the foreign setting, `{0}` and `{1}` for the elements
            of a list. "": there is nothing to type.
        example: the value for `{}` if no value was typed, or if the options do not accept it.
        why: what is different here, or why nothing needs to be typed.
        values: values of the foreign setting, in lower case, for which different options are typed. Each word
            counts, as in transformers' --fsdp "full_shard offload".
    """

    typed: str = ""
    example: str = ""
    why: str = ""
    values: dict[str, str] = field(default_factory=dict)

    def options(self, value: str) -> str:
        """
        The options to type for a value of the foreign setting; "" stands for the example. If two words choose
        a different value of one setting, the first word counts.
        """
        first: dict[str, str] = {}
        for option in " ".join(self.values.get(word, "") for word in words_of(value)).split():
            first.setdefault(option.partition("=")[0], option)
        typed = " ".join(first.values()) or self.typed
        elements = words_of(value)
        if typed.count("{") != len(elements):
            elements = words_of(self.example)
        for index, element in enumerate(elements):
            typed = typed.replace(f"{{{index}}}", shlex.quote(element))
        return typed.replace("{}", shlex.quote(value) if value else self.example)

    def is_left_out(self, value: str) -> bool:
        """Whether the value switches off what is off here anyway: --use_fsdp=False."""
        (first, *_), has_value = words_of(value) or [""], "{}" in self.typed
        if first == "0" and (not self.typed or re.search(r"[=:]\d", self.typed)):
            return False  # a number, not a switch: --num_workers=0
        return first in OFF and first not in self.values and not has_value

    def translates(self, value: str | list[str]) -> bool:
        """Whether the options have the meaning of this value. Otherwise they are an example."""
        if isinstance(value, list):
            is_known = any(word.lower() in self.values for word in value)
            return is_known or ("{0}" in self.typed and self.typed.count("{") == len(value))
        (first, *_), is_example = words_of(value) or [""], re.search(r"=\d", self.typed)
        if any(word in self.values for word in words_of(value)):
            return True
        if "{}" in self.typed:
            return first not in UNSET
        return first in ON and not is_example


def words_of(value: str) -> list[str]:
    """The words of a value, in lower case: full_shard and auto_wrap of 'full_shard auto_wrap'."""
    return re.findall(r"[^\s,'\"()\[\]]+", value.lower())


def without(typed: str, off: str) -> dict[str, str]:
    """The `values` of a switch: the options for True and for False."""
    return {"true": typed} | dict.fromkeys(OFF, off)


DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16-true"), "--dtype=bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed", "16-true"), "--dtype=float16"),
    **dict.fromkeys(("fp32", "float32", "32", "32-true", *OFF), "--dtype=float32"),
    "tf32": "--dtype=tf32",
}
STRATEGIES = {  # of FSDP, by name and by PyTorch's number
    **dict.fromkeys(("full_shard", "1"), "--zero=3"),
    **dict.fromkeys(("shard_grad_op", "2"), "--zero=2"),
    **dict.fromkeys(("no_shard", "3"), "--zero=0"),
    **dict.fromkeys(("hybrid_shard", "4"), "--zero=3 --dp_replicate=2"),
    **dict.fromkeys(("hybrid_shard_zero2", "_hybrid_shard_zero2", "5"), "--zero=2 --dp_replicate=2"),
}
LAUNCHER = "an option of the launcher stands before the script: torchrun --nnodes=2 ... train.py"
UNTIED = "--arch=llama --head=untied"
PER_GPU = "over all processes: multiply a number for each GPU by the number of GPUs"
IN_STEPS = (
    "a run is counted in steps, here epochs x training tokens / (gradient_accumulation_steps x batch_size x "
    "block_size)"
)
# names -> advice. A script takes the first row of a name whose options are all settings of the script.
ROWS = (
    # -- batch
    (
        "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
        "per_gpu_train_batch_size per_gpu_batch_size local_batch_size device_batch_size mbs bs",
        Advice("--batch_size={}", "12"),
    ),
    (
        "global_batch_size train_batch_size total_batch_size effective_batch_size gbs",
        Advice(
            "--gradient_accumulation_steps=40 --batch_size=12",
            why="their product is the number of sequences per step, on any number of processes",
        ),
    ),
    (
        "grad_accum grad_accum_steps grad_accumulation_steps gradient_accumulation accumulation_steps "
        "accumulate_grad_batches gradient_accumulation_iters num_pp_microbatches num_microbatches "
        "pipeline_parallel_microbatches",
        Advice("--gradient_accumulation_steps={}", "40", PER_GPU),
    ),
    (
        "per_device_eval_batch_size eval_batch_size val_batch_size",
        Advice(why="not needed: an evaluation uses batch_size"),
    ),
    (
        "seq_len seq_length max_seq_len max_seq_length sequence_length sequence_len context_length "
        "context_size max_context_length ctx_len n_ctx max_position_embeddings model_max_length",
        Advice("--block_size={}", "1024"),
    ),
    # -- length of the run
    (
        "total_steps max_steps num_steps n_steps train_steps training_steps num_train_steps "
        "num_training_steps max_train_steps total_num_steps num_iterations iterations n_iters num_iters "
        "train_iters steps",
        Advice("--max_iters={} --lr_decay_iters={}", "5000"),
    ),
    (
        "epochs epoch num_epochs n_epochs num_train_epochs train_epochs max_epochs",
        Advice("--max_iters=5000 --lr_decay_iters=5000", why=IN_STEPS),
    ),
    ("max_tokens", Advice("--max_new_tokens={}", "100")),
    ("max_tokens train_tokens total_tokens", Advice("--max_iters=5000 --lr_decay_iters=5000", why=IN_STEPS)),
    ("max_time max_run_time time_limit max_duration", Advice("--time_limit_s={}", "3600", "in seconds")),
    # -- optimizer and schedule
    (
        "lr base_lr max_lr peak_lr initial_lr init_lr lr_max adam_lr warmup_max_lr",
        Advice("--learning_rate={}", "6e-4"),
    ),
    ("min_learning_rate lr_min eta_min", Advice("--min_lr={}", "6e-5")),
    ("min_lr_ratio min_lr_factor", Advice("--min_lr=6e-5", why="a rate: the ratio times learning_rate")),
    (
        "optim optimizer_name optimizer_type optimizer.type opt",
        Advice(
            "--optimizer=adamw",
            values=dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused"), "--optimizer=adamw")
            | {"muon": "--optimizer=muon"},
            why="adamw or muon",
        ),
    ),
    ("adam_beta1 adam_b1 b1", Advice("--beta1={}", "0.9")),
    ("adam_beta2 adam_b2 b2", Advice("--beta2={}", "0.95")),
    ("betas adam_betas", Advice("--beta1={0} --beta2={1}", "0.9 0.95")),
    ("momentum", Advice("--beta1={}", "0.9", "AdamW's; of Muon: --muon_momentum=0.95")),
    ("adam_epsilon adam_eps eps epsilon", Advice(why="not a setting: AdamW uses PyTorch's default, 1e-8")),
    ("wd l2 adam_weight_decay", Advice("--weight_decay={}", "0.1")),
    (
        "max_grad_norm max_norm grad_norm_clip clip_grad clip_grad_norm gradient_clip gradient_clip_val "
        "gradient_clipping grad_norm",
        Advice("--grad_clip={}", "1.0"),
    ),
    (
        "warmup warmup_steps num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_num_steps",
        Advice("--warmup_iters={}", "100"),
    ),
    ("warmup_ratio warmup_fraction lr_warmup_fraction", Advice("--warmup_iters=100", why="in steps")),
    ("lr_decay_steps decay_steps", Advice("--lr_decay_iters={}", "5000")),
    (
        "lr_scheduler lr_scheduler_type scheduler scheduler_type scheduler.type lr_decay_style decay_type "
        "lr_schedule_type",
        Advice(
            "--lr_schedule=cosine",
            values={
                "cosine": "--lr_schedule=cosine",
                "linear": "--lr_schedule=linear",
                "wsd": "--lr_schedule=wsd --cooldown_iters=1000",
                "warmup_stable_decay": "--lr_schedule=wsd --cooldown_iters=1000",
                "constant": "--decay_lr=False",
                **dict.fromkeys(("constant_with_warmup", "warmuplr"), "--lr_schedule=wsd --cooldown_iters=1"),
                "warmupdecaylr": "--lr_schedule=linear",
                "warmupcosinelr": "--lr_schedule=cosine",
            },
        ),
    ),
    (
        "use_linear_scaling linear_scaling scale_lr linear_lr_scaling",
        Advice(
            "--lr_scaling=linear --base_batch=480",
            why="base_batch: the sequences per step for which learning_rate was chosen",
        ),
    ),
    # -- model
    ("num_layers num_hidden_layers n_layers num_blocks depth", Advice("--n_layer={}", "12")),
    ("hidden_size d_model embed_dim emb_dim model_dim n_embed dim", Advice("--n_embd={}", "768")),
    ("num_heads num_attention_heads n_heads", Advice("--n_head={}", "12")),
    (
        "num_key_value_heads n_kv_heads num_kv_heads num_query_groups n_query_groups",
        Advice("--arch=llama --n_kv_head={}", "4"),
    ),
    ("intermediate_size ffn_hidden_size ffn_dim d_ff hidden_dim", Advice("--n_hidden={}", "3072")),
    ("num_experts num_local_experts n_experts n_routed_experts", Advice("--n_expert={}", "8")),
    (
        "num_experts_per_tok moe_router_topk n_expert_per_token experts_per_token",
        Advice("--n_expert=8 --n_expert_active={}", "2"),
    ),
    (
        "attention_dropout hidden_dropout attn_dropout resid_dropout attn_pdrop resid_pdrop embd_pdrop",
        Advice("--dropout={}", "0.1"),
    ),
    (
        "tie_word_embeddings tie_embeddings weight_tying",
        Advice("--head=tied", values=without("--head=tied", UNTIED), why="gpt2's head is always tied"),
    ),
    (
        "untie_embeddings_and_output_weights",
        Advice(UNTIED, values=without(UNTIED, "--head=tied"), why="gpt2's head is always tied"),
    ),
    (
        "use_flash_attention use_flash_attention_2 use_flash_attn flash_attention flash_attn "
        "attn_implementation attention_backend",
        Advice(why="not needed: attention uses the fastest kernel of PyTorch"),
    ),
    ("model_type architecture", Advice("--arch=gpt2", why="gpt2, nanochat or llama")),
    (
        "model model_name model_name_or_path model_path pretrained pretrained_model "
        "pretrained_model_name_or_path initial_checkpoint_dir hf_model",
        Advice("--init_from=gpt2", why="or the folder of a run, or of Hugging Face weights"),
    ),
    # -- precision, device, compiling
    (
        "mixed_precision precision amp use_amp amp_dtype torch_dtype data_type mixed_precision_param "
        "autocast",
        Advice("--dtype=bfloat16", values=DTYPES),
    ),
    (
        "bf16 use_bf16 bfloat16 bf16.enabled",
        Advice("--dtype=bfloat16", values=without("--dtype=bfloat16", "--dtype=float32")),
    ),
    (
        "fp16 use_fp16 float16 half fp16.enabled",
        Advice("--dtype=float16", values=without("--dtype=float16", "--dtype=float32")),
    ),
    ("fp32 float32", Advice("--dtype=float32")),
    ("tf32 allow_tf32 use_tf32", Advice("--dtype=tf32", values=without("--dtype=tf32", "--dtype=float32"))),
    ("fp8 use_fp8 float8", Advice("--dtype=bfloat16", why="FP8 is not part of this repository")),
    ("loss_scale initial_scale_power", Advice("--dtype=float16", why="the loss scale is dynamic")),
    ("use_cpu no_cuda cpu", Advice("--device=cpu", values=without("--device=cpu", "--device=auto"))),
    (
        "accelerator",
        Advice(
            "--device=auto",
            values=dict.fromkeys(("gpu", "cuda"), "--device=cuda")
            | {"cpu": "--device=cpu", "mps": "--device=mps"},
        ),
    ),
    (
        "use_cuda use_gpu",
        Advice(
            "--device=auto", why="auto takes a GPU if there is one", values=dict.fromkeys(OFF, "--device=cpu")
        ),
    ),
    ("cuda gpu", Advice("--device=auto", why="the default, which takes a GPU if there is one")),
    ("gpu_id device_id", Advice("--device=cuda:{}", "0")),
    ("gpu_ids", Advice("--device=cuda:0", why="for several, set CUDA_VISIBLE_DEVICES=0,1")),
    (
        "torch_compile use_compile use_torch_compile compile.enable compile_model dynamo_backend",
        Advice("--compile=True", values=dict.fromkeys(OFF, "--compile=False")),
    ),
    ("full_determinism use_deterministic_algorithms cudnn_deterministic", Advice("--deterministic=True")),
    (
        "benchmark cudnn_benchmark",
        Advice(why="not needed: only convolutions use cudnn.benchmark, and a GPT contains none"),
    ),
    ("random_seed data_seed manual_seed seed_everything", Advice("--seed={}", "1337")),
    # -- processes
    (
        "world_size num_processes num_gpus n_gpus n_gpu ngpus gpus nproc_per_node nprocs n_procs devices "
        "gpus_per_node",
        Advice("--nproc={}", "2", "processes on this machine; on several machines: docs/launchers.md"),
    ),
    (
        "nnodes num_nodes num_machines node_rank machine_rank master_addr master_port main_process_ip "
        "main_process_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval "
        "standalone start_method role tee redirects local_addr hostfile launcher",
        Advice(why=LAUNCHER),
    ),
    (
        "distributed multi_gpu use_ddp ddp use_distributed distributed_training data_parallel dataparallel",
        Advice("--nproc=2", why="several processes use DDP, whether --nproc or torchrun starts them"),
    ),
    (
        "distributed_type strategy",
        Advice(
            "--zero=0",
            why="zero: 0 is DDP, 3 is FSDP",
            values={
                **dict.fromkeys(("multi_gpu", "multi_cpu", "ddp", "ddp_spawn", "dp"), "--zero=0"),
                "fsdp": "--fsdp=True",
                "deepspeed": "--zero=2",
                **dict.fromkeys(("deepspeed_stage_1", "deepspeed_stage_1_offload"), "--zero=1"),
                "deepspeed_stage_2": "--zero=2",
                "deepspeed_stage_2_offload": "--zero=2 --cpu_offload=True",
                "deepspeed_stage_3": "--zero=3",
                "deepspeed_stage_3_offload": "--zero=3 --cpu_offload=True",
            },
        ),
    ),
    (
        "dist_backend ddp_backend distributed_backend process_group_backend",
        Advice("--backend=auto", values={"nccl": "--backend=nccl", "gloo": "--backend=gloo"}),
    ),
    (
        "ddp_timeout dist_timeout nccl_timeout init_timeout_seconds train_timeout_seconds",
        Advice("--dist_timeout_s={}", "600"),
    ),
    ("ddp_bucket_cap_mb bucket_cap_mb", Advice("--ddp_bucket_mb={}", "25")),
    ("reduce_bucket_size", Advice("--ddp_bucket_mb=25", why="in MB, with zero 0 and 1; not in elements")),
    (
        "find_unused_parameters ddp_find_unused_parameters ddp_static_graph static_graph broadcast_buffers "
        "ddp_broadcast_buffers gradient_as_bucket_view",
        Advice(why="not needed: each step uses all parameters, and there are no buffers"),
    ),
    ("sync_bn sync_batchnorm use_sync_bn", Advice(why="not needed: a GPT contains no BatchNorm")),
    ("sync_each_batch", Advice("--grad_sync=every")),
    (
        "comm_hook ddp_comm_hook gradient_compression compression",
        Advice(
            "--grad_compression=fp16",
            values={
                "bf16": "--grad_compression=bf16",
                "bf16_compress_hook": "--grad_compression=bf16",
                "powersgd": "--grad_compression=powersgd:4",
                "power_sgd": "--grad_compression=powersgd:4",
                **dict.fromkeys(OFF, "--grad_compression=none"),
            },
        ),
    ),
    (
        "diloco diloco_workers num_diloco_workers n_diloco_workers diloco.num_workers diloco_num_workers "
        "diloco.n_workers local_sgd n_islands num_islands",
        Advice("--islands={} --local_steps=50", "2", "DiLoCo's workers are called islands here"),
    ),
    (
        "local_sgd_steps diloco_steps inner_steps num_inner_steps h_steps sync_every sync_steps",
        Advice("--islands=2 --local_steps={}", "50"),
    ),
    (
        "outer_learning_rate diloco_outer_lr diloco.outer_learning_rate",
        Advice("--islands=2 --local_steps=50 --outer_lr={}", "0.7"),
    ),
    (
        "outer_nesterov_momentum diloco_outer_momentum",
        Advice("--islands=2 --local_steps=50 --outer_momentum={}", "0.9"),
    ),
    # -- sharding and memory
    ("zero_stage zero_optimization zero_level stage zero_optimization_stage", Advice("--zero={}", "2")),
    (
        "deepspeed use_deepspeed deepspeed_config deepspeed_config_file ds_config zero2 enable_deepspeed",
        Advice(
            "--zero=2", why="the file is not read; docs/migrating.md lists the names of the settings here"
        ),
    ),
    ("use_fsdp fsdp_enabled enable_fsdp full_shard fsdp2 zero3 fsdp_version", Advice("--fsdp=True")),
    ("fsdp_config", Advice(why="not needed with --zero=2 or 3: each block is sharded, from the start")),
    # fsdp is True or False here, in transformers it is text such as 'full_shard auto_wrap'
    (
        "fsdp sharding_strategy fsdp_sharding_strategy",
        Advice("--zero=3", values=STRATEGIES | {"offload": "--zero=3 --cpu_offload=True"}),
    ),
    (
        "reshard_after_forward fsdp_reshard_after_forward",
        Advice("--zero=3", values=without("--zero=3", "--zero=2") | {"never": "--zero=2"} | STRATEGIES),
    ),
    (
        "offload offload_params fsdp_offload_params offload_param offload_optimizer offload_param_device "
        "offload_optimizer_device offload_param.device offload_optimizer.device enable_cpu_offload "
        "fsdp_cpu_offload zero_offload",
        Advice(
            "--zero=3 --cpu_offload=True",
            values=dict.fromkeys(OFF, "--cpu_offload=False")
            | dict.fromkeys(("cpu", "nvme", *ON), "--zero=3 --cpu_offload=True"),
        ),
    ),
    (
        "auto_wrap_policy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap "
        "transformer_layer_cls_to_wrap fsdp_state_dict_type fsdp_use_orig_params use_orig_params "
        "fsdp_sync_module_states sync_module_states fsdp_cpu_ram_efficient_loading fsdp_min_num_params "
        "limit_all_gathers zero3_init_flag zero3_save_16bit_model",
        Advice("--fsdp=True", why="the rest is not needed: each block is sharded, from the start"),
    ),
    (
        "fsdp_forward_prefetch forward_prefetch fsdp_backward_prefetch backward_prefetch",
        Advice("--zero=3 --fsdp_prefetch=1"),
    ),
    (
        "dp_replicate_size dp_replicate_degree data_parallel_replicate_degree "
        "parallelism_config_dp_replicate_size",
        Advice("--zero=3 --dp_replicate={}", "2"),
    ),
    (
        "dp_shard dp_shard_size dp_shard_degree data_parallel_shard_degree parallelism_config_dp_shard_size",
        Advice("--zero=3", why="the shards are the processes that dp_replicate, tp, pp and cp leave"),
    ),
    (
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size "
        "tp_degree model_parallel_size parallelism_config_tp_size megatron_lm_tp_degree",
        Advice("--tp={}", "2"),
    ),
    (
        "sequence_parallel enable_sequence_parallel sequence_parallelism",
        Advice("--tp=2", why="tp divides the sequences too"),
    ),
    (
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size "
        "pp_size pp_degree megatron_lm_pp_degree",
        Advice("--pp={}", "2"),
    ),
    (
        "pipeline_parallel_schedule pipeline_schedule schedule",
        Advice(
            "--pp_schedule=1f1b",
            values={
                "gpipe": "--pp_schedule=gpipe",
                "interleaved1f1b": "--pp_schedule=interleaved",
                "interleavedzerobubble": "--pp_schedule=zero_bubble",
                "zbvzerobubble": "--pp_schedule=zbv",
            },
        ),
    ),
    (
        "context_parallel context_parallel_size context_parallel_degree cp_size cp_degree ring_size "
        "ulysses_degree sequence_parallel_size ulysses_sequence_parallel_size parallelism_config_cp_size",
        Advice("--cp={}", "2"),
    ),
    (
        "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size "
        "ep_degree",
        Advice("--n_expert=8 --ep={}", "2"),
    ),
    (
        "gradient_checkpointing grad_checkpointing use_gradient_checkpointing activation_checkpoint "
        "activation_checkpoint.mode fsdp_activation_checkpointing checkpoint_activations recompute "
        "recompute_activations recompute_granularity use_checkpoint",
        Advice(
            "--activation_checkpointing=full",
            values={"selective": "--activation_checkpointing=selective"}
            | dict.fromkeys(OFF, "--activation_checkpointing=none"),
        ),
    ),
    # -- checkpoints
    (
        "resume resume_from resume_from_checkpoint resume_checkpoint load_checkpoint load_from restore load "
        "initial_load_path ckpt ckpt_path checkpoint checkpoint_path load_checkpoint_path",
        Advice(
            "--init_from=resume",
            why="the newest checkpoint in --out_dir; a folder or a ckpt.pt instead: only the weights",
        ),
    ),
    (
        "auto_resume autoresume",
        Advice("--init_from=auto --save_interval=500", why="a restart resumes the newest checkpoint"),
    ),
    (
        "save_steps save_every save_freq save_frequency save_every_n_steps checkpoint_interval "
        "checkpoint_every checkpoint_freq checkpointing_steps ckpt_interval ckpt_every checkpoint.interval",
        Advice("--save_interval={}", "500"),
    ),
    (
        "save_total_limit checkpoints_total_limit keep_latest_k max_checkpoints keep_checkpoints",
        Advice("--keep_last={}", "2", "the best checkpoint is kept too"),
    ),
    (
        "save_strategy checkpointing",
        Advice(
            "--save_interval=500",
            values={"best": "--always_save_checkpoint=False"} | dict.fromkeys(OFF, "--save_checkpoint=False"),
        ),
    ),
    (
        "enable_checkpointing",
        Advice("--save_checkpoint=True", values=dict.fromkeys(OFF, "--save_checkpoint=False")),
    ),
    (
        "load_best_model_at_end save_best metric_for_best_model",
        Advice(why="not needed: the checkpoint of the best validation loss is kept, and sample.py reads it"),
    ),
    (
        "output_dir output output_path save_dir save_path save_folder checkpoint.folder dump_folder "
        "results_dir run_dir log_dir logdir logging_dir default_root_dir checkpoint_dir outdir",
        Advice("--out_dir={}", "out"),
    ),
    ("overwrite_output_dir", Advice(why="not needed: a new run moves an earlier run to previous_1/")),
    ("push_to_hub hub_model_id", Advice(why="not here: python export.py OUT_DIR --to=hf writes the model")),
    # -- logging and evaluation
    (
        "logging_steps log_steps log_every log_freq log_frequency log_every_n_steps steps_per_print "
        "print_every print_freq logging_interval",
        Advice("--log_interval={}", "10"),
    ),
    (
        "eval_steps eval_step eval_every eval_freq eval.interval evaluation_interval evaluate_every "
        "val_every val_interval val_check_interval val_freq validation.freq",
        Advice("--eval_interval={}", "500"),
    ),
    ("eval_strategy evaluation_strategy", Advice("--eval_interval=500")),
    (
        "eval.max_iters eval_batches val_steps validation_steps validation.steps max_eval_steps "
        "limit_val_batches val_batches",
        Advice("--eval_iters={}", "200"),
    ),
    ("fast_dev_run", Advice("--max_iters=1 --eval_iters=1", why="two steps and two evaluations")),
    ("overfit_batches", Advice(why="not here: prepare a small data set, see data/README.md")),
    (
        "auto_scale_batch_size auto_find_batch_size",
        Advice("--layout=auto", why="the fastest batch_size that fits, with the same sequences per step"),
    ),
    (
        "do_eval",
        Advice(why="not needed: a run evaluates at each eval_interval; without training: --eval_only=True"),
    ),
    ("eval evaluate evaluation", Advice("--eval_only=True")),
    ("do_train train", Advice(why="not needed: this script trains")),
    (
        "use_wandb wandb with_wandb enable_wandb log_wandb log_to_wandb",
        Advice("--wandb_log=True", values=without("--wandb_log=True", "--wandb_log=False")),
    ),
    ("no_wandb disable_wandb", Advice("--wandb_log=False", values={v: "--wandb_log=True" for v in OFF})),
    (
        "use_lora lora lora_r lora_rank lora_alpha use_peft use_qlora qlora load_in_8bit load_in_4bit",
        Advice(why="not here, see docs/questions.md: all weights are trained, in float32"),
    ),
    (
        "report_to log_with logger logger_name tracker with_tracking",
        Advice(
            "--wandb_log=True",
            values={"tensorboard": "--tensorboard_log=True", "wandb": "--wandb_log=True"}
            | dict.fromkeys(OFF, "--wandb_log=False"),
        ),
    ),
    (
        "tensorboard use_tensorboard enable_tensorboard tensorboard_dir",
        Advice("--tensorboard_log=True", values=dict.fromkeys(OFF, "--tensorboard_log=False")),
    ),
    ("run_name experiment_name exp_name wandb_name wandb_run", Advice("--wandb_run_name={}", "gpt2")),
    ("project project_name wandb_project_name", Advice("--wandb_project={}", "owt")),
    (
        "wandb_entity wandb_mode wandb_group",
        Advice(
            "--wandb_log=True",
            why="wandb reads the rest from variables such as WANDB_ENTITY, WANDB_MODE",
            values={"disabled": "--wandb_log=False"},
        ),
    ),
    (
        "profiler profiling enable_profiling use_profiler wall_clock_breakdown",
        Advice("--profile=True", values=without("--profile=True", "--profile=False")),
    ),
    ("disable_tqdm log_level verbose", Advice("--log_interval=10", why="the only setting of the console")),
    # -- data
    (
        "train_data_path train_data train_data_dir train_dataset train_file train_path train_bin data_path "
        "data_dir data_root data data_file dataset_name dataset_path dataset_dir input_bin input_file",
        Advice("--dataset={}", "shakespeare_char", "a folder with train.bin and val.bin: data/README.md"),
    ),
    (
        "validation_file val_file val_data val_data_path val_data_dir eval_dataset validation_split "
        "eval_data_path",
        Advice(why="not needed: the folder of --dataset contains val.bin, see data/README.md"),
    ),
    (
        "tokenizer tokenizer_name tokenizer_path tokenizer_dir tokenizer_type",
        Advice(why="part of the data set: python data/NAME/prepare.py --tokenizer=..."),
    ),
    (
        "num_workers dataloader_num_workers workers n_workers pin_memory dataloader_pin_memory "
        "prefetch_factor persistent_workers dataloader_prefetch_factor drop_last dataloader_drop_last "
        "num_proc",
        Advice(why="not needed: a thread reads the next batches from the mapped files"),
    ),
    ("shuffle use_distributed_sampler", Advice("--data_order=shuffle", why="each window once per epoch")),
    # -- faults
    ("detect_anomaly terminate_on_nan detect_nan", Advice("--on_nan=stop", why="the default")),
    ("skip_nan nan_policy skip_nan_grad logging_nan_inf_filter", Advice("--on_nan=skip")),
    (
        "config_file config_path cfg config_name job.config_file",
        Advice(why="type the name of the file alone: a .py file that assigns to settings"),
    ),
    # -- sampling
    ("prompt text input prompt_text", Advice("--start={}", "'def main('")),
    ("max_length length gen_len max_gen_len num_tokens n_tokens", Advice("--max_new_tokens={}", "100")),
    ("max_length", Advice("--block_size={}", "1024")),
    ("num_return_sequences n_samples n", Advice("--num_samples={}", "3")),
    ("temp", Advice("--temperature={}", "0.8")),
    ("topk", Advice("--top_k={}", "200")),
    ("topp nucleus", Advice("--top_p={}", "0.9")),
)
TABLE: dict[str, list[Advice]] = {}
for _names, _advice in ROWS:
    for _name in _names.split():
        TABLE.setdefault(_name, []).append(_advice)


def advice_for(name: str) -> list[Advice]:
    """
    The advice for a foreign setting, in order of preference. Parts before a dot, as in torchtitan's and
    litgpt's `training.steps`, are left out if the table does not contain the whole name. A section for the
    evaluation is not left out: `validation.seq_len` is not that of the training.
    """
    words = name.replace("-", "_").lower().split(".")
    latest = section_of_evaluation(name)
    starts = range(len(words) if latest is None else latest + 1)
    endings = (".".join(words[start:]) for start in starts)
    return next((TABLE[ending] for ending in endings if ending in TABLE), [])


def section_of_evaluation(name: str) -> int | None:
    """
    Which part of a dotted name is a section for the evaluation, as in `validation.seq_len`: the last such
    part, counted from 0. None: no part is, or the setting itself says so, as in `eval.eval_iters`.
    """
    *sections, last = name.replace("-", "_").lower().split(".")
    found = [place for place, part in enumerate(sections) if not {*part.split("_")}.isdisjoint(EVALUATION)]
    return None if not found or last.startswith("eval_") else found[-1]


def settings_in(options: str) -> list[str]:
    """The names of the settings in options such as '--zero=3 --dp_replicate=2'."""
    return re.findall(r"--(\w+)=", options)


# ------------------------------------------------------------------------------------------------------------
# what `accelerate launch` passes on in variables, and this repository does not read

SHARDING = ("zero", "cpu_offload", "dp_replicate", "tp", "pp", "cp")  # chosen by --layout=auto
# variables of accelerate (1.x, utils/launch.py) -> a name in TABLE
VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation",
}
OF_FSDP = {
    "FSDP_SHARDING_STRATEGY": "fsdp_sharding_strategy",
    "FSDP_RESHARD_AFTER_FORWARD": "fsdp_reshard_after_forward",
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_activation_checkpointing",
}
OF_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
}
OF_PARALLELISM = {
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "dp_replicate_size",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "dp_shard_size",
    "PARALLELISM_CONFIG_TP_SIZE": "tp_size",
    "PARALLELISM_CONFIG_CP_SIZE": "cp_size",
}
OF_MEGATRON = {"MEGATRON_LM_TP_DEGREE": "tp_degree", "MEGATRON_LM_PP_DEGREE": "pp_degree"}
GROUPS = {  # a switch of accelerate -> the variables that then count
    "ACCELERATE_USE_FSDP": OF_FSDP,
    "ACCELERATE_USE_DEEPSPEED": OF_DEEPSPEED,
    "ACCELERATE_USE_PARALLELISM_CONFIG": OF_PARALLELISM,
    "ACCELERATE_USE_MEGATRON_LM": OF_MEGATRON,
}


def unapplied_settings(config: Mapping[str, object], env: Mapping[str, str]) -> str:
    """
    A sentence about the settings of `accelerate launch` that this run does not follow, with what to type; ""
    if there are none.
    """
    dropped, wanted = [], {}
    for variable, name in variables_that_count(env).items():
        value = env.get(variable, "")
        if name == "deepspeed_config_file":
            options = f"--zero={stage_in(value)}"
        elif name == "gradient_accumulation" and value.isdigit():  # accelerate counts for each process
            options = advice_for(name)[0].options(str(int(value) * int(env.get("WORLD_SIZE") or 1)))
        else:
            options = advice_for(name)[0].options(value)
        typed = dict(re.findall(r"--(\w+)=(\S+)", options))
        if any(is_different(config, *pair) for pair in typed.items()):
            dropped.append(f"{variable}={value}")
            wanted |= typed
    words = " ".join(f"--{name}={value}" for name, value in wanted.items())
    reason = "not applied, since train.py reads only its arguments and configs"
    return f"accelerate's {', '.join(dropped)}: {reason}: type {words}" if dropped else ""


def variables_that_count(env: Mapping[str, str]) -> dict[str, str]:
    """
    The variables of accelerate, and the setting that each stands for, without those that accelerate sets
    although nobody has chosen anything.
    """
    names = dict(VARIABLES)
    for switch, group in GROUPS.items():
        if env.get(switch, "").lower() in ("true", "1"):
            names |= group
    is_fsdp2 = (
        env.get("FSDP_VERSION") == "2"
    )  # with FSDP 1, a strategy stands for what FSDP 2 calls resharding
    names.pop("FSDP_SHARDING_STRATEGY" if is_fsdp2 else "FSDP_RESHARD_AFTER_FORWARD", None)
    chosen = {}
    for variable, name in names.items():
        value = env.get(variable, "").lower()
        is_size = variable.endswith(("_SIZE", "_DEGREE", "_STEPS"))
        is_off = value in ("-1", "auto", *OFF) and variable != "FSDP_RESHARD_AFTER_FORWARD"
        if value and not is_off and not (is_size and value == "1"):
            chosen[variable] = name
    return chosen


def stage_in(path: str) -> int:
    """The stage of ZeRO in a config of DeepSpeed; 2, for example, if the file cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int(json.loads(Path(path).read_text())["zero_optimization"]["stage"])
    return 2


def is_different(config: Mapping[str, object], name: str, value: str) -> bool:
    """Whether a run with these settings does not do what --name=value says."""
    if name in SHARDING and config["layout"] == "auto":
        return False
    actual = 3 if name == "zero" and config.get("fsdp") else config[name]
    try:
        return float(actual) != float(value)
    except (TypeError, ValueError):
        return str(actual) != value
