"""A small GPT over bytes, and the text it learns: the sources of Python's standard library."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model; the defaults make 10.7 M parameters."""

    vocabulary: int = 256  # a token is a byte
    context: int = 64
    layers: int = 6
    heads: int = 6
    width: int = 384


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then an MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width per head)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(-2))
        mlp: torch.Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + mlp


class GPT(nn.Module):
    """Decoder-only transformer whose output layer is its token embedding.

    Its first weights are drawn from torch's default generator.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The two layers of a block that add to the residual start smaller (GPT-2).
                residual = name.endswith(("mix.weight", "down.weight"))
                scale = (2 * shape.layers) ** -0.5 if residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each token of (batch, time + 1) given those before."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Corpus:
    """The bytes of the standard library's top-level modules, in the order of their names.

    Which bytes a sequence holds depends on (seed, step, index in the global batch) and on nothing
    else: not on the number of ranks, nor on what the process did before. So a run needs no data
    loader state in its checkpoints.
    """

    def __init__(self, seed: int, context: int) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray(b"".join(path.read_bytes() for path in paths))
        self._tokens = torch.frombuffer(text, dtype=torch.uint8)
        self._seed = seed
        self._length = context + 1

    def sequences(self, step: int, indices: range) -> torch.Tensor:
        """Return the sequences at the given indices of a step's global batch."""
        return torch.stack([self._sequence(step, index) for index in indices]).long()

    def _sequence(self, step: int, index: int) -> torch.Tensor:
        draw = random.Random(f"{self._seed}/{step}/{index}")
        start = draw.randrange(len(self._tokens) - self._length)
        return self._tokens[start : start + self._length]
