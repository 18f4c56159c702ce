// libcudnn's older interface: convolutions, of any layout that strides can tell. What else it has is not written.
#include "cudnn.hpp"

#include <algorithm>
#include <cmath>

namespace emulated::dnn {

namespace {

constexpr int KNOWN = 8;      // algorithms: the first sums in F64, the others in F32
constexpr int ALGORITHMS = 2; // those proposed: the second needs a workspace, and is deterministic

} // namespace

static int refused(bool refused) { return refused ? int(DNN_NOT_SUPPORTED) + int(choice(14)) : int(DNN_SUCCESS); }

int refusal() { return refused(refuses()); }

int refusal_of_graph() { return refused(refuses_graphs()); }

namespace {

// As cuDNN's headers lay it out.
struct Performance {
    int algorithm, status;
    float time;
    size_t memory;
    int determinism, math, reserved[3];
};

// The number that products know a type by.
int known(int type) {
    switch (type) {
    case 0:
        return R_32F;
    case 1:
        return R_64F;
    case 2:
        return R_16F;
    case 9:
        return R_16BF;
    default:
        return -1;
    }
}

} // namespace

int set(Tensor *tensor, int type, int rank, const int *size, const int *stride) {
    if (known(type) < 0)
        return complain(DNN_NOT_SUPPORTED, "cuDNN: tensors of type %d are not implemented", type);
    if (rank < 3 || rank > MAX || std::any_of(size, size + rank, [](int n) { return n < 1; }))
        return complain(DNN_BAD_PARAM, "cuDNN: a tensor of %d dimensions, or without elements", rank);
    tensor->type = known(type);
    tensor->rank = rank;
    int packed = 1;
    for (int i = rank - 1; i >= 0; i--) {
        tensor->size[i] = size[i];
        tensor->stride[i] = stride ? stride[i] : packed;
        packed *= size[i];
    }
    return DNN_SUCCESS;
}

bool fit(const Tensor &x, const Tensor &w, const Convolution &convolution, const Tensor &y) {
    const int rank = x.rank, groups = convolution.groups;
    bool fits = w.rank == rank && y.rank == rank && convolution.rank == rank - 2 && groups > 0 &&
                x.size[1] == w.size[1] * groups && w.size[0] % groups == 0 && y.size[1] == w.size[0] &&
                y.size[0] == x.size[0];
    for (int i = 0; fits && i < convolution.rank; i++) {
        int reach = convolution.dilation[i] * (w.size[i + 2] - 1) + 1;
        fits = y.size[i + 2] == (x.size[i + 2] + 2 * convolution.padding[i] - reach) / convolution.stride[i] + 1;
    }
    return fits;
}

namespace {

// Packed, with the channels last or not.
int set_packed(Tensor *tensor, int type, int format, int rank, const int *size) {
    if (format != 0 && format != 1)
        return complain(DNN_NOT_SUPPORTED, "cuDNN: format %d is not implemented", format);
    if (int status = set(tensor, type, rank, size, nullptr))
        return status;
    if (format == 1) {
        int packed = 1;
        tensor->stride[1] = packed;
        packed *= size[1];
        for (int i = rank - 1; i > 1; i--) {
            tensor->stride[i] = packed;
            packed *= size[i];
        }
        tensor->stride[0] = packed;
    }
    return DNN_SUCCESS;
}

int check(const Tensor *x, const Tensor *w, const Convolution *convolution, const Tensor *y) {
    if (!x || !w || !convolution || !y)
        return DNN_BAD_PARAM;
    bool fits = x->type == w->type && x->type == y->type && fit(*x, *w, *convolution, *y);
    return fits ? DNN_SUCCESS : complain(DNN_BAD_PARAM, "cuDNN: tensors do not fit their convolution");
}

using Values = std::vector<double>;

Values read(const Tensor &tensor, const void *data) {
    Values values(tensor.count());
    for (size_t i = 0; i < values.size(); i++)
        values[i] = load(data, tensor.type, tensor.at(i));
    return values;
}

void write(const Tensor &tensor, void *data, const Values &values, double alpha, double beta) {
    for (size_t i = 0; i < values.size(); i++) {
        size_t at = tensor.at(i);
        store(data, tensor.type, at, alpha * values[i] + (beta != 0 ? beta * load(data, tensor.type, at) : 0));
    }
}

// Calls f(x, w, y) with the indices of each input, weight and output that go together.
template <class F> void each(const Tensor &x, const Tensor &w, const Tensor &y, const Convolution &c, F f) {
    auto space = [](const Tensor &tensor, int i) { return i < tensor.rank - 2 ? tensor.size[i + 2] : 1; };
    const int x_channels = x.size[1], depth = w.size[1], out = w.size[0], per_group = out / c.groups;
    int xs[3], ws[3], ys[3];
    for (int i = 0; i < 3; i++)
        xs[i] = space(x, i), ws[i] = space(w, i), ys[i] = space(y, i);
    const size_t x_size = size_t(xs[0]) * xs[1] * xs[2], w_size = size_t(ws[0]) * ws[1] * ws[2],
                 y_size = size_t(ys[0]) * ys[1] * ys[2];
    for (size_t at = 0; at < y_size; at++) {
        const int place[3] = {int(at / ys[2] / ys[1]), int(at / ys[2] % ys[1]), int(at % ys[2])};
        for (size_t tap = 0; tap < w_size; tap++) {
            const int offset[3] = {int(tap / ws[2] / ws[1]), int(tap / ws[2] % ws[1]), int(tap % ws[2])};
            size_t from = 0;
            bool inside = true;
            for (int i = 0; i < 3; i++) {
                int step = i < c.rank ? (c.mode == 0 ? ws[i] - 1 - offset[i] : offset[i]) * c.dilation[i] : 0;
                int p = i < c.rank ? place[i] * c.stride[i] + step - c.padding[i] : 0;
                inside &= p >= 0 && p < xs[i];
                from = from * xs[i] + p;
            }
            if (!inside)
                continue;
            for (int image = 0; image < x.size[0]; image++)
                for (int k = 0; k < out; k++)
                    for (int d = 0; d < depth; d++)
                        f((size_t(image) * x_channels + k / per_group * depth + d) * x_size + from,
                          (size_t(k) * depth + d) * w_size + tap, (size_t(image) * out + k) * y_size + at);
        }
    }
}

int compute(const Task &work) {
    const Tensor &result = work.pass == FORWARD ? work.y : work.pass == DATA ? work.x : work.w;
    const Tensor &first = work.pass == DATA ? work.w : work.x, &second = work.pass == FORWARD ? work.w : work.y;
    auto there = [](const char *name, const Tensor &tensor, const void *data) {
        if (memory::valid(data, tensor.extent() * size_of(tensor.type)))
            return int(SUCCESS);
        return sticky = complain(
                   ILLEGAL_ADDRESS, "cuDNN: %s of a convolution: access %s", name,
                   memory::describe(static_cast<const char *>(data) + tensor.extent() * size_of(tensor.type) - 1)
                       .c_str());
    };
    for (int error : {there("the first operand", first, work.a), there("the second operand", second, work.b),
                      there("the result", result, work.to)})
        if (error)
            return error;
    Values a = read(first, work.a), b = read(second, work.b), sums(result.count());
    auto add = [&](double &sum, double term) { sum = work.single ? float(sum + term) : sum + term; };
    switch (work.pass) {
    case FORWARD:
        each(work.x, work.w, work.y, work.convolution, [&](size_t x, size_t w, size_t y) { add(sums[y], a[x] * b[w]); });
        break;
    case DATA:
        each(work.x, work.w, work.y, work.convolution, [&](size_t x, size_t w, size_t y) { add(sums[x], a[w] * b[y]); });
        break;
    case FILTER:
        each(work.x, work.w, work.y, work.convolution, [&](size_t x, size_t w, size_t y) { add(sums[w], a[x] * b[y]); });
        break;
    }
    if (work.bias) {
        size_t channels = result.size[1], space = 1;
        for (int i = 2; i < result.rank; i++)
            space *= result.size[i];
        if (!memory::valid(work.bias, channels * size_of(work.bias_type)))
            return sticky = complain(ILLEGAL_ADDRESS, "cuDNN: the bias is not in device memory");
        for (size_t i = 0; i < sums.size(); i++)
            sums[i] += load(work.bias, work.bias_type, i / space % channels);
    }
    write(result, work.to, sums, work.alpha, work.beta);
    return SUCCESS;
}

} // namespace

int launch(void *stream, const char *name, const Task &task, size_t needed, void *workspace, size_t workspace_size) {
    if (needed && (workspace_size < needed || !memory::valid(workspace, needed)))
        return complain(DNN_BAD_PARAM, "%s: a workspace of %zu bytes, where %zu are needed", name, workspace_size,
                        needed);
    int error = submit(stream, name, [=] {
        if (needed) // so that nobody keeps there what is of use
            std::fill_n(static_cast<unsigned char *>(workspace), needed, GARBAGE);
        return compute(task);
    });
    return error ? DNN_EXECUTION_FAILED : DNN_SUCCESS;
}

namespace {

size_t workspace_of(int algorithm) { return algorithm >= 1 ? WORKSPACE : 0; }

int start(Handle *handle, const char *name, Pass pass, const Tensor *x, const Tensor *w, const Tensor *y,
          const Convolution *convolution, const void *a, const void *b, void *to, const void *alpha, const void *beta,
          int algorithm, void *workspace, size_t workspace_size) {
    if (!handle)
        return DNN_NOT_INITIALIZED;
    if (int status = check(x, w, convolution, y))
        return status;
    if (int status = refusal())
        return status;
    if (algorithm < 0 || algorithm >= KNOWN)
        return complain(DNN_NOT_SUPPORTED, "%s: algorithm %d does not exist", name, algorithm);
    const int scale = x->type == R_64F ? R_64F : R_32F;
    Task task{pass, *x, *w, *y, *convolution, a, b, to, load(alpha, scale, 0), load(beta, scale, 0), algorithm >= 1};
    return launch(handle->stream, name, task, workspace_of(algorithm), workspace, workspace_size);
}

int algorithms(const Convolution *convolution, int wanted, int *found, Performance *performances) {
    if (int status = refusal())
        return status;
    *found = std::min(wanted, ALGORITHMS);
    for (int i = 0; i < *found; i++) {
        int algorithm = ALGORITHMS - 1 - i;
        performances[i] = {algorithm, DNN_SUCCESS,       1.0f + i, workspace_of(algorithm),
                           algorithm, convolution->math, {0, 0, 0}};
    }
    return DNN_SUCCESS;
}

} // namespace

extern "C" {

size_t cudnnGetVersion() { return 92100; }
size_t cudnnGetCudartVersion() { return 13000; }
int cudnnGetProperty(int which, int *value) {
    *value = which == 0 ? 9 : which == 1 ? 21 : 0;
    return DNN_SUCCESS;
}
const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS_NOT_SUCCESS" : "CUDNN_STATUS_SUCCESS"; }
int cudnnCreate(Handle **handle) {
    if (sticky || not_while_capturing("cudnnCreate"))
        return DNN_NOT_INITIALIZED;
    *handle = new Handle;
    return DNN_SUCCESS;
}
int cudnnDestroy(Handle *handle) {
    delete handle;
    return DNN_SUCCESS;
}
int cudnnSetStream(Handle *handle, void *stream) {
    handle->stream = stream;
    return DNN_SUCCESS;
}
int cudnnGetStream(Handle *handle, void **stream) {
    *stream = handle->stream;
    return DNN_SUCCESS;
}

int cudnnCreateTensorDescriptor(Tensor **tensor) {
    *tensor = new Tensor;
    return DNN_SUCCESS;
}
int cudnnDestroyTensorDescriptor(Tensor *tensor) {
    delete tensor;
    return DNN_SUCCESS;
}
int cudnnSetTensor4dDescriptor(Tensor *tensor, int format, int type, int n, int c, int h, int w) {
    const int size[] = {n, c, h, w};
    return set_packed(tensor, type, format, 4, size);
}
int cudnnSetTensor4dDescriptorEx(Tensor *tensor, int type, int n, int c, int h, int w, int n_stride, int c_stride,
                                 int h_stride, int w_stride) {
    const int size[] = {n, c, h, w}, stride[] = {n_stride, c_stride, h_stride, w_stride};
    return set(tensor, type, 4, size, stride);
}
int cudnnSetTensorNdDescriptor(Tensor *tensor, int type, int rank, const int *size, const int *stride) {
    return set(tensor, type, rank, size, stride);
}
int cudnnCreateFilterDescriptor(Tensor **filter) { return cudnnCreateTensorDescriptor(filter); }
int cudnnDestroyFilterDescriptor(Tensor *filter) { return cudnnDestroyTensorDescriptor(filter); }
int cudnnSetFilter4dDescriptor(Tensor *filter, int type, int format, int k, int c, int h, int w) {
    return cudnnSetTensor4dDescriptor(filter, format, type, k, c, h, w);
}
int cudnnSetFilterNdDescriptor(Tensor *filter, int type, int format, int rank, const int *size) {
    return set_packed(filter, type, format, rank, size);
}

int cudnnCreateConvolutionDescriptor(Convolution **convolution) {
    *convolution = new Convolution;
    return DNN_SUCCESS;
}
int cudnnDestroyConvolutionDescriptor(Convolution *convolution) {
    delete convolution;
    return DNN_SUCCESS;
}
int cudnnSetConvolutionNdDescriptor(Convolution *convolution, int rank, const int *padding, const int *stride,
                                    const int *dilation, int mode, int type) {
    if (rank < 1 || rank > 3)
        return DNN_NOT_SUPPORTED;
    convolution->rank = rank;
    convolution->mode = mode;
    convolution->compute = type;
    for (int i = 0; i < rank; i++) {
        if (padding[i] < 0 || stride[i] < 1 || dilation[i] < 1)
            return DNN_BAD_PARAM;
        convolution->padding[i] = padding[i];
        convolution->stride[i] = stride[i];
        convolution->dilation[i] = dilation[i];
    }
    return DNN_SUCCESS;
}
int cudnnSetConvolution2dDescriptor(Convolution *convolution, int pad_h, int pad_w, int stride_h, int stride_w,
                                    int dilation_h, int dilation_w, int mode, int type) {
    const int padding[] = {pad_h, pad_w}, stride[] = {stride_h, stride_w}, dilation[] = {dilation_h, dilation_w};
    return cudnnSetConvolutionNdDescriptor(convolution, 2, padding, stride, dilation, mode, type);
}
int cudnnSetConvolutionGroupCount(Convolution *convolution, int groups) {
    convolution->groups = groups;
    return groups < 1 ? DNN_BAD_PARAM : refusal();
}
int cudnnSetConvolutionMathType(Convolution *convolution, int math) {
    convolution->math = math;
    return DNN_SUCCESS;
}

int cudnnGetConvolutionForwardWorkspaceSize(Handle *, const Tensor *x, const Tensor *w, const Convolution *convolution,
                                            const Tensor *y, int algorithm, size_t *size) {
    *size = workspace_of(algorithm);
    if (int status = refusal())
        return status;
    return algorithm < KNOWN ? check(x, w, convolution, y) : DNN_NOT_SUPPORTED;
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(Handle *handle, const Tensor *w, const Tensor *y,
                                                 const Convolution *convolution, const Tensor *x, int algorithm,
                                                 size_t *size) {
    return cudnnGetConvolutionForwardWorkspaceSize(handle, x, w, convolution, y, algorithm, size);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(Handle *handle, const Tensor *x, const Tensor *y,
                                                   const Convolution *convolution, const Tensor *w, int algorithm,
                                                   size_t *size) {
    return cudnnGetConvolutionForwardWorkspaceSize(handle, x, w, convolution, y, algorithm, size);
}

int cudnnGetConvolutionForwardAlgorithm_v7(Handle *, const Tensor *x, const Tensor *w, const Convolution *convolution,
                                           const Tensor *y, int wanted, int *found, Performance *performances) {
    int status = check(x, w, convolution, y);
    return status ? status : algorithms(convolution, wanted, found, performances);
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(Handle *, const Tensor *w, const Tensor *y,
                                                const Convolution *convolution, const Tensor *x, int wanted, int *found,
                                                Performance *performances) {
    int status = check(x, w, convolution, y);
    return status ? status : algorithms(convolution, wanted, found, performances);
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(Handle *, const Tensor *x, const Tensor *y,
                                                  const Convolution *convolution, const Tensor *w, int wanted,
                                                  int *found, Performance *performances) {
    int status = check(x, w, convolution, y);
    return status ? status : algorithms(convolution, wanted, found, performances);
}

// A trial's results are garbage, as they may be.
#define EMULATED_FIND(RESULT)                                                                                          \
    if (capturing(handle->stream) && not_while_capturing("cudnnFindConvolution"))                                      \
        return DNN_EXECUTION_FAILED;                                                                                   \
    if (int status = check(x, w, convolution, y))                                                                      \
        return status;                                                                                                 \
    if (!capturing(handle->stream) && finish(handle->stream))                                                          \
        return DNN_EXECUTION_FAILED;                                                                                   \
    if (!memory::valid(data, RESULT->extent() * size_of(RESULT->type)))                                                \
        return complain(DNN_BAD_PARAM, "cudnnFindConvolution: its result is not in device memory");                    \
    for (size_t i = 0; i < RESULT->count(); i++)                                                                       \
        store(data, RESULT->type, RESULT->at(i), NAN);                                                                 \
    return algorithms(convolution, wanted, found, performances)

int cudnnFindConvolutionForwardAlgorithmEx(Handle *handle, const Tensor *x, const void *, const Tensor *w, const void *,
                                           const Convolution *convolution, const Tensor *y, void *data, int wanted,
                                           int *found, Performance *performances, void *, size_t) {
    EMULATED_FIND(y);
}
int cudnnFindConvolutionBackwardDataAlgorithmEx(Handle *handle, const Tensor *w, const void *, const Tensor *y,
                                                const void *, const Convolution *convolution, const Tensor *x,
                                                void *data, int wanted, int *found, Performance *performances, void *,
                                                size_t) {
    EMULATED_FIND(x);
}
int cudnnFindConvolutionBackwardFilterAlgorithmEx(Handle *handle, const Tensor *x, const void *, const Tensor *y,
                                                  const void *, const Convolution *convolution, const Tensor *w,
                                                  void *data, int wanted, int *found, Performance *performances, void *,
                                                  size_t) {
    EMULATED_FIND(w);
}

int cudnnConvolutionForward(Handle *handle, const void *alpha, const Tensor *x, const void *x_data, const Tensor *w,
                            const void *w_data, const Convolution *convolution, int algorithm, void *workspace,
                            size_t workspace_size, const void *beta, const Tensor *y, void *y_data) {
    return start(handle, "cudnnConvolutionForward", FORWARD, x, w, y, convolution, x_data, w_data, y_data, alpha, beta,
                 algorithm, workspace, workspace_size);
}
int cudnnConvolutionBackwardData(Handle *handle, const void *alpha, const Tensor *w, const void *w_data,
                                 const Tensor *y, const void *y_data, const Convolution *convolution, int algorithm,
                                 void *workspace, size_t workspace_size, const void *beta, const Tensor *x,
                                 void *x_data) {
    return start(handle, "cudnnConvolutionBackwardData", DATA, x, w, y, convolution, w_data, y_data, x_data, alpha,
                 beta, algorithm, workspace, workspace_size);
}
int cudnnConvolutionBackwardFilter(Handle *handle, const void *alpha, const Tensor *x, const void *x_data,
                                   const Tensor *y, const void *y_data, const Convolution *convolution, int algorithm,
                                   void *workspace, size_t workspace_size, const void *beta, const Tensor *w,
                                   void *w_data) {
    return start(handle, "cudnnConvolutionBackwardFilter", FILTER, x, w, y, convolution, x_data, y_data, w_data, alpha,
                 beta, algorithm, workspace, workspace_size);
}
}

} // namespace emulated::dnn
