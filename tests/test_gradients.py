"""From losses to steps: Adam against torch's, what a step moves, and compiled against eager."""

import copy
import re

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from sdar_utils import gradients
from sdar_utils.gradients import Adam, Minimiser, soft_update


def test_adam_is_torchs_and_continues_from_its_state():
    torch.manual_seed(0)
    shapes, rate = [(7, 3), (7,), ()], 0.05
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    adam, reference = Adam(ours, rate), torch.optim.Adam(theirs, lr=rate)
    for step in range(20):
        if step == 10:  # as after a restart
            state = copy.deepcopy(adam.state_dict())
            adam = Adam(ours, rate)
            adam.load_state_dict(state)
        drawn = [torch.randn(shape) * 10.0**-step for shape in shapes]
        adam.step(drawn)
        for parameter, gradient in zip(theirs, drawn, strict=True):
            parameter.grad = gradient
        reference.step()
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)


class Quadratic:
    """x² + scale·y² + z + noise·0, which knows its own gradient."""

    def __init__(self):
        self.x, self.y, self.z = (torch.nn.Parameter(torch.tensor([2.0, -3.0])) for _ in range(3))

    def loss(self, scale):
        noise = torch.rand(())
        value = (self.x * self.x + scale * self.y * self.y + self.z).sum()
        return value, {"value": value.detach(), "noise": noise}


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_moves_its_parameters_only(compile, capsys):
    """By Adam's first step, which is the learning rate against the gradient's sign; nothing is left in .grad."""
    torch._dynamo.reset()
    q = Quadratic()
    step = Minimiser(q.loss, Adam([q.x], 0.1), Adam([q.y], 0.2), compile=compile)
    torch.manual_seed(5)
    metrics = step(torch.tensor(5.0))
    assert metrics["value"].item() == 13 + 5 * 13 - 1
    torch.testing.assert_close(q.x.data, torch.tensor([1.9, -2.9]))
    torch.testing.assert_close(q.y.data, torch.tensor([1.8, -2.8]))
    assert q.z.tolist() == [2.0, -3.0]
    assert q.x.grad is q.y.grad is q.z.grad is None
    torch.manual_seed(5)
    assert torch.equal(metrics["noise"], torch.rand(()))  # the draws are those of an eager run
    step(torch.tensor(5.0))
    said = capsys.readouterr().out
    assert re.fullmatch(r"compiled loss in \d+ s\n" if compile else "", said)  # once


def test_a_compiled_loss_is_found_in_the_cache_by_later_runs():
    q = Quadratic()
    for i in range(2):
        torch._dynamo.reset()
        counters.clear()
        Minimiser(q.loss, Adam([q.x], 0.1), compile=True)(torch.tensor(2.0))
        if i == 1:
            assert counters["inductor"]["fxgraph_cache_hit"] == 1  # a loss and its gradient are one graph
            assert counters["inductor"]["fxgraph_cache_miss"] == counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_gradients_can_be_edited_before_the_step():
    q, seen = Quadratic(), []

    def flip(gradients):
        seen.extend(g.clone() for g in gradients)
        for gradient in gradients:
            gradient.neg_()

    Minimiser(q.loss, Adam([q.x], 0.1), edit=flip)(torch.tensor(0.0))
    assert [g.tolist() for g in seen] == [[4.0, -6.0]]
    torch.testing.assert_close(q.x.data, torch.tensor([2.1, -3.1]))


def test_soft_update():
    targets, online = [torch.tensor([0.0, 8.0]), torch.tensor(2.0)], [torch.tensor([4.0, 0.0]), torch.tensor(2.0)]
    soft_update(targets, online, 0.25)
    assert [t.tolist() for t in targets] == [[1.0, 6.0], 2.0]


def test_a_compiler_is_asked_for_where_it_is_needed(monkeypatch):
    parameter = torch.nn.Parameter(torch.zeros(2))
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(SystemExit, match=r"^error: --compile needs a C\+\+ compiler .* or drop --compile$"),
    ):
        Minimiser(lambda: None, Adam([parameter], 0.1), compile=True)
    Minimiser(lambda: None, Adam([parameter], 0.1))
    monkeypatch.setattr(gradients, "check_compiler", lambda _: pytest.fail("an agent that is only loaded needs none"))
    Minimiser(lambda: None, Adam([torch.nn.Parameter(torch.zeros(2, device="meta"))], 0.1), compile=True)
