"""SDAR: spatially decoupled action repetition for continuous control.

At every step a selection policy β decides, for each action dimension separately, whether to repeat the previous
action or to act anew; an action policy π then fills in the dimensions that act.

Nie, Fu and Gao, "Select before Act: Spatially Decoupled Action Repetition for Continuous Control", ICLR 2025.
Equation numbers in the docstrings are the paper's.

    python sdar_continuous_action.py --env-id LunarLanderContinuous-v3 --total-timesteps 100000
"""

import contextlib
import copy
import ctypes
import dataclasses
import fcntl
import io
import json
import math
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm


# --- shared: options ---
@dataclass
class CommonArgs:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment: networks, exploration, task and evaluation"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """train on the GPU; without one the run falls back to the CPU and says so"""
    track: bool = False
    """sync the run to Weights & Biases"""
    wandb_project_name: str = "sdar"
    """the W&B project's name"""
    wandb_entity: str | None = None
    """the W&B entity (team)"""
    capture_video: bool = False
    """record one greedy episode of every evaluation into the run directory's `videos` folder"""

    env_id: str = "Hopper-v4"
    """the task: any Gymnasium id with Box actions and Box or goal (Dict) observations"""
    total_timesteps: int = 1_000_000
    """how many environment steps to train for"""
    buffer_size: int = 1_000_000
    """how many transitions the replay buffer holds"""
    gamma: float = 0.99
    """the discount factor"""
    tau: float = 0.005
    """how far the target networks move towards the online ones at each update"""
    batch_size: int = 256
    """how many transitions an update uses"""
    learning_starts: int = 5000
    """how many steps of random actions come before the first update"""
    hidden_dim: int = 256
    """width of the hidden layers"""

    runs_dir: str = "runs"
    """where run directories are made"""
    run_name: str | None = None
    """the run directory's name; by default {env_id}__{exp_name}__{seed}__{unix time}"""
    resume: bool = False
    """continue the run of this name exactly where its last checkpoint is; its other options are remembered"""
    eval_every: int = 10_000
    """evaluate every so many steps (0: only at the end)"""
    eval_episodes: int = 10
    """episodes of an evaluation: so many greedy ones and so many stochastic ones"""
    checkpoint_every: int = 50_000
    """write a checkpoint every so many steps (0: only when stopped and at the end)"""
    compile: bool = False
    """compile the losses with torch.compile (on a GPU with CUDA graphs)"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the replay buffer lives; auto: on the GPU when it takes at most half of its free memory"""


def fail(message: str) -> NoReturn:
    """Bad input ends the program with one line that says what to do."""
    raise SystemExit(f"error: {message}")


def check_common_args(args: CommonArgs) -> None:
    for name in ("total_timesteps", "buffer_size", "batch_size", "hidden_dim", "eval_episodes"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    for name in ("seed", "learning_starts", "eval_every", "checkpoint_every"):
        if getattr(args, name) < 0:
            fail(f"--{name.replace('_', '-')} must not be negative, but it is {getattr(args, name)}")
    if not 0 <= args.gamma <= 1:
        fail(f"--gamma must lie in [0, 1], not {args.gamma}")
    if not 0 < args.tau <= 1:
        fail(f"--tau must lie in (0, 1], not {args.tau}")
    if args.buffer_device == "cuda" and not args.cuda:
        fail("--buffer-device cuda contradicts --no-cuda; drop one of the two")
    if args.run_name is not None and (not args.run_name.strip(".") or "/" in args.run_name or "\0" in args.run_name):
        fail(f"--run-name {args.run_name!r} is no directory name; put the path into --runs-dir")
    if args.resume and args.run_name is None:
        fail("--resume needs the --run-name of the run to continue")


def parse_args(args_class: type) -> Any:
    """The command line as an `args_class`; with --resume, what it does not name comes from the run's args.json."""
    args = tyro.cli(args_class)
    check_common_args(args)
    if args.resume:
        stored = dataclasses.replace(args, **stored_options(args))
        args = tyro.cli(args_class, default=dataclasses.replace(stored, resume=True, runs_dir=args.runs_dir))
    return args


# --- end shared ---


@dataclass
class Args(CommonArgs):
    policy_lr: float = 3e-4
    """learning rate of the action policy π and the selection policy β"""
    q_lr: float = 1e-3
    """learning rate of the critics"""
    alpha_lr: float = 1e-3
    """learning rate of the two temperatures"""
    policy_frequency: int = 2
    """update the policies every so many steps"""
    compensate_policy_delay: bool = True
    """update π and the temperatures policy_frequency times each time, and the targets at every step; off, each is
    updated once per policy update, which is Algorithm 1 to the letter"""

    selection: Literal["decoupled", "joint"] = "decoupled"
    """decoupled: one act-or-repeat bit per action dimension; joint: one bit for all of them (an ablation)"""
    selection_objective: Literal["auto", "exact", "sampled"] = "auto"
    """how β is trained: exact sums over all act-or-repeat schemas (Eq. 8), sampled draws some (Eq. 9); auto takes
    exact up to three bits"""
    num_selection_samples: int = 10
    """K, the number of schemas drawn per state by the sampled objective"""
    selection_baseline: bool = True
    """subtract the mean value of the other K-1 schemas in the sampled objective: the same gradient in expectation,
    far less variance; off gives the plain Eq. 9"""
    selection_entropy_scale: float = 0.5
    """λ: β's target entropy is λ·|A|·log 2 (the paper uses 0.4 to 0.6, by task)"""
    warmup_repeats: bool = False
    """draw the act-or-repeat bits from β during the random warm-up too, which repeats half of them; off, every
    dimension acts there, as in SAC's warm-up"""
    mask_repeated_logprob: bool = False
    """sum log π over the acting dimensions only instead of all"""
    entropy_in_target: bool = False
    """add both policies' entropy bonuses to the critics' target; Eq. 6 has none"""


ACT_PLACEHOLDER = -2.0  # ξ: stands in π's input for the previous action of a dimension that acts, outside of [-1, 1]
MAX_EXACT_BITS = 12
SCHEMAS_AT_ONCE = 64  # the exact objective evaluates this many schemas in one pass, which bounds its memory


def check_args(args: Args) -> None:
    check_common_args(args)
    if args.policy_frequency < 1:
        fail(f"--policy-frequency must be at least 1, not {args.policy_frequency}")
    if args.num_selection_samples < 1 + args.selection_baseline:
        fail(
            f"--num-selection-samples {args.num_selection_samples} is too few: 1 at least, 2 with the leave-one-out "
            "baseline (--no-selection-baseline turns it off)"
        )


# --- shared: environment ---
class NotFinite(Exception):
    """A number that training depends on became infinite or NaN."""

    def __init__(self, what: str, step: int | None = None):
        super().__init__(what)
        self.what, self.step = what, step


def make_env(env_id: str, render_mode: str | None = None) -> gym.Env:
    """The task with flat float32 observations and actions in [-1, 1]^|A|."""
    warnings.filterwarnings("ignore", message=".*is out of date.*", category=DeprecationWarning)
    if ":" not in env_id and env_id not in gym.registry:
        with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()):  # it greets on stderr
            import gymnasium_robotics

            gym.register_envs(gymnasium_robotics)
    try:
        env = gym.make(env_id, render_mode=render_mode)
    except Exception as error:  # a task's constructor may raise anything
        reason = " ".join(str(error).split())
        fail(f"cannot make --env-id {env_id}: {reason} (gymnasium.pprint_registry() lists the tasks installed)")
    if env_id.startswith("BipedalWalker"):
        env = FreshWorld(env)
    return flatten_observations(rescale_actions(env, env_id), env_id)


