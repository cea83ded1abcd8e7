"""What tests of fused kernels share: random tensors, and a kernel held to its formula in float64."""

import torch


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def hold(kernel, formula, tensors, *rest, dtype=torch.float32):
    """Results and gradients of all float tensors are within a few roundings of the formula in float64."""
    floats = [n for n, x in enumerate(tensors) if x is not None and x.is_floating_point()]
    ours = [x if n not in floats else x.clone().requires_grad_() for n, x in enumerate(tensors)]
    exact = [x if n not in floats else x.double().requires_grad_() for n, x in enumerate(tensors)]
    found, wanted = kernel(*ours, *rest), formula(*exact)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    upstream = [normal(*x.shape, seed=n).to(y.dtype) for n, (x, y) in enumerate(zip(wanted, found))]
    grads = torch.autograd.grad(found, [ours[n] for n in floats], upstream, allow_unused=True)
    exact_grads = torch.autograd.grad(wanted, [exact[n] for n in floats], [d.double() for d in upstream], allow_unused=True)
    for x, y in zip((*found, *grads), (*wanted, *exact_grads)):
        assert (x is None) == (y is None)
        if y is not None:
            assert x.shape == y.shape
            assert (x.double() - y).norm() <= 3 * torch.finfo(dtype).eps * y.norm() + 1e-30
