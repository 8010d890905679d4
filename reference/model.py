"""The serial model: a GPT with every part that a strategy has to split, and the oracle of every test.

Tied embeddings, grouped-query attention, learned or rotary positions, optional mixture-of-experts layers (a
dense loop over the experts). One process, no communication: a parallel strategy is right when it computes
what this file does.

Shapes in this package: B sequences, S tokens a sequence, T = B S tokens, W width, H query heads, K key and
value heads, D = W / H head size, V vocabulary, E experts, k experts a token.

References: GPT-2 (Radford et al. 2019), grouped-query attention (Ainslie et al. 2023), rotary positions (Su
et al. 2021), top-k gates and the auxiliary loss (Shazeer et al. 2017; Fedus et al. 2021, section 2.2), router
z-loss (Zoph et al. 2022, equation 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries `[B, H, S, D]`, keys and values `[B, K, S, D]` -> `[B, H, S, D]`; a strategy may put its own."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model.

    Attributes:
        vocab_size: V.
        max_positions: The longest sequence that learned positions know.
        num_layers: Blocks.
        num_heads: H.
        num_kv_heads: K, a divisor of H; 0 means H (plain multi-head attention).
        width: W, a multiple of H.
        ffn_width: Hidden width of a feed-forward layer or of one expert; 0 means 4 W.
        padded_vocab_size: Rows of the embedding, at least V; 0 means V. Padding rows are never predicted.
        positions: `learned` or `rotary`.
        rotary_base: The base of rotary frequencies.
        dropout: Probability, after the embedding, attention and feed-forward.
        num_experts: E; 0 means no mixture of experts.
        expert_every: Every that many-th block has experts (2: blocks 1, 3, 5, ...).
        top_k: Experts a token.
        capacity_factor: An expert takes at most ceil(factor T k / E) tokens; 0 means no limit.
        auxiliary_weight: Weight of the load-balancing loss.
        z_weight: Weight of the router z-loss.

    Raises:
        ValueError: Sizes that do not divide, or are out of range.
    """

    vocab_size: int = 50257
    max_positions: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 0
    width: int = 768
    ffn_width: int = 0
    padded_vocab_size: int = 0
    positions: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10_000.0
    dropout: float = 0.0
    num_experts: int = 0
    expert_every: int = 1
    top_k: int = 2
    capacity_factor: float = 0.0
    auxiliary_weight: float = 0.01
    z_weight: float = 0.001

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} does not divide by {self.num_heads} heads")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide by {self.kv_heads} key and value heads")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.head_size}")
        if self.embedding_rows < self.vocab_size:
            raise ValueError(f"padded vocabulary {self.padded_vocab_size} is less than {self.vocab_size}")
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top-k {self.top_k} needs to lie between 1 and the {self.num_experts} experts")

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """D."""
        return self.width // self.num_heads

    @property
    def hidden(self) -> int:
        """Hidden width of a feed-forward layer."""
        return self.ffn_width or 4 * self.width

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return self.padded_vocab_size or self.vocab_size

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` (from 0) is a mixture of experts."""
        return self.num_experts > 0 and (layer + 1) % self.expert_every == 0


class Dropout(nn.Module):
    """Dropout that draws from its own generator where it has one: ranks in step, or out of step."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements with the probability and scale up the rest; identity in evaluation. Any shape."""
        if not self.training or self.probability == 0.0:
            return x
        keep = 1.0 - self.probability
        return x * torch.empty_like(x).bernoulli_(keep, generator=self.generator) / keep


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn each pair (i, i + D/2) of a head by position x base^(-2i/D) (Su et al. 2021, section 3.2).

    Args:
        x: `[B, heads, S, D]`.
        positions: `[S]` or `[B, S]`, global positions: a context-parallel rank passes those it holds.
        base: The base of the frequencies.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = positions.to(torch.float64)[..., None] * base**-exponents
    angles = angles if positions.dim() == 1 else angles[:, None]
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v; H / K neighbouring query heads share one of k and v."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Causal self-attention with one fused projection whose rows are [queries; keys; values], heads in order.

    A strategy may replace `core`, the linear layers, and the numbers of heads (those that this rank holds).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = (
            config.num_heads,
            config.kv_heads,
            config.head_size,
        )
        self.rotary_base = config.rotary_base if config.positions == "rotary" else None
        self.qkv = nn.Linear(config.width, (self.num_heads + 2 * self.num_kv_heads) * self.head_size)
        self.proj = nn.Linear(config.width, config.width)
        self.core: AttentionCore = causal_attention

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`[B, S, W]` -> `[B, S, W]`."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        if self.rotary_base is not None:
            q, k = rotate(q, positions, self.rotary_base), rotate(k, positions, self.rotary_base)
        mixed: Tensor = self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """Two linear layers with GELU (tanh form) between; also one expert."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, config.hidden)
        self.proj = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., W]` -> `[..., W]`."""
        out: Tensor = self.proj(F.gelu(self.fc(x), approximate="tanh"))
        return out


class Routing(NamedTuple):
    """Where tokens go. `weights` and `experts` are `[T, k]`; `probabilities` and `logits` are `[T, E]`."""

    weights: Tensor
    experts: Tensor
    probabilities: Tensor
    logits: Tensor


class Gate(nn.Module):
    """Choose the k experts of each token, in float32 at least."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.linear = nn.Linear(config.width, config.num_experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        """`[T, W]` -> routing. Weights of k > 1 experts are scaled to sum 1; one keeps its probability."""
        logits = self.linear(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.top_k, -1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(weights, experts, probabilities, logits)


def capacity(tokens: int, config: GPTConfig) -> int:
    """Return how many of `tokens` (the whole microbatch, on all ranks) one expert takes."""
    if config.capacity_factor == 0:
        return tokens
    return math.ceil(config.capacity_factor * tokens * config.top_k / config.num_experts)


class MoE(nn.Module):
    """Experts as a dense loop: each takes its tokens in order of their index, up to its capacity."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, W]` -> (`[B, S, W]`, weighted auxiliary loss of this microbatch, scalar)."""
        tokens = x.flatten(0, -2)
        routing = self.gate(tokens)
        limit = capacity(tokens.shape[0], self.config)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, choices = (routing.experts == number).nonzero(as_tuple=True)
            rows, choices = rows[:limit], choices[:limit]
            weights = routing.weights[rows, choices].to(x.dtype)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[:, None])
        return out.view_as(x), auxiliary_loss(routing, self.config)


