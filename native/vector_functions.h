// Functions of vectors. Sources for one set of instructions include this after vectors_avx2.h or vectors_avx512.h.

// 2 to the (x - high) for x of at most about `high`, an integer, with Cephes' polynomial.
GGPIPE_TARGET GGPIPE_INLINE inline F powers_of_2(F x, F high) {
    const F integer = rounded(x), r = x - integer, exponent = integer - high;
    F p = multiply_add(r, all(1.535336188319500e-4f), all(1.339887440266574e-3f));
    p = multiply_add(p, r, all(9.618437357674640e-3f));
    p = multiply_add(p, r, all(5.550332471162809e-2f));
    p = multiply_add(p, r, all(2.402264791363012e-1f));
    p = multiply_add(p, r, all(6.931472028550421e-1f));
    p = multiply_add(p, r, all(1.0f));
    return scaled(p, exponent);
}

// The hyperbolic tangent.
GGPIPE_TARGET GGPIPE_INLINE inline F tanh(F x) {
    const F e = powers_of_2((x < 0 ? x : -x) * all(2.88539008f), all(0)), size = (1 - e) / (1 + e);  // e to the -2|x|
    return x < 0 ? -size : size;
}

GGPIPE_TARGET GGPIPE_INLINE inline F load(const float * from) {
    F x;
    memcpy(&x, from, sizeof x);
    return x;
}
GGPIPE_TARGET GGPIPE_INLINE inline void store(float * to, F x) { memcpy(to, &x, sizeof x); }
