/* Activations of vectors. Their exponentials have arguments of at most 0, so nothing overflows; NaN stays NaN. */
#ifndef PENSTOCK_ACTIVATIONS_H
#define PENSTOCK_ACTIVATIONS_H

#include "decay.h"

INLINE vec sigmoid(vec x) {
    ivec positive = x > splat(0);
    vec e = exp_of(exponential_of(choose(positive, -x, x))), whole = splat(1) / (splat(1) + e);
    return choose(positive, whole, e * whole);
}

/* (1 - e) / (1 + e) for e = exp(-2 |x|), with the sign of x; 1 - e is exact for small x, too. */
INLINE vec tanh_of(vec x) {
    ivec positive = x > splat(0);
    vec less = expm1_of(exponential_of(splat(2) * choose(positive, -x, x))), y = less / (splat(2) + less);
    return choose(positive, -y, y);
}

/* exp(x) of any x. */
INLINE vec exp_of_any(vec x) {
    ivec positive = x > splat(0);
    vec e = exp_of(exponential_of(choose(positive, -x, x)));
    return choose(positive, splat(1) / e, e);
}

#endif
