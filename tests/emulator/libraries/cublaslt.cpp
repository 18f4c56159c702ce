// libcublasLt: products with an epilogue.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "product.hpp"

namespace emulated {
namespace {

struct Layout {
    int type;
    int order = 0; // by columns
    unsigned long rows, columns;
    long ld;
    int batch = 1;
    long stride = 0;
};

struct Description {
    int compute, scale;
    int pointer_mode = 0, transpose_a = 0, transpose_b = 0, transpose_c = 0;
    int epilogue = 1, bias_type = -1;
    void *bias = nullptr, *aux = nullptr;
    long bias_stride = 0, aux_ld = 0, aux_stride = 0;
};

// As cuBLASLt's headers lay it out.
struct Result {
    unsigned long algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

enum Epilogue {
    RELU = 2,
    BIAS = 4,
    GELU = 32,
    AUX = 128,
    DRELU = 8 | AUX,
    DGELU = 64 | AUX,
    BGRAD = 16,
    BGRADA = 256,
    BGRADB = 512
};

bool has_epilogue(int epilogue) {
    switch (epilogue) {
    case 1:
    case RELU:
    case BIAS:
    case RELU | BIAS:
    case GELU:
    case GELU | BIAS:
    case GELU | AUX:
    case GELU | AUX | BIAS:
    case BGRADA:
    case BGRADB:
        return true;
    default:
        return false;
    }
}

double gelu(double x) { return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

int check(const Description *description, const Layout *a, const Layout *b, const Layout *c, const Layout *d) {
    if (!description || !a || !b || !c || !d)
        return BLAS_INVALID_VALUE;
    unsigned long m = description->transpose_a ? a->columns : a->rows,
                  k = description->transpose_a ? a->rows : a->columns;
    unsigned long k_b = description->transpose_b ? b->columns : b->rows,
                  n = description->transpose_b ? b->rows : b->columns;
    if (k != k_b || d->rows != m || d->columns != n || c->rows != m || c->columns != n)
        return complain(BLAS_INVALID_VALUE, "cublasLtMatmul: %lu x %lu times %lu x %lu to %lu x %lu", m, k, k_b, n,
                        d->rows, d->columns);
    for (const Layout *layout : {a, b, c, d})
        if (layout->order != 0 || layout->ld < std::max(1l, long(layout->rows)) || layout->batch != d->batch)
            return complain(BLAS_INVALID_VALUE, "cublasLtMatmul: order %d, ld %ld of %lu rows, %d products",
                            layout->order, layout->ld, layout->rows, layout->batch);
    if (!supported(a->type, b->type, d->type, description->compute) || c->type != d->type || description->transpose_c ||
        description->scale != scale_type(description->compute))
        return complain(BLAS_NOT_SUPPORTED, "cublasLtMatmul: types %d, %d, %d and %d, computed as %d", a->type, b->type,
                        c->type, d->type, description->compute);
    if (!has_epilogue(description->epilogue))
        return complain(BLAS_NOT_SUPPORTED, "cublasLtMatmul: epilogue %d is not implemented", description->epilogue);
    return BLAS_SUCCESS;
}

template <class T> int set(T &to, const void *from, size_t size) {
    if (size < sizeof(T))
        return BLAS_INVALID_VALUE;
    memcpy(&to, from, sizeof(T));
    return BLAS_SUCCESS;
}

// The sums over k of an operand, which are a bias's gradient.
void bias_gradient(const Description &description, const Product &p, int bias_type) {
    const bool of_a = description.epilogue == BGRADA;
    const Matrix &x = of_a ? p.a : p.b;
    for (int batch = 0; batch < p.batch; batch++)
        for (long i = 0; i < (of_a ? p.m : p.n); i++) {
            double sum = 0;
            for (long q = 0; q < p.k; q++) {
                bool k_is_row = of_a ? p.transpose_a : !p.transpose_b;
                sum += load(x.at(batch), x.type, k_is_row ? i * x.ld + q : q * x.ld + i);
            }
            store(description.bias, bias_type, batch * description.bias_stride + i, sum);
        }
}

} // namespace

extern "C" {

int cublasLtCreate(void **handle) {
    if (sticky || not_while_capturing("cublasLtCreate"))
        return BLAS_NOT_INITIALIZED;
    *handle = new int;
    return BLAS_SUCCESS;
}
int cublasLtDestroy(void *handle) {
    delete static_cast<int *>(handle);
    return BLAS_SUCCESS;
}
size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatrixLayoutCreate(Layout **layout, int type, unsigned long rows, unsigned long columns, long ld) {
    *layout = new Layout{type, 0, rows, columns, ld};
    return BLAS_SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) {
    delete layout;
    return BLAS_SUCCESS;
}
int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t size) {
    switch (attribute) {
    case 0:
        return set(layout->type, value, size);
    case 1:
        return set(layout->order, value, size);
    case 2:
        return set(layout->rows, value, size);
    case 3:
        return set(layout->columns, value, size);
    case 4:
        return set(layout->ld, value, size);
    case 5:
        return set(layout->batch, value, size);
    case 6:
        return set(layout->stride, value, size);
    default:
        return complain(BLAS_NOT_SUPPORTED, "cublasLtMatrixLayoutSetAttribute of attribute %d", attribute);
    }
}
int cublasLtMatmulDescCreate(Description **description, int compute, int scale) {
    *description = new Description{compute, scale};
    return BLAS_SUCCESS;
}
int cublasLtMatmulDescDestroy(Description *description) {
    delete description;
    return BLAS_SUCCESS;
}
int cublasLtMatmulDescSetAttribute(Description *description, int attribute, const void *value, size_t size) {
    switch (attribute) {
    case 0:
        return set(description->compute, value, size);
    case 1:
        return set(description->scale, value, size);
    case 2:
        return set(description->pointer_mode, value, size);
    case 3:
        return set(description->transpose_a, value, size);
    case 4:
        return set(description->transpose_b, value, size);
    case 5:
        return set(description->transpose_c, value, size);
    case 7:
        return set(description->epilogue, value, size);
    case 8:
        return set(description->bias, value, size);
    case 10:
        return set(description->bias_stride, value, size);
    case 11:
        return set(description->aux, value, size);
    case 12:
        return set(description->aux_ld, value, size);
    case 13:
        return set(description->aux_stride, value, size);
    case 26:
        return set(description->bias_type, value, size);
    default:
        return complain(BLAS_NOT_SUPPORTED, "cublasLtMatmulDescSetAttribute of attribute %d", attribute);
    }
}
int cublasLtMatmulPreferenceCreate(void **preference) {
    *preference = new int;
    return BLAS_SUCCESS;
}
int cublasLtMatmulPreferenceDestroy(void *preference) {
    delete static_cast<int *>(preference);
    return BLAS_SUCCESS;
}
int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return BLAS_SUCCESS; }
int cublasLtMatmulAlgoGetHeuristic(void *, const Description *description, const Layout *a, const Layout *b,
                                   const Layout *c, const Layout *d, void *, int wanted, Result *results, int *found) {
    *found = 0;
    if (int status = check(description, a, b, c, d))
        return status;
    if (wanted < 1)
        return BLAS_INVALID_VALUE;
    results[0] = Result{};
    results[0].waves = 1;
    if (refuses()) {
        // By an error, by having nothing, or by having what cannot run.
        static const int errors[] = {BLAS_INVALID_VALUE, 8 /* another architecture */, 14 /* internal */, BLAS_NOT_SUPPORTED};
        if (unsigned kind = choice(6); kind < 4)
            return errors[kind];
        else if (kind == 4)
            return BLAS_SUCCESS;
        results[0].state = BLAS_NOT_SUPPORTED;
    }
    *found = 1;
    return BLAS_SUCCESS;
}

int cublasLtMatmul(void *handle, const Description *given, const void *alpha, const void *a, const Layout *a_layout,
                   const void *b, const Layout *b_layout, const void *beta, const void *c, const Layout *c_layout,
                   void *d, const Layout *d_layout, const void *, void *workspace, size_t workspace_size,
                   void *stream) {
    if (!handle)
        return BLAS_NOT_INITIALIZED;
    if (int status = check(given, a_layout, b_layout, c_layout, d_layout))
        return status;
    if (workspace_size && workspace && !memory::valid(workspace, workspace_size))
        return complain(BLAS_INVALID_VALUE, "cublasLtMatmul: its workspace is not in device memory");
    if (given->pointer_mode)
        return complain(BLAS_NOT_SUPPORTED, "cublasLtMatmul: factors in device memory are not implemented");
    Description description = *given;
    auto matrix = [](const void *data, const Layout *layout) {
        return Matrix{layout->type, layout->ld, layout->stride, data};
    };
    Product p{description.transpose_a != 0,
              description.transpose_b != 0,
              long(d_layout->rows),
              long(d_layout->columns),
              long(description.transpose_a ? a_layout->rows : a_layout->columns),
              d_layout->batch,
              description.compute,
              load(alpha, description.scale, 0),
              load(beta, description.scale, 0),
              matrix(a, a_layout),
              matrix(b, b_layout),
              matrix(c, c_layout),
              matrix(d, d_layout),
              nullptr};
    p.backwards = true;
    const int epilogue = description.epilogue, type = p.d.type;
    const int bias_type = description.bias_type < 0 ? type : description.bias_type;
    const bool bias = epilogue & BIAS, gradient = epilogue == BGRADA || epilogue == BGRADB;
    long bias_length = epilogue == BGRADB ? p.n : p.m;
    if ((bias || gradient) && !memory::valid(description.bias, bias_length * size_of(bias_type)))
        return complain(BLAS_INVALID_VALUE, "cublasLtMatmul: a bias of %ld is not in device memory", bias_length);
    const bool aux = epilogue & AUX;
    if (aux && (description.aux_ld < p.m ||
                !memory::valid(description.aux, ((p.n - 1) * description.aux_ld + p.m) * size_of(type))))
        return complain(BLAS_INVALID_VALUE, "cublasLtMatmul: an auxiliary matrix with ld %ld", description.aux_ld);
    if (epilogue != 1 && !gradient)
        p.epilogue = [=](int batch, long row, long column, double value) {
            if (bias)
                value += load(description.bias, bias_type, batch * description.bias_stride + row);
            if (aux)
                store(description.aux, type, batch * description.aux_stride + column * description.aux_ld + row, value);
            if (epilogue & RELU)
                value = value > 0 || std::isnan(value) ? value : 0;
            return epilogue & GELU ? gelu(value) : value;
        };
    int error = submit(stream, "cublasLtMatmul", [=] {
        if (int error = check_memory(p))
            return error;
        if (gradient)
            bias_gradient(description, p, bias_type);
        multiply(p);
        return int(SUCCESS);
    });
    return error ? BLAS_EXECUTION_FAILED : BLAS_SUCCESS;
}
}

} // namespace emulated
