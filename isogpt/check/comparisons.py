"""
What `bench.py --check` compares: the model of model.py, small, on every layout, compiled, in generation and
exported, and train.py itself, each with what one process computes without any of this.

Each comparison takes place in new processes, so that one that crashes, or waits forever, ends no other. They
are forked from bench.py, which has computed nothing.
"""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import combinations
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing import start_processes
from torch.utils.flop_counter import FlopCounterMode

from isogpt.check.facts import LIMIT, ROWS, Fact, Trial, crash_of, difference, fact, first_difference
from isogpt.check.layout import ONE_PROCESS, first_problem
from isogpt.checkpoint import huggingface
from isogpt.common.console import discard_output
from isogpt.launch.network import choose_interface
from isogpt.nn import counts, generation, kernels
from isogpt.parallel import compilation, parallelize
from isogpt.parallel.mesh import Mesh, connect_mesh
from isogpt.parallel.pipeline import SCHEDULES
from isogpt.parallel.plan import LayoutError, Plan, plan_of
from isogpt.speed.launches import Launches
from isogpt.speed.trial_runs import DIFFERS, HOLDS, LIMIT_S, REFUSED, TIMEOUT_S, compare_runs, verdict
from isogpt.speed.workload import Workload
from isogpt.training import optim, precision, settings

CPU = torch.device("cpu")
Answer = tuple[str, str]  # the state and the text of a comparison
# {name: settings} of the layouts of two or more processes
LAYOUTS = {
    "ddp": {},
    **{f"zero {stage}": {"zero": stage} for stage in (1, 2, 3)},
    **{f"{name} 2": {name: 2} for name in ("tp", "cp", "ep", "islands")},
    **{f"pp 2, {schedule}": {"pp": 2, "pp_schedule": schedule} for schedule in SCHEDULES},
    "exact": {"exact": True},
    "exact, zero 3": {"exact": True, "zero": 3},
    **{f"recompute {what}": {"activation_checkpointing": what} for what in ("full", "selective")},
}
# with four processes, also these in pairs
COMBINED = {
    f"{one}, {other}": LAYOUTS[one] | LAYOUTS[other]
    for one, other in combinations(("zero 3", "tp 2", "cp 2", "ep 2", "pp 2, 1f1b"), 2)
}
COMBINED["zero 3, dp_replicate 2"] = {"zero": 3, "dp_replicate": 2}
# settings of train.py before a layout changes them
ALONE = ONE_PROCESS | {"fsdp": False, "batch_size": ROWS, "gradient_accumulation_steps": 8}


def plan_with(changes: dict, config: dict, model_args: dict, processes: int = 1) -> Plan:
    """The plan of a layout. Settings of the config that divide the work are not kept."""
    config = config | ALONE | changes
    facts = {"world_size": processes, "device_type": "cpu", "dtype": "float32", "model_args": model_args}
    return plan_of(config, config["islands"], **facts)


# ------------------------------------------------------------------------------------------------------------
# the comparisons


def compare_layout(model_class: type[nn.Module], plan: Plan, config: dict) -> Answer:
    """Compare a step of all ranks with that of one process (all ranks)."""
    settings.check_plan(plan)
    mesh = connect_mesh(dist.get_rank(), plan, TIMEOUT_S)
    problem = first_problem(model_class, plan, mesh, CPU, config)
    if problem and draws_random_numbers(Trial(model_class, plan, mesh, CPU, config)):
        return REFUSED, f"training draws random numbers, which are not those of one process: {problem}"
    return verdict(problem)