def auxiliary_loss(routing: Routing, config: GPTConfig) -> Tensor:
    """Return weight x E sum_e f_e P_e + z-weight x mean(logsumexp(logits)^2), over one microbatch.

    f_e is the share of choices that fell on expert e (before any is dropped; no gradient), P_e its mean
    probability.
    """
    counts = torch.bincount(routing.experts.flatten(), minlength=config.num_experts)
    shares = counts.to(routing.logits.dtype) / routing.experts.numel()
    balance = config.num_experts * (shares * routing.probabilities.mean(0)).sum()
    z = routing.logits.logsumexp(-1).square().mean()
    return config.auxiliary_weight * balance + config.z_weight * z


class Block(nn.Module):
    """One layer: attention, then feed-forward or experts, each after a norm and around a residual."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp: nn.Module = MoE(config) if config.has_experts(layer) else MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, W]` -> (`[B, S, W]`, auxiliary loss; 0 without experts)."""
        x = x + self.dropout(self.attention(self.ln_1(x), positions))
        out = self.mlp(self.ln_2(x))
        out, auxiliary = out if isinstance(out, tuple) else (out, x.new_zeros(()))
        return x + self.dropout(out), auxiliary


class GPT(nn.Module):
    """The whole model. `embed`, `blocks` and `head` are what pipeline stages take their parts of.

    Args:
        config: Sizes.
        seed: Of the initial weights, which do not depend on the world or on torch's global generator.
        dtype: Of the parameters.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.embedding_rows, config.width)
        self.wpe = nn.Embedding(config.max_positions, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.dropout = Dropout(config.dropout)
        self._initialise(torch.Generator().manual_seed(seed))
        self.to(dtype)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """GPT-2's: normal, deviation 0.02, residual projections smaller by sqrt(2 layers), biases 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("proj.weight")
                deviation = 0.02 / math.sqrt(2 * self.config.num_layers) if residual else 0.02
                parameter.normal_(0.0, deviation, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`[B, S]` int64 -> `[B, S, W]`."""
        x: Tensor = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        out: Tensor = self.dropout(x)
        return out

    def head(self, x: Tensor) -> Tensor:
        """`[B, S, W]` -> logits `[B, S, V]`, with the embedding's own weight."""
        weight = self.wte.weight
        if weight.shape[0] > self.config.vocab_size:
            weight = weight[: self.config.vocab_size]
        return F.linear(self.ln_f(x), weight)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Predict the next token.

        Args:
            tokens: `[B, S]`, int64.
            positions: Global positions, `[S]` or `[B, S]`; 0 to S - 1 where left out.

        Returns:
            Logits `[B, S, V]`, and the weighted auxiliary loss summed over the layers (scalar).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens, positions)
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, layer_auxiliary = block(x, positions)
            auxiliary = auxiliary + layer_auxiliary
        return self.head(x), auxiliary
