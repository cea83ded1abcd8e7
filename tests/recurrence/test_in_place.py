"""Updates in place as torch's users know them: versions, inference tensors, shapes."""

import pytest
import torch
from cases import NAMES, TRITON

import penstock as ps

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
IMPLEMENTATIONS = [*NAMES, "triton_recurrent"] if TRITON else NAMES


def drawn(N=1, T=2, H=2, K=4):
    q, k, v, x = (torch.randn(N, T, H, K) for _ in range(4))
    return q, k, v, torch.nn.functional.logsigmoid(x)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_update_is_counted_as_a_write(impl):
    """So a backward pass that needs the old state raises, as after torch's own updates in place."""
    q, k, v, g = drawn()
    pool = torch.randn(1, 2, 4, 4)
    output = ps.gla(q.requires_grad_(), k, v, g, initial_state=pool, impl="chunkwise").output
    with torch.no_grad():
        ps.advance("gla", q, k, v, g, state=pool, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_inference_pools_are_refused_outside_of_inference_mode(impl):
    q, k, v, g = drawn()
    with torch.inference_mode():
        pool = torch.randn(1, 2, 4, 4)
        ps.advance("gla", q, k, v, g, state=pool, impl=impl)
        before = pool.clone()
    for _ in range(2):  # cached calls, too
        with pytest.raises(ps.InvalidArgument, match=r"state must be made outside of torch\.inference_mode"):
            ps.advance("gla", q, k, v, g, state=pool, impl=impl)
    assert torch.equal(pool, before)


def test_a_decay_without_axes_is_refused():
    q, k, v, _ = (x[:, 0] for x in drawn())
    with pytest.raises(ps.ShapeError, match="g must be of shape"):
        ps.decode_step("gla", q, k, v, torch.tensor(-1.0), state=torch.zeros(1, 2, 4, 4))


def test_compiled_calls_take_scales_that_vary():
    q, k, v, g = drawn()
    compiled = torch.compile(lambda q, scale: ps.gla(q, k, v, g, scale=scale).output, fullgraph=True, backend="aot_eager")
    for scale in (0.3, 0.7, 0.1):
        assert torch.allclose(compiled(q, scale), ps.gla(q, k, v, g, scale=scale).output)