class FreshWorld(gym.Wrapper):
    """A new Box2D world for each episode: BipedalWalker's keeps traces of earlier ones, so that a seed would not do."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        task = self.unwrapped
        task._destroy()
        task.world = type(task.world)()
        return self.env.reset(**kwargs)


def rescale_actions(env: gym.Env, env_id: str) -> gym.Env:
    space = env.action_space
    if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        fail(f"{env_id} has the action space {space}; these algorithms need a continuous (Box) one")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        fail(f"{env_id} has unbounded actions; wrap it with bounds, so that they can be rescaled to [-1, 1]")
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)

    def rescale(action: np.ndarray) -> np.ndarray:
        scaled = low + (action.reshape(space.shape).astype(np.float64) + 1) / 2 * (high - low)
        return np.clip(scaled, low, high).astype(space.dtype)

    unit_box = gym.spaces.Box(-1, 1, (math.prod(space.shape),), np.float32)
    return gym.wrappers.TransformAction(env, rescale, unit_box)


def flatten_observations(env: gym.Env, env_id: str) -> gym.Env:
    space = env.observation_space
    if isinstance(space, gym.spaces.Box):
        parts, size = None, math.prod(space.shape)
    elif isinstance(space, gym.spaces.Dict) and {"observation", "desired_goal"} <= set(space):
        parts = ("observation", "desired_goal")
        size = sum(math.prod(space[part].shape) for part in parts)
    else:
        fail(
            f"{env_id} has the observation space {space}; Box, or Dict with observation and desired_goal, is supported"
        )

    def flatten(observation: Any) -> np.ndarray:
        if parts is not None:
            observation = np.concatenate([np.ravel(observation[part]) for part in parts])
        return np.asarray(observation, np.float32).reshape(-1)

    return gym.wrappers.TransformObservation(env, flatten, gym.spaces.Box(-np.inf, np.inf, (size,), np.float32))


def derived_seed(*words: int) -> int:
    """An independent 32-bit seed for each combination of words (experiment seed, purpose, index)."""
    return int(np.random.SeedSequence(words).generate_state(1)[0])


class Episode:
    """The training episode under way.

    Each episode starts from a seed of its own, so seed and actions are all of the environment's state: replaying
    them restores it exactly, at any step and for any deterministic simulator.
    """

    def __init__(self, env: gym.Env, seed: int):
        self.env, self.seed, self.index = env, seed, -1
        self.begin()

    def begin(self) -> None:
        self.index += 1
        self.actions: list[np.ndarray] = []
        self.total_reward = 0.0
        self.over = False
        self.memory: Any = None  # what the agent carries from step to step
        self.segment: list[Any] = []  # steps not stored yet, for algorithms that store several as one
        self.obs, _ = self.env.reset(seed=derived_seed(self.seed, 0, self.index))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Returns the next observation, the reward, and whether the task ended (a time limit is no end)."""
        if not np.isfinite(action).all():
            raise NotFinite("the action")
        self.obs, reward, terminated, truncated, _ = self.env.step(action)
        if not (np.isfinite(self.obs).all() and math.isfinite(reward)):
            raise NotFinite("the task's observation or reward")
        self.actions.append(action)
        self.total_reward += float(reward)
        self.over = terminated or truncated
        return self.obs, float(reward), bool(terminated)

    def state_dict(self) -> dict[str, Any]:
        actions = torch.from_numpy(np.array(self.actions, np.float32).reshape(-1, *self.env.action_space.shape))
        obs = torch.from_numpy(self.obs)
        return {"index": self.index, "actions": actions, "obs": obs, "memory": self.memory, "segment": self.segment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"] - 1
        self.begin()
        for action in state["actions"].numpy():
            self.step(action)
        self.memory, self.segment = state["memory"], state["segment"]
        if not np.array_equal(self.obs, state["obs"].numpy()):
            say(
                "warning: the task did not replay to where it was, so it is not deterministic; the run goes on with a "
                "new episode and will differ from one that was never stopped"
            )
            self.begin()


# --- end shared ---


# --- shared: replay buffer ---
SEGMENT_ROWS = 16_384  # rows in one file of a saved buffer


class ReplayBuffer:
    """A ring of float32 rows with a transition's fields side by side, so that a batch is one gather."""

    def __init__(self, capacity: int, fields: dict[str, tuple[int, ...]], device: torch.device):
        """`fields` maps a field's name to the shape of one entry: (n,), or () for a scalar."""
        self.capacity, self.fields = capacity, fields
        self.widths = [math.prod(shape) for shape in fields.values()]
        try:
            self.rows = torch.empty(capacity, sum(self.widths), device=device)
        except RuntimeError:
            size = capacity * sum(self.widths) * 4 / 2**30
            fail(f"a replay buffer of {capacity:,} rows takes {size:,.1f} GiB, too much here; lower --buffer-size")
        self.added = 0  # rows ever added; row i lives in slot i % capacity
        self.segments: list[dict[str, Any]] = []  # the files that hold the saved rows, oldest first

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, **row: Any) -> None:
        values = np.concatenate([np.ravel(row[field]).astype(np.float32, copy=False) for field in self.fields])
        self.rows[self.added % self.capacity].copy_(torch.from_numpy(values))
        self.added += 1

    def sample(self, batch_size: int, device: torch.device) -> dict[str, Tensor]:
        return self.gather(torch.randint(len(self), (batch_size,), device=self.rows.device), device)

    def gather(self, slots: Tensor, device: torch.device) -> dict[str, Tensor]:
        """The rows in these slots, each field of shape (*slots.shape, *its own)."""
        rows = self.rows.index_select(0, slots.reshape(-1)).to(device, non_blocking=True)
        rows = rows.unflatten(0, slots.shape)
        columns = zip(self.fields.items(), rows.split(self.widths, dim=-1), strict=True)
        return {name: column if shape else column.squeeze(-1) for (name, shape), column in columns}

    def save(self, directory: Path, name: str) -> dict[str, Any]:
        """Writes the rows added since the last save; files that are there already stay as they are."""
        oldest = max(0, self.added - self.capacity)
        start = max(oldest, self.segments[-1]["stop"]) if self.segments else oldest
        while start < self.added:
            stop = min(start + SEGMENT_ROWS, self.added)
            slots = torch.arange(start, stop, device=self.rows.device) % self.capacity
            rows = self.rows[slots].cpu().numpy()
            file = f"{name}-{start:010d}-{stop:010d}.bin"
            write_atomically(directory / file, rows.data)
            self.segments.append({"file": file, "start": start, "stop": stop, "crc32": zlib.crc32(rows.data)})
            start = stop
        self.segments = [segment for segment in self.segments if segment["stop"] > oldest]
        return {"added": self.added, "segments": self.segments}

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        covered = max(0, state["added"] - self.capacity)
        for segment in state["segments"]:
            start, stop = segment["start"], segment["stop"]
            rows = np.fromfile(directory / Path(segment["file"]).name, np.float32)
            if start > covered or zlib.crc32(rows.data) != segment["crc32"]:
                raise ValueError(f"{segment['file']} is damaged or out of order")
            slots = torch.arange(start, stop, device=self.rows.device) % self.capacity
            self.rows[slots] = torch.from_numpy(rows.reshape(stop - start, -1)).to(self.rows.device)
            covered = stop
        if covered != state["added"]:
            raise ValueError("replay rows are missing")
        self.added, self.segments = state["added"], list(state["segments"])


# --- end shared ---


