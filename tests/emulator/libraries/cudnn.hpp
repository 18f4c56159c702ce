// What libcudnn's two interfaces have in common: tensors, convolutions, and their computation.
#pragma once
#include "product.hpp"

namespace emulated::dnn {

enum DnnStatus {
    DNN_SUCCESS = 0,
    DNN_NOT_INITIALIZED = 1001,
    DNN_BAD_PARAM = 2000,
    DNN_NOT_SUPPORTED = 3000,
    DNN_EXECUTION_FAILED = 5000
};

constexpr int MAX = 5; // dimensions: images, channels, and up to three of space
constexpr size_t WORKSPACE = 4096;

struct Handle {
    void *stream = nullptr;
};

// A tensor, or a filter.
struct Tensor {
    int type = 0, rank = 0;
    int size[MAX], stride[MAX];

    size_t count() const {
        size_t count = 1;
        for (int i = 0; i < rank; i++)
            count *= size[i];
        return count;
    }
    // How many elements its memory has.
    size_t extent() const {
        size_t last = 0;
        for (int i = 0; i < rank; i++)
            last += size_t(size[i] - 1) * stride[i];
        return last + 1;
    }
    // Where the element of an index in order is.
    size_t at(size_t index) const {
        size_t place = 0;
        for (int i = rank - 1; i >= 0; i--) {
            place += index % size[i] * stride[i];
            index /= size[i];
        }
        return place;
    }
};

struct Convolution {
    int rank = 0, mode = 0, compute = 0, groups = 1, math = 0;
    int padding[MAX], stride[MAX], dilation[MAX];
};

enum Pass { FORWARD, DATA, FILTER };

struct Task {
    Pass pass;
    Tensor x, w, y;
    Convolution convolution;
    const void *a, *b; // what is read
    void *to;
    double alpha, beta;
    bool single; // sums in F32, not in F64
    // Added to each channel, if there is one.
    const void *bias = nullptr;
    int bias_type = 0;
};

// Success, or by chance one of the codes of what is not supported.
int refusal();
int refusal_of_graph();

// Describes a tensor of cuDNN's type, packed if there are no strides.
int set(Tensor *tensor, int type, int rank, const int *size, const int *stride);

// Whether tensors of whatever types are those of a convolution.
bool fit(const Tensor &x, const Tensor &w, const Convolution &convolution, const Tensor &y);

// Has the stream compute it, with `needed` bytes of workspace.
int launch(void *stream, const char *name, const Task &task, size_t needed, void *workspace, size_t workspace_size);

} // namespace emulated::dnn
