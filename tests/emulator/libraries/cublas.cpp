// libcublas: products, and the few vector operations that cudarc has.
#include <algorithm>
#include <cmath>

#include "product.hpp"

namespace emulated {
namespace {

// What a handle takes for itself where its user gives it none, as on Hopper.
constexpr size_t WORKSPACE = 32 << 20;
constexpr size_t ALIGNMENT = 256;

struct Handle {
    void *stream = nullptr;
    int pointer_mode = 0, math_mode = 0;
    // The user's: none where the size is 0.
    unsigned char *workspace = nullptr;
    size_t workspace_size = 0;
};

// Gives work to the handle's stream, with the memory that it runs in. A captured stream gets that for each product, as
// part of its graph, unless the user has given some.
int in_workspace(const Handle *handle, const char *name, Work work) {
    void *workspace = handle->workspace;
    size_t size = handle->workspace_size;
    const bool of_graph = !size && capturing(handle->stream);
    if (of_graph)
        if (int error = allocate_in_capture(handle->stream, size = WORKSPACE, &workspace))
            return error;
    int error = submit(handle->stream, name, [=] {
        auto start = static_cast<unsigned char *>(workspace);
        if (size && !memory::valid(start, size))
            return sticky = complain(ILLEGAL_ADDRESS, "%s: its workspace is no longer allocated", name);
        for (size_t i = 0; i < std::min(size, ALIGNMENT); i++) // so that nobody keeps there what is of use
            start[i] = start[size - 1 - i] = GARBAGE;
        return work();
    });
    return error ?: of_graph ? release_in_capture(handle->stream, workspace) : int(SUCCESS);
}

double scalar(const Handle *handle, const void *pointer, int type) {
    if (handle->pointer_mode == 1 && !memory::valid(pointer, size_of(type))) {
        sticky = complain(ILLEGAL_ADDRESS, "cuBLAS: a factor is not in device memory, where its pointer mode says so");
        return NAN;
    }
    return load(pointer, type, 0);
}

int status_of(int error) { return error ? BLAS_EXECUTION_FAILED : BLAS_SUCCESS; }

int product(Handle *handle, const char *name, Product p, const void *alpha, const void *beta) {
    if (!handle)
        return BLAS_NOT_INITIALIZED;
    long a_rows = p.transpose_a ? p.k : p.m, b_rows = p.transpose_b ? p.n : p.k;
    if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0 || p.a.ld < std::max(1l, a_rows) ||
        p.b.ld < std::max(1l, b_rows) || p.c.ld < std::max(1l, p.m) || !alpha || !beta)
        return complain(BLAS_INVALID_VALUE, "%s: m %ld, n %ld, k %ld, ld %ld, %ld and %ld, %d products", name, p.m, p.n,
                        p.k, p.a.ld, p.b.ld, p.c.ld, p.batch);
    if (!supported(p.a.type, p.b.type, p.c.type, p.compute))
        return complain(BLAS_NOT_SUPPORTED, "%s: types %d, %d and %d, computed as %d", name, p.a.type, p.b.type,
                        p.c.type, p.compute);
    if (p.m == 0 || p.n == 0 || p.batch == 0)
        return BLAS_SUCCESS;
    p.d = p.c;
    const int type = scale_type(p.compute);
    const bool on_host = handle->pointer_mode == 0;
    if (on_host) {
        p.alpha = load(alpha, type, 0);
        p.beta = load(beta, type, 0);
    }
    Handle copy = *handle;
    return status_of(in_workspace(handle, name, [=]() mutable {
        if (!on_host) {
            p.alpha = scalar(&copy, alpha, type);
            p.beta = scalar(&copy, beta, type);
        }
        if (int error = check_memory(p))
            return error;
        multiply(p);
        return int(SUCCESS);
    }));
}

int strided(Handle *handle, const char *name, int ta, int tb, long m, long n, long k, const void *alpha, const void *a,
            int a_type, long lda, long a_stride, const void *b, int b_type, long ldb, long b_stride, const void *beta,
            void *c, int c_type, long ldc, long c_stride, int batch, int compute) {
    return product(handle, name,
                   {ta != 0,
                    tb != 0,
                    m,
                    n,
                    k,
                    batch,
                    compute,
                    0,
                    0,
                    {a_type, lda, a_stride, a},
                    {b_type, ldb, b_stride, b},
                    {c_type, ldc, c_stride, c},
                    {},
                    nullptr},
                   alpha, beta);
}

int listed(Handle *handle, const char *name, int ta, int tb, long m, long n, long k, const void *alpha,
           const void *const *a, int a_type, long lda, const void *const *b, int b_type, long ldb, const void *beta,
           void *const *c, int c_type, long ldc, int batch, int compute) {
    return product(handle, name,
                   {ta != 0,
                    tb != 0,
                    m,
                    n,
                    k,
                    batch,
                    compute,
                    0,
                    0,
                    {a_type, lda, 0, nullptr, const_cast<void *const *>(a)},
                    {b_type, ldb, 0, nullptr, const_cast<void *const *>(b)},
                    {c_type, ldc, 0, nullptr, c},
                    {},
                    nullptr},
                   alpha, beta);
}

// With a stride between elements.
template <class T>
int product_with_vector(Handle *handle, const char *name, int transpose, int m, int n, const T *alpha, const T *a,
                        int lda, const T *x, int incx, const T *beta, T *y, int incy) {
    if (!handle)
        return BLAS_NOT_INITIALIZED;
    if (m < 0 || n < 0 || lda < std::max(1, m) || incx == 0 || incy == 0)
        return BLAS_INVALID_VALUE;
    Handle copy = *handle;
    const int type = sizeof(T) == 8 ? R_64F : R_32F;
    return status_of(submit(handle->stream, name, [=] {
        double factor = scalar(&copy, alpha, type), old = scalar(&copy, beta, type);
        long rows = transpose ? n : m, columns = transpose ? m : n;
        for (long i = 0; i < rows; i++) {
            double sum = 0;
            for (long j = 0; j < columns; j++)
                sum += double(transpose ? a[i * lda + j] : a[j * lda + i]) *
                       x[incx > 0 ? j * incx : (j - columns + 1) * incx];
            T &to = y[incy > 0 ? i * incy : (i - rows + 1) * incy];
            to = T(factor * sum + (old != 0 ? old * to : 0));
        }
        return int(SUCCESS);
    }) ?: capturing(handle->stream) ? int(SUCCESS) : finish(handle->stream)); // which has read the factors
}

template <class T> int sum_of_absolutes(Handle *handle, int n, const T *x, int step, T *result) {
    if (!handle)
        return BLAS_NOT_INITIALIZED;
    if (handle->pointer_mode == 0)
        if (int error = capturing(handle->stream) ? not_while_capturing("cublasAsum") : 0)
            return status_of(error);
    return status_of(submit(handle->stream, "cublasAsum", [=] {
        double sum = 0;
        for (long i = 0; i < n && step > 0; i++)
            sum += std::fabs(double(x[i * step]));
        *result = T(sum);
        return int(SUCCESS);
    }) ?: capturing(handle->stream) ? int(SUCCESS) : finish(handle->stream));
}

} // namespace

