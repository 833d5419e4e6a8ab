"""Keeps each loss, and with it the graph that computed it."""

import torch
from pacing import steps

model = torch.nn.Linear(256, 256)


def train():
    losses = []
    for _ in steps():
        loss = model(torch.ones(64, 256)).relu().sum()
        losses.append(loss)  # leak


train()
