"""Each row of the table against its paper's formula, written out here. This guards the oracle.

The formulas are literal: sums over the tokens before, in NumPy's float64, none of Penstock's code. Each gives the output
of one sequence and head from q, k [T,K] and v [T,V].
"""

import numpy as np
import pytest
import torch
from cases import NAMES, TRITON

import penstock as ps
from penstock.recurrence.variants import VARIANTS

B, T, H, K, V = 2, 19, 3, 8, 5
RUNS = [(name, torch.float64, 1e-12) for name in NAMES if name != "cpu"]
RUNS += [(name, torch.float32, 2e-6) for name in NAMES]
RUNS += [pytest.param(name, torch.float32, 2e-6, marks=pytest.mark.slow) for name in TRITON]  # the contract tests hold them to the oracle
every_implementation = pytest.mark.parametrize(("impl", "dtype", "limit"), RUNS)


def normal(*shape, seed):
    """Values that float32 holds exactly, so that every dtype sees the same."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


@pytest.fixture
def qkv():
    return normal(B, T, H, K, seed=1), normal(B, T, H, K, seed=2), normal(B, T, H, V, seed=3)


def head_by_head(formula, *tensors):
    """The formula for each sequence and head of [B,T,H,*] tensors."""
    heads = [[formula(h, *(x[b, :, h] for x in tensors)) for h in range(H)] for b in range(B)]
    return np.stack([np.stack(row, axis=1) for row in heads])


def check(found, wanted, limit):
    assert np.linalg.norm(found.double().numpy() - wanted) <= limit * np.linalg.norm(wanted)


def tensors(dtype, *arrays):
    return [torch.from_numpy(x).to(dtype) for x in arrays]


def rounded(x):
    return x.astype(np.float32).astype(np.float64)


FEATURE_MAPS = {
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(x)),
    "relu": lambda x: np.maximum(x, 0),
    "identity": lambda x: x,
}


@every_implementation
@pytest.mark.parametrize("feature_map", [None, *FEATURE_MAPS])
def test_linear_attention_is_a_sum_of_weighted_values(qkv, feature_map, impl, dtype, limit):
    """Katharopoulos et al. 2020, equation 9's numerator: sum over j <= i of (phi(q_i) . phi(k_j)) v_j."""

    def formula(h, q, k, v):
        phi = FEATURE_MAPS[feature_map or "identity"]
        return np.stack([sum((phi(q[i]) @ phi(k[j])) * v[j] for j in range(i + 1)) for i in range(T)])

    found = ps.linear_attention(*tensors(dtype, *qkv), feature_map=feature_map, scale=1, impl=impl)
    check(found.output, head_by_head(formula, *qkv), limit)


@every_implementation
def test_normalised_linear_attention_equals_the_formula(qkv, impl, dtype, limit):
    """Katharopoulos et al. 2020, equations 9 and 12, with phi(x) = elu(x) + 1 of equation 7."""

    def formula(h, q, k, v):
        phi = FEATURE_MAPS["elu+1"]
        weights = [[phi(q[i]) @ phi(k[j]) for j in range(i + 1)] for i in range(T)]
        return np.stack([sum(w * v[j] for j, w in enumerate(row)) / sum(row) for row in weights])

    wanted = head_by_head(formula, *qkv)
    for scale in (None, 3.0):
        found = ps.linear_attention(*tensors(dtype, *qkv), feature_map="elu+1", normalize=True, scale=scale, impl=impl)
        check(found.output, wanted, limit)


def test_linear_attention_takes_any_feature_map(qkv):
    q, k, v = tensors(torch.float64, *qkv)
    squared = ps.linear_attention(q, k, v, feature_map=torch.square).output
    check(squared, ps.linear_attention(q**2, k**2, v).output.numpy(), 1e-12)


@every_implementation
def test_normalised_state_carries_the_normaliser(qkv, impl, dtype, limit):
    """Two halves with the state between them; the state's last column is the sum of phi(k)."""
    q, k, v = tensors(dtype, *qkv)
    options = {"feature_map": "elu+1", "normalize": True, "output_final_state": True, "impl": impl}
    whole = ps.linear_attention(q, k, v, **options)
    first = ps.linear_attention(q[:, :7], k[:, :7], v[:, :7], **options)
    second = ps.linear_attention(q[:, 7:], k[:, 7:], v[:, 7:], initial_state=first.final_state, **options)
    check(torch.cat([first.output, second.output], 1), whole.output.double().numpy(), limit)
    check(whole.final_state[..., -1], FEATURE_MAPS["elu+1"](qkv[1]).sum(1), limit)