extern "C" {

int cublasCreate_v2(Handle **handle) {
    if (sticky || not_while_capturing("cublasCreate")) // it allocates
        return BLAS_NOT_INITIALIZED;
    *handle = new Handle;
    return BLAS_SUCCESS;
}
int cublasDestroy_v2(Handle *handle) {
    delete handle;
    return BLAS_SUCCESS;
}
int cublasGetVersion_v2(Handle *, int *version) {
    *version = 130000;
    return BLAS_SUCCESS;
}
int cublasSetStream_v2(Handle *handle, void *stream) {
    handle->stream = stream;
    handle->workspace_size = 0; // as the real one does
    return BLAS_SUCCESS;
}
int cublasGetStream_v2(Handle *handle, void **stream) {
    *stream = handle->stream;
    return BLAS_SUCCESS;
}
int cublasSetPointerMode_v2(Handle *handle, int mode) {
    handle->pointer_mode = mode;
    return BLAS_SUCCESS;
}
int cublasGetPointerMode_v2(Handle *handle, int *mode) {
    *mode = handle->pointer_mode;
    return BLAS_SUCCESS;
}
int cublasSetMathMode(Handle *handle, int mode) {
    handle->math_mode = mode;
    return BLAS_SUCCESS;
}
int cublasGetMathMode(Handle *handle, int *mode) {
    *mode = handle->math_mode;
    return BLAS_SUCCESS;
}
int cublasSetAtomicsMode(Handle *, int) { return BLAS_SUCCESS; }
int cublasSetSmCountTarget(Handle *, int) { return BLAS_SUCCESS; }
int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t size) {
    if (size && (reinterpret_cast<size_t>(workspace) % ALIGNMENT || !memory::valid(workspace, size)))
        return complain(BLAS_INVALID_VALUE, "cublasSetWorkspace: %zu bytes that are not allocated, or not aligned to %zu",
                        size, ALIGNMENT);
    handle->workspace = static_cast<unsigned char *>(workspace);
    handle->workspace_size = size;
    return BLAS_SUCCESS;
}
const char *cublasGetStatusName(int status) {
    return status == 0    ? "CUBLAS_STATUS_SUCCESS"
           : status == 1  ? "CUBLAS_STATUS_NOT_INITIALIZED"
           : status == 7  ? "CUBLAS_STATUS_INVALID_VALUE"
           : status == 13 ? "CUBLAS_STATUS_EXECUTION_FAILED"
                          : "CUBLAS_STATUS_NOT_SUPPORTED";
}
const char *cublasGetStatusString(int status) { return cublasGetStatusName(status); }