def compare_alone(trial: Trial) -> Answer:
    """
    Whether each parameter that is trained gets a gradient, a step changes these parameters and no other, and
    the loss of micro-batches is that of all in one. Says what updates the parameters.
    """
    model = trial.new_model()
    is_random = draws_random_numbers(trial)
    before = weights_of(model)
    trial.step_of_one_process(model)
    optimizers = optim.make_optimizers(model, trial.config)
    for optimizer in optimizers:
        optimizer.step()
    for name, p in model.named_parameters():
        is_trained = p.grad is not None and bool(p.grad.any())
        if is_random and p.requires_grad and not is_trained:
            continue  # what uses it may have been dropped
        if p.requires_grad and p.grad is None:
            return DIFFERS, f"{name} gets no gradient"
        if is_trained == torch.equal(p, before[name].value):
            return DIFFERS, f"a step {'does not change' if is_trained else 'changes'} {name}"
    batches = trial.batches(Mesh())
    with torch.no_grad():
        apart = sum(model(x, y, 1.0)[1] for x, y in batches)
        whole = model(*map(torch.cat, zip(*batches, strict=True)), 1.0)[1]
    if not is_random and difference(fact(apart), fact(whole, LIMIT)):
        text = "a term of the loss counts once per micro-batch: multiply it by (targets != IGNORE).sum()"
        return DIFFERS, f"{text} / target_count, or sequences of a micro-batch mix"
    return HOLDS, optim.describe_updates(model, optimizers, trial.mesh)


@torch.no_grad()
def draws_random_numbers(trial: Trial) -> bool:
    """Whether the loss of a micro-batch in training depends on random numbers."""
    model, (x, y) = trial.new_model(), trial.batches(Mesh())[0]
    losses = set()
    for seed in range(8):  # a layer that is seldom dropped may be there with some of them
        precision.seed_micro_batch(seed, 0, 0, Mesh())
        losses.add(model(x, y, 1.0)[1].item())
    return len(losses) > 1


@torch.no_grad()
def compare_logits(trial: Trial) -> Answer:
    """
    Compare the logits of the last position, which sampling reads, with those of all positions. Says which
    losses are not the cross-entropy of the logits: a term may count in training alone.
    """
    model = trial.new_model()
    x, y = trial.batches(Mesh())[0]
    count = float((y != kernels.IGNORE).sum())
    precision.seed_micro_batch(trial.draw, 0, 0, Mesh())
    losses = {"in training": model(x, y, count)[1]}
    logits, losses["with logits"] = model.eval()(x, y)
    losses["of an evaluation"] = model(x, y, count)[1]
    entropy = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=kernels.IGNORE)
    others = {name: loss for name, loss in losses.items() if difference(fact(loss), fact(entropy, LIMIT))}
    texts = [f"the loss {name} {loss:.6f}" for name, loss in others.items()]
    note = ", ".join([f"the cross-entropy of the logits is {entropy:.6f}", *texts]) if texts else ""
    last = "the last position without targets"
    return verdict(first_difference({last: fact(logits[:, -1:], LIMIT)}, {last: fact(model(x)[0])}), note)


def compare_compiled(trial: Trial) -> Answer:
    """
    Compare the facts of the compiled model with those of the same model, uncompiled. Its random numbers are
    different, and so are the facts of training that depend on them.
    """
    if problem := compilation.trial_compilation(CPU):
        return REFUSED, f"it does not work on this machine: {problem}"
    compiled = trial.new_model()
    compilation.compile_parts(compiled, by_block=False)
    expected, facts, note = trial.facts(trial.new_model()), trial.facts(compiled), ""
    if draws_random_numbers(trial):
        facts = {"the loss of an evaluation": facts["the loss of an evaluation"]}
        expected = {name: expected[name] for name in facts}
        note = "in evaluations: training draws random numbers, which differ"
    return verdict(first_difference(expected, facts), note)


def compare_generation(trial: Trial) -> Answer:
    """Compare the logits of cached steps with those of whole sequences, see generation.problem_of_cache."""
    model = trial.new_model().eval()
    x, _ = trial.batches(Mesh())[0]
    problem = generation.problem_of_cache(model, x[:1, :4], max_new_tokens=trial.length)
    return (REFUSED if problem else HOLDS), problem


def weights_of(model: nn.Module) -> dict[str, Fact]:
    """Copies of the weights, which may not differ."""
    return {name: fact(p.detach().clone()) for name, p in model.state_dict().items()}


def compare_export(trial: Trial) -> Answer:
    """
    Export the model to transformers, which compares logits, and compare the weights of what is read back.
    """
    model = trial.new_model()
    with TemporaryDirectory() as folder:
        huggingface.save(Path(folder), model, {})
        copy = type(model).from_pretrained(folder)
    return verdict(first_difference(weights_of(model), weights_of(copy)))


