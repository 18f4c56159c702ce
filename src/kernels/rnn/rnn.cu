// What a step of an LSTM or a GRU does beside its product with a weight: a thread has one unit of a row of the batch.
// lstm.rs and gru.rs have the formulas.
//
// States, (batch, n), and products, (batch, gates n), are of one step. Outputs, (batch, steps, n), and gates with their
// gradients, (batch, steps, gates n), are of all steps: a launch writes one, and backward also reads the state of the step
// before. States, products, gradients and, in forward, gates have the type of the arithmetic. Forward completes the gates in
// place. A state may be written where it was read: by the same thread. What the next product multiplies, states or gradients
// of one step, is written once more as its `operand`.

// What products multiply: BF16 where all is BF16.
template <class T> struct OperandOf { typedef Acc<T> type; };
template <> struct OperandOf<bf16> { typedef bf16 type; };
template <class T> using Operand = typename OperandOf<T>::type;

// Where a unit is: in the layer, in a state and in outputs; and where its first gate is, in gates and in a product.
template <int GATES> struct Unit {
    size_t unit, state, output, gate, product;

    DEVICE Unit(size_t i, size_t steps, size_t n, size_t step) : unit(i % n), state(i) {
        size_t row = i / n, at = row * steps + step;
        output = at * n + unit;
        gate = at * GATES * n + unit;
        product = row * GATES * n + unit;
    }
};

template <int GATES, class F> DEVICE void each_unit(size_t batch, size_t steps, size_t n, size_t step, const F &f) {
    for (size_t i = global_thread(); i < batch * n; i += global_threads()) f(Unit<GATES>(i, steps, n, step));
}

// The derivatives of sigmoid and tanh, from their values.
template <class A> DEVICE A logistic_derivative(A y) { return y * (A(1) - y); }
template <class A> DEVICE A tangent_derivative(A y) { return A(1) - y * y; }

template <class T>
DEVICE void lstm(T *y_h, T *y_c, Acc<T> *gates, Operand<T> *operand, Acc<T> *c, const Acc<T> *c_before,
                 const Acc<T> *product, size_t batch, size_t steps, size_t n, size_t step) {
    typedef Acc<T> A;
    each_unit<4>(batch, steps, n, step, [&](Unit<4> at) {
        A u[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u[k] = gates[at.gate + k * n] + product[at.product + k * n];
            gates[at.gate + k * n] = u[k];
        }
        A cell = sigmoid(u[1]) * c_before[at.state] + sigmoid(u[0]) * tangent(u[2]);
        A hidden = sigmoid(u[3]) * tangent(cell);
        c[at.state] = cell;
        narrow(hidden, operand[at.state]);
        narrow(cell, y_c[at.output]);
        narrow(hidden, y_h[at.output]);
    });
}

// `before` is the step whose state this one started from; that of the first is `c0`.
template <class T>
DEVICE void lstm_backward(Acc<T> *gradients, Operand<T> *operand, Acc<T> *dc, const Acc<T> *dh, const T *gates,
                          const T *y_c, const T *c0, const T *grad_h, const T *grad_c, size_t batch, size_t steps,
                          size_t n, size_t step, size_t before, int first) {
    typedef Acc<T> A;
    each_unit<4>(batch, steps, n, step, [&](Unit<4> at) {
        const T *u = gates + at.gate;
        A i = sigmoid(widen(u[0])), f = sigmoid(widen(u[n]));
        A g = tangent(widen(u[2 * n])), o = sigmoid(widen(u[3 * n]));
        A c = widen(first ? c0[at.state] : y_c[Unit<4>(at.state, steps, n, before).output]);
        A t = tangent(widen(y_c[at.output]));
        A hidden = dh[at.state] + widen(grad_h[at.output]);
        A cell = dc[at.state] + widen(grad_c[at.output]) + hidden * o * tangent_derivative(t);
        A of[4] = {cell * g * logistic_derivative(i), cell * c * logistic_derivative(f),
                   cell * i * tangent_derivative(g), hidden * t * logistic_derivative(o)};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            gradients[at.gate + k * n] = of[k];
            narrow(of[k], operand[at.product + k * n]);
        }
        dc[at.state] = cell * f;
    });
}

