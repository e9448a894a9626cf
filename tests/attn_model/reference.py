"""The network's parts as loops: no tricks, plainly right, float64 in and out."""

import math

import torch
from torch import Tensor


def rms_norm_naive(vector: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return vector / torch.sqrt((vector * vector).mean() + epsilon) * weight


def project_naive(module, cell: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], list]:
    """Queries, keys, values and gates of one cell, a list over heads each."""
    width, d_head = module.d_model, module.d_head
    row = module.in_projection.weight @ cell + module.in_projection.bias
    query, key, value, logit = row[:width], row[width : 2 * width], row[2 * width : 3 * width], None
    logit = row[3 * width :]
    heads: tuple[list, list, list, list] = ([], [], [], [])
    for h in range(module.n_heads):
        part = slice(h * d_head, (h + 1) * d_head)
        q, k = query[part], key[part]
        if module.query_norm is not None:
            q = rms_norm_naive(q, module.query_norm.weight, module.query_norm.eps)
            k = rms_norm_naive(k, module.key_norm.weight, module.key_norm.eps)
        if module.gate == "none":
            gate = torch.ones(())
        elif module.gate == "headwise":
            gate = 1 / (1 + torch.exp(-logit[h]))
        else:
            gate = 1 / (1 + torch.exp(-logit[part]))
        for entries, entry in zip(heads, (q, k, value[part], gate), strict=True):
            entries.append(entry)
    return heads


def attention_naive(module, cells: Tensor, mask: Tensor, weigh) -> Tensor:
    """Attention by loops over sets, heads, queries and keys; `weigh` is the kernel of q and k."""
    out = torch.zeros_like(cells)
    for b in range(cells.shape[0]):
        real = [n for n in range(cells.shape[1]) if mask[b, n]]
        projected = {n: project_naive(module, cells[b, n]) for n in real}
        for i in real:
            mixed = []
            for h in range(module.n_heads):
                q = projected[i][0][h]
                weight = [weigh(q, projected[j][1][h]) for j in real]
                total = sum(weight)
                value = sum(
                    w / total * projected[j][2][h] for w, j in zip(weight, real, strict=True)
                )
                mixed.append(projected[i][3][h] * value)
            head_output = torch.cat(mixed)
            out[b, i] = module.out_projection.weight @ head_output + module.out_projection.bias
    return out


def softmax_kernel(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp((q * k).sum() / math.sqrt(len(q)))


def linear_kernel(q: Tensor, k: Tensor) -> Tensor:
    def phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, torch.exp(x))

    return (phi(q) * phi(k)).sum()


def gelu_naive(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def moe_naive(module, cells: Tensor, mask: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts cell by cell, without noise; returns the output and the balance loss."""
    num_experts = module.num_experts
    out = torch.zeros_like(cells)
    counts, probability, num_real = [0] * num_experts, [torch.zeros(())] * num_experts, 0
    for b in range(cells.shape[0]):
        for n in range(cells.shape[1]):
            if not mask[b, n]:
                continue
            num_real += 1
            x = cells[b, n]
            logit = [(module.router.weight[e] * x).sum() for e in range(num_experts)]
            if shift is not None:
                logit = [value + shift[b, e] for e, value in enumerate(logit)]
            total = sum(torch.exp(value) for value in logit)
            for e in range(num_experts):
                probability[e] = probability[e] + torch.exp(logit[e]) / total
            score = [(logit[e] + module.balance_bias[e]).item() for e in range(num_experts)]
            chosen = sorted(range(num_experts), key=lambda e: -score[e])[: module.top_k]
            chosen_total = sum(torch.exp(logit[e]) for e in chosen)
            for e in chosen:
                counts[e] += 1
                hidden = gelu_naive(x @ module.up_weight[e] + module.up_bias[e])
                result = hidden @ module.down_weight[e] + module.down_bias[e]
                out[b, n] = out[b, n] + torch.exp(logit[e]) / chosen_total * result
    share = [count / (module.top_k * max(num_real, 1)) for count in counts]
    pairs = zip(share, probability, strict=True)
    return out, num_experts * sum(f * p / max(num_real, 1) for f, p in pairs)
