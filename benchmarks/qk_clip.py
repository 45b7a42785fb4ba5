"""Attention logits of a small model in training, without and with QK-Clip.

It prints JSON; --figure also draws a picture.

    python benchmarks/qk_clip.py --figure docs/results/pictures/qk_clip.png
"""

import argparse
import json

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omn_dist import DualOptimizer
from omn_dist.optim.qk_clip import QKClip

WIDTH, NUM_HEADS, VOCABULARY, LENGTH = 64, 4, 32, 48


class Attention(nn.Module):
    """Residual causal attention without normalisation of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, each (sequences, heads, positions, head width)."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return [project(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for project in projections]

    def forward(self, x: Tensor, clip: QKClip, name: str) -> Tensor:
        """The residual stream after this layer."""
        mixed = clip.attention(name, *self.heads(x), is_causal=True)
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers of attention over token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, clip: QKClip) -> Tensor:
        """Logits of the next token."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for index, layer in enumerate(self.layers):
            x = layer(F.rms_norm(x, (WIDTH,)), clip, f"layers.{index}")
        return self.head(F.rms_norm(x, (WIDTH,)))


def batch(generator: torch.Generator) -> Tensor:
    """Sequences whose second half repeats the first, so attention can predict it."""
    first = torch.randint(VOCABULARY, (16, LENGTH // 2), generator=generator)
    return torch.cat((first, first), dim=1)


def train(threshold: float, num_steps: int, lr: float) -> dict[str, list[float]]:
    """The loss and the largest logit of any head at each step; a huge threshold never clips."""
    torch.manual_seed(0)
    model, clip = Model(), QKClip(threshold=threshold)
    for index, layer in enumerate(model.layers):
        clip.add_grouped(f"layers.{index}", layer.q_proj.weight, layer.k_proj.weight, num_heads=NUM_HEADS)
    matrices = [weight for name, weight in model.layers.named_parameters()]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizer = DualOptimizer(
        [{"params": matrices, "algorithm": "muon"}, {"params": others, "algorithm": "adamw"}],
        preset="muonclip",
        lr=lr,
        weight_decay=0.0,
        adamw_lr=3e-3,
    )
    generator = torch.Generator().manual_seed(1)
    losses, largest = [], []
    for _ in range(num_steps):
        tokens = batch(generator)
        loss = F.cross_entropy(model(tokens[:, :-1], clip).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clip.step()
        losses.append(loss.item())
        largest.append(max(float(value.max()) for value in clip.largest.values()))
    return {"loss": losses, "largest_logit": largest}


def main() -> None:
    """Run both, print JSON, and draw the figure if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threshold", type=float, default=30.0, help="tau (30)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (300)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the matrices (0.05)")
    parser.add_argument("--figure", metavar="PATH", help="draw both runs")
    arguments = parser.parse_args()
    runs = {
        "without QK-Clip": train(1e30, arguments.steps, arguments.lr),
        f"with QK-Clip, tau = {arguments.threshold:g}": train(arguments.threshold, arguments.steps, arguments.lr),
    }
    summary = {
        name: {"final_loss": run["loss"][-1], "largest_logit": max(run["largest_logit"]), "last_logit": run["largest_logit"][-1]}
        for name, run in runs.items()
    }
    print(json.dumps({"torch": torch.__version__, "steps": arguments.steps, "lr": arguments.lr, "runs": summary}, indent=1))
    if arguments.figure:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
        for name, run in runs.items():
            axes[0].semilogy(run["largest_logit"], label=name)
            axes[1].plot(run["loss"], label=name)
        axes[0].axhline(arguments.threshold, color="gray", linestyle=":")
        axes[0].set(xlabel="step", ylabel="largest attention logit, before the clip")
        axes[1].set(xlabel="step", ylabel="training loss")
        axes[0].legend()
        figure.tight_layout()
        figure.savefig(arguments.figure, dpi=120)


if __name__ == "__main__":
    main()
