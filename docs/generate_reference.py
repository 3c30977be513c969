"""Writes the tables of the reference that follow from the code: recipe keys and commands.

    python docs/generate_reference.py            # write them
    python docs/generate_reference.py --check    # exit 1 where a page is out of date

A page keeps its hand-written text; what stands between its two marks is replaced. Defaults, kinds
and bounds are read from the models; what a key means stands in `MEANING`, which must name every
key and no other.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from m2flow.cli.app import app
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.common.recipe import LARGEST, Recipe
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.reasoning.config import ReasoningRecipe

DOCS = Path(__file__).parent
BEGIN, END = "<!-- generated: {} -->", "<!-- end of generated: {} -->"

MEANING = {
    "workload": "what kind of run it is; installed packages may add workloads of their own",
    "name": "names the run and its directory",
    "seed": "fixes the model's initial weights, the problems and everything that is sampled",
    "steps": "training steps",
    "mode": "the plan to build; `--mode` sets it too, `--plan FILE` replaces it",
    "lanes": "`cpu:N` (the cores shared evenly by N lanes), `gpu:N`, or `auto`: all GPUs, else "
    "a lane for each core; `MxKIND:N`, such as `2xcpu:1`, on each of M machines",
    "lane_memory": "memory that states and calls may take on a lane, such as `200MB` or `1.5GiB`; "
    "workers that do not fit there together make way for each other; `null`: 90 % of a GPU's "
    "memory, and no limit on CPU lanes",
    "layouts": "name of the layout of each worker that is divided over several lanes, by worker: "
    "`fsdpN`, `tpN`, `tpN.fsdpM`, `cpN` and, where it has experts, `epN` divide a `learner`, "
    "`critic` or `reference` over lanes, `fsdpN` a `reward_model`, `tpN` the heads of a "
    "`generator` or `judge`; N must divide the number of the worker's lanes, and for `tpN` that of "
    "key-value heads. The `learner` of an embodied run has `fsdpN`, where OpenVLA or OpenVLA-OFT "
    "trains without adapters. An eager run has none",
    "reward": "what scores answers: a function by its dotted path, `my_module:my_function`, or "
    "one of `addition`, `code`, `format`, `gym`, `math`; or a list of tables with `function` and "
    "`weight`, whose weighted rewards add up. None: the task's own; `[]` where models alone judge",
    "reward_model.path": "a folder for `AutoModelForSequenceClassification` whose score joins the "
    "reward ([how](../how-to/own-reward.md)); `null` for none",
    "reward_model.weight": "factor of its score",
    "reward_model.label": "of a head with several labels, the one whose probability is the score",
    "reward_model.dtype": "what it computes in; `auto`: bfloat16 on accelerators, float32 on CPUs",
    "reward_model.tokens_per_microbatch": "tokens that it reads at a time, padding included",
    "judge.path": "the folder of a causal language model that judges answers in words "
    "([how](../how-to/own-reward.md)); `null` for none",
    "judge.weight": "factor of its score, which is from 0 to 1",
    "judge.template": "what it is asked, with `{answer}`, and `{question}`, `{gold}` (the right "
    "answer) and `{highest}` where wanted; `null`: to compare with the right answer",
    "judge.pattern": "a regular expression: the first group of its last match in what the judge "
    "writes is the score",
    "judge.highest": "the best score that it may give; the score is divided by it",
    "judge.max_new_tokens": "longest judgement",
    "judge.temperature": "of its sampling; 0 is greedy",
    "judge.chat_options": "variables of its chat template, such as `enable_thinking: false`",
    "judge.max_running": "judgements drawn together by a replica at most",
    "judge.dtype": "what it computes in; `auto`: bfloat16 on accelerators, float32 on CPUs",
    "judge.cache_gb": "as `generation.cache_gb`, for the judge",
    "prompts_per_step": "prompts of a step",
    "samples_per_prompt": "answers drawn for each prompt: a group",
    "minibatches": "mini-batches of a training step: an optimizer step for each, in each of "
    "`algorithm.epochs`",
    "minibatch_order": "which samples the next mini-batch is made of: `index`, those whose number "
    "is next, under every plan the same; `arrival`, those that are finished next, so that no "
    "optimizer step waits for one long answer ([what that costs](../explanation/the-promise.md))",
    "max_staleness": "how many versions the weights that generate may lag behind; 0 is on-policy",
    "load_deadline_seconds": "longest that lanes may take to start, and a lane to load one worker",
    "lane_restarts": "how often a lane whose process has ended is started again with fewer than "
    "ten steps in between; 0: the run ends",
    "elastic": "whether the run goes on without a lane that cannot be started again, and takes it "
    "in again when it can be had ([how](../how-to/resume.md#lanes-that-do-not-come-back))",
    "spare_lanes": "processes that wait on each machine, with their imports done, to be a lane of "
    "cores that is lost; none with `lane_restarts: 0`, and a lane of a GPU is started afresh",
    "snapshot_every": "steps after which a snapshot of what is trained is taken at the latest, for "
    "the loss of a lane; null: as often as 1.5 % of the lanes' time allows",
    "journal_gb": "10**9 bytes of finished rollouts that are kept on disk until a checkpoint holds "
    "their step, so that `--resume` does not make them again; 0 for none",
    "max_skipped_updates": "optimizer steps in a row that are left out because a loss or gradient "
    "is not finite (a mini-batch counts once in all epochs of a step), or steps in a row of which "
    "half of the rewards or more have failed, or of the episodes were given up; one more ends the "
    "run",
    "grace_seconds": "longest that a step may take to its end after SIGTERM, SIGHUP or Ctrl-C",
    "deadline_seconds": "longest that one call may take before the run is stopped with an account "
    "of who waits for whom",
    "logger": "where figures go; `jsonl` must be among them, `tensorboard` needs the `dash` "
    "extra, and the others the extra of their name ([how](../how-to/loggers.md))",
    "samples_logged_per_step": "rollouts of a step that are written to `samples.jsonl`",
    "model.path": "a folder in Hugging Face layout; without it a tiny Qwen2 is built on the spot",
    "model.dtype": "what is computed in; `auto`: bfloat16 on accelerators, float32 on CPUs. Of a "
    "model that learns in bfloat16 the optimizer keeps float32 weights, gradients and moments",
    "model.lora_rank": "rank of LoRA adapters, which alone are trained (extra `lora`); 0: all "
    "weights are",
    "model.lora_alpha": "the adapters' scale times their rank; `null`: twice the rank",
    "model.lora_publish": "what goes to the lanes that generate: `merged`, the weights with the "
    "adapters added, or `adapter`, the adapters alone, which each lane adds to the model that the "
    "run has begun with",
    "model.hidden_size": "tiny model: width; it and the six below have no effect beside "
    "`model.path`, and a line says so where they are written",
    "model.num_hidden_layers": "tiny model: layers",
    "model.num_attention_heads": "tiny model: query heads",
    "model.num_key_value_heads": "tiny model: key-value heads",
    "model.intermediate_size": "tiny model: width of the MLP",
    "model.max_position_embeddings": "tiny model: longest prompt and answer together, in tokens",
    "model.initializer_range": "tiny model: standard deviation of its initial weights",
    "data.task": "where problems come from and how answers are scored",
    "data.path": "`jsonl`: what to train on: a file of JSON lines, CSV, Parquet or Arrow, or a "
    "folder of such files (Parquet and Arrow need the `data` extra)",
    "data.eval_path": "`jsonl`: a file to hold out; without it the last rows of `data.path` are "
    "(a tenth, at most 256)",
    "data.question_column": "`jsonl`: column of the question, with dots into nested ones; `null`: "
    "`question`, `problem` or `prompt`. A text, or a conversation: a list of turns, the last of "
    "them the user's",
    "data.answer_column": "`jsonl`: column of the right answer, such as "
    "`reward_model.ground_truth`; `null`: `answer`, or without it, for the reward `code`, `tests`",
    "data.on_bad_row": "`jsonl`: stop at a row that cannot be used, or leave it out with a warning",
    "data.template": "`jsonl`, `gym`: the prompt, with `{question}` where the question goes",
    "data.dataset": "`gym`: a data set of reasoning-gym, or names with their shares",
    "data.max_prompt_tokens": "`jsonl`: rows with a longer prompt are left out, held-out ones too",
    "data.chat": "whether a prompt is the user's turn of a conversation in the chat template of "
    "the model's tokenizer; `null`: where the tokenizer has one",
    "data.system_prompt": "what stands before that turn; `null`: what the template puts there",
    "data.chat_options": "variables of the chat template, such as `enable_thinking: false`; others "
    "than it reads are refused. One that asks for the date is told 26 July 2024, unless it has a "
    "variable for that, such as `date_string`",
    "data.curriculum": "`jsonl`: prefer problems that the policy solves now and then: those whose "
    "rate of success so far is in `band` (`[0.2, 0.8]`), and those never asked, weigh 1, others "
    "`outside` (0.1); `null`: each problem once an epoch",
    "data.options": "settings of the task itself (`addition`: `min_digits`, `max_digits`, "
    "`equal_lengths`, `thinking_share`; `jsonl`: `held_out_rows`), or of the data set (`gym`)",
    "warmup.steps": "supervised steps on the task's demonstrations before reinforcement",
    "warmup.samples_per_step": "demonstrations of a supervised step",
    "warmup.learning_rate": "peak of the warm-up's own schedule",
    "generation.max_new_tokens": "longest answer; 4096 where `model.path` is set",
    "generation.temperature": "of the sampling; the trainer uses the same",
    "generation.top_k": "draw from so many of the likeliest tokens; 0 for all",
    "generation.top_p": "draw from the fewest tokens that together have at least this probability",
    "generation.min_p": "draw from tokens at least so many times as likely as the likeliest",
    "generation.max_running": "sequences decoded together by a replica at most",
    "generation.engine": "what draws answers: `native`, or an engine of another package in a "
    "process of its own on one lane ([engines](../how-to/engines.md))",
    "generation.dtype": "what generation computes in; `null`: as `model.dtype`",
    "generation.cache_gb": "memory for keys and values on each lane, in 10^9 bytes; requests that "
    "find no room wait, and what they had drawn is computed again. `null`: half of the memory of "
    "an accelerator, and what they need on CPUs",
    "generation.tokens_per_step": "most that a step draws of an answer; one that has not ended by "
    "then goes on in a later step, and its group is trained on when all of its answers have "
    "ended; `null`: all of it",
    "generation.max_versions": "most versions by which weights that drew a token may lag behind "
    "the step that trains on it; a recipe by which it may be more is refused ([how "
    "old](../explanation/algorithms.md#answers-that-go-on-in-a-later-step)); `null`: no bound",
    "generation.captured_decode": "on accelerators: record the native engine's decode steps as "
    "CUDA graphs, and replay them ([engines](../how-to/engines.md)); CPUs, gangs, models with "
    "experts and transformers' own forward pass go without",
    "generation.stop": "strings of which any ends an answer with the token that completes it; "
    "special tokens of the tokenizer by their names",
    "algorithm.name": "what is learned from a step; it sets the keys of `algorithm` that are not "
    "said ([table](../explanation/algorithms.md))",
    "algorithm.scale": "what advantages are divided by: the deviation of the group, of all tokens "
    "of the step (training then waits for all of its answers), or nothing",
    "algorithm.equal_groups": "whether groups whose rewards are all the same count for anything "
    "(DAPO drops them)",
    "algorithm.further_draws": "how often another prompt is asked in place of one whose group says "
    "nothing, with `equal_groups: drop`; `null`: 3 for `dapo`, 0 for others",
    "algorithm.truncated": "an answer that was cut off ends there, is not trained on, or (`ppo`) "
    "is worth what the critic expects behind it",
    "algorithm.overlong_buffer": "so many tokens before the longest answer a penalty begins, which "
    "rises to 1 (DAPO); 0 for none",
    "algorithm.surrogate": "PPO's clipped ratio, or CISPO's clipped weight",
    "algorithm.clip_low": "how far below 1 the probability ratio may move",
    "algorithm.clip_high": "how far above 1 it may move",
    "algorithm.dual_clip": "bound of the loss for negative advantages",
    "algorithm.ratio_level": "one ratio a token (PPO, GRPO) or a sequence (GSPO)",
    "algorithm.aggregation": "how token losses become one number: DAPO, GRPO's first paper, "
    "Dr.GRPO, in this order",
    "algorithm.epochs": "how often a step's mini-batches are gone through",
    "algorithm.gamma": "`ppo`, `reinforce++`: discount from one token to the next",
    "algorithm.lam": "`ppo`: 0 trusts the critic, 1 the rewards (GAE's lambda)",
    "algorithm.kl_coefficient": "weight of the KL against the starting model; above 0 a "
    "reference worker joins the flow",
    "algorithm.kl_in": "whether the KL is a term of the loss, or taken off the reward",
    "algorithm.kl_estimator": "how the KL is estimated; `null`: k3 in the loss, where `k1` does "
    "nothing, and k1 in the reward, where the others are biased",
    "algorithm.entropy_coefficient": "weight of an entropy bonus",
    "algorithm.gap_level": "with `training.recompute_logprobs`: tokens that an older policy, or "
    "another engine, drew are weighed one by one, or by their whole sequence",
    "algorithm.gap_rule": "weights beyond `gap_cap` are cut to it, or made 0",
    "algorithm.gap_cap": "largest of these weights; with `mask` one over it is the least",
    "critic.learning_rate": "`ppo`: peak learning rate of the critic's AdamW; 1e-5 where "
    "`model.path` is set",
    "critic.warmup_steps": "`ppo`: steps at the start in which the critic alone learns",
    "critic.value_clip": "`ppo`: how far a value may move towards its return in a step before "
    "its gradient stops; `null` for no bound",
    "optimizer.learning_rate": "peak learning rate of AdamW; of reasoning and agentic runs 1e-6 "
    "where `model.path` is set, 2e-5 with `model.lora_rank` above 0",
    "optimizer.betas": "AdamW's two decay rates",
    "optimizer.weight_decay": "AdamW's weight decay",
    "optimizer.max_grad_norm": "gradients are scaled down to this norm; `null` for no bound",
    "optimizer.schedule": "of the learning rate, from the end of its warm-up to that of the run",
    "optimizer.warmup_steps": "optimizer steps over which the learning rate rises, behind those in "
    "which a critic alone learns",
    "training.tokens_per_microbatch": "tokens computed at a time; bounds memory; 16384 where "
    "`model.path` is set",
    "training.sharing": "what a micro-batch computes once: prefixes, prompts, or nothing",
    "training.drop_zero_advantage": "skip the forward pass of samples that have no gradient; their "
    "tokens count all the same",
    "training.gradient_checkpointing": "compute activations again in the backward pass, for a "
    "third more arithmetic; `null`: on accelerators",
    "training.optimizer_on_host": "keep master copies and moments in host memory, where the CPU "
    "steps them: 6 bytes of an accelerator for each 16-bit parameter in place of 18",
    "training.fused_kernels": "compute norms, rotary embeddings and MLPs of Llama, Mistral, Qwen2 "
    "and Qwen3 by Liger's kernels on CUDA (`pip install 'm2flow[liger]'`), in layouts other than "
    "`tpN`; `null`: where they can be used; `true`: refuse the run where not",
    "training.moments": "`8bit` keeps the optimizer's moments in 8 bits: 2 bytes of a parameter in "
    "place of 8; needs torchao (`pip install 'm2flow[torchao]'`)",
    "training.rounding": "`stochastic` steps bfloat16 weights themselves, rounded at random so "
    "that the mean is exact, and keeps no float32 copies; needs torchao",
    "training.recompute_logprobs": "take the ratio against the trainer's own log-probabilities at "
    "the start of the step; the policy that sampled keeps its weight (decoupled PPO)",
    "evaluation.every": "steps between evaluations; there is one at step 0 and at the end too",
    "evaluation.problems": "held-out problems, answered greedily; 0 for no evaluation",
    "checkpoint.every": "steps between checkpoints; there is one at the end too",
    "checkpoint.keep": "checkpoints kept",
}
"""What each key of a reasoning recipe means, by its path."""

EMBODIED = {
    "model": "of vision-language-action kinds: a published checkpoint's folder, or `tiny` for a "
    "small model of the same structure, made on the spot; the latter too where nothing is said",
    "states": "by key with dots: what takes the place of the recipe's own values with "
    "`model: states`, such as a small policy of states in place of the published one",
    "tiny": "by key with dots: what takes the place of the recipe's own values with `model: tiny`; "
    "the command line still wins",
    "rollouts_per_step": "rollouts of a step, each in an environment of its own",
    "environment.name": "the simulator: `family:task` (`envpool`, `gymnasium`, `libero`, "
    "`maniskill`, `metaworld`, `table`), or a class of your own, `my_module:MyEnvironment`",
    "environment.options": "the environment's own settings, such as `pixels` and `motion`",
    "environment.reward": "a function of your own in place of the simulator's reward, "
    "`my_module:my_function`, given the environment and what a step did "
    "([how](../how-to/own-environment.md#a-reward-of-your-own))",
    "environment.processes": "processes of each lane in which simulators run, so that a crash or a "
    "hang costs an episode; 0 for the lane's own; none: one a core for heavy simulators",
    "environment.deadlines": "seconds after which a process of simulators counts as hung, and is "
    "killed: `step` (60) and `reset` (300) of one environment, `start` (600) until simulators "
    "stand, `render` (120) of a call that draws, saves or restores",
    "environment.python": "interpreter of those processes, where the simulator is installed in a "
    "virtual environment of its own; none for the run's",
    "environment.steps_aside": "a simulator that cannot save its state leaves a lane that is short "
    "of memory (`lane_memory`) too: its episodes are replayed from their seeds and actions when it "
    "is back; one that saves its state leaves in any case",
    "optimizer.warmup_steps": "optimizer steps over which the learning rate rises; the policy's "
    "behind those in which the critic alone learns",
    "policy.kind": "an actor-critic on states or on pictures, or a vision-language-action model",
    "policy.chunk": "actions decided at once",
    "policy.hidden": "`mlp`: widths of its layers",
    "policy.normalize_state": "`mlp`: states are brought to mean 0 and deviation 1, by all states "
    "seen so far",
    "policy.features": "`cnn`: width behind the convolutions",
    "policy.distribution": "`mlp`, `cnn`: what actions are drawn from; `auto` is categorical for "
    "choices and Gaussian otherwise",
    "policy.cameras": "names of the pictures it looks at",
    "policy.statistics": "name of the data set whose scale the checkpoint's actions have",
    "policy.gripper": "the simulator's convention for the gripper",
    "policy.centre_crop": "crop pictures to the middle 90 % of their area, as LIBERO checkpoints "
    "were trained",
    "policy.resize": "how pictures come to the model's size: `bicubic`, as the checkpoint's own "
    "processor does, or `lanczos`, as published evaluations on LIBERO do beforehand",
    "policy.temperature": "of the distribution that action tokens are drawn from",
    "policy.dtype": "of a checkpoint's weights",
    "policy.lora_rank": "train only adapters of this rank (beside them, in full, the projections "
    "of states and, of `pi0`, of actions); 0 trains everything",
    "policy.proprioception": "`openvla-oft`: the policy reads the robot's state too",
    "policy.head": "`openvla-oft`: actions from bins, or by the checkpoint's L1 regression head, "
    "which can be evaluated and not trained",
    "policy.noise": "`pi0`: what makes denoising steps Gaussian, the stochastic equation or a "
    "network",
    "policy.noise_level": "`pi0`: factor of the standard deviation in `sde`",
    "policy.denoising_steps": "`pi0`: steps from noise to action; none: as the checkpoint says",
    "warmup.steps": "steps of behaviour cloning before reinforcement; 0 for none",
    "warmup.data": "a file of recorded demonstrations, `.npz`, in the place of an expert "
    "([how](../how-to/own-environment.md#demonstrations-from-a-file))",
    "warmup.episodes": "episodes of the expert that it is cloned from",
    "warmup.batch_size": "turns of a step of cloning",
    "warmup.learning_rate": "of cloning",
    "warmup.expert": "who shows them, `my_module:my_function` of the environment; none: the "
    "environment's own method `expert`",
    "rollout.horizon": "environment steps of a rollout at most",
    "rollout.automatic_reset": "where an episode ends, the rollout goes on with another one; "
    "`false`: a rollout is one episode",
    "algorithm.name": "where advantages come from: the policy's value head, or the other episodes "
    "of a group, which begin alike; or `sac`, which learns critics of state and action from a "
    "buffer",
    "algorithm.level": "`ppo`, `grpo`: what has a probability ratio of its own: an action token, "
    "an action, or a whole chunk",
    "algorithm.clip_low": "`ppo`, `grpo`: how far below 1 the probability ratio may move",
    "algorithm.clip_high": "`ppo`, `grpo`: how far above 1 it may move",
    "algorithm.gamma": "`ppo`, `sac`: discount from one environment step to the next",
    "algorithm.lam": "`ppo`: 0 trusts the critic, 1 the rewards (GAE's lambda)",
    "algorithm.advantage_level": "`ppo`: what has an advantage of its own: a chunk of actions, or "
    "each action of it, without the chunk's rewards before that action "
    "([how](../explanation/algorithms.md#chunks-of-actions))",
    "algorithm.value_clip": "`ppo`: how far a value may move towards its return in a step before "
    "its gradient stops, in shares of the returns' root mean square; `null` for no bound",
    "algorithm.value_coefficient": "`ppo`: weight of the critic's loss",
    "algorithm.value_warmup_steps": "`ppo`: steps at the start in which the critic alone learns; "
    "optimizer steps that are left out do not count",
    "algorithm.entropy_coefficient": "`ppo`, `grpo`: weight of an entropy bonus",
    "algorithm.normalize_advantage": "`ppo`: bring advantages to mean 0 and deviation 1 over all "
    "turns of the step; those of actions have the mean of their place in the chunk",
    "algorithm.group_size": "`grpo`: rollouts that begin alike",
    "algorithm.normalize_std": "`grpo`: divide advantages by the group's standard deviation",
    "algorithm.reward": "`grpo`: what episodes are compared by",
    "algorithm.further_draws": "`grpo`: how often another start is tried in place of one whose "
    "group teaches nothing: its share of successes is outside `success_bounds`, or without bounds "
    "its episodes are all worth the same "
    "([why so](../decisions/0091-groups-of-episodes-drawn-again.md))",
    "algorithm.success_bounds": "`grpo`: groups whose share of successes (once in the episode) is "
    "below the first or above the second are dropped from the loss, such as `[0.1, 0.9]`; `null` "
    "keeps all",
    "algorithm.aggregation": "`grpo`: what `algorithm.level` counts weighs the same each "
    "(`token-mean`), or an episode the same as another, however long "
    "(`sequence-mean-token-mean`)",
    "algorithm.polyak": "`sac`: share of the way that the target critics move in an update",
    "algorithm.target_entropy": "`sac`: entropy of a chunk of actions in [-1, 1] that the "
    "temperature aims at, in nats; `null`: minus the number of its figures",
    "algorithm.first_temperature": "`sac`: what a nat of entropy is worth at the start",
    "replay.capacity": "transitions that the buffer keeps, the newest ones",
    "replay.begin": "transitions that it must have before anything is learned",
    "replay.batch_size": "transitions of an update",
    "replay.updates": "optimizer steps after each step of training",
    "update.epochs": "passes over the turns of a step",
    "update.minibatches": "optimizer steps of a pass",
    "update.turns_per_microbatch": "turns computed at a time, of the warm-up's batches and of what "
    "cut episodes are worth too; bounds memory",
    "update.gradient_checkpointing": "compute activations of OpenVLA and OpenVLA-OFT again in the "
    "backward pass, for a third more arithmetic; `null`: on accelerators",
    "evaluation.episodes": "greedy episodes of an evaluation, at most `rollouts_per_step` of them "
    "at a time; 0 for none",
    "evaluation.films": "how many of them the report shows, where the environment draws itself; "
    "solved ones come first, of four times as many that are filmed, or of fewer where drawing "
    "takes longer than the simulators' steps",
}
"""What the keys of an embodied recipe mean that a reasoning recipe does not have, or not so."""


AGENTIC = {
    "tools": "what the policy may call: `calculator`, `python`, `search`, `mcp`, or a function by "
    "its path `my_module:my_function`; one name, or a list of tables with `tool` and `options` "
    "([which](../how-to/agents.md))",
    "turn_reward": "functions that judge each turn, as `reward` has them; `null` for none",
    "agent": "an agent of yours that makes the trajectories over an OpenAI-compatible endpoint, "
    "by its path: a name, or a table with `function`, `deadline_seconds` and `concurrency`; "
    "`null`: m2flow's own loop of turns and tools",
    "data.task": "where problems come from: products of numbers (`arithmetic`), facts of invented "
    "people (`lookup`), a file, or reasoning-gym",
    "data.options": "settings of the task itself (`arithmetic`: `min_digits`, `max_digits`, "
    "`tool_share`; `lookup`: `tool_share`, `friend_share`; `jsonl`: `held_out_rows`), or of the "
    "data set (`gym`)",
    "generation.max_new_tokens": "longest turn; 1024 where `model.path` is set",
    "episode.max_turns": "turns of the model in a trajectory",
    "episode.max_tokens": "all tokens of a trajectory behind its prompt, those of tools included; "
    "8192 where `model.path` is set",
    "episode.max_result_tokens": "longest answer of a tool; a longer one is cut and marked; 1024 "
    "where `model.path` is set",
    "episode.tool_deadline_seconds": "longest that a call of a tool may take; one that takes "
    "longer costs its trajectory",
    "episode.tool_concurrency": "calls that each lane of tools carries out at a time",
    "episode.dialect": "how calls are written: `chat`, as JSON in `<tool_call>` tags, and answers "
    "as turns of the chat template; `tags`, between two texts; `auto`: `chat` where the model's "
    "tokenizer has a template",
    "episode.call": "`tags`: what stands before and behind a call",
    "episode.result": "`tags`: what stands before and behind an answer",
    "episode.credit": "whether all turns are credited with the whole trajectory, or each with what "
    "follows it (`turn_reward`)",
}
"""What the keys of an agentic recipe mean that a reasoning recipe does not have, or not so."""


def agentic_tables() -> str:
    """The tables of an agentic recipe, without the keys that a reasoning recipe has alike."""
    paths = {path for path, _ in fields_of(AgenticRecipe)}
    strangers = set(AGENTIC) ^ (paths - {path for path, _ in fields_of(ReasoningRecipe)})
    alike = {"data.task", "data.options", "generation.max_new_tokens"}
    assert strangers == alike, f"AGENTIC and the models differ in {sorted(strangers ^ alike)}"
    own = set(AgenticRecipe.model_fields) - {"episode", "tools", "turn_reward", "agent"}
    task = "| key | default | values | meaning |\n|---|---|---|---|\n" + "\n".join(
        line
        for section, prefix in (
            (AgenticRecipe.model_fields["data"].annotation, "data."),
            (AgenticRecipe.model_fields["generation"].annotation, "generation."),
        )
        for line in _table(section, prefix, MEANING | AGENTIC).splitlines()
        if any(f"`{path}`" in line for path in alike)
    )
    return f"{recipe_tables(AgenticRecipe, AGENTIC, own)}\n\n### data and generation\n\n{task}"


def reasoning_tables() -> str:
    """The tables of a reasoning recipe, which has a meaning for each key and no other."""
    strangers = set(MEANING) ^ {path for path, _ in fields_of(ReasoningRecipe)}
    assert not strangers, f"MEANING and the models differ in {sorted(strangers)}"
    return recipe_tables(ReasoningRecipe, MEANING)


def embodied_tables() -> str:
    """The tables of an embodied recipe, without the keys that every recipe has."""
    strangers = set(EMBODIED) - {path for path, _ in fields_of(EmbodiedRecipe)}
    assert not strangers, f"EMBODIED and the models differ in {sorted(strangers)}"
    return recipe_tables(
        EmbodiedRecipe, MEANING | EMBODIED, {*Recipe.model_fields} - {"evaluation"}
    )


def recipe_tables(
    recipe: type[BaseModel], meaning: Mapping[str, str], known: Container[str] = ()
) -> str:
    """A table for the top level of a recipe and one for each section; `known` keys left out."""
    parts = [_table(recipe, "", meaning, known)]
    for name, field in recipe.model_fields.items():
        if (section := _section(field)) is not None and name not in known:
            assert section.__doc__ is not None
            table = _table(section, f"{name}.", meaning)
            parts += [f"### {name}", section.__doc__.splitlines()[0], table]
    return "\n\n".join(parts)


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(path, field) of every key that holds a value, sections opened."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from fields_of(section, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _table(
    model: type[BaseModel], prefix: str, meaning: Mapping[str, str], known: Container[str] = ()
) -> str:
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if _section(field) is None and name not in known:
            required = name == "workload" or field.is_required()
            default = "required" if required else _default(field)
            cells = (f"`{prefix}{name}`", default, _kind(field), meaning[prefix + name])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    text = f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
    return f"`{text.lower() if isinstance(value, bool) else text}`"


def _kind(field: FieldInfo) -> str:
    return _name_of(field.annotation, field.metadata)


def _name_of(kind: Any, constraints: typing.Iterable[Any] = ()) -> str:
    """A type in the words of a person who writes YAML."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        inner = [x for info in parts[1:] for x in getattr(info, "metadata", [info])]
        return _name_of(parts[0], [*inner, *constraints])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (types.UnionType, typing.Union):
        names = [_name_of(part, constraints) for part in parts if part is not type(None)]
        return " or ".join(names) + (" or `null`" if type(None) in parts else "")
    if origin is tuple:
        inner_names = dict.fromkeys(_name_of(part) for part in parts if part is not Ellipsis)
        return f"list of {' or '.join(inner_names)}"
    if origin is dict or kind is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table of " + ", ".join(f"`{key}`" for key in kind.model_fields)
    name = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}[kind]
    return name + "".join(_bounds(constraints))


