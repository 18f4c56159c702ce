// The moments of a channel's parts, (parts, channels, 3): how many, their mean and the sum of their
// squared distances from it. Merged by a warp: the mean, and the biased variance.
template <class A>
DEVICE void merge(const A *parts_of, size_t channel, size_t channels, size_t parts, double &mean, double &var) {
    const A *own = parts_of + channel * 3;
    double count = 0, sum = 0, squares = 0;
    for (size_t part = threadIdx.x % 32; part < parts; part += 32) {
        const A *from = own + part * channels * 3;
        count += from[0];
        sum += (double)from[0] * from[1];
    }
    count = warp_reduce<Sum>(count);
    mean = warp_reduce<Sum>(sum) / count;
    for (size_t part = threadIdx.x % 32; part < parts; part += 32) {
        const A *from = own + part * channels * 3;
        double distance = from[1] - mean;
        squares += from[2] + from[0] * distance * distance;
    }
    var = warp_reduce<Sum>(squares) / count;
}

template <class A> DEVICE A affine(A x, A mean, A scale, A shift) {
    // The mean is taken off first: folded into the bias, it would cancel where it is large.
    return (x - mean) * scale + shift;
}

// What follows: 0 nothing, 1 relu, 2 relu after the residual has been added, 3 relu6. NaN stays.
template <class A> DEVICE A finished(A y, int finish) {
    if (finish == 3 && y >= 6) return A(6);
    return finish && y <= 0 ? A(0) : y;
}

// Stops a gradient where a rectifier left zero, or relu6 six, of a result rounded to T, and lets it through where that is
// NaN. Computes the result from x again, so that no gradient in between is written and read twice. `by` is 0 for no
// rectifier, 1 for relu and 3 for relu6.
template <class T, class A> struct Gate {
    A mean, scale, shift;
    int by;

    DEVICE A operator()(A x, A g) const {
        if (!by) return g;
        T y;
        narrow(affine(x, mean, scale, shift), y);
        return widen(y) <= 0 || (by == 3 && widen(y) >= 6) ? A(0) : g;
    }
};

template <class T, class A>
DEVICE Gate<T, A> gate_of(const A *means, const A *inv_stds, const A *weight, const A *bias, int by, size_t channel) {
    A scale = by ? inv_stds[channel] : A(0);
    if (weight) scale = weight[channel] * scale;
    return {means[channel], scale, bias ? bias[channel] : A(0), by};
}