@every_implementation
def test_retention_is_the_decay_matrix(qkv, impl, dtype, limit):
    """RetNet, equation 5: (Q K^T o D) V, D_nm = gamma^(n-m) for n >= m, gamma = 1 - 2^(-5-h), and QK^T over sqrt(K)."""

    def formula(h, q, k, v):
        gamma = 1 - 2.0 ** (-5 - h)
        D = np.array([[gamma ** (n - m) if n >= m else 0 for m in range(T)] for n in range(T)])
        return (q @ k.T / np.sqrt(K) * D) @ v

    check(ps.retention(*tensors(dtype, *qkv), impl=impl).output, head_by_head(formula, *qkv), limit)


@every_implementation
def test_lightning_attention_is_retention_with_other_decays(qkv, impl, dtype, limit):
    """o_t = q_t sum over s <= t of lambda^(t-s) k_s^T v_s."""
    g = rounded(-np.array([0.5, 0.01, 3.0]))

    def formula(h, q, k, v):
        return np.stack([q[t] @ sum(np.exp(g[h]) ** (t - s) * np.outer(k[s], v[s]) for s in range(t + 1)) for t in range(T)])

    found = ps.retention(*tensors(dtype, *qkv), g=torch.from_numpy(g), scale=1, impl=impl)
    check(found.output, head_by_head(formula, *qkv), limit)


@every_implementation
def test_simple_gla_is_mamba_2(qkv, impl, dtype, limit):
    """Mamba-2: Y = (L o C B^T) (X dt) with L_ij = a_i ... a_{j+1}, a = exp(dt A); and the state space model itself."""
    q, k, x = qkv
    dt = np.log1p(np.exp(normal(B, T, H, seed=4)))
    A = -np.exp(normal(H, seed=5))
    g, v = rounded(dt * A), rounded(x * dt[..., None])

    def matrix(h, C, B_, xdt, g):
        L = np.array([[np.prod(np.exp(g[j + 1 : i + 1])) if j <= i else 0 for j in range(T)] for i in range(T)])
        return (L * (C @ B_.T)) @ xdt

    def state_space(h, C, B_, xdt, g):
        state, y = np.zeros((V, K)), []
        for t in range(T):
            state = np.exp(g[t]) * state + np.outer(xdt[t], B_[t])
            y.append(state @ C[t])
        return np.stack(y)

    found = ps.simple_gla(*tensors(dtype, q, k, v, g), scale=1, impl=impl)
    check(found.output, head_by_head(matrix, q, k, v, g), limit)
    check(found.output, head_by_head(state_space, q, k, v, g), limit)


@every_implementation
def test_gla_is_the_gated_recurrence(qkv, impl, dtype, limit):
    """GLA, equation 3: S_t = (alpha_t^T 1) o S_{t-1} + k_t^T v_t, o_t = q_t S_t / sqrt(K), alpha_t = sigmoid(x)^(1/16)."""
    g = rounded(np.log(1 / (1 + np.exp(-normal(B, T, H, K, seed=6)))) / 16)

    def formula(h, q, k, v, g):
        S, o = np.zeros((K, V)), []
        for t in range(T):
            S = np.outer(np.exp(g[t]), np.ones(V)) * S + np.outer(k[t], v[t])
            o.append(q[t] @ S / np.sqrt(K))
        return np.stack(o)

    check(ps.gla(*tensors(dtype, *qkv, g), impl=impl).output, head_by_head(formula, *qkv, g), limit)


@every_implementation
def test_gla_computes_hgrn2(qkv, impl, dtype, limit):
    """HGRN2: S_t = diag(f_t) S_{t-1} + (1 - f_t)^T v_t, o_t = q_t S_t."""
    q, _, v = qkv
    f = 1 / (1 + np.exp(-normal(B, T, H, K, seed=7)))
    g = rounded(np.log(f))
    k = rounded(1 - np.exp(g))

    def formula(h, q, v, k, g):
        S, o = np.zeros((K, V)), []
        for t in range(T):
            S = np.diag(np.exp(g[t])) @ S + np.outer(k[t], v[t])
            o.append(q[t] @ S)
        return np.stack(o)

    check(ps.gla(*tensors(dtype, q, k, v, g), scale=1, impl=impl).output, head_by_head(formula, q, v, k, g), limit)


