// Batch normalisation of (rows, channels, inner). A block goes over one part of one channel.
//
// Sums over a part are F32 (F64 for F64), in an order that depends on the shape alone; parts are
// merged in F64, by every warp for itself, so that nothing waits for another launch.

// For every LEN elements of this block's part of its channel: `f` is given where they are.
template <int LEN, class F>
DEVICE void for_each_pack(size_t rows, size_t channels, size_t inner, size_t parts, F f) {
    size_t channel = blockIdx.x % channels, part = blockIdx.x / channels;
    size_t packs = inner / LEN, all = rows * packs;
    size_t at = all * part / parts + threadIdx.x, end = all * (part + 1) / parts;
    size_t row = at / packs, pack = at % packs;
    size_t row_step = blockDim.x / packs, pack_step = blockDim.x % packs;
    for (; at < end; at += blockDim.x) {
        f((row * channels + channel) * inner + pack * LEN);
        row += row_step;
        pack += pack_step;
        if (pack >= packs) {
            pack -= packs;
            row += 1;
        }
    }
}

// Only the first LEN elements.
template <int LEN, class T> DEVICE Pack<T> load(const T *from) {
    if constexpr (LEN == Pack<T>::LEN) return load_pack(from);
    Pack<T> pack;
    pack.at[0] = *from;
    return pack;
}

template <int LEN, class T> DEVICE void store(T *to, const Pack<T> &pack) {
    if constexpr (LEN == Pack<T>::LEN) store_pack(to, pack);
    else *to = pack.at[0];
}

// Number, mean and sum of squared distances from the mean, of the block's part: `parts_of[0..3]`.
//
// About the channel's first element, so that a large mean costs no digits; and packs are merged as
// Chan, Golub and LeVeque merge samples, so that an odd first element costs none either.
template <int LEN, class T, class A>
DEVICE void moments(const T *x, A *parts_of, size_t rows, size_t channels, size_t inner, size_t parts) {
    A shift = widen(x[blockIdx.x % channels * inner]);
    A count = 0, mean = 0, squares = 0;
    for_each_pack<LEN>(rows, channels, inner, parts, [&](size_t at) {
        Pack<T> pack = load<LEN>(x + at);
        A values[LEN], sum = 0;
        for (int i = 0; i < LEN; i++) sum += values[i] = widen(pack.at[i]) - shift;
        A own = sum * (A(1) / LEN);
        for (int i = 0; i < LEN; i++) squares += (values[i] - own) * (values[i] - own);
        A distance = own - mean, share = A(LEN) / (count + LEN);
        mean += distance * share;
        squares += distance * distance * count * share;
        count += LEN;
    });
    A all = block_reduce<Sum>(count, A(0));
    A centre = block_reduce<Sum>(count * mean, A(0)) / all;
    A distance = mean - centre;
    squares = block_reduce<Sum>(squares + count * distance * distance, A(0));
    if (threadIdx.x == 0) {
        A *to = parts_of + (size_t)blockIdx.x * 3;
        to[0] = all;
        to[1] = centre;
        to[2] = squares;
    }
}

