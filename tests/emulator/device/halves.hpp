// The bits of 16-bit floats: rounded to nearest even.
#pragma once
#include <cstring>
#include <type_traits>

namespace emulated {

inline unsigned float_bits(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float bits_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Rounds to odd, so that rounding the result once more, to 16 bits, rounds what came in.
inline float to_odd(double x) {
    float nearest = static_cast<float>(x);
    if (nearest == x || nearest != nearest || (float_bits(nearest) & 1))
        return nearest;
    bool away = (nearest < 0 ? -nearest : nearest) > (x < 0 ? -x : x);
    return bits_float(float_bits(nearest) + (away ? -1 : 1));
}

inline unsigned short half_bits(float value) {
    unsigned bits = float_bits(value), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return 0x7fff;
    if (bits >= 0x477ff000)
        return sign | 0x7c00;
    if (bits < 0x38800000) // subnormal: the sum's rounding is the wanted one
        return sign | (float_bits(bits_float(bits) + 0.5f) - 0x3f000000);
    return sign | (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13;
}

inline float half_value(unsigned short half) {
    unsigned sign = (half & 0x8000u) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00)
        return bits_float(sign | 0x7f800000 | rest << 13);
    float magnitude = rest < 0x400 ? static_cast<float>(rest) / (1 << 24) : bits_float((rest << 13) + 0x38000000);
    return bits_float(sign | float_bits(magnitude));
}

inline unsigned short bfloat_bits(float value) {
    unsigned bits = float_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float bfloat_value(unsigned short half) { return bits_float(static_cast<unsigned>(half) << 16); }

} // namespace emulated