# --- shared: state-action networks ---
class StateActionMLP(nn.Module):
    """(s, a) → hidden → hidden → outputs, with ReLU."""

    def __init__(self, obs_dim: int, act_dim: int, outputs: int, hidden_dim: int):
        super().__init__()
        self.obs_dim = obs_dim
        self.fc1 = nn.Linear(obs_dim + act_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, outputs)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        if actions.dim() == obs.dim():
            x = self.fc1(torch.cat([obs, actions], dim=-1))
        else:  # many actions per state, (K, batch, |A|): they share the state's half of the layer
            obs_weight, act_weight = self.fc1.weight.tensor_split([self.obs_dim], dim=1)
            x = F.linear(actions, act_weight).add_(F.linear(obs, obs_weight, self.fc1.bias))
        return self.fc3(self.fc2(x.relu_()).relu_())


class Critic(StateActionMLP):
    """Q(s, a)."""

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return super().forward(obs, actions).squeeze(-1)


# --- end shared ---


# --- shared: squashed Gaussian ---
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


def bounded_log_std(raw: Tensor) -> Tensor:
    return LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(raw) + 1)


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mean + std·noise) and the log-density of each dimension."""
    pre_tanh = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - 2 * (math.log(2) - pre_tanh - F.softplus(-2 * pre_tanh))  # log(1 - tanh²), stable
    return torch.tanh(pre_tanh), log_prob


# --- end shared ---


class SelectionPolicy(StateActionMLP):
    """β(b | s, a⁻): a logit of acting for each bit, (s, a⁻) → selection_logits."""


class ActionPolicy(StateActionMLP):
    """π(â | s, a_mix), Eq. 3: mean and log standard deviation of a tanh-squashed Gaussian."""

    def forward(self, obs: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw_log_std = super().forward(obs, mixed).chunk(2, dim=-1)
        return mean, bounded_log_std(raw_log_std)


# Decision: how an action is chosen.


def mix(act_mask: Tensor, prev_actions: Tensor, new: Tensor | float) -> Tensor:
    """Mix(b, a⁻, x) of Eqs. 2 and 4: x where b acts, a⁻ bit for bit where b repeats."""
    return torch.where(act_mask, new, prev_actions)


def sample_act_mask(selection_logits: Tensor, *samples: int) -> Tensor:
    """Stage 1: b ~ β, of shape (*samples, batch, bits)."""
    probability = torch.sigmoid(selection_logits)
    return torch.rand_like(probability.expand(*samples, *probability.shape)) < probability


def act_given_mask(policy: ActionPolicy, obs: Tensor, prev_actions: Tensor, act_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Stage 2, Eqs. 2-4: the action a and log π of each dimension of the candidate â."""
    mean, log_std = policy(obs, mix(act_mask, prev_actions, ACT_PLACEHOLDER))
    candidate, log_prob = squashed_gaussian(mean, log_std, torch.randn_like(mean))
    return mix(act_mask, prev_actions, candidate), log_prob


def selection_log_prob(selection_logits: Tensor, act_mask: Tensor) -> Tensor:
    """log β(b | s, a⁻), summed over the bits."""
    return (act_mask * selection_logits - F.softplus(selection_logits)).sum(-1)  # log σ(x) = x - softplus(x)


def selection_entropy(selection_logits: Tensor) -> Tensor:
    """Entropy of β in closed form: a product of Bernoullis."""
    return (F.softplus(selection_logits) - selection_logits * torch.sigmoid(selection_logits)).sum(-1)


def all_schemas(bits: int, device: torch.device | None = None) -> Tensor:
    """𝓑 = {0, 1}^bits as act masks, (2^bits, 1, bits)."""
    index = torch.arange(2**bits, device=device)
    return (index[:, None] >> torch.arange(bits, device=device) & 1).bool()[:, None]


# Losses.


def bellman_target(rewards: Tensor, terminated: Tensor, next_values: Tensor, gamma: float) -> Tensor:
    """𝒯Q of Eq. 6. A time limit does not count as terminated: the target bootstraps through it."""
    return rewards + gamma * (1 - terminated) * next_values


def action_objective(values: Tensor, log_prob: Tensor, alpha_action: Tensor) -> Tensor:
    """Eq. 7 as far as π has a part in it, and f(b) of the selection objectives: Q(s, a) - α_π·log π(â | s, a⁻, b)."""
    return values - alpha_action * log_prob


def exact_selection_objective(selection_logits: Tensor, schemas: Tensor, values: Tensor) -> Tensor:
    """Eq. 8 less its entropy term: Σ_b β(b)·f(b) over all schemas, given f as `values` (2^bits, batch)."""
    return (selection_log_prob(selection_logits, schemas).exp() * values).sum(0)


def sampled_selection_objective(selection_logits: Tensor, act_masks: Tensor, values: Tensor, baseline: bool) -> Tensor:
    """Eq. 9 less its entropy term: f(b)·β(b)/β_old(b) averaged over K draws b ~ β_old, given f as `values` (K, batch).

    β_old is β before this update, so the ratio is 1 and only its gradient matters. The baseline takes from each f
    the mean of the other K-1 draws of the same state, which are independent of b: the expectation stays.
    """
    log_prob = selection_log_prob(selection_logits, act_masks)
    ratio = (log_prob - log_prob.detach()).exp()
    if baseline:
        samples = values.shape[0]
        values = (values - values.mean(0)) * (samples / (samples - 1))  # equals f - mean of the others
    return (values * ratio).mean(0)


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: float) -> Tensor:
    """Eq. 10: α grows while the entropy is below its target and shrinks while it is above."""
    return log_alpha * (entropy - target_entropy)


def masked_mean(values: Tensor, keep: Tensor) -> Tensor:
    """Mean over the entries to keep, without a shape that depends on the data; 0 if there are none."""
    return (values * keep).sum() / keep.sum().clamp(min=1)


# --- shared: agent helpers ---
def frozen_view(module: nn.Module) -> nn.Module:
    """The same weights in the same memory, without gradients: what a policy's loss passes through."""
    view = copy.deepcopy(module)
    for ours, theirs in zip(view.parameters(), module.parameters(), strict=True):
        ours.data = theirs.data
        ours.requires_grad_(False)
    return view


class Adam:
    """Adam's fused kernel alone: for small networks torch.optim.Adam takes longer around it than in it."""

    def __init__(self, parameters: Iterable[Tensor], learning_rate: float):
        self.parameters, self.learning_rate = list(parameters), learning_rate
        self.means = [torch.zeros_like(p) for p in self.parameters]
        self.squares = [torch.zeros_like(p) for p in self.parameters]
        self.steps = torch.zeros((), device=self.parameters[0].device)  # there, so that CUDA graphs can capture a step

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        torch._fused_adam_(
            self.parameters,
            gradients,
            self.means,
            self.squares,
            [],
            [self.steps] * len(self.parameters),
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "means": self.means, "squares": self.squares}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        theirs = [state["steps"], *state["means"], *state["squares"]]
        for ours, their in zip([self.steps, *self.means, *self.squares], theirs, strict=True):
            ours.copy_(their)


def differentiated(loss_function: Callable, parameters: list[Tensor], compile: bool) -> Callable:
    """The function that gives the gradients and the metrics of `loss_function`, which gives a loss and metrics."""

    def gradients(*inputs: Any) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        loss, metrics = loss_function(*inputs)
        return torch.autograd.grad(loss, parameters), metrics

    return compiled(gradients, loss_function.__name__, parameters[0].device) if compile else gradients


