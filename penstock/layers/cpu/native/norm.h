/* The norm of a row before its weight. */
#ifndef PENSTOCK_NORM_H
#define PENSTOCK_NORM_H

#include "rows.h"

/* The factor of the norm of x, n elements padded with zeros. With `centre` the mean is subtracted from x first. */
static inline vec norm_factor(float *x, int64_t n, int centre, double eps) {
    if (centre) {
        vec total = splat(0);
        for (int64_t i = 0; i < n; i += LANES) total += load(x + i);
        float mean = sum_lanes(total) / n;
        for (int64_t i = 0; i < n; i++) x[i] -= mean;
    }
    return splat((float)(1 / __builtin_sqrt((double)dot(x, x, n) / n + eps)));
}

#endif