def _bounds(constraints: typing.Iterable[Any]) -> Iterator[str]:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    for constraint in constraints:
        for name, word in words.items():
            if (bound := getattr(constraint, name, None)) not in (None, LARGEST):
                yield f", {word} {'2**63' if bound == 2**63 else format(bound, 'g')}"


def command_tables() -> str:
    """For each command its form, what it does, and a table of what it takes."""
    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        form = " ".join([f"m2flow {name}", *(_metavar(p) for p in arguments), "[OPTIONS]"])
        parts += [f"### {name}", f"    {form}", command.help.strip()]
        rows = [(f"`{_metavar(p)}`", "", p.help) for p in arguments]
        rows += [(f"`{', '.join(p.opts)}`", _option_default(p), p.help) for p in options]
        rows = [row for row in rows if row[0] != "`--help`"]
        table = ["| argument or option | default | meaning |", "|---|---|---|"]
        parts.append("\n".join([*table, *(f"| {' | '.join(row)} |" for row in rows)]))
    return "\n\n".join(parts)


def _metavar(argument: Any) -> str:
    name = argument.metavar or str(argument.name).upper()
    if argument.nargs == -1 and argument.metavar is None:
        return "[KEY=VALUE ...]"
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option_default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.default is None or option.is_flag else f"`{option.default}`"


PAGES = {
    "recipe keys": (DOCS / "reference" / "recipe.md", reasoning_tables),
    "agentic recipe keys": (DOCS / "reference" / "recipe.md", agentic_tables),
    "embodied recipe keys": (DOCS / "reference" / "recipe.md", embodied_tables),
    "commands": (DOCS / "reference" / "cli.md", command_tables),
}


def up_to_date(name: str) -> str:
    """The text of a page with its generated part as it should be."""
    path, generate = PAGES[name]
    before, begin, rest = path.read_text().partition(BEGIN.format(name))
    _, end, after = rest.partition(END.format(name))
    assert begin and end, f"{path} has lost its marks for {name}"
    return f"{before}{begin}\n\n{generate()}\n\n{end}{after}"


def main() -> int:
    """Write the pages, or with `--check` say which are out of date."""
    stale = [name for name, (path, _) in PAGES.items() if path.read_text() != up_to_date(name)]
    for name in stale:
        path = PAGES[name][0]
        if "--check" in sys.argv:
            print(f"{path} is out of date: python docs/generate_reference.py")
        else:
            path.write_text(up_to_date(name))
            print(f"wrote {path}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