def minimiser(loss_function: Callable, *optimizers: Adam, compile: bool) -> Callable[..., dict[str, Tensor]]:
    """The function that takes the loss's inputs, moves the optimizers' parameters one step, and gives the metrics."""
    gradients_of = differentiated(loss_function, [p for adam in optimizers for p in adam.parameters], compile)

    def step(*inputs: Any) -> dict[str, Tensor]:
        gradients, metrics = gradients_of(*inputs)
        rest = iter(gradients)
        for adam in optimizers:
            adam.step([next(rest) for _ in adam.parameters])
        return metrics

    return step


@torch.no_grad()
def soft_update(targets: list[Tensor], online: list[Tensor], tau: float) -> None:
    torch._foreach_lerp_(targets, online, tau)


def check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        fail("--compile needs a C++ compiler and found none; install one (Debian: g++), or set CXX, or drop --compile")


def compiled(function: Callable, name: str, device: torch.device) -> Callable:
    """torch.compile works at the first call, which says how long it took; later runs find its work in a cache."""
    if device.type == "cuda":
        settings = {"mode": "reduce-overhead"}
    else:  # the eager generator is the faster one, and draws what the run would draw without --compile
        settings = {"options": {"fallback_random": True, "cpp_wrapper": True}}
    if device.type == "cpu":
        check_compiler()
    fast = None

    def call(*inputs: Any) -> Any:
        nonlocal fast
        if fast is not None:
            return fast(*inputs)
        began = time.monotonic()
        torch._dynamo.config.trace_autograd_ops = True  # loss and gradient in one piece: nothing to keep in between
        fast = torch.compile(function, fullgraph=True, **settings)
        outputs = fast(*inputs)
        say(f"compiled {name} in {time.monotonic() - began:.0f} s")
        return outputs

    return call


# --- end shared ---