// y = (x - mean) * weight / sqrt(var + eps) + bias, plus the residual where `finish` is 2; then `finished`.
//
// With `parts_of`, mean and variance are what it says, and are written with 1 / sqrt(var + eps).
// Without, they are read, and `inv_std` is not there.
template <class T, class A>
DEVICE void normalise(const T *x, const T *residual, T *y, const A *weight, const A *bias,
                      const A *parts_of, A *means, A *vars, A *inv_stds, int finish, double eps,
                      size_t rows, size_t channels, size_t inner, size_t parts) {
    size_t channel = blockIdx.x % channels;
    double exact_mean, exact_var;
    if (parts_of) {
        merge(parts_of, channel, channels, parts, exact_mean, exact_var);
        exact_mean += (double)widen(x[channel * inner]);
    } else {
        exact_mean = means[channel];
        exact_var = vars[channel];
    }
    A mean = (A)exact_mean, inv_std = (A)(1.0 / sqrt(exact_var + eps));
    if (parts_of && blockIdx.x / channels == 0 && threadIdx.x == 0) {
        means[channel] = mean;
        vars[channel] = (A)exact_var;
        inv_stds[channel] = inv_std;
    }
    A scale = weight ? weight[channel] * inv_std : inv_std, shift = bias ? bias[channel] : A(0);
    auto one = [&](A x, A residual) {
        A y = affine(x, mean, scale, shift);
        if (finish == 2) y += residual;
        return finished(y, finish);
    };
    constexpr int LEN = Pack<T>::LEN;
    if (inner % LEN == 0 && aligned(x) && aligned(y) && aligned(residual)) {
        for_each_pack<LEN>(rows, channels, inner, parts, [&](size_t at) {
            Pack<T> pack = load_pack(x + at), other = pack;
            if (finish == 2) other = load_pack(residual + at);
            for (int i = 0; i < LEN; i++) narrow(one(widen(pack.at[i]), widen(other.at[i])), pack.at[i]);
            store_pack(y + at, pack);
        });
    } else {
        for_each_pack<1>(rows, channels, inner, parts, [&](size_t at) {
            A other = finish == 2 ? widen(residual[at]) : A(0);
            narrow(one(widen(x[at]), other), y[at]);
        });
    }
}

// The sums of g, let through, and of g * (x - mean) over the block's part: `parts_of[0..2]`.
template <int LEN, class T, class A>
DEVICE void gradient_sums(const T *x, const T *g, Gate<T, A> gate, A *parts_of, size_t rows,
                          size_t channels, size_t inner, size_t parts) {
    A sum = 0, dot = 0;
    for_each_pack<LEN>(rows, channels, inner, parts, [&](size_t at) {
        Pack<T> xs = load<LEN>(x + at), gs = load<LEN>(g + at);
        A own_sum = 0, own_dot = 0;
        for (int i = 0; i < LEN; i++) {
            A value = widen(xs.at[i]), through = gate(value, widen(gs.at[i]));
            own_sum += through;
            own_dot += through * (value - gate.mean);
        }
        sum += own_sum;
        dot += own_dot;
    });
    sum = block_reduce<Sum>(sum, A(0));
    dot = block_reduce<Sum>(dot, A(0));
    if (threadIdx.x == 0) {
        parts_of[(size_t)blockIdx.x * 2] = sum;
        parts_of[(size_t)blockIdx.x * 2 + 1] = dot;
    }
}

// dx, and from the first block of each channel dweight and dbias.
//
// With `train`, `spreads` are 1 / sqrt(var + eps), and the gradient passes through the statistics:
// dx = weight * inv_std * (g - average(g) - normalised * average(g * normalised)).
// Without, they are variances.
template <class T, class A>
DEVICE void input_gradient(const T *x, const T *g, T *dx, const A *weight, const A *spreads,
                           Gate<T, A> gate, const A *parts_of, A *dweight, A *dbias, int train,
                           double eps, size_t rows, size_t channels, size_t inner, size_t parts) {
    size_t channel = blockIdx.x % channels;
    double sum = 0, dot = 0;
    for (size_t part = threadIdx.x % 32; part < parts; part += 32) {
        const A *from = parts_of + (part * channels + channel) * 2;
        sum += from[0];
        dot += from[1];
    }
    sum = warp_reduce<Sum>(sum);
    dot = warp_reduce<Sum>(dot);
    double spread = spreads[channel], inv_std = train ? spread : 1.0 / sqrt(spread + eps);
    if (blockIdx.x / channels == 0 && threadIdx.x == 0) {
        dweight[channel] = (A)(dot * inv_std);
        dbias[channel] = (A)sum;
    }
    double exact = weight ? weight[channel] * inv_std : inv_std, count = (double)rows * (double)inner;
    A mean = gate.mean, scale = (A)exact;
    A deviation_scale = (A)(-exact * inv_std * inv_std * dot / count), shift = (A)(-exact * sum / count);
    auto one = [&](A x, A g) {
        A scaled = gate(x, g) * scale;
        return train ? (x - mean) * deviation_scale + (scaled + shift) : scaled;
    };
    constexpr int LEN = Pack<T>::LEN;
    if (inner % LEN == 0 && aligned(x) && aligned(g) && aligned(dx)) {
        for_each_pack<LEN>(rows, channels, inner, parts, [&](size_t at) {
            Pack<T> xs = load_pack(x + at), gs = load_pack(g + at);
            for (int i = 0; i < LEN; i++) narrow(one(widen(xs.at[i]), widen(gs.at[i])), xs.at[i]);
            store_pack(dx + at, xs);
        });
    } else {
        for_each_pack<1>(rows, channels, inner, parts, [&](size_t at) {
            narrow(one(widen(x[at]), widen(g[at])), dx[at]);
        });
    }
}

