"""Keeps the activations that a forward hook saves."""

import torch
from pacing import steps

model = torch.nn.Linear(256, 256)


def install():
    saved = []

    def hook(module, arguments, output):
        saved.append(output.detach())  # leak

    model.register_forward_hook(hook)


install()
for _ in steps():
    with torch.no_grad():
        model(torch.ones(64, 256))
