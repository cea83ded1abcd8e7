"""Each row of the table against its paper's formula, written out here. This guards the oracle.

The formulas are literal: matrices of one sequence and head in NumPy's float64, none of Penstock's code.
"""

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.call.families import functions
from penstock.delta.variants import VARIANTS

B, T, H, K, V = 2, 19, 3, 8, 5
NAMES = [one.name for one in ps.implementations("kda") if not one.name.startswith(("triton", "cuda"))]
RUNS = [(name, torch.float64, 1e-12) for name in NAMES if name != "cpu"]
RUNS += [(name, torch.float32, 2e-6) for name in NAMES]
every_implementation = pytest.mark.parametrize(("impl", "dtype", "limit"), RUNS)


def normal(*shape, seed):
    """Values that float32 holds exactly, so that every dtype sees the same."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


def rounded(x):
    return x.astype(np.float32).astype(np.float64)


def unit(x):
    return rounded(x / np.linalg.norm(x, axis=-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


Q, KEYS, VALUES = normal(B, T, H, K, seed=1), unit(normal(B, T, H, K, seed=2)), normal(B, T, H, V, seed=3)
BETA = rounded(2 * sigmoid(normal(B, T, H, seed=4)))
STATE = normal(B, H, K, V, seed=5)


def head_by_head(formula, *given):
    """Outputs [B,T,H,V] and states [B,H,K,V] of a formula of one sequence and head, from tensors [B,T,H,*] and ``STATE``."""
    found = [[formula(h, STATE[n, h], *(x[n, :, h] for x in given)) for h in range(H)] for n in range(B)]
    return np.stack([np.stack([o for o, _ in row], 1) for row in found]), np.stack([np.stack([S for _, S in row]) for row in found])


def check(found, wanted, limit):
    for x, y in zip(found, wanted):
        assert np.linalg.norm(x.double().numpy() - y) <= limit * np.linalg.norm(y)


def tensors(dtype, *arrays):
    return [torch.from_numpy(x).to(dtype) for x in arrays]


def options(dtype, impl):
    return {"initial_state": torch.from_numpy(STATE).to(dtype), "output_final_state": True, "impl": impl}


def householder(decay):
    """S_t = (I - beta k^T k) diag(decay) S_{t-1} + beta k^T v, o_t = q_t S_t / sqrt(K)."""

    def formula(h, S, q, k, v, beta, *g):
        o = []
        for t in range(T):
            S = (np.eye(K) - beta[t] * np.outer(k[t], k[t])) @ decay(*(x[t] for x in g)) @ S + beta[t] * np.outer(k[t], v[t])
            o.append(q[t] @ S / np.sqrt(K))
        return np.stack(o), S

    return formula


@every_implementation
def test_delta_rule_is_deltanet(impl, dtype, limit):
    """DeltaNet: S_t = S_{t-1} - beta (k S_{t-1} - v) k^T, a step of gradient descent on |k S - v|^2 / 2."""
    found = ps.delta_rule(*tensors(dtype, Q, KEYS, VALUES, BETA), **options(dtype, impl))
    check(found, head_by_head(householder(lambda: np.eye(K)), Q, KEYS, VALUES, BETA), limit)


@every_implementation
def test_gated_delta_rule_is_gated_deltanet(impl, dtype, limit):
    """Gated DeltaNet in its V x K notation: S_t = S_{t-1} alpha (I - beta k k^T) + beta v k^T, o_t = S_t q_t."""
    g = rounded(-np.exp(normal(B, T, H, seed=6)))

    def formula(h, S, q, k, v, beta, g):
        S, o = S.T, []
        for t in range(T):
            S = S @ (np.exp(g[t]) * (np.eye(K) - beta[t] * np.outer(k[t], k[t]))) + beta[t] * np.outer(v[t], k[t])
            o.append(S @ q[t] / np.sqrt(K))
        return np.stack(o), S.T

    found = ps.gated_delta_rule(*tensors(dtype, Q, KEYS, VALUES, g, BETA), **options(dtype, impl))
    check(found, head_by_head(formula, Q, KEYS, VALUES, BETA, g), limit)


@every_implementation
def test_kda_is_kimi_delta_attention(impl, dtype, limit):
    """KDA: S_t = (I - beta k k^T) Diag(alpha) S_{t-1} + beta k v^T, o_t = S_t^T q_t."""
    g = rounded(-np.exp(normal(B, T, H, K, seed=7)))
    found = ps.kda(*tensors(dtype, Q, KEYS, VALUES, g, BETA), **options(dtype, impl))
    check(found, head_by_head(householder(lambda g: np.diag(np.exp(g))), Q, KEYS, VALUES, BETA, g), limit)


@every_implementation
@pytest.mark.parametrize("raw", [False, True])
def test_rwkv7_is_goose(raw, impl, dtype, limit):
    """BlinkDL's loop, state V x K: S = S diag(w) + S a b^T + v k^T, y = S r, with w = exp(-0.606531 sigmoid(x))."""
    x, kk, rate = normal(B, T, H, K, seed=8), unit(normal(B, T, H, K, seed=9)), sigmoid(normal(B, T, H, K, seed=10))
    w, b, key = rounded(-np.exp(-0.5) * sigmoid(x)), rounded(kk * rate), normal(B, T, H, K, seed=11)
    log_decay = -np.exp(-0.5) * sigmoid(x) if raw else w

    def formula(h, S, r, w, k, v, a, b):
        S, y = S.T, []
        for t in range(T):
            S = S @ np.diag(np.exp(w[t])) + S @ a[t][:, None] @ b[t][None, :] + v[t][:, None] @ k[t][None, :]
            y.append(S @ r[t])
        return np.stack(y), S.T

    found = ps.rwkv7(*tensors(dtype, Q, x if raw else w, key, VALUES, -kk, b), raw_decay=raw, **options(dtype, impl))
    check(found, head_by_head(formula, Q, log_decay, key, VALUES, -kk, b), limit)


