// Matrix products for cuBLAS and cuBLASLt: operands of any supported type, column by column.
#pragma once
#include <cmath>
#include <cstddef>
#include <vector>

#include "../driver/driver.hpp"

namespace emulated {

enum Type { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
enum Compute {
    C16F = 64,
    C16F_PEDANTIC,
    C32F = 68,
    C32F_PEDANTIC,
    C64F,
    C64F_PEDANTIC,
    C32F_FAST_16F = 74,
    C32F_FAST_16BF,
    C32F_FAST_TF32 = 77
};
enum Status {
    BLAS_SUCCESS = 0,
    BLAS_NOT_INITIALIZED = 1,
    BLAS_INVALID_VALUE = 7,
    BLAS_EXECUTION_FAILED = 13,
    BLAS_NOT_SUPPORTED = 15
};

size_t size_of(int type);
double load(const void *data, int type, size_t index);
void store(void *data, int type, size_t index, double value);

// Whether a product of these types is one that cuBLAS has.
bool supported(int a, int b, int c, int compute);
// The type of alpha and beta.
int scale_type(int compute);

struct Matrix {
    int type;
    long ld;
    // From a product of the batch to the next.
    long stride;
    const void *data;
    // Or each one's own.
    void *const *list = nullptr;
    const void *at(int batch) const;
};

struct Product {
    bool transpose_a, transpose_b;
    long m, n, k;
    int batch, compute;
    double alpha, beta;
    Matrix a, b, c, d;
    // What becomes of each result before it is stored.
    std::function<double(int batch, long row, long column, double value)> epilogue;
    // Sums from their end, so that they round differently.
    bool backwards = false;
};

// With EMULATED_GPU_REFUSE=seed, whether a library does not support what it is asked for: every other time, by chance;
// with `all`, every time.
bool refuses();
// The same of cuDNN's graph API, which alone may be told to.
bool refuses_graphs();
// With EMULATED_GPU_REFUSE=exact-engine, whether the graph API's engine without tensor cores fails when it runs.
bool refuses_exact_engine();
// Below `count`, by the same chance.
unsigned choice(unsigned count);

// Whether the matrices lie in memory that is allocated; else the device is in error.
int check_memory(const Product &product);
void multiply(const Product &product);

} // namespace emulated