def compare_initial_values(trial: Trial) -> Answer:
    """Compare a model that is made in memory with one that is allocated after it is made, as in a run."""
    config = trial.model_class.config_class(**trial.plan.model_args)
    expected = weights_of(trial.model_class(config, trial.draw))
    with torch.device("meta"):
        model = trial.model_class(config)
    parallelize.materialize(model, CPU)
    parallelize.init_weights(model, trial.draw)
    return verdict(first_difference(expected, weights_of(model)))


def compare_counts(trial: Trial) -> Answer:
    """
    Compare the weights that a token is multiplied by, which plans and MFU count, with the matmuls and
    convolutions of a forward pass, 2 FLOPs for each weight.
    """
    if trial.plan.model_args["n_expert"]:
        return REFUSED, "torch counts no matmuls of experts"
    model = trial.new_model()
    counted = 2 * counts.count_model(model).matrices
    x, y = trial.batches(Mesh())[0]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x, y, 1.0)
    flops = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    measured = sum(flops.get(f"aten.{op}", 0) for op in ("mm", "addmm", "convolution")) / x.numel()
    if measured > 1.01 * counted:  # fewer, if batched matmuls compute some
        return REFUSED, f"plans and MFU count {counted:,} of {measured:,.0f} FLOPs of matmuls per token"
    return HOLDS, ""


# {name: comparison} of those in a single process
IN_ONE_PROCESS = {
    "one process": compare_alone,
    "initial values": compare_initial_values,
    "parameters and FLOPs": compare_counts,
    "loss by logits": compare_logits,
    "generation with a cache": compare_generation,
    "export to transformers": compare_export,
    "compile": compare_compiled,
}


# ------------------------------------------------------------------------------------------------------------
# all comparisons


def check_model(launches: Launches, workload: Workload, processes: int) -> Iterator[tuple[str, str, str]]:
    """
    Make all comparisons of a small form of the model, and yield the name, state and text of each when it is
    made.

    Args:
        processes: how many the layouts are compared on.
    """
    config, model_args = workload.settings, workload.model_args()
    trial = Trial(workload.gpt, plan_with({}, config, model_args), Mesh(), CPU, config)
    for name, compare in IN_ONE_PROCESS.items():
        yield name, *in_processes(1, partial(compare, trial))
    layouts = LAYOUTS | COMBINED if processes % 4 == 0 else LAYOUTS
    for name, changes in layouts.items():
        if model_args["n_expert"] or "ep" not in changes:
            plan = plan_with(changes, config, model_args, processes)
            compare = partial(compare_layout, workload.gpt, plan, config | changes)
            yield name, *in_processes(processes, compare)
    yield from compare_runs(launches, config | ALONE, trial.plan.model_args)


def in_processes(processes: int, compare: Callable[[], Answer]) -> Answer:
    """Compare in new processes. Return what the first says, since others may wait for one that has failed."""
    receiver, sender = Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        args = (compare, processes, folder, sender.send)
        ranks = start_processes(answer, args, processes, join=False, daemon=True, start_method="fork")
        result = REFUSED, f"no result within {LIMIT_S:.0f} s"
        if receiver.poll(LIMIT_S):
            result = receiver.recv()
        for process in ranks.processes:
            process.kill()  # it may wait for a collective, and handle SIGTERM afterwards
            process.join()
    return result


def answer(rank: int, compare: Callable[[], Answer], processes: int, folder: str, send: Callable) -> None:
    """Compare as one of the processes. It prints nothing: transformers does, and an edited model may."""
    discard_output()
    os.dup2(1, 2)
    torch.set_num_threads(1)
    try:
        if processes > 1:
            choose_interface()
            limit = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("gloo", f"file://{folder}/store", limit, processes, rank)
        result = compare()
    except Exception as e:  # whatever an edited model raises
        is_sentence = type(e) in (ValueError, LayoutError)
        result = REFUSED, str(e) if is_sentence else f"it cannot be computed: {crash_of(e)}"
    send(result)