@every_implementation
def test_rwkv5_is_eagle(qkv, impl, dtype, limit):
    """Eagle: wkv_t = diag(u) k_t^T v_t + sum over i < t of diag(w)^(t-1-i) k_i^T v_i, w = exp(-exp(omega)), o_t = r_t wkv_t."""
    w, u = rounded(-np.exp(normal(H, K, seed=8))), normal(H, K, seed=9)

    def formula(h, r, k, v):
        decay = np.exp(w[h])

        def wkv(t):
            past = sum((np.diag(decay ** (t - 1 - i)) @ np.outer(k[i], v[i]) for i in range(t)), np.zeros((K, V)))
            return np.diag(u[h]) @ np.outer(k[t], v[t]) + past

        return np.stack([r[t] @ wkv(t) for t in range(T)])

    check(ps.rwkv5(*tensors(dtype, *qkv, w, u), impl=impl).output, head_by_head(formula, *qkv), limit)


@every_implementation
def test_rwkv6_is_finch(qkv, impl, dtype, limit):
    """Finch: wkv_t = diag(u) k_t^T v_t + sum over i < t of diag(prod of w_j over i < j < t) k_i^T v_i, o_t = r_t wkv_t."""
    w, u = rounded(-np.exp(normal(B, T, H, K, seed=10))), normal(H, K, seed=11)

    def formula(h, r, k, v, w):
        def wkv(t):
            between = [np.diag(np.prod(np.exp(w[i + 1 : t]), axis=0)) for i in range(t)]
            past = sum((between[i] @ np.outer(k[i], v[i]) for i in range(t)), np.zeros((K, V)))
            return np.diag(u[h]) @ np.outer(k[t], v[t]) + past

        return np.stack([r[t] @ wkv(t) for t in range(T)])

    check(ps.rwkv6(*tensors(dtype, *qkv, w, u), impl=impl).output, head_by_head(formula, *qkv, w), limit)


@every_implementation
@pytest.mark.parametrize("tokens", [1, 7])
def test_rwkv6_equals_the_hugging_face_loop(qkv, tokens, impl, dtype, limit):
    """That loop takes flat [B,T,H*K] tensors, the raw time_decay, and a state [B,H,K,V] in and out; calls follow one another."""
    receptance, key, value = qkv[0], qkv[1], np.concatenate([qkv[2], qkv[2][..., : K - V]], -1)
    time_decay, time_first = normal(B, T, H, K, seed=12), normal(H, K, seed=13)
    first = normal(B, H, K, K, seed=14)
    w = rounded(-np.exp(time_decay))
    state, wanted = first.copy(), np.zeros((B, T, H, K))
    for t in range(T):
        attention = key[:, t, :, :, None] * value[:, t, :, None, :]
        read = time_first[None, :, :, None] * attention + state
        wanted[:, t] = (receptance[:, t, :, None, :] @ read)[:, :, 0]
        state = attention + np.exp(w[:, t, :, :, None]) * state
    carried, outputs = torch.from_numpy(first).to(dtype), []
    for begin in range(0, T, tokens):
        inputs = tensors(dtype, *(x[:, begin : begin + tokens] for x in (receptance, key, value, w)), time_first)
        output, carried = ps.rwkv6(*inputs, initial_state=carried, output_final_state=True, impl=impl)
        outputs.append(output)
    check(torch.cat(outputs, 1), wanted, limit)
    check(carried, state, limit)


def test_every_variant_has_a_formula():
    """Each variant has a test named after it."""
    tested = {name for name in VARIANTS if any(test.startswith(f"test_{name}_") for test in globals())}
    assert tested == set(VARIANTS)


def test_variants_name_their_functions():
    for name, row in VARIANTS.items():
        assert row.name == name
        assert name in ps.__all__
        assert row.source
        assert row.bonus == (row.read == "previous")