int cublasGemmEx(Handle *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int a_type,
                 int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                 int compute, int) {
    return strided(handle, "cublasGemmEx", ta, tb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c,
                   c_type, ldc, 0, 1, compute);
}
int cublasGemmStridedBatchedEx(Handle *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                               int a_type, int lda, long long a_stride, const void *b, int b_type, int ldb,
                               long long b_stride, const void *beta, void *c, int c_type, int ldc, long long c_stride,
                               int batch, int compute, int) {
    return strided(handle, "cublasGemmStridedBatchedEx", ta, tb, m, n, k, alpha, a, a_type, lda, a_stride, b, b_type,
                   ldb, b_stride, beta, c, c_type, ldc, c_stride, batch, compute);
}
int cublasGemmBatchedEx(Handle *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *const *a,
                        int a_type, int lda, const void *const *b, int b_type, int ldb, const void *beta,
                        void *const *c, int c_type, int ldc, int batch, int compute, int) {
    return listed(handle, "cublasGemmBatchedEx", ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c,
                  c_type, ldc, batch, compute);
}

#define EMULATED_GEMM(LETTER, ELEMENT, TYPE, COMPUTE)                                                                  \
    int cublas##LETTER##gemm_v2(Handle *handle, int ta, int tb, int m, int n, int k, const ELEMENT *alpha,             \
                                const ELEMENT *a, int lda, const ELEMENT *b, int ldb, const ELEMENT *beta, ELEMENT *c, \
                                int ldc) {                                                                             \
        return strided(handle, "cublas" #LETTER "gemm", ta, tb, m, n, k, alpha, a, TYPE, lda, 0, b, TYPE, ldb, 0,      \
                       beta, c, TYPE, ldc, 0, 1, COMPUTE);                                                             \
    }                                                                                                                  \
    int cublas##LETTER##gemmStridedBatched(Handle *handle, int ta, int tb, int m, int n, int k, const ELEMENT *alpha,  \
                                           const ELEMENT *a, int lda, long long a_stride, const ELEMENT *b, int ldb,   \
                                           long long b_stride, const ELEMENT *beta, ELEMENT *c, int ldc,               \
                                           long long c_stride, int batch) {                                            \
        return strided(handle, "cublas" #LETTER "gemmStridedBatched", ta, tb, m, n, k, alpha, a, TYPE, lda, a_stride,  \
                       b, TYPE, ldb, b_stride, beta, c, TYPE, ldc, c_stride, batch, COMPUTE);                          \
    }                                                                                                                  \
    int cublas##LETTER##gemmBatched(Handle *handle, int ta, int tb, int m, int n, int k, const ELEMENT *alpha,         \
                                    const void *const *a, int lda, const void *const *b, int ldb, const ELEMENT *beta, \
                                    void *const *c, int ldc, int batch) {                                              \
        return listed(handle, "cublas" #LETTER "gemmBatched", ta, tb, m, n, k, alpha, a, TYPE, lda, b, TYPE, ldb,      \
                      beta, c, TYPE, ldc, batch, COMPUTE);                                                             \
    }

EMULATED_GEMM(S, float, R_32F, C32F)
EMULATED_GEMM(D, double, R_64F, C64F)
EMULATED_GEMM(H, unsigned short, R_16F, C16F)
int cublasHgemm(Handle *handle, int ta, int tb, int m, int n, int k, const unsigned short *alpha,
                const unsigned short *a, int lda, const unsigned short *b, int ldb, const unsigned short *beta,
                unsigned short *c, int ldc) {
    return cublasHgemm_v2(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

int cublasSgemv_v2(Handle *handle, int transpose, int m, int n, const float *alpha, const float *a, int lda,
                   const float *x, int incx, const float *beta, float *y, int incy) {
    return product_with_vector(handle, "cublasSgemv", transpose, m, n, alpha, a, lda, x, incx, beta, y, incy);
}
int cublasDgemv_v2(Handle *handle, int transpose, int m, int n, const double *alpha, const double *a, int lda,
                   const double *x, int incx, const double *beta, double *y, int incy) {
    return product_with_vector(handle, "cublasDgemv", transpose, m, n, alpha, a, lda, x, incx, beta, y, incy);
}
int cublasSasum_v2(Handle *handle, int n, const float *x, int step, float *result) {
    return sum_of_absolutes(handle, n, x, step, result);
}
int cublasDasum_v2(Handle *handle, int n, const double *x, int step, double *result) {
    return sum_of_absolutes(handle, n, x, step, result);
}
}

} // namespace emulated