// `bias` is added to the product, and may be null. `inner` is what the reset gate is multiplied with.
template <class T>
DEVICE void gru(T *y, T *inner, Acc<T> *gates, Operand<T> *operand, Acc<T> *h, const Acc<T> *h_before,
                const Acc<T> *product, const Acc<T> *bias, size_t batch, size_t steps, size_t n, size_t step) {
    typedef Acc<T> A;
    each_unit<3>(batch, steps, n, step, [&](Unit<3> at) {
        A *of = gates + at.gate, p[3];
#pragma unroll
        for (int k = 0; k < 3; k++) {
            p[k] = product[at.product + k * n] + (bias ? bias[at.unit + k * n] : A(0));
        }
        A r = of[0] + p[0], z = of[n] + p[1], u = of[2 * n] + sigmoid(r) * p[2];
        A fresh = tangent(u);
        A hidden = fresh + sigmoid(z) * (h_before[at.state] - fresh);
        of[0] = r, of[n] = z, of[2 * n] = u;
        h[at.state] = hidden;
        narrow(hidden, operand[at.state]);
        narrow(p[2], inner[at.output]);
        narrow(hidden, y[at.output]);
    });
}

// The gradient of a state has two parts: `kept`, which went past the gates, and `product`, which went through them.
template <class T>
DEVICE void gru_backward(Acc<T> *of_x, Acc<T> *of_h, Operand<T> *operand, Acc<T> *kept, const Acc<T> *product,
                         const T *gates, const T *inner, const T *y, const T *h0, const T *grad, size_t batch,
                         size_t steps, size_t n, size_t step, size_t before, int first) {
    typedef Acc<T> A;
    each_unit<3>(batch, steps, n, step, [&](Unit<3> at) {
        const T *u = gates + at.gate;
        A r = sigmoid(widen(u[0])), z = sigmoid(widen(u[n])), fresh = tangent(widen(u[2 * n]));
        A h = widen(first ? h0[at.state] : y[Unit<3>(at.state, steps, n, before).output]);
        A hidden = kept[at.state] + product[at.state] + widen(grad[at.output]);
        A dz = hidden * (h - fresh) * logistic_derivative(z);
        A du = hidden * (A(1) - z) * tangent_derivative(fresh);
        A dr = du * widen(inner[at.output]) * logistic_derivative(r);
        A x[3] = {dr, dz, du}, inside[3] = {dr, dz, du * r};
#pragma unroll
        for (int k = 0; k < 3; k++) {
            of_x[at.gate + k * n] = x[k];
            of_h[at.gate + k * n] = inside[k];
            narrow(inside[k], operand[at.product + k * n]);
        }
        kept[at.state] = hidden * z;
    });
}

#define STEPS(t, T)                                                                                                   \
    KERNEL lstm_##t(T *y_h, T *y_c, Acc<T> *gates, Operand<T> *operand, Acc<T> *c, const Acc<T> *c_before,            \
                    const Acc<T> *product, size_t batch, size_t steps, size_t n, size_t step) {                       \
        lstm(y_h, y_c, gates, operand, c, c_before, product, batch, steps, n, step);                                  \
    }                                                                                                                 \
    KERNEL lstm_backward_##t(Acc<T> *gradients, Operand<T> *operand, Acc<T> *dc, const Acc<T> *dh, const T *gates,    \
                             const T *y_c, const T *c0, const T *grad_h, const T *grad_c, size_t batch, size_t steps, \
                             size_t n, size_t step, size_t before, int first) {                                       \
        lstm_backward(gradients, operand, dc, dh, gates, y_c, c0, grad_h, grad_c, batch, steps, n, step, before,      \
                      first);                                                                                         \
    }                                                                                                                 \
    KERNEL gru_##t(T *y, T *inner, Acc<T> *gates, Operand<T> *operand, Acc<T> *h, const Acc<T> *h_before,             \
                   const Acc<T> *product, const Acc<T> *bias, size_t batch, size_t steps, size_t n, size_t step) {    \
        gru(y, inner, gates, operand, h, h_before, product, bias, batch, steps, n, step);                             \
    }                                                                                                                 \
    KERNEL gru_backward_##t(Acc<T> *of_x, Acc<T> *of_h, Operand<T> *operand, Acc<T> *kept, const Acc<T> *product,     \
                            const T *gates, const T *inner, const T *y, const T *h0, const T *grad, size_t batch,     \
                            size_t steps, size_t n, size_t step, size_t before, int first) {                          \
        gru_backward(of_x, of_h, operand, kept, product, gates, inner, y, h0, grad, batch, steps, n, step, before,    \
                     first);                                                                                          \
    }
EACH_FLOAT(STEPS)
