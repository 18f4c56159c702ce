// Sizes of a convolution, as its kernels' arguments, and the coordinates of pixels.

struct Shape {
    size_t c_in, c_out, h, w, oh, ow, kh, kw, stride, ph, pw, dilation;
};

#define SHAPE                                                                                      \
    size_t c_in, size_t c_out, size_t h, size_t w, size_t oh, size_t ow, size_t kh, size_t kw,     \
        size_t stride, size_t ph, size_t pw, size_t dilation
#define AS_SHAPE Shape{c_in, c_out, h, w, oh, ow, kh, kw, stride, ph, pw, dilation}

// Division by the numbers that processors divide by quickly, where they are enough.
DEVICE size_t quotient(size_t a, size_t b) { return (a | b) >> 32 ? a / b : (u32)a / (u32)b; }

// A pixel of the batch: its image, its row and its column.
struct Pixel {
    size_t image, y, x;

    DEVICE Pixel(size_t at, size_t height, size_t width) {
        size_t row = quotient(at, width);
        x = at - row * width;
        image = quotient(row, height);
        y = row - image * height;
    }

    DEVICE void next(size_t height, size_t width) {
        if (++x < width) return;
        x = 0;
        if (++y < height) return;
        y = 0;
        image++;
    }
};

// Of one axis: where the kernel lies when its tap `k` is at `at`, and whether it is there at all.
DEVICE bool position(size_t at, size_t k, size_t padding, size_t stride, size_t dilation,
                     size_t positions, size_t &position) {
    size_t padded = at + padding, reach = k * dilation;
    if (padded < reach) return false;
    position = quotient(padded - reach, stride);
    return position * stride == padded - reach && position < positions;
}

// From sums to what they are rounded to.
#define EACH_ROUNDED(X)                                                                            \
    OF_F32(X(f32_f32, float, float)) OF_F16(X(f32_f16, float, f16))                                \
    OF_BF16(X(f32_bf16, float, bf16)) OF_F64(X(f64_f64, double, double))
