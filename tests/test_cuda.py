"""On a real GPU, by `make test-gpu`: the same numbers as on the CPU, no needless wait, graphs that are replayed."""

import warnings

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from sdar_utils.checkpoint import agent_file, load_agent
from sdar_utils.evaluation import EpisodesNoise
from sdar_utils.noise import Noise
from sdar_utils.replay import ReplayBuffer
from tests.conftest import TINY, evaluations, load, weights
from tests.test_fake_cuda import ACT, OBS, VARIANTS, minimisers
from tests.test_resume import PowerCut, cut_at

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BATCH = 32


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def make_agent(variant: str, device: torch.device, **more):
    script, options = VARIANTS[variant]
    torch.manual_seed(0)
    args = load(script).Args(**{**TINY, "batch_size": BATCH, **options, **more})
    agent = load(script).Agent(OBS, ACT, args, CPU if device == CPU else device)
    if device != CPU:
        agent.load_state_dict(make_agent(variant, CPU, **{**more, "compile": False}).state_dict())
    return agent


def make_batches(variant: str, device: torch.device, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The arguments of the script's update, but for the step."""
    script = VARIANTS[variant][0]
    g = torch.Generator().manual_seed(seed)
    sizes = {"temporl_continuous_action": [1, 1], "ute_continuous_action": [1, 2, 3]}.get(script, [1])
    batches = []
    for size in sizes:
        shape = (size * BATCH, 3) if script.startswith("taac") else (size * BATCH,)
        widths = {"obs": OBS, "next_obs": OBS, "actions": ACT, "prev_actions": ACT, "last_actions": ACT}
        batch = {name: torch.rand(*shape, width, generator=g) * 2 - 1 for name, width in widths.items()}
        batch |= {name: torch.randn(shape, generator=g) for name in ("rewards", "discounts")}
        batch |= {name: (torch.rand(shape, generator=g) < 0.3).float() for name in ("terminated", "first", "act_mask")}
        batch["lengths"] = torch.randint(1, 21, shape, generator=g).float()
        batches.append({name: column.to(device) for name, column in batch.items()})
    return batches


def update(agent, variant: str, step: int):
    batches = make_batches(variant, agent.device, seed=step)
    return agent.update(*batches) if len(batches) > 1 else agent.update(*batches, step)


@pytest.fixture
def no_chance(monkeypatch):
    """Draws are their medians, which are the same on every device and in every graph."""
    monkeypatch.setattr(torch, "randn_like", lambda x: x.detach() * 0)
    monkeypatch.setattr(torch, "rand_like", lambda x: x.detach() * 0 + 0.5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_cpu(variant, no_chance):
    """Of every loss, in float64, where the order of sums does not matter much."""
    gradients = []
    for device in (CPU, GPU):
        agent, (batch, *_) = make_agent(variant, device).double(), make_batches(variant, device)
        batch = {name: column.double() for name, column in batch.items()}
        found = [torch.autograd.grad(m.loss_function(batch)[0], m.parameters) for m in minimisers(agent)]
        gradients.append([g.cpu() for part in found for g in part])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_updates_are_those_of_eager_code(variant, no_chance):
    agents = [make_agent(variant, GPU, compile=compiled) for compiled in (False, True)]
    for step in (1, 2, 3, 4):
        eager, compiled = (update(agent, variant, step) for agent in agents)
        assert eager.keys() == compiled.keys()
        for name in eager:
            torch.testing.assert_close(eager[name], compiled[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_waits_for_nothing(variant, compiled):
    """Nor do adding rows and sampling them; deciding waits once, for the action."""
    agent = make_agent(variant, GPU, compile=compiled)
    buffer = ReplayBuffer(100, {"obs": (OBS,), "rewards": ()}, GPU)
    batches = [make_batches(variant, GPU, seed) for seed in range(4)]
    for step, batch in enumerate(batches):  # the first ones compile, record and make room
        agent.update(*batch) if len(batch) > 1 else agent.update(*batch, step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batch in enumerate(batches):
            for _ in range(5):
                buffer.add(obs=np.ones(OBS), rewards=step)
            buffer.sample(BATCH)
            agent.update(*batch) if len(batch) > 1 else agent.update(*batch, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decision_waits_once_for_each_thing_it_returns(variant):
    agent, noise = make_agent(variant, GPU), Noise(GPU)
    obs, previous = np.ones(OBS, np.float32), np.zeros(ACT, np.float32)
    agent.act(obs, previous, noise)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            agent.act(obs, previous, noise)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    returned = 2 if VARIANTS[variant][0].startswith(("temporl", "ute")) else 1  # for how many steps, too
    assert len([w for w in seen if "synchroniz" in str(w.message)]) == returned


@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_graphs_are_recorded_once(variant):
    agent, marks = make_agent(variant, GPU, compile=True), []
    for step in range(1, 201):
        update(agent, variant, step)
        if step in (50, 200):
            torch.cuda.synchronize()
            recorded = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
            marks.append((torch.cuda.memory_allocated(), recorded))
    assert counters["inductor"]["cudagraph_skips"] == 0
    (before, recorded), (after, recorded_in_the_end) = marks
    assert recorded == recorded_in_the_end > 0
    assert after <= before + 2**20


@pytest.mark.parametrize("buffer_device", ["cpu", "cuda"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_ends_with_an_agent_that_plays_on_both_devices(variant, compiled, buffer_device, tmp_path):
    script, options = VARIANTS[variant]
    options = {**TINY, **options, "cuda": True, "compile": compiled, "buffer_device": buffer_device}
    args = load(script).Args(**options, env_id="Pendulum-v1", total_timesteps=300, eval_every=0, runs_dir=str(tmp_path))
    directory = load(script).train(args)
    assert np.isfinite(evaluations(directory)[-1]["return"])
    obs, previous = np.random.default_rng(0).normal(size=(2, 20, 3)).astype(np.float32)
    actions = []
    for device in (CPU, GPU):
        agent = load_agent(agent_file(directory), device)[0]
        actions.append(agent.act(obs, np.tanh(previous[:, :1]), EpisodesNoise([None] * 20, device))[0])
    close = np.isclose(actions[0], actions[1], rtol=1e-2, atol=1e-3)
    assert close.mean() > 0.9  # a bit that is as good as undecided may fall on either side


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_that_was_killed_resumes(compiled, tmp_path, monkeypatch):
    sac = load("sac_continuous_action")
    options = {**TINY, "cuda": True, "compile": compiled, "checkpoint_every": 100, "eval_every": 0}
    options |= {"env_id": "tests.tasks:Rounds-v0", "total_timesteps": 400, "runs_dir": str(tmp_path)}
    whole = sac.train(sac.Args(**options, run_name="whole"))
    with monkeypatch.context() as patch:
        cut_at(patch, 250, "update")
        with pytest.raises(PowerCut):
            sac.train(sac.Args(**options, run_name="killed"))
    torch._dynamo.reset()
    killed = sac.train(sac.Args(**options, run_name="killed", resume=True))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(killed)[name], value, rtol=1e-3, atol=1e-4)
