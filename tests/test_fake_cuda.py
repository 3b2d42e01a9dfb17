"""What a GPU would stumble over, without one: tensors on two devices, waits, graphs that cannot be replayed."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from sdar_utils.gradients import Adam, Minimiser, soft_update
from tests.conftest import SCRIPTS, TINY, load

OBS, ACT, BATCH = 3, 2, 7
GPU = torch.device("cuda:0")
CPU, CUDA, META = 0, 1, 14  # numbers of c10::DeviceType
VARIANTS = {
    **{script: (script, {}) for script in SCRIPTS},
    "sampled": ("sdar_continuous_action", {"selection_objective": "sampled", "action_entropy": "acting"}),
    "normalised": ("taac_continuous_action", {"reward_normaliser": "full", "advantage_clip": True}),
    "as published": ("ute_continuous_action", {"as_published": True}),
}


class FakeMode(FakeTensorMode):
    def __deepcopy__(self, memo):  # an agent copies its networks
        return self


@pytest.fixture
def fake_gpu():
    """Tensors on a GPU that have shapes, devices and types, but no values.

    A torch without CUDA asks for the guard that switches GPUs even so; that of the meta device does nothing, as wanted.
    """
    if torch.version.cuda is None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        assert guards[CPU]
        assert not guards[CUDA] or guards[CUDA] == guards[META]
        guards[CUDA] = guards[META]
    with FakeMode() as mode:
        yield mode


def make_agent(variant: str, device: torch.device):
    script, options = VARIANTS[variant]
    return load(script).Agent(OBS, ACT, load(script).Args(**{**TINY, "batch_size": BATCH, **options}), device)


def make_batch(variant: str, device: torch.device) -> dict[str, torch.Tensor]:
    """A row of everything that any of the scripts stores; TAAC's are sequences."""
    shape = (BATCH, 3) if VARIANTS[variant][0].startswith("taac") else (BATCH,)
    widths = {"obs": OBS, "next_obs": OBS, "actions": ACT, "prev_actions": ACT, "last_actions": ACT}
    scalars = ("rewards", "terminated", "first", "discounts", "lengths", "act_mask")
    batch = {name: torch.ones(*shape, width, device=device) for name, width in widths.items()}
    return batch | {name: torch.ones(shape, device=device) for name in scalars}


def minimisers(agent) -> list[Minimiser]:
    return [part for part in vars(agent).values() if isinstance(part, Minimiser)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_is_on_the_gpu_and_nothing_waits_for_it(variant, fake_gpu):
    """Losses and metrics, the optimizers' steps and the targets'. (The backward pass itself wants a real GPU.)"""
    agent, batch = make_agent(variant, GPU), make_batch(variant, GPU)
    if hasattr(agent, "normalise_rewards"):
        assert agent.normalise_rewards(batch["rewards"]).device == GPU
    for minimise in minimisers(agent):
        loss, metrics = minimise.loss_function(batch)
        assert {value.device for value in (loss, *metrics.values())} == {GPU}
        gradients = [torch.empty_like(p) for p in minimise.parameters]
        if minimise.edit is not None:
            minimise.edit(gradients)
        for optimizer in minimise.optimizers:
            count = len(optimizer.parameters)
            optimizer.step(gradients[:count])
            gradients = gradients[count:]
            assert {state.device for state in (optimizer.steps, *optimizer.means, *optimizer.squares)} == {GPU}
    online = getattr(agent, "critic_parameters", None) or agent.online_parameters
    soft_update(agent.target_parameters, online, 0.5)
    assert {value.device for value in agent.state_dict().values()} == {GPU}


def test_a_stray_tensor_and_a_wait_are_noticed(fake_gpu):
    x = torch.ones(3, device=GPU)
    with pytest.raises(RuntimeError, match="two devices"):
        x + torch.ones(3)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        x.sum().item()
    with pytest.raises(Exception, match="_local_scalar_dense"):
        bool(x.sum() > 0)


def captured(minimise: Minimiser, *inputs) -> tuple:
    """What --compile makes of a loss and its gradient before any code is generated: about the graph, and its inputs."""
    found = []

    def keep(graph, example_inputs):
        found.extend([TracingContext.get().fw_metadata, example_inputs])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(minimise.differentiate, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*inputs)
    return tuple(found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_loss_can_be_a_cuda_graph(variant):
    """Nothing that goes in is changed, and all but the batch's columns stays where it is, so that it is not copied."""
    cpu = torch.device("cpu")
    agent, batch = make_agent(variant, cpu), make_batch(variant, cpu)
    for minimise in minimisers(agent):
        about, inputs = captured(minimise, batch)
        assert about.num_mutated_inp_runtime_indices == 0
        static = set(about.static_input_indices)
        assert len(static) >= len(minimise.parameters)
        assert {x.shape[:1] for i, x in enumerate(inputs) if i not in static} == {(BATCH,)}


def test_what_cannot_be_a_cuda_graph_is_noticed():
    weight, counter = torch.nn.Parameter(torch.ones(3)), torch.zeros(())

    def loss(batch):
        counter.add_(1)
        return (weight * batch["rewards"].mean()).sum() * counter, {}

    about, _ = captured(Minimiser(loss, Adam([weight], 0.1)), {"rewards": torch.ones(BATCH)})
    assert about.num_mutated_inp_runtime_indices == 1