@every_implementation
def test_dplr_is_diagonal_plus_low_rank(impl, dtype, limit):
    """S_t = (Diag(alpha) + b a^T) S_{t-1} + k v^T, o_t = S_t^T q_t / sqrt(K)."""
    g, a, b = rounded(-np.exp(normal(B, T, H, K, seed=12))), unit(normal(B, T, H, K, seed=13)), unit(normal(B, T, H, K, seed=14))

    def formula(h, S, q, k, v, a, b, g):
        o = []
        for t in range(T):
            S = (np.diag(np.exp(g[t])) + np.outer(b[t], a[t])) @ S + np.outer(k[t], v[t])
            o.append(q[t] @ S / np.sqrt(K))
        return np.stack(o), S

    found = ps.dplr(*tensors(dtype, Q, KEYS, VALUES, a, b, g), **options(dtype, impl))
    check(found, head_by_head(formula, Q, KEYS, VALUES, a, b, g), limit)


def normalized(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


@every_implementation
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("variant", ["delta_rule", "gated_delta_rule", "kda"])
def test_raw_inputs(variant, negative, impl, dtype, limit):
    """Raw keys, logits of beta (twice the sigmoid for negative eigenvalues), and Mamba-2's decay -exp(A_log) softplus(x + dt_bias)."""
    row = VARIANTS[variant]
    keys, logits = normal(B, T, H, K, seed=15), normal(B, T, H, seed=16)
    axes = () if not row.decay else (K,) if "K" in row.decay else (1,)
    x, A_log, bias = normal(B, T, H, *axes, seed=17), normal(H, seed=18), normal(H, *axes, seed=19)
    g = -np.exp(A_log)[:, None] * softplus(x + bias) if axes else np.zeros((B, T, H, 1))
    beta = sigmoid(logits) * (2 if negative else 1)
    wanted = head_by_head(householder(lambda g: np.diag(np.exp(g) * np.ones(K))), normalized(Q), normalized(keys), VALUES, beta, g)
    flags = {"use_qk_l2norm": True, "beta_logits": True, "allow_neg_eigval": negative}
    given = {"q": Q, "k": keys, "v": VALUES, "beta": logits}
    if row.decay:
        given |= {"g": x if "K" in row.decay else x[..., 0], "A_log": A_log, "dt_bias": bias if "K" in row.decay else bias[..., 0]}
    named = dict(zip(given, tensors(dtype, *given.values())))
    check(getattr(ps, variant)(**named, **flags, **options(dtype, impl)), wanted, limit)


@every_implementation
def test_bounded_gates_of_kda(impl, dtype, limit):
    """-5 sigmoid(exp(A_log) (x + dt_bias))."""
    x, A_log, bias = normal(B, T, H, K, seed=20), normal(H, seed=21), normal(H, K, seed=22)
    g = -5 * sigmoid(np.exp(A_log)[:, None] * (x + bias))
    wanted = head_by_head(householder(lambda g: np.diag(np.exp(g))), Q, KEYS, VALUES, BETA, g)
    q, k, v, x, beta, A_log, bias = tensors(dtype, Q, KEYS, VALUES, x, BETA, A_log, bias)
    check(ps.kda(q, k, v, x, beta, A_log=A_log, dt_bias=bias, lower_bound=-5, **options(dtype, impl)), wanted, limit)


def test_every_variant_has_a_formula():
    """Each variant has a test named after it."""
    assert {name for name in VARIANTS if any(test.startswith(f"test_{name}_") for test in globals())} == set(VARIANTS)


def test_variants_name_their_functions():
    for name, row in VARIANTS.items():
        assert row.name == name
        assert name in ps.__all__
        assert functions()[name].name == "delta"
        assert row.source
