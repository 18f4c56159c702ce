// The names of CUDA's header for 8-bit floats, as far as candle's kernels use them: E4M3 only.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

namespace emulated {

inline float e4m3_value(unsigned char bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f)
        return NAN;
    float magnitude = exponent ? std::ldexp(static_cast<float>(8 + mantissa), exponent - 10)
                               : std::ldexp(static_cast<float>(mantissa), -9);
    return bits & 0x80 ? -magnitude : magnitude;
}

// To nearest even, and to the largest where that is too large.
inline unsigned char e4m3_bits(double value) {
    unsigned char sign = std::signbit(value) ? 0x80 : 0;
    value = std::fabs(value);
    if (std::isnan(value))
        return 0x7f;
    if (value >= 448)
        return sign | 0x7e;
    int exponent = value == 0 ? -6 : std::max(std::ilogb(value), -6);
    int scaled = static_cast<int>(std::nearbyint(std::ldexp(value, 3 - exponent))); // 8 to 16: carries by itself
    return sign | (((exponent + 6) << 3) + scaled);
}

} // namespace emulated

struct __nv_fp8_e4m3 {
    unsigned char __x;
    __nv_fp8_e4m3() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    explicit __nv_fp8_e4m3(T value) : __x(emulated::e4m3_bits(static_cast<double>(value))) {}
    explicit __nv_fp8_e4m3(__half value) : __nv_fp8_e4m3(float(value)) {}
    explicit __nv_fp8_e4m3(__nv_bfloat16 value) : __nv_fp8_e4m3(float(value)) {}
    explicit operator float() const { return emulated::e4m3_value(__x); }
};

inline __half_raw __nv_cvt_fp8_to_halfraw(unsigned char bits, __nv_fp8_interpretation_t) {
    return __half(emulated::e4m3_value(bits));
}
