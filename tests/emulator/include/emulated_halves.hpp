// What the two 16-bit formats share: a float's arithmetic, rounded to nearest even after each step. How
// they are rounded is in ../device/halves.hpp.
#pragma once
// A type of 16 bits and its operators.
#define EMULATED_HALF(TYPE, RAW, BITS, VALUE)                                                                          \
    struct RAW {                                                                                                       \
        unsigned short x;                                                                                              \
    };                                                                                                                 \
    struct alignas(2) TYPE {                                                                                           \
        unsigned short __x;                                                                                            \
        TYPE() = default;                                                                                              \
        TYPE(RAW raw) : __x(raw.x) {}                                                                                  \
        TYPE(float value) : __x(emulated::BITS(value)) {}                                                              \
        TYPE(double value) : __x(emulated::BITS(emulated::to_odd(value))) {}                                           \
        template <class T, class = std::enable_if_t<std::is_integral_v<T>>>                                            \
        TYPE(T value) : TYPE(static_cast<double>(value)) {}                                                            \
        operator RAW() const { return {__x}; }                                                                         \
        operator float() const { return emulated::VALUE(__x); }                                                        \
        TYPE &operator=(float value) { return *this = TYPE(value); }                                                   \
        TYPE &operator=(double value) { return *this = TYPE(value); }                                                  \
        template <class T, class = std::enable_if_t<std::is_integral_v<T>>> TYPE &operator=(T value) {                 \
            return *this = TYPE(value);                                                                                \
        }                                                                                                              \
    };                                                                                                                 \
    inline TYPE operator+(TYPE a, TYPE b) { return float(a) + float(b); }                                              \
    inline TYPE operator-(TYPE a, TYPE b) { return float(a) - float(b); }                                              \
    inline TYPE operator*(TYPE a, TYPE b) { return float(a) * float(b); }                                              \
    inline TYPE operator/(TYPE a, TYPE b) { return float(a) / float(b); }                                              \
    inline TYPE operator-(TYPE a) { return RAW{static_cast<unsigned short>(a.__x ^ 0x8000)}; }                         \
    inline TYPE operator+(TYPE a) { return a; }                                                                        \
    inline TYPE &operator+=(TYPE &a, TYPE b) { return a = a + b; }                                                     \
    inline TYPE &operator-=(TYPE &a, TYPE b) { return a = a - b; }                                                     \
    inline TYPE &operator*=(TYPE &a, TYPE b) { return a = a * b; }                                                     \
    inline TYPE &operator/=(TYPE &a, TYPE b) { return a = a / b; }                                                     \
    inline bool operator==(TYPE a, TYPE b) { return float(a) == float(b); }                                            \
    inline bool operator!=(TYPE a, TYPE b) { return float(a) != float(b); }                                            \
    inline bool operator<(TYPE a, TYPE b) { return float(a) < float(b); }                                              \
    inline bool operator<=(TYPE a, TYPE b) { return float(a) <= float(b); }                                            \
    inline bool operator>(TYPE a, TYPE b) { return float(a) > float(b); }                                              \
    inline bool operator>=(TYPE a, TYPE b) { return float(a) >= float(b); }                                            \
    inline TYPE __hadd(TYPE a, TYPE b) { return a + b; }                                                               \
    inline TYPE __hsub(TYPE a, TYPE b) { return a - b; }                                                               \
    inline TYPE __hmul(TYPE a, TYPE b) { return a * b; }                                                               \
    inline TYPE __hdiv(TYPE a, TYPE b) { return a / b; }                                                               \
    inline TYPE __hneg(TYPE a) { return -a; }                                                                          \
    inline TYPE __habs(TYPE a) { return RAW{static_cast<unsigned short>(a.__x & 0x7fff)}; }                            \
    inline TYPE __hfma(TYPE a, TYPE b, TYPE c) { return emulated::to_odd(double(float(a)) * float(b) + float(c)); }    \
    inline bool __hisnan(TYPE a) { return std::isnan(float(a)); }                                                      \
    inline int __hisinf(TYPE a) { return std::isinf(float(a)) ? (float(a) > 0 ? 1 : -1) : 0; }                         \
    inline bool __heq(TYPE a, TYPE b) { return a == b; }                                                               \
    inline bool __hne(TYPE a, TYPE b) { return a != b; }                                                               \
    inline bool __hlt(TYPE a, TYPE b) { return a < b; }                                                                \
    inline bool __hle(TYPE a, TYPE b) { return a <= b; }                                                               \
    inline bool __hgt(TYPE a, TYPE b) { return a > b; }                                                                \
    inline bool __hge(TYPE a, TYPE b) { return a >= b; }                                                               \
    inline TYPE __hmax(TYPE a, TYPE b) { return std::fmax(float(a), float(b)); }                                       \
    inline TYPE __hmin(TYPE a, TYPE b) { return std::fmin(float(a), float(b)); }                                       \
    inline TYPE __hmax_nan(TYPE a, TYPE b) { return __hisnan(a) || __hisnan(b) ? TYPE(NAN) : __hmax(a, b); }           \
    inline TYPE __hmin_nan(TYPE a, TYPE b) { return __hisnan(a) || __hisnan(b) ? TYPE(NAN) : __hmin(a, b); }           \
    inline TYPE hsqrt(TYPE a) { return std::sqrt(float(a)); }                                                          \
    inline TYPE hrsqrt(TYPE a) { return rsqrtf(float(a)); }                                                            \
    inline TYPE hrcp(TYPE a) { return 1.0f / float(a); }                                                               \
    inline TYPE hexp(TYPE a) { return std::exp(float(a)); }                                                            \
    inline TYPE hexp2(TYPE a) { return std::exp2(float(a)); }                                                          \
    inline TYPE hlog(TYPE a) { return std::log(float(a)); }                                                            \
    inline TYPE hlog2(TYPE a) { return std::log2(float(a)); }                                                          \
    inline TYPE hsin(TYPE a) { return std::sin(float(a)); }                                                            \
    inline TYPE hcos(TYPE a) { return std::cos(float(a)); }                                                            \
    inline TYPE htanh(TYPE a) { return std::tanh(float(a)); }                                                          \
    inline TYPE hceil(TYPE a) { return std::ceil(float(a)); }                                                          \
    inline TYPE hfloor(TYPE a) { return std::floor(float(a)); }                                                        \
    inline TYPE hrint(TYPE a) { return std::nearbyint(float(a)); }                                                     \
    inline TYPE htrunc(TYPE a) { return std::trunc(float(a)); }                                                        \
    struct alignas(4) TYPE##2 {                                                                                        \
        TYPE x, y;                                                                                                     \
        TYPE##2() = default;                                                                                           \
        TYPE##2(TYPE x, TYPE y) : x(x), y(y) {}                                                                        \
    };                                                                                                                 \
    inline TYPE##2 __halves2##TYPE##2(TYPE x, TYPE y) { return {x, y}; }                                               \
    inline TYPE##2 __hadd2(TYPE##2 a, TYPE##2 b) { return {a.x + b.x, a.y + b.y}; }                                    \
    inline TYPE##2 __hsub2(TYPE##2 a, TYPE##2 b) { return {a.x - b.x, a.y - b.y}; }                                    \
    inline TYPE##2 __hmul2(TYPE##2 a, TYPE##2 b) { return {a.x * b.x, a.y * b.y}; }                                    \
    inline TYPE##2 __h2div(TYPE##2 a, TYPE##2 b) { return {a.x / b.x, a.y / b.y}; }                                    \
    inline TYPE##2 __hneg2(TYPE##2 a) { return {-a.x, -a.y}; }                                                         \
    inline TYPE##2 __habs2(TYPE##2 a) { return {__habs(a.x), __habs(a.y)}; }                                           \
    inline TYPE##2 __hmax2(TYPE##2 a, TYPE##2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                      \
    inline TYPE##2 __hmin2(TYPE##2 a, TYPE##2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                      \
    inline TYPE##2 __hfma2(TYPE##2 a, TYPE##2 b, TYPE##2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    inline TYPE##2 operator+(TYPE##2 a, TYPE##2 b) { return __hadd2(a, b); }                                           \
    inline TYPE##2 operator-(TYPE##2 a, TYPE##2 b) { return __hsub2(a, b); }                                           \
    inline TYPE##2 operator*(TYPE##2 a, TYPE##2 b) { return __hmul2(a, b); }                                           \
    EMULATED_HALF_LANES(TYPE)                                                                                          \
    EMULATED_HALF_LANES(TYPE##2)                                                                                       \
    inline TYPE atomicAdd(TYPE *address, TYPE value) {                                                                 \
        TYPE old = *address;                                                                                           \
        *address = old + value;                                                                                        \
        return old;                                                                                                    \
    }                                                                                                                  \
    inline TYPE##2 atomicAdd(TYPE##2 * address, TYPE##2 value) {                                                       \
        TYPE##2 old = *address;                                                                                        \
        *address = __hadd2(old, value);                                                                                \
        return old;                                                                                                    \
    }                                                                                                                  \
    inline TYPE __ldg(const TYPE *address) { return *address; }

#define EMULATED_HALF_LANES(TYPE)                                                                                      \
    inline TYPE __shfl_sync(unsigned mask, TYPE value, int source, int width = 32) {                                   \
        return emulated::shuffle(mask, value, source, width);                                                          \
    }                                                                                                                  \
    inline TYPE __shfl_up_sync(unsigned mask, TYPE value, unsigned delta, int width = 32) {                            \
        return emulated::shuffle_up(mask, value, delta, width);                                                        \
    }                                                                                                                  \
    inline TYPE __shfl_down_sync(unsigned mask, TYPE value, unsigned delta, int width = 32) {                          \
        return emulated::shuffle_down(mask, value, delta, width);                                                      \
    }                                                                                                                  \
    inline TYPE __shfl_xor_sync(unsigned mask, TYPE value, int bits, int width = 32) {                                 \
        return emulated::shuffle_xor(mask, value, bits, width);                                                        \
    }