class Agent(nn.Module):
    """β, π, twin critics with their targets, and the two temperatures."""

    def __init__(self, obs_dim: int, act_dim: int, args: Args, device: torch.device):
        super().__init__()
        self.args, self.device, self.act_dim = args, device, act_dim
        self.bits = 1 if args.selection == "joint" else act_dim
        self.exact = args.selection_objective == "exact" or (args.selection_objective == "auto" and self.bits <= 3)
        if self.exact and self.bits > MAX_EXACT_BITS:
            fail(
                f"--selection-objective exact would evaluate 2^{self.bits} = {2**self.bits:,} schemas for each of the "
                f"{args.batch_size} states of a batch; it is limited to {MAX_EXACT_BITS} action dimensions, use sampled"
            )
        self.target_entropy_action = -float(act_dim)
        self.target_entropy_selection = args.selection_entropy_scale * self.bits * math.log(2)

        with device:
            self.selection = SelectionPolicy(obs_dim, act_dim, self.bits, args.hidden_dim)
            self.policy = ActionPolicy(obs_dim, act_dim, 2 * act_dim, args.hidden_dim)
            self.q1 = Critic(obs_dim, act_dim, 1, args.hidden_dim)
            self.q2 = Critic(obs_dim, act_dim, 1, args.hidden_dim)
            self.log_alpha_selection = nn.Parameter(torch.zeros(()))
            self.log_alpha_action = nn.Parameter(torch.zeros(()))
        self.q1_target = copy.deepcopy(self.q1).requires_grad_(False)
        self.q2_target = copy.deepcopy(self.q2).requires_grad_(False)
        self.frozen_critics = (frozen_view(self.q1), frozen_view(self.q2))  # a tuple: not in the state dict
        self.schemas = all_schemas(self.bits, device) if self.exact else None

        online, targets = [self.q1, self.q2], [self.q1_target, self.q2_target]
        self.critic_parameters = [p for q in online for p in q.parameters()]
        self.target_parameters = [p for q in targets for p in q.parameters()]
        critics = Adam(self.critic_parameters, args.q_lr)
        policy = Adam(self.policy.parameters(), args.policy_lr)
        selection = Adam(self.selection.parameters(), args.policy_lr)
        alphas = Adam([self.log_alpha_selection, self.log_alpha_action], args.alpha_lr)
        self.optimizers = {"critics": critics, "policy": policy, "selection": selection, "alphas": alphas}
        self.update_critics = minimiser(self.critic_loss, critics, compile=args.compile)
        self.update_policy = minimiser(self.policy_loss, policy, alphas, compile=args.compile)
        self.update_selection = minimiser(self.selection_loss, selection, compile=args.compile)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, memory: Tensor | None, mode: str) -> tuple[np.ndarray, Tensor]:
        """The action for one observation. `memory` is what the last call returned, None at an episode's start.

        mode: "sample" (both policies stochastic), "greedy" (b_i = 1 where β_i > 0.5, â = tanh(mean)) or "random"
        (warm-up: â uniform; all act or, with warmup_repeats, b ~ β).
        """
        state = torch.from_numpy(obs).to(self.device)
        if memory is None or (mode == "random" and not self.args.warmup_repeats):  # every dimension acts
            prev_action = torch.zeros(self.act_dim, device=self.device)  # not looked at
            act_mask = torch.ones(self.bits, dtype=torch.bool, device=self.device)
        else:
            prev_action = memory
            selection_logits = self.selection(state, prev_action)
            act_mask = selection_logits > 0 if mode == "greedy" else sample_act_mask(selection_logits)
        if mode == "random":
            action = mix(act_mask, prev_action, torch.rand_like(prev_action) * 2 - 1)
        elif mode == "greedy":
            mean, _ = self.policy(state, mix(act_mask, prev_action, ACT_PLACEHOLDER))
            action = mix(act_mask, prev_action, torch.tanh(mean))
        else:
            action, _ = act_given_mask(self.policy, state, prev_action, act_mask)
        return action.cpu().numpy(), action

    def update(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """One critic update and, every policy_frequency steps, the policy block of Algorithm 1."""
        args = self.args
        if self.args.compile:
            torch.compiler.cudagraph_mark_step_begin()
        metrics = self.update_critics(batch)
        update_policies = step % args.policy_frequency == 0
        if update_policies:
            with torch.no_grad():
                selection_logits = self.selection(batch["obs"], batch["prev_actions"])  # β changes last
            for _ in range(args.policy_frequency if args.compensate_policy_delay else 1):
                policy_metrics = self.update_policy(batch, selection_logits)
            metrics = {**metrics, **policy_metrics, **self.update_selection(batch)}
        if update_policies or args.compensate_policy_delay:
            soft_update(self.target_parameters, self.critic_parameters, args.tau)
        return metrics

    def critic_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. 6: both critics against the clipped double-Q target under β and π."""
        with torch.no_grad():
            next_obs, actions = batch["next_obs"], batch["actions"]
            selection_logits = self.selection(next_obs, actions)
            act_mask = sample_act_mask(selection_logits)
            next_actions, log_prob = act_given_mask(self.policy, next_obs, actions, act_mask)
            next_values = torch.minimum(self.q1_target(next_obs, next_actions), self.q2_target(next_obs, next_actions))
            if self.args.entropy_in_target:
                next_values = action_objective(next_values, self.joint_log_prob(log_prob, act_mask), self.alpha_action)
                next_values = next_values - self.alpha_selection * selection_log_prob(selection_logits, act_mask)
            target = bellman_target(batch["rewards"], batch["terminated"], next_values, self.args.gamma)
        q1, q2 = self.q1(batch["obs"], batch["actions"]), self.q2(batch["obs"], batch["actions"])
        q1_loss, q2_loss = F.mse_loss(q1, target), F.mse_loss(q2, target)
        metrics = {
            "losses/qf1_values": q1.detach().mean(),
            "losses/qf2_values": q2.detach().mean(),
            "losses/qf1_loss": q1_loss.detach(),
            "losses/qf2_loss": q2_loss.detach(),
            "losses/qf_loss": (q1_loss + q2_loss).detach() / 2,
        }
        return q1_loss + q2_loss, metrics

    def policy_loss(self, batch: dict[str, Tensor], selection_logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. 7 for π, with b ~ β and no gradient through b, plus Eq. 10 for both temperatures."""
        with torch.no_grad():
            first = batch["first"].bool()
            act_mask = sample_act_mask(selection_logits) | first[:, None]  # where a⁻ does not exist, all act
            entropy_selection = masked_mean(selection_entropy(selection_logits), ~first)
        actions, log_prob = act_given_mask(self.policy, batch["obs"], batch["prev_actions"], act_mask)
        log_prob = self.joint_log_prob(log_prob, act_mask)
        policy_loss = -action_objective(self.clipped_value(batch["obs"], actions), log_prob, self.alpha_action).mean()
        entropy_action = -log_prob.detach().mean()
        alpha_loss = temperature_loss(self.log_alpha_selection, entropy_selection, self.target_entropy_selection)
        alpha_loss = alpha_loss + temperature_loss(self.log_alpha_action, entropy_action, self.target_entropy_action)
        metrics = {
            "losses/actor_loss": policy_loss.detach(),
            "losses/alpha_loss": alpha_loss.detach(),
            "losses/action_entropy": entropy_action,
            "alpha/selection": self.alpha_selection,
            "alpha/action": self.alpha_action,
        }
        return policy_loss + alpha_loss, metrics  # they share no parameter: one backward pass serves both

    def selection_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. 8 or Eq. 9 for β over the rows that have a previous action."""
        obs, prev_actions = batch["obs"], batch["prev_actions"]
        selection_logits = self.selection(obs, prev_actions)
        with torch.no_grad():
            if self.exact:
                act_masks = self.schemas
            else:
                act_masks = sample_act_mask(selection_logits, self.args.num_selection_samples)
            chunks = act_masks.split(SCHEMAS_AT_ONCE)
            values = torch.cat([self.schema_values(obs, prev_actions, chunk) for chunk in chunks])  # (K, batch)
        if self.exact:
            objective = exact_selection_objective(selection_logits, act_masks, values)
        else:
            objective = sampled_selection_objective(selection_logits, act_masks, values, self.args.selection_baseline)
        entropy = selection_entropy(selection_logits)
        has_previous = 1 - batch["first"]
        loss = -masked_mean(objective + self.alpha_selection * entropy, has_previous)
        act_probability = torch.sigmoid(selection_logits.detach()) * has_previous[:, None]
        metrics = {
            "losses/selection_loss": loss.detach(),
            "repetition/selection_entropy": masked_mean(entropy.detach(), has_previous),
            "repetition/act_probability": act_probability.sum(0) / has_previous.sum().clamp(min=1),
        }
        return loss, metrics

    def schema_values(self, obs: Tensor, prev_actions: Tensor, act_masks: Tensor) -> Tensor:
        """f(b) = min(Q1, Q2)(s, a_b) - α_π·log π(â_b | s, a_mix,b) for many schemas of each state, (K, batch)."""
        act_masks = act_masks.expand(-1, obs.shape[0], -1)
        actions, log_prob = act_given_mask(self.policy, obs, prev_actions, act_masks)
        log_prob = self.joint_log_prob(log_prob, act_masks)
        return action_objective(self.clipped_value(obs, actions), log_prob, self.alpha_action)

    def clipped_value(self, obs: Tensor, actions: Tensor) -> Tensor:
        q1, q2 = self.frozen_critics
        return torch.minimum(q1(obs, actions), q2(obs, actions))

    def joint_log_prob(self, log_prob: Tensor, act_mask: Tensor) -> Tensor:
        """log π(â | s, a⁻, b): over all dimensions, as the equations are written, or over the acting ones."""
        return (log_prob * act_mask).sum(-1) if self.args.mask_repeated_logprob else log_prob.sum(-1)

    @property
    def alpha_selection(self) -> Tensor:
        return self.log_alpha_selection.detach().exp()

    @property
    def alpha_action(self) -> Tensor:
        return self.log_alpha_action.detach().exp()


# --- shared: evaluation ---
class Stopped(Exception):
    """A signal asked the run to stop."""


@dataclass
class Trajectory:
    actions: np.ndarray  # (T, |A|), as executed, in [-1, 1]
    total_reward: float
    frames: list[np.ndarray]


def play_episode(
    agent: "Agent",
    env: gym.Env,
    seed: int,
    mode: str,
    film: bool = False,
    keep_going: Callable[[], None] = lambda: None,
) -> Trajectory:
    """One seeded episode. `keep_going` is called at every step and may raise."""
    obs, _ = env.reset(seed=seed)
    memory, over, actions, total_reward, frames = None, False, [], 0.0, []
    while not over:
        keep_going()
        if film:
            frames.append(env.render())
        action, memory = agent.act(obs, memory, mode)
        if not np.isfinite(action).all():
            raise NotFinite("an evaluation's action")
        obs, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        total_reward += float(reward)
        over = terminated or truncated
    return Trajectory(np.stack(actions), total_reward, frames)


@contextlib.contextmanager
def private_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Evaluation draws from a stream of its own: how often it runs does not change the training."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def repetition_metrics(trajectories: list[np.ndarray]) -> dict[str, Any]:
    """The paper's APR and AFR from executed actions (T, |A|), averaged over trajectories.

    p is the share of steps t ≥ 1 (and dimensions) with a_t == a_{t-1}, exactly, and APR = 1/(1 - p); AFR is the mean
    Euclidean norm of a_t - a_{t-1}, and afr_per_dim the mean absolute change of a dimension, which is the scale of the
    paper's tables. Trajectories of one step have no such pair and are left out.
    """
    changes = [np.diff(actions, axis=0) for actions in trajectories if len(actions) > 1]
    if not changes:
        width = trajectories[0].shape[1]
        missing = dict.fromkeys(("repeat_rate", "apr", "afr", "afr_per_dim"), math.nan)
        return {**missing, "apr_dim": [math.nan] * width}
    repeats = np.mean([(change == 0).mean(axis=0) for change in changes], axis=0)  # p of each dimension
    with np.errstate(divide="ignore"):  # never acting has APR ∞
        apr, apr_dim = 1 / (1 - repeats.mean()), 1 / (1 - repeats)
    return {
        "repeat_rate": float(repeats.mean()),
        "apr": float(apr),
        "afr": float(np.mean([np.linalg.norm(change, axis=1).mean() for change in changes])),
        "afr_per_dim": float(np.mean([np.abs(change).mean() for change in changes])),
        "apr_dim": [float(value) for value in apr_dim],
    }


def summarise(trajectories: list[Trajectory]) -> dict[str, Any]:
    returns = np.array([t.total_reward for t in trajectories])
    spread = returns.std(ddof=1) / math.sqrt(len(returns)) if len(returns) > 1 else 0.0
    return {
        "episodes": len(returns),
        "return": float(returns.mean()),
        "return_standard_error": float(spread),
        "length": float(np.mean([len(t.actions) for t in trajectories])),
        **repetition_metrics([t.actions for t in trajectories]),
    }


def act_or_repeat_image(actions: np.ndarray) -> np.ndarray:
    """Time × dimension as in the paper's Fig. 4: dark where a dimension acts, light where it repeats; (H, W, 3)."""
    acts = np.vstack([np.ones_like(actions[:1], bool), np.diff(actions, axis=0) != 0])
    cell = max(1, 1000 // len(acts)), 16
    rows = [np.kron(column, np.ones((cell[1], cell[0]), bool)) for column in acts.T]
    picture = np.full((len(rows) * (cell[1] + 2) - 2, rows[0].shape[1], 3), 255, np.uint8)
    for i, row in enumerate(rows):
        top = i * (cell[1] + 2)
        picture[top : top + cell[1]] = np.where(row[..., None], (20, 50, 120), (185, 210, 238))
    return picture


# --- end shared ---


# --- shared: checkpoint ---
SCRIPT = Path(__file__).stem
FORMAT = 1
NOT_EXPERIMENT = ("resume", "runs_dir")  # options that may differ between a run's start and its resumption


def write_atomically(path: Path, data: Any) -> None:
    """Either the whole file is there under its name or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def save_file(path: Path, contents: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "script": SCRIPT, **contents}, buffer)
    write_atomically(path, buffer.getbuffer())


def load_file(path: Path) -> dict[str, Any]:
    """A checkpoint.pt or agent.pt of this script. Nothing in the file is executed, whoever made it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged_record = archive.testzip()  # torch.load does not look at the checksums
        if damaged_record is not None:
            raise zipfile.BadZipFile(damaged_record)
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        fail(f"there is no {path}")
    except Exception as error:  # whatever a damaged or hostile file makes the reader raise
        fail(f"{path} is damaged or not one of ours ({type(error).__name__}); nothing was changed")
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        fail(f"{path} is not a file of this project, or one of another version; nothing was changed")
    if contents.get("script") != SCRIPT:
        fail(f"{path} was written by {contents.get('script')}.py, this is {SCRIPT}.py; nothing was changed")
    return contents


def stored_options(args: CommonArgs) -> dict[str, Any]:
    """The options that the run to resume was started with."""
    path = Path(args.runs_dir) / args.run_name / "args.json"
    try:
        options = json.loads(path.read_text())["args"]
        assert set(options) == {field.name for field in dataclasses.fields(args)}
    except FileNotFoundError:
        fail(f"nothing to resume: there is no {path}; start the run without --resume")
    except (ValueError, TypeError, KeyError, AssertionError):
        fail(f"{path} is damaged or not from this version of {SCRIPT}.py; nothing was changed")
    return options


def check_same_options(args: CommonArgs, stored: dict[str, Any], where: Path) -> None:
    for name, value in dataclasses.asdict(args).items():
        if name not in NOT_EXPERIMENT and stored.get(name) != value:
            option = f"--{name.replace('_', '-')}"
            fail(
                f"{where} was started with {option} {stored.get(name)}, not {value}; a run is resumed with the options "
                "it has, or start another under a new --run-name"
            )


def rng_state(device: torch.device) -> dict[str, Any]:
    _, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    version_, internal, gauss = state["python"]
    random.setstate((version_, tuple(internal), gauss))
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def load_agent(path: Path, device: torch.device) -> "Agent":
    """The agent of an agent.pt or checkpoint.pt, ready to act."""
    contents = load_file(path)
    try:
        args = Args(**contents["args"])
        agent = Agent(contents["obs_dim"], contents["act_dim"], args, torch.device("meta"))
        agent.load_state_dict(contents["weights"], assign=True)  # shapes are compared before anything is allocated
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        fail(f"{path} does not hold an agent of {SCRIPT}.py ({type(error).__name__})")
    agent.device = device
    return agent.to(device)


# --- end shared ---


# --- shared: run ---
LOG_EVERY = 250  # steps between two looks at the losses, each of which waits for the device


def say(message: str) -> None:
    """A line for the user that leaves the progress bar whole."""
    tqdm.write(message, file=sys.stderr if message.startswith("warning") else sys.stdout)
    sys.stdout.flush()


def choose_device(args: CommonArgs) -> torch.device:
    if args.cuda and not torch.cuda.is_available():
        say("warning: no CUDA device found, training on the CPU (--no-cuda does so without this warning)")
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def choose_buffer_device(args: CommonArgs, device: torch.device, fields: dict[str, tuple[int, ...]]) -> torch.device:
    if device.type == "cpu" or args.buffer_device == "cpu":
        return torch.device("cpu")
    needed = 4 * sum(map(math.prod, fields.values())) * min(args.buffer_size, args.total_timesteps)
    fits = args.buffer_device == "cuda" or needed < torch.cuda.mem_get_info(device)[0] / 2
    return device if fits else torch.device("cpu")


def seed_everything(args: CommonArgs) -> None:
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic


def keep_freed_memory() -> None:
    """Lets glibc reuse the memory of freed tensors; it would return it to the kernel and fault it in at each update."""
    if platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # from malloc.h
        libc.mallopt(mmap_threshold, 2**25)  # its own limit; what is larger, as a replay buffer, is mapped as ever
        libc.mallopt(trim_threshold, 2**30)


def describe_run(args: CommonArgs, device: torch.device) -> dict[str, Any]:
    """The contents of args.json."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    packages = ("torch", "gymnasium", "gymnasium-robotics", "mujoco", "box2d", "numpy", "tensorboard", "tyro")
    return {
        "args": dataclasses.asdict(args),
        "script": SCRIPT,
        "commit": commit or None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {package: version(package) for package in packages},
    }


def to_json(contents: dict[str, Any]) -> bytes:
    """JSON has no NaN and no infinity: they become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return (json.dumps(plain(contents), indent=2) + "\n").encode()


def check_rendering(env: gym.Env) -> None:
    try:
        env.reset(seed=0)
        env.render()
    except Exception as error:  # each renderer has its own
        reason = " ".join(str(error).split())
        fail(
            f"--capture-video cannot render {env.spec.id}: {reason}. Without a screen, install EGL (Debian: libegl1 "
            "libgl1) and set MUJOCO_GL=egl, or OSMesa (libosmesa6) and MUJOCO_GL=osmesa"
        )


CHARTS = {  # the Custom Scalars page of TensorBoard; tags are regular expressions
    "return": ["eval/return$", "eval/return_stochastic$", "charts/episodic_return$"],
    "action persistence rate (APR)": ["eval/apr$", "eval/apr_dim_.*"],
    "action fluctuation rate (AFR)": ["eval/afr$", "eval/afr_per_dim$"],
    "act probability": ["repetition/act_probability_.*"],
}


class Run:
    """One run's directory, logs, progress, evaluations, checkpoints and signals; `steps` is the training's clock."""

    def __init__(
        self, args: CommonArgs, agent: "Agent", episode: Episode, buffers: dict[str, ReplayBuffer], device: torch.device
    ):
        self.args, self.agent, self.episode, self.buffers, self.device = args, agent, episode, buffers, device
        self.step = 0
        self.last_log_step = 0
        self.evaluated = self.saved = -1  # the steps of the last evaluation and the last checkpoint
        self.pending: dict[str, list[tuple[int, Tensor]]] = {}  # losses since the last log, still on the device
        self.signal: int | None = None
        self.last_return = self.last_eval = math.nan
        self.seconds = 0.0  # spent by earlier processes of this run
        self.eval_env = make_env(args.env_id, "rgb_array" if args.capture_video else None)
        if args.capture_video:
            check_rendering(self.eval_env)

        if args.run_name is None:
            args.run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "-")
        self.directory = Path(args.runs_dir) / args.run_name
        if args.resume:
            check_same_options(args, stored_options(args), self.directory)
        else:
            self.create()
        self.lock()
        try:
            self.finished = (self.directory / "agent.pt").exists()
            self.restored = args.resume and not self.finished and self.restore()
        except BaseException:
            os.close(self.lock_handle)
            raise

    def create(self) -> None:
        if self.directory.exists():
            fail(f"{self.directory} exists; continue it with --resume, or choose another --run-name")
        half_made = self.directory.with_name(f".{self.directory.name}.{os.getpid()}")
        try:
            write_atomically(half_made / "args.json", to_json(describe_run(self.args, self.device)))
            os.rename(half_made, self.directory)
        except OSError as error:
            shutil.rmtree(half_made, ignore_errors=True)
            fail(f"cannot make the run directory {self.directory}: {error.strerror}")

    def lock(self) -> None:
        """Two processes must not write one run. The kernel lifts the lock when the process ends, however it ends."""
        self.lock_handle = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(self.lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock_handle)
            fail(f"{self.directory} is being written by another process")

    # The clock.

    def __enter__(self) -> "Run":
        if not self.finished:
            if self.args.learning_starts >= self.args.total_timesteps:
                say("warning: --learning-starts is not below --total-timesteps, so nothing will be learned")
            self.open_logs()
        self.handlers = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if not self.finished:
            self.bar.close()
            self.writer.close()
            if self.args.track:
                import wandb

                wandb.finish(exit_code=0 if error is None else 1)
        os.close(self.lock_handle)
        if isinstance(error, NotFinite):
            self.fail_not_finite(error)

    def steps(self) -> Iterator[int]:
        """Yields the number of each step to take; between two steps it logs, evaluates, saves and minds signals."""
        if self.finished:
            self.drop_replay()
            say(f"{self.directory} is finished already")
            return
        self.between_steps()
        while self.step < self.args.total_timesteps:
            self.step += 1
            yield self.step
            self.bar.update()
            self.between_steps()
        save_file(self.directory / "agent.pt", self.agent_contents())
        self.drop_replay()
        self.bar.close()
        say(f"done: {self.directory} has agent.pt, evaluation.json and the TensorBoard logs")

    def drop_replay(self) -> None:
        """A finished run does not keep the gigabytes that only training needs."""
        shutil.rmtree(self.directory / "replay", ignore_errors=True)

    def between_steps(self) -> None:
        at_end = self.step == self.args.total_timesteps

        def due(last: int, every: int) -> bool:
            return last < self.step and (at_end or (every > 0 and self.step % every == 0))

        try:
            if due(self.last_log_step, LOG_EVERY):
                self.log_losses()
            if due(self.evaluated, self.args.eval_every):
                self.evaluate()
            self.mind_signal()
        except Stopped:
            self.save()
            self.bar.close()
            say(f"stopped at step {self.step:,}; to continue: {self.resume_command()}")
            raise SystemExit(128 + self.signal) from None
        if self.step > 0 and due(self.saved, self.args.checkpoint_every):
            self.save()

    def on_signal(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(number, self.handlers[number])  # a second one ends the process at once

    def mind_signal(self) -> None:
        if self.signal is not None:
            raise Stopped

    def resume_command(self) -> str:
        where = ["--runs-dir", self.args.runs_dir, "--run-name", self.args.run_name]
        return shlex.join(["python", Path(__file__).name, *where, "--resume"])

    # Logs.

    def open_logs(self) -> None:
        args = self.args
        if args.track:
            import wandb

            try:
                wandb.init(
                    project=args.wandb_project_name,
                    entity=args.wandb_entity,
                    group=f"{args.env_id}__{args.exp_name}",
                    name=args.run_name,
                    id=re.sub(r"[^\w.-]", "-", args.run_name),
                    resume="allow",
                    config=dataclasses.asdict(args),
                    dir=self.directory,
                    sync_tensorboard=True,
                    save_code=True,
                )
            except wandb.errors.Error as error:
                reason = " ".join(str(error).split())
                fail(f"--track: {reason} (wandb login sets it up, WANDB_MODE=offline does without a server)")
        # A TensorBoard that is open already forgets what it has seen beyond the checkpoint.
        self.writer = SummaryWriter(self.directory, purge_step=self.step + 1 if self.restored else None)
        if not self.restored:
            options = {name: str(value) for name, value in dataclasses.asdict(args).items()}
            table = "\n".join(f"|{name}|{value}|" for name, value in options.items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
            for summary in hparams(options, {"eval/return": 0, "eval/apr": 0, "eval/afr": 0}):
                self.writer.file_writer.add_summary(summary)
            self.writer.add_custom_scalars({"overview": {title: ["Multiline", tags] for title, tags in CHARTS.items()}})
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit=" steps", disable=None, dynamic_ncols=True)
        self.started = time.monotonic()
        self.clock = (self.step, self.started)  # where steps/s are counted from

    def record(self, metrics: dict[str, Tensor]) -> None:
        """Keeps an update's losses, without waiting for them, until the next log."""
        reused = self.args.compile and self.device.type == "cuda"  # the next replay of the CUDA graph overwrites them
        for tag, value in metrics.items():
            self.pending.setdefault(tag, []).append((self.step, value.clone() if reused else value))

    def fetch_losses(self) -> dict[str, np.ndarray]:
        """The recorded losses, (updates, values) for each tag, in one transfer; raises if one is not finite."""
        if not self.pending:
            return {}
        columns = [torch.stack([value.reshape(-1) for _, value in values]) for values in self.pending.values()]
        host = torch.cat([column.reshape(-1) for column in columns]).cpu().split([c.numel() for c in columns])
        losses = {tag: h.reshape(c.shape).numpy() for tag, h, c in zip(self.pending, host, columns, strict=True)}
        bad = [
            (self.pending[tag][row][0], order, tag)
            for order, (tag, values) in enumerate(losses.items())
            for row in np.flatnonzero(~np.isfinite(values).all(axis=1))[:1]
        ]
        if bad:
            step, _, tag = min(bad)
            raise NotFinite(tag, step)
        return losses

    def log_losses(self) -> None:
        for tag, values in self.fetch_losses().items():
            mean = values.mean(axis=0)
            is_vector = self.pending[tag][0][1].dim() > 0
            for i, value in enumerate(mean):
                self.writer.add_scalar(f"{tag}_{i}" if is_vector else tag, value, self.step)
        self.pending.clear()
        now, (last_step, last_time) = time.monotonic(), self.clock
        self.writer.add_scalar("charts/SPS", int((self.step - last_step) / max(now - last_time, 1e-9)), self.step)
        self.last_log_step, self.clock = self.step, (self.step, now)

    def log_episode(self) -> None:
        self.last_return = self.episode.total_reward
        self.writer.add_scalar("charts/episodic_return", self.last_return, self.step)
        self.writer.add_scalar("charts/episodic_length", len(self.episode.actions), self.step)
        self.bar.set_postfix_str(f"return {self.last_return:.1f}, eval {self.last_eval:.1f}", refresh=False)

    def evaluate(self) -> None:
        """Greedy and stochastic episodes on the same starts, logged and, at the end, kept in evaluation.json."""
        began, seed, results = time.monotonic(), self.args.seed, {}
        for mode in ("greedy", "sample"):
            with private_rng(derived_seed(seed, 2), self.device):
                trajectories = [
                    play_episode(
                        self.agent,
                        self.eval_env,
                        derived_seed(seed, 1, i),
                        mode,
                        film=self.args.capture_video and mode == "greedy" and i == 0,
                        keep_going=self.mind_signal,
                    )
                    for i in range(self.args.eval_episodes)
                ]
            results[mode] = summarise(trajectories)
            if mode == "greedy":
                shown = trajectories[0]
        greedy = results["greedy"]
        self.last_eval, self.evaluated = greedy["return"], self.step
        elapsed = self.seconds + time.monotonic() - self.started
        scalars = {
            "eval/return": greedy["return"],
            "eval/return_stochastic": results["sample"]["return"],
            "eval/length": greedy["length"],
            **{f"eval/{name}": greedy[name] for name in ("apr", "afr", "afr_per_dim")},
            **{f"eval/apr_dim_{i}": apr for i, apr in enumerate(greedy["apr_dim"])},
            "charts/seconds": elapsed,
        }
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, self.step)
        picture = act_or_repeat_image(shown.actions)
        self.writer.add_image("eval/act_or_repeat", picture, self.step, dataformats="HWC")
        if shown.frames:
            self.save_video(shown.frames)
        if self.step == self.args.total_timesteps:
            about = {"step": self.step, "seconds": elapsed, "greedy": greedy, "stochastic": results["sample"]}
            write_atomically(self.directory / "evaluation.json", to_json(about))
        say(
            f"step {self.step:,} of {self.args.total_timesteps:,}: return {greedy['return']:.1f} ± "
            f"{greedy['return_standard_error']:.1f} (stochastic {results['sample']['return']:.1f}), "
            f"APR {greedy['apr']:.2f}, AFR {greedy['afr']:.3f}, {elapsed:.0f} s"
        )
        step, counted_from = self.clock
        self.clock = (step, counted_from + time.monotonic() - began)  # steps/s are the training's

    def save_video(self, frames: list[np.ndarray]) -> None:
        import imageio.v3 as imageio

        path = self.directory / "videos" / f"step-{self.step:09d}.mp4"
        path.parent.mkdir(exist_ok=True)
        fps = self.eval_env.metadata.get("render_fps", 30)
        imageio.imwrite(path, np.stack(frames), fps=fps, macro_block_size=1)
        if self.args.track:
            import wandb

            wandb.log({"eval/video": wandb.Video(str(path), format="mp4"), "global_step": self.step})

    # Checkpoints.

    def agent_contents(self) -> dict[str, Any]:
        (obs_dim,), (act_dim,) = self.eval_env.observation_space.shape, self.eval_env.action_space.shape
        weights = {name: tensor.detach().cpu() for name, tensor in self.agent.state_dict().items()}
        return {"args": dataclasses.asdict(self.args), "obs_dim": obs_dim, "act_dim": act_dim, "weights": weights}

    def save(self) -> None:
        """All that the run's future depends on. The old checkpoint stays valid until the new one is complete."""
        self.fetch_losses()
        contents = self.agent_contents()
        for name, tensor in contents["weights"].items():
            if not torch.isfinite(tensor).all():
                raise NotFinite(f"the weight {name}")
        self.writer.flush()
        try:
            replay = self.directory / "replay"
            contents |= {
                "step": self.step,
                "evaluated": self.evaluated,
                "optimizers": {name: optimizer.state_dict() for name, optimizer in self.agent.optimizers.items()},
                "episode": self.episode.state_dict(),
                "buffers": {name: buffer.save(replay, name) for name, buffer in self.buffers.items()},
                "rng": rng_state(self.device),
                "pending": self.pending,
                "last_log_step": self.last_log_step,
                "logs": {path.name: path.stat().st_size for path in self.directory.glob("events.*")},
                "seconds": self.seconds + time.monotonic() - self.started,
                "shown": (self.last_return, self.last_eval),
            }
            save_file(self.directory / "checkpoint.pt", contents)
        except OSError as error:
            fail(f"cannot write a checkpoint: {error.strerror} ({error.filename}); {self.what_is_kept()}")
        self.saved = self.step
        self.drop_unused_replay_files(contents)

    def restore(self) -> bool:
        path = self.directory / "checkpoint.pt"
        if not path.exists():
            say(f"{self.directory} has no checkpoint yet: starting from the beginning")
            self.truncate_logs({})
            return False
        contents = load_file(path)
        try:
            check_same_options(self.args, contents["args"], path)
            self.agent.load_state_dict(contents["weights"])
            for name, optimizer in self.agent.optimizers.items():
                optimizer.load_state_dict(contents["optimizers"][name])
            for name, buffer in self.buffers.items():
                buffer.load(self.directory / "replay", contents["buffers"][name])
            self.episode.load_state_dict(contents["episode"])
            self.episode.memory = tree_map_only(Tensor, lambda t: t.to(self.device), self.episode.memory)
            self.step = self.saved = contents["step"]
            if not 0 <= self.step <= self.args.total_timesteps:
                raise ValueError(f"step {self.step}")
            self.evaluated, self.last_log_step = contents["evaluated"], contents["last_log_step"]
            for tag, values in contents["pending"].items():
                self.pending[tag] = [(step, value.to(self.device)) for step, value in values]
            self.seconds = contents["seconds"]
            self.last_return, self.last_eval = contents["shown"]
            set_rng_state(contents["rng"], self.device)
            logs = dict(contents["logs"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OSError) as error:
            reason = " ".join(str(error).split())
            fail(f"{path} is damaged or does not fit this run ({type(error).__name__}: {reason}); nothing was changed")
        self.truncate_logs(logs)
        self.drop_unused_replay_files(contents)
        say(f"resuming {self.directory} at step {self.step:,}")
        return True

    def truncate_logs(self, sizes: dict[str, int]) -> None:
        """Takes back what was logged after the checkpoint: it is about to happen again."""
        for path in self.directory.glob("events.*"):
            if path.name in sizes:
                os.truncate(path, min(sizes[path.name], path.stat().st_size))
            else:
                path.unlink()

    def drop_unused_replay_files(self, contents: dict[str, Any]) -> None:
        needed = {segment["file"] for state in contents["buffers"].values() for segment in state["segments"]}
        for path in (self.directory / "replay").glob("*"):
            if path.name not in needed:
                path.unlink()

    def what_is_kept(self) -> str:
        return f"{self.directory} keeps {f'the checkpoint of step {self.saved:,}' if self.saved >= 0 else 'its logs'}"

    def fail_not_finite(self, error: NotFinite) -> NoReturn:
        try:  # a loss that went before is the better name for the trouble
            self.fetch_losses()
        except NotFinite as earlier:
            error = earlier
        step = self.step if error.step is None else error.step
        fail(f"{error.what} is not finite at step {step:,}; {self.what_is_kept()}")


# --- end shared ---


def train(args: Args) -> Path:
    """Algorithm 1. Returns the run directory."""
    check_args(args)
    keep_freed_memory()
    seed_everything(args)
    device = choose_device(args)
    env = make_env(args.env_id)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    agent = Agent(obs_dim, act_dim, args, device)
    fields = {
        "obs": (obs_dim,),
        "prev_actions": (act_dim,),
        "actions": (act_dim,),
        "rewards": (),
        "next_obs": (obs_dim,),
        "terminated": (),
        "first": (),  # a⁻ does not exist, prev_actions is zero
    }
    capacity = min(args.buffer_size, args.total_timesteps)
    buffer = ReplayBuffer(capacity, fields, choose_buffer_device(args, device, fields))
    episode = Episode(env, args.seed)

    with Run(args, agent, episode, {"replay": buffer}, device) as run:
        for step in run.steps():
            obs, first = episode.obs, episode.memory is None
            prev_action = np.zeros(act_dim, np.float32) if first else episode.actions[-1]
            mode = "random" if step <= args.learning_starts else "sample"
            action, episode.memory = agent.act(obs, episode.memory, mode)
            next_obs, reward, terminated = episode.step(action)
            buffer.add(
                obs=obs,
                prev_actions=prev_action,
                actions=action,
                rewards=reward,
                next_obs=next_obs,
                terminated=terminated,
                first=first,
            )
            if step > args.learning_starts:
                run.record(agent.update(buffer.sample(args.batch_size, device), step))
            if episode.over:
                run.log_episode()
                episode.begin()
    return run.directory


if __name__ == "__main__":
    train(parse_args(Args))
