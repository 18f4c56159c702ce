#include "product.hpp"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <random>

#include "../device/halves.hpp"

namespace emulated {

unsigned choice(unsigned count) {
    static const char *const seed = getenv("EMULATED_GPU_REFUSE");
    static std::minstd_rand numbers(seed ? strtoul(seed, nullptr, 0) : 0);
    std::lock_guard guard(device_lock());
    return numbers() / 16 % count;
}

bool refuses() {
    static const char *const seed = getenv("EMULATED_GPU_REFUSE");
    static const bool all = seed && !strcmp(seed, "all");
    static const bool by_chance = seed && isdigit(static_cast<unsigned char>(*seed));
    return all || (by_chance && choice(2));
}

bool refuses_graphs() {
    static const char *const seed = getenv("EMULATED_GPU_REFUSE");
    static const bool graphs = seed && !strcmp(seed, "graphs");
    return graphs || refuses();
}

bool refuses_exact_engine() {
    static const char *const seed = getenv("EMULATED_GPU_REFUSE");
    return seed && !strcmp(seed, "exact-engine");
}

size_t size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

double load(const void *data, int type, size_t index) {
    switch (type) {
    case R_64F:
        return static_cast<const double *>(data)[index];
    case R_32F:
        return static_cast<const float *>(data)[index];
    case R_16F:
        return half_value(static_cast<const unsigned short *>(data)[index]);
    default:
        return bfloat_value(static_cast<const unsigned short *>(data)[index]);
    }
}

void store(void *data, int type, size_t index, double value) {
    switch (type) {
    case R_64F:
        static_cast<double *>(data)[index] = value;
        break;
    case R_32F:
        static_cast<float *>(data)[index] = static_cast<float>(value);
        break;
    case R_16F:
        static_cast<unsigned short *>(data)[index] = half_bits(to_odd(value));
        break;
    default:
        static_cast<unsigned short *>(data)[index] = bfloat_bits(to_odd(value));
    }
}

int scale_type(int compute) {
    return compute == C64F || compute == C64F_PEDANTIC ? R_64F : compute < C32F ? R_16F : R_32F;
}

bool supported(int a, int b, int c, int compute) {
    if (a != b)
        return false;
    switch (compute) {
    case C64F:
    case C64F_PEDANTIC:
        return a == R_64F && c == R_64F;
    case C16F:
    case C16F_PEDANTIC:
        return a == R_16F && c == R_16F;
    case C32F:
    case C32F_PEDANTIC:
        return a != R_64F && (c == a || c == R_32F);
    case C32F_FAST_16F:
    case C32F_FAST_16BF:
    case C32F_FAST_TF32:
        return a == R_32F && c == R_32F;
    default:
        return false;
    }
}

const void *Matrix::at(int batch) const {
    return list ? list[batch] : static_cast<const char *>(data) + batch * stride * long(size_of(type));
}

namespace {

int check_matrix(const char *name, const Matrix &matrix, long rows, long columns, int batch) {
    if (rows == 0 || columns == 0)
        return SUCCESS;
    if (matrix.list && !memory::valid(matrix.list, batch * sizeof(void *)))
        return sticky = complain(ILLEGAL_ADDRESS, "a product's list of matrices %s is not in device memory", name);
    size_t bytes = ((columns - 1) * matrix.ld + rows) * size_of(matrix.type);
    for (int i = 0; i < batch; i++)
        if (!memory::valid(matrix.at(i), bytes))
            return sticky = complain(ILLEGAL_ADDRESS,
                                     "a product's matrix %s (%ld x %ld, ld %ld, number %d of %d): access %s", name,
                                     rows, columns, matrix.ld, i, batch,
                                     memory::describe(static_cast<const char *>(matrix.at(i)) + bytes - 1).c_str());
    return SUCCESS;
}

// What the compute type leaves of an operand.
float input(double value, int compute) {
    float x = static_cast<float>(value);
    if (compute == C32F_FAST_16F)
        return half_value(half_bits(x));
    if (compute == C32F_FAST_16BF)
        return bfloat_value(bfloat_bits(x));
    if (compute != C32F_FAST_TF32 || !std::isfinite(x))
        return x;
    unsigned bits = float_bits(x);
    return bits_float((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

// op(X) as `rows` x `columns`, column by column.
template <class T>
void pack(std::vector<T> &to, const Matrix &matrix, const void *data, bool transpose, long rows, long columns,
          int compute) {
    to.resize(rows * columns);
    for (long column = 0; column < columns; column++)
        for (long row = 0; row < rows; row++) {
            double value = load(data, matrix.type, transpose ? row * matrix.ld + column : column * matrix.ld + row);
            to[column * rows + row] = sizeof(T) == 8 ? T(value) : T(input(value, compute));
        }
}

template <class T> void multiply_as(const Product &p) {
    // What tensor cores do with 16-bit sums: round them every few steps.
    const bool half_sums = scale_type(p.compute) == R_16F;
    std::vector<T> a, b, sums(p.m);
    for (int batch = 0; batch < p.batch; batch++) {
        pack(a, p.a, p.a.at(batch), p.transpose_a, p.m, p.k, p.compute);
        pack(b, p.b, p.b.at(batch), p.transpose_b, p.k, p.n, p.compute);
        for (long j = 0; j < p.n; j++) {
            std::fill(sums.begin(), sums.end(), T(0));
            for (long i = 0; i < p.k; i++) {
                const long q = p.backwards ? p.k - 1 - i : i;
                const T factor = b[j * p.k + q];
                const T *column = &a[q * p.m];
                for (long row = 0; row < p.m; row++)
                    sums[row] += column[row] * factor;
                if (half_sums && (i % 16 == 15 || i + 1 == p.k))
                    for (T &sum : sums)
                        sum = half_value(half_bits(static_cast<float>(sum)));
            }
            for (long i = 0; i < p.m; i++) {
                double value = p.alpha * double(sums[i]);
                if (p.beta != 0)
                    value += p.beta * load(p.c.at(batch), p.c.type, j * p.c.ld + i);
                if (p.epilogue)
                    value = p.epilogue(batch, i, j, value);
                store(const_cast<void *>(p.d.at(batch)), p.d.type, j * p.d.ld + i, value);
            }
        }
    }
}

} // namespace

int check_memory(const Product &p) {
    long a_rows = p.transpose_a ? p.k : p.m, b_rows = p.transpose_b ? p.n : p.k;
    if (int error = check_matrix("A", p.a, a_rows, p.m + p.k - a_rows, p.batch))
        return error;
    if (int error = check_matrix("B", p.b, b_rows, p.k + p.n - b_rows, p.batch))
        return error;
    if (p.beta != 0)
        if (int error = check_matrix("C", p.c, p.m, p.n, p.batch))
            return error;
    return check_matrix("D", p.d, p.m, p.n, p.batch);
}

void multiply(const Product &product) {
    if (scale_type(product.compute) == R_64F)
        multiply_as<double>(product);
    else
        multiply_as<float>(product);
}

} // namespace emulated