// running = running * kept + batch * weight, for mean and variance.
template <class A>
DEVICE void average(A *mean, A *var, const A *batch_mean, const A *batch_var, A kept, A of_mean, A of_var,
                    size_t channels) {
    for (size_t at = global_thread(); at < channels; at += global_threads()) {
        mean[at] = mean[at] * kept + batch_mean[at] * of_mean;
        var[at] = var[at] * kept + batch_var[at] * of_var;
    }
}

#define SIZES size_t rows, size_t channels, size_t inner, size_t parts
#define KERNELS(t, T)                                                                              \
    KERNEL moments_##t(const T *x, Acc<T> *parts_of, SIZES) {                                      \
        if (inner % Pack<T>::LEN == 0 && aligned(x))                                               \
            moments<Pack<T>::LEN>(x, parts_of, rows, channels, inner, parts);                      \
        else                                                                                       \
            moments<1>(x, parts_of, rows, channels, inner, parts);                                 \
    }                                                                                              \
    KERNEL normalise_##t(const T *x, const T *residual, T *y, const Acc<T> *weight,                \
                         const Acc<T> *bias, const Acc<T> *parts_of, Acc<T> *mean, Acc<T> *var,    \
                         Acc<T> *inv_std, int finish, double eps, SIZES) {                         \
        normalise(x, residual, y, weight, bias, parts_of, mean, var, inv_std, finish, eps, rows,   \
                  channels, inner, parts);                                                         \
    }                                                                                              \
    KERNEL gradient_sums_##t(const T *x, const T *g, const Acc<T> *mean, const Acc<T> *inv_std,    \
                             const Acc<T> *weight, const Acc<T> *bias, int rectifier, Acc<T> *parts_of, \
                             SIZES) {                                                              \
        auto gate = gate_of<T>(mean, inv_std, weight, bias, rectifier, blockIdx.x % channels);     \
        if (inner % Pack<T>::LEN == 0 && aligned(x) && aligned(g))                                 \
            gradient_sums<Pack<T>::LEN>(x, g, gate, parts_of, rows, channels, inner, parts);       \
        else                                                                                       \
            gradient_sums<1>(x, g, gate, parts_of, rows, channels, inner, parts);                  \
    }                                                                                              \
    KERNEL input_gradient_##t(const T *x, const T *g, T *dx, const Acc<T> *mean,                   \
                              const Acc<T> *spread, const Acc<T> *weight, const Acc<T> *bias,      \
                              int rectifier, const Acc<T> *parts_of, Acc<T> *dweight, Acc<T> *dbias, \
                              int train, double eps, SIZES) {                                      \
        auto gate = gate_of<T>(mean, spread, weight, bias, rectifier, blockIdx.x % channels);      \
        input_gradient(x, g, dx, weight, spread, gate, parts_of, dweight, dbias, train, eps, rows, \
                       channels, inner, parts);                                                    \
    }

EACH_FLOAT(KERNELS)

#define AVERAGE(t, T)                                                                              \
    KERNEL average_##t(T *mean, T *var, const T *batch_mean, const T *batch_var, double kept,      \
                       double of_mean, double of_var, size_t channels) {                           \
        average<T>(mean, var, batch_mean, batch_var, kept, of_mean, of_var, channels);             \
    }
OF_F32(AVERAGE(f32, float)) OF_F64(AVERAGE(f64, double))
