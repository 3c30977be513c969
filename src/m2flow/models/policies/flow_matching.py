"""A flow-matching policy on transformers' own pi0, with log-probabilities of the noise path.

Denoising an action by an ordinary differential equation has no density. Both ways of pi-RL (Chen
et al. 2025, arXiv 2510.25889) make each step a Gaussian, so that the path from noise to action
has one:

* "sde": the stochastic equation with the same marginals (Flow-GRPO, arXiv 2505.05470, eq. 9). At
  time t (1 noise, 0 action), step d and velocity v: mean x - d (v + s^2 / 2t (x + (1 - t) v)),
  standard deviation s sqrt(d), with s = noise * sqrt(t / (1 - t)), t at most 1 - d under the root;
* "network": a small network on the action expert's hidden state gives the standard deviation
  within bounds (Flow-Noise); the mean is that of the plain equation.

Tokens are the whole path: coordinates (S + 1) * A per action, first the noise, last the action.
Their log-probabilities sum to that of the path. Greedy acting follows the plain equation from the
item's own noise. Path, means, deviations and log-probabilities are float32, whatever the network
computes in: a small deviation is less than the spacing of bfloat16 numbers. So are states and
actions until they are scaled.

Where fewer actions are carried out than the checkpoint decides on (K of H), those that are not
stand behind those that are, in rows k, k + K, k + 2K and so on of an action k, and have neither
log-probability nor entropy, as in pi-RL.

Legend: B batch, K actions of a chunk, H actions that are decided on, A action size, S denoising
steps, L tokens of the prefix, M size that pi0 pads states and actions to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.models.folder import checked_folder, from_folder, read_json, weight_files
from m2flow.models.policies.distributions import normal_entropy, normal_logprob
from m2flow.models.policies.protocol import (
    ALL_ROWS,
    Evaluation,
    Observations,
    Policy,
    PolicyOutput,
    seed_tensor,
    standard_normal,
)
from m2flow.models.policies.torchvision_import import import_torchvision

Noise = Literal["sde", "network"]
_BEGIN = "<bos>"


@dataclass(frozen=True)
class FlowOptions:
    """How a flow-matching checkpoint is used.

    Attributes:
        action_size: coordinates of an action that the environment takes; pi0 pads to more.
        cameras: names of the observed pictures, in the order of training.
        chunk: actions that are carried out; None for all that the checkpoint decides on.
        low, high: bounds that actions are brought into; None where there are none.
        noise: which density the path has, see the module.
        noise_level: factor of the standard deviation in "sde".
        std_range: bounds of the standard deviation in "network".
        steps: denoising steps; None as the checkpoint says.
        critic: whether there is a value head.
        action_mean, action_std: scale of the data set's actions; None where it is 0 and 1.
        state_mean, state_std: that of the states.
    """

    action_size: int
    cameras: tuple[str, ...] = ("image",)
    chunk: int | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    noise: Noise = "sde"
    noise_level: float = 0.5
    std_range: tuple[float, float] = (0.08, 0.16)
    steps: int | None = None
    critic: bool = False
    action_mean: tuple[float, ...] | None = None
    action_std: tuple[float, ...] | None = None
    state_mean: tuple[float, ...] | None = None
    state_std: tuple[float, ...] | None = None


class FlowMatchingPolicy(Policy):
    """pi0 whose denoising steps are Gaussian."""

    horizon: int

    def __init__(self, model: Any, tokenizer: Any, options: FlowOptions) -> None:
        """Take the model, and the tokenizer of the checkpoint (package tokenizers)."""
        super().__init__()
        config = model.config
        if options.noise not in ("sde", "network"):
            raise UserError(
                "unknown density of the path",
                key="noise",
                value=options.noise,
                expected="sde or network",
            )
        if not 0 < options.action_size <= config.max_action_dim:
            raise UserError(
                "actions do not fit the checkpoint",
                key="action_size",
                value=options.action_size,
                expected=f"1 to {config.max_action_dim}",
            )
        if options.noise_level <= 0 or not 0 < options.std_range[0] < options.std_range[1]:
            raise UserError("the noise of the path is not positive", key="noise_level")
        # The expert is given embeddings: its own table of them is never looked into.
        model.model.dit.embed_tokens.requires_grad_(False)
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.steps = options.steps or config.num_inference_steps
        self.horizon, self.size = config.chunk_size, options.action_size
        self.coordinates = config.max_action_dim  # denoised; those beyond `size` mean nothing
        self.chunk = options.chunk or self.horizon
        if self.horizon % self.chunk:
            raise UserError(
                "the actions that the checkpoint decides on are no whole number of chunks",
                key="policy.chunk",
                value=self.chunk,
                expected=f"a divisor of {self.horizon}",
            )
        self.noise_network: nn.Module | None = None
        if options.noise == "network":
            width = config.dit_config.hidden_size
            self.noise_network = nn.Sequential(
                nn.Linear(width, width), nn.Tanh(), nn.Linear(width, self.coordinates)
            )
        self.value_head: nn.Module | None = None
        if options.critic:
            width = config.vlm_config.text_config.hidden_size
            self.value_head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    @torch.no_grad()
    def act(
        self, observations: Observations, *, seeds: Sequence[int], greedy: bool = False
    ) -> PolicyOutput:
        scene = self._scene(observations)
        seed_B = seed_tensor(seeds, scene.state.device)
        drawn = (self.steps + 1) * self.horizon * self.coordinates
        noise = standard_normal(seed_B, drawn).float()
        noise = noise.view(len(seeds), self.steps + 1, self.horizon, self.coordinates)
        path = [noise[:, 0]]
        logprobs = [normal_logprob(path[0], torch.zeros(()), torch.zeros(()))]
        for step in range(self.steps):
            if greedy:
                velocity, _ = self._velocity(scene, path[-1], self._time(step))
                following = path[-1] - velocity / self.steps
                logprob = torch.zeros_like(following)
            else:
                mean, log_std = self._transition(scene, path[-1], step)
                following = mean + log_std.exp() * noise[:, step + 1]
                logprob = normal_logprob(following, mean, log_std)
            path.append(following)
            logprobs.append(logprob)
        return PolicyOutput(
            self._environment_actions(path[-1][:, : self.chunk, : self.size]),
            self._rows(torch.cat(path, dim=-1)),
            self._counted(logprobs),
            self._value(scene),
        )

    def evaluate(self, observations: Observations, tokens: Tensor) -> Evaluation:
        scene = self._scene(observations)
        width = (self.steps + 1) * self.coordinates
        rows = tokens.view(len(tokens), self.chunk, -1, width).transpose(1, 2)
        path = rows.reshape(len(tokens), self.horizon, width).split(self.coordinates, dim=-1)
        zero = torch.zeros((), device=tokens.device)
        logprobs = [normal_logprob(path[0], zero, zero)]
        entropies = [normal_entropy(zero).expand_as(path[0])]
        for step in range(self.steps):
            mean, log_std = self._transition(scene, path[step], step)
            logprobs.append(normal_logprob(path[step + 1], mean, log_std))
            entropies.append(normal_entropy(log_std).expand_as(mean))
        return Evaluation(
            self._counted(logprobs),
            self._counted(entropies),
            self._value(scene),
        )

    def cloning_loss(
        self,
        observations: Observations,
        actions_BHA: Tensor,
        seed: int,
        rows: slice = ALL_ROWS,
    ) -> Tensor:
        """Flow matching as pi0 was trained (arXiv 2410.24164, section IV): transformers' own loss.

        The mean square error of the velocity, at times and noise that are drawn with the seed, for
        the whole batch, on the CPU.
        """
        scene = self._scene({name: part[rows] for name, part in observations.items()})
        config, state = self.model.config, scene.state
        ends = [config.time_sampling_beta_alpha, config.time_sampling_beta_beta]
        times = torch.distributions.Beta(*torch.tensor(ends, dtype=torch.float32))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            time_B = times.sample(actions_BHA.shape[:1])
            noise_BHM = torch.randn(len(actions_BHA), self.horizon, self.coordinates)
        time_B = time_B * config.time_sampling_scale + config.time_sampling_offset
        output = self.model(
            state=state,
            noise=noise_BHM[rows].to(state),
            timestep=time_B[rows].to(state.device),
            attention_mask=scene.mask,
            past_key_values=scene.cache,
            actions=self._own_actions(actions_BHA[rows].to(state.device)).to(state.dtype),
        )
        return output.loss.float().mean()

    def _rows(self, path_BHD: Tensor) -> Tensor:
        """Return figures of all actions as rows of those that are carried out, [B, K, D H/K]."""
        batch, _, width = path_BHD.shape
        split = path_BHD.view(batch, self.horizon // self.chunk, self.chunk, width)
        return split.transpose(1, 2).reshape(batch, self.chunk, -1)

    def _counted(self, figures: Sequence[Tensor]) -> Tensor:
        """Return figures [B, H, coordinates] of each point as those that count, [B, K, (S + 1) A].

        They are of actions that are carried out, and of the coordinates that an action has.
        """
        return torch.cat([some[:, : self.chunk, : self.size] for some in figures], dim=-1)

    def _transition(self, scene: _Scene, x_BKA: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the next point of the path, float32."""
        time, width = self._time(step), 1.0 / self.steps
        velocity, hidden = self._velocity(scene, x_BKA, time)
        if self.noise_network is not None:
            low, high = (torch.tensor(bound).log() for bound in self.options.std_range)
            share = torch.sigmoid(self.noise_network(hidden.float()))  # its weights are float32
            return x_BKA - width * velocity, low + share * (high - low)
        sigma = self.options.noise_level * (time / (1 - min(time, 1 - width))) ** 0.5
        score = sigma**2 / (2 * time) * (x_BKA + (1 - time) * velocity)
        mean = x_BKA - width * (velocity + score)
        return mean, torch.full((), sigma * width**0.5, device=mean.device).log()

    def _time(self, step: int) -> float:
        return 1.0 - step / self.steps

    def _velocity(self, scene: _Scene, x_BKA: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the velocity, float32 [B, K, A], and the expert's hidden state [B, K, width]."""
        model = self.model
        time_B = torch.full((len(x_BKA),), time, device=x_BKA.device)
        output = model.model(
            action_embeds=model.embed_action_time(scene.state, x_BKA.to(scene.state.dtype), time_B),
            attention_mask=scene.mask,
            past_key_values=scene.cache,
        )
        # The prefix alone stays: a step does not see the steps before it.
        scene.cache.crop(scene.mask.shape[1] - scene.cache.get_seq_length())
        hidden = output.last_hidden_state[:, -self.horizon :]
        return model.action_out_proj(hidden).float(), hidden

    def _scene(self, observations: Observations) -> _Scene:
        model, device = self.model, self.model.device
        pictures = [_picture(observations, c, model, device) for c in self.options.cameras]
        pixels = torch.stack(pictures, dim=1)
        seen = torch.ones(pixels.shape[:2], dtype=torch.bool, device=device)
        ids, mask = self._prompts(observations["instruction"], device)
        embeddings = model.model.embed_prefix(ids, pixels, seen)
        output = model.model.vlm(
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(ids),
            use_cache=True,
        )
        state = self._scaled(observations["state"].to(device))
        summary = output.last_hidden_state.masked_fill(mask.unsqueeze(-1) == 0, 0.0).sum(1)
        mean = summary / mask.sum(1, keepdim=True)
        return _Scene(output.past_key_values, mask, state, mean)

    def _prompts(self, instructions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ids and mask: places of the pictures, begin token, instruction, newline."""
        config = self.model.config.vlm_config
        patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        places = [config.image_token_id] * (patches * len(self.options.cameras))
        begin = self.tokenizer.token_to_id(_BEGIN)
        rows = [
            [*places, begin, *self.tokenizer.encode(f"{text}\n", add_special_tokens=False).ids]
            for text in instructions
        ]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        return ids, (torch.arange(longest, device=device) < lengths.unsqueeze(1)).long()

    def _scaled(self, state_BS: Tensor) -> Tensor:
        limit = self.model.config.max_state_dim
        if state_BS.shape[1] > limit:
            raise UserError(
                "the robot state does not fit the checkpoint",
                key="state",
                value=state_BS.shape[1],
                expected=f"at most {limit}",
            )
        if self.options.state_mean is not None:
            mean = state_BS.new_tensor(self.options.state_mean)
            std = state_BS.new_tensor(self.options.state_std or (1.0,))
            size = state_BS.shape[1]
            state_BS = (state_BS - mean[:size]) / (std[:size] + 1e-8)
        return F.pad(state_BS, (0, limit - state_BS.shape[1])).to(self.model.dtype)

    def _environment_actions(self, actions_BKA: Tensor) -> Tensor:
        if self.options.action_mean is not None:
            mean = actions_BKA.new_tensor(self.options.action_mean)
            std = actions_BKA.new_tensor(self.options.action_std or (1.0,))
            actions_BKA = actions_BKA * (std + 1e-8) + mean
        if self.options.low is None or self.options.high is None:
            return actions_BKA
        low, high = (actions_BKA.new_tensor(end) for end in (self.options.low, self.options.high))
        return actions_BKA.clamp(low, high)

    def _own_actions(self, actions_BHA: Tensor) -> Tensor:
        """Scale an environment's actions as the model has them, and pad them with zeros."""
        if self.options.action_mean is not None:
            mean = actions_BHA.new_tensor(self.options.action_mean)
            std = actions_BHA.new_tensor(self.options.action_std or (1.0,))
            actions_BHA = (actions_BHA - mean) / (std + 1e-8)
        return F.pad(actions_BHA, (0, self.coordinates - self.size))

    def _value(self, scene: _Scene) -> Tensor | None:
        if self.value_head is None:
            return None
        return self.value_head(scene.summary.float()).squeeze(-1)


@dataclass(frozen=True)
class _Scene:
    """An encoded observation: what all denoising steps share."""

    cache: Any
    mask: Tensor
    state: Tensor
    summary: Tensor


def _picture(observations: Observations, camera: str, model: Any, device: torch.device) -> Tensor:
    """Return one camera [B, 3, side, side] in [-1, 1]: proportions kept, black around it."""
    if camera not in observations:
        raise UserError(
            "the environment gives no such picture",
            key="cameras",
            value=camera,
            expected=f"names among: {', '.join(sorted(observations))}",
        )
    side = model.config.vlm_config.vision_config.image_size
    pixels = observations[camera].to(device).permute(0, 3, 1, 2).float()
    height, width = pixels.shape[-2:]
    scale = side / max(height, width)
    shape = (max(1, int(height * scale)), max(1, int(width * scale)))
    if shape != (height, width):
        pixels = F.interpolate(pixels, shape, mode="bicubic", antialias=True).round().clamp(0, 255)
    normed = pixels / 127.5 - 1.0
    top, left = (side - shape[0]) // 2, (side - shape[1]) // 2
    around = (left, side - shape[1] - left, top, side - shape[0] - top)
    return F.pad(normed, around, value=-1.0).to(model.dtype)


def load_pi0(folder: str | Path, options: FlowOptions, dtype: torch.dtype) -> FlowMatchingPolicy:
    """Load a pi0 checkpoint in transformers' layout with its `tokenizer.json`.

    Scales that the options do not give come from `norm_stats.json`, as openpi writes it.
    """
    from tokenizers import Tokenizer

    path = checked_folder(folder)
    raw = read_json(path / "config.json", "the architecture")
    family = raw["model_type"]
    if family != "pi0":
        raise UserError(
            "a checkpoint of another family of models",
            key=f"{path}/config.json",
            value=family,
            expected='model_type "pi0"',
            hint="set policy.kind to openvla or openvla-oft" if family == "openvla" else None,
        )
    if not (path / "tokenizer.json").is_file():
        raise UserError("tokenizer.json is missing", key=str(path), hint="PaliGemma's is meant")
    options = _with_scales(path, options, raw.get("max_action_dim", PADDED_SIZE))
    weight_files(path)  # refuses where they are not in safetensors
    model = from_folder(_pi0_class(), path, dtype=dtype, use_safetensors=True)
    return FlowMatchingPolicy(model, Tokenizer.from_file(str(path / "tokenizer.json")), options)


PADDED_SIZE = 32
"""Figures of an action that pi0 decides on, where its configuration does not say."""


def _with_scales(folder: Path, options: FlowOptions, padded: int) -> FlowOptions:
    """Return the options with the scales of the folder's `norm_stats.json` where it has one.

    Those of actions may be padded, as the actions are, to so many figures.
    """
    if options.action_mean is not None or not (folder / "norm_stats.json").is_file():
        return options
    content = read_json(folder / "norm_stats.json", "the scale of actions")
    statistics = content.get("norm_stats", content)

    def scale(part: str, figure: str) -> tuple[float, ...]:
        try:
            return tuple(statistics[part][figure])
        except (KeyError, TypeError):
            raise UserError(
                f"has no {part}.{figure}",
                key=f"{folder}/norm_stats.json",
                expected=f"statistics of actions and state, not of {', '.join(statistics)}",
            ) from None

    size = options.action_size
    mean, std = scale("actions", "mean"), scale("actions", "std")
    if len(mean) not in (size, padded) or len(std) != len(mean):
        raise UserError(
            "actions have another size than those that the checkpoint was trained on",
            key=f"{folder}/norm_stats.json",
            value=len(mean),
            expected=f"{size} figures, or {padded} with padding",
        )
    return replace(
        options,
        action_mean=mean[:size],
        action_std=std[:size],
        state_mean=scale("state", "mean"),
        state_std=scale("state", "std"),
    )


def tiny_pi0(
    instructions: Sequence[str],
    options: FlowOptions,
    *,
    state_size: int,
    chunk: int = 4,
    image_size: int = 32,
    width: int = 64,
    seed: int = 0,
) -> FlowMatchingPolicy:
    """Make a small pi0 with random weights and one token per word, for tests and two CPU cores."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    pi0 = _pi0_class()

    words = sorted({word for text in instructions for word in text.split()})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", _BEGIN, "\n", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\S+| +"), "isolated")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shared = {**heads, "head_dim": width // 2}  # the expert reads the cache of the language model
    config = pi0.config_class(
        vlm_config={
            "model_type": "paligemma",
            "projection_dim": width,
            "image_token_id": len(vocabulary),
            "text_config": {
                "model_type": "gemma",
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "vocab_size": len(vocabulary),
                **shared,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": width // 2,
                "intermediate_size": width,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 8,
                "image_size": image_size,
                "vision_use_head": False,
            },
        },
        dit_config={
            "model_type": "gemma",
            "hidden_size": width // 2,
            "intermediate_size": width,
            **shared,
        },
        chunk_size=chunk,
        max_state_dim=state_size,
        max_action_dim=options.action_size + 2,  # published: 32
        num_inference_steps=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return FlowMatchingPolicy(pi0(config).eval(), tokenizer, options)


def _pi0_class() -> Any:
    import_torchvision()
    try:
        from transformers import PI0ForConditionalGeneration
    except ImportError as error:
        raise UserError(
            "the installed transformers has no pi0", expected="transformers 5.23 or newer"
        ) from error
    return PI0ForConditionalGeneration
