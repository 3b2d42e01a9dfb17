"""Networks and densities in plain numpy, one state at a time, written from the papers' text."""

import numpy as np


def mlp(net, *inputs):
    """inputs -> ReLU -> ReLU -> outputs, in float64."""
    weights = {name: value.detach().double().numpy() for name, value in net.state_dict().items()}
    x = np.concatenate(inputs)
    for layer in ("fc1", "fc2"):
        x = np.maximum(weights[f"{layer}.weight"] @ x + weights[f"{layer}.bias"], 0)
    return weights["fc3.weight"] @ x + weights["fc3.bias"]


def gaussian(net, *inputs):
    """Mean and standard deviation of the Gaussian under the tanh; its log lies in [-5, 2]."""
    mean, raw = np.split(mlp(net, *inputs), 2)
    return mean, np.exp(-5 + 3.5 * (np.tanh(raw) + 1))


def log_density(action, mean, std):
    """Of tanh(u), u ~ N(mean, std), by the change of variables, naively."""
    u = np.arctanh(action)
    normal = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    return np.log(normal / (1 - action**2))


def value(critics, obs, action):
    """Clipped double-Q."""
    return min(mlp(q, obs, action)[0] for q in critics)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
