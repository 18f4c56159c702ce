// Intrinsics: bits, conversions, and arithmetic that the compiler may not fuse or reorder.
#pragma once

// Of two arithmetic types, as CUDA's overloads do: the smaller by the common type.
template <class A, class B>
constexpr std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>, std::common_type_t<A, B>> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>, std::common_type_t<A, B>> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
std::enable_if_t<(std::is_floating_point_v<A> || std::is_floating_point_v<B>) && std::is_arithmetic_v<A> &&
                     std::is_arithmetic_v<B>,
                 std::common_type_t<A, B>>
min(A a, B b) {
    return std::fmin(std::common_type_t<A, B>(a), std::common_type_t<A, B>(b));
}
template <class A, class B>
std::enable_if_t<(std::is_floating_point_v<A> || std::is_floating_point_v<B>) && std::is_arithmetic_v<A> &&
                     std::is_arithmetic_v<B>,
                 std::common_type_t<A, B>>
max(A a, B b) {
    return std::fmax(std::common_type_t<A, B>(a), std::common_type_t<A, B>(b));
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
}
inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(x)) << 32 | __brev(x >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return ((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31)) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
inline int __mulhi(int a, int b) { return static_cast<long long>(a) * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }

namespace emulated {
template <class To, class From> To reinterpret(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace emulated
inline unsigned __float_as_uint(float x) { return emulated::reinterpret<unsigned>(x); }
inline int __float_as_int(float x) { return emulated::reinterpret<int>(x); }
inline float __uint_as_float(unsigned x) { return emulated::reinterpret<float>(x); }
inline float __int_as_float(int x) { return emulated::reinterpret<float>(x); }
inline long long __double_as_longlong(double x) { return emulated::reinterpret<long long>(x); }
inline double __longlong_as_double(long long x) { return emulated::reinterpret<double>(x); }
inline int __double2hiint(double x) { return __double_as_longlong(x) >> 32; }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline double __hiloint2double(int high, int low) {
    return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}

// To an integer as the GPU converts: what is too large becomes the largest, a NaN zero.
namespace emulated {
template <class To, class From> To saturate(From x) {
    if (std::isnan(x))
        return std::is_same_v<From, double> ? static_cast<To>(1ull << (sizeof(To) * 8 - 1)) : To(0);
    constexpr From limit = static_cast<From>(1ull << (sizeof(To) * 8 - 1)) * (std::is_signed_v<To> ? 1 : 2);
    if (x >= limit)
        return std::is_signed_v<To> ? static_cast<To>((1ull << (sizeof(To) * 8 - 1)) - 1) : To(-1);
    if (std::is_signed_v<To> ? x < -limit : x <= -1)
        return std::is_signed_v<To> ? static_cast<To>(1ull << (sizeof(To) * 8 - 1)) : To(0);
    return static_cast<To>(x);
}
} // namespace emulated
#define EMULATED_TO_INTEGER(FROM, NAME, TO)                                                                            \
    inline TO __##FROM##2##NAME##_rn(FROM x) { return emulated::saturate<TO>(std::nearbyint(x)); }                     \
    inline TO __##FROM##2##NAME##_rz(FROM x) { return emulated::saturate<TO>(std::trunc(x)); }                         \
    inline TO __##FROM##2##NAME##_ru(FROM x) { return emulated::saturate<TO>(std::ceil(x)); }                          \
    inline TO __##FROM##2##NAME##_rd(FROM x) { return emulated::saturate<TO>(std::floor(x)); }
EMULATED_TO_INTEGER(float, int, int)
EMULATED_TO_INTEGER(float, uint, unsigned)
EMULATED_TO_INTEGER(float, ll, long long)
EMULATED_TO_INTEGER(float, ull, unsigned long long)
EMULATED_TO_INTEGER(double, int, int)
EMULATED_TO_INTEGER(double, uint, unsigned)
EMULATED_TO_INTEGER(double, ll, long long)
EMULATED_TO_INTEGER(double, ull, unsigned long long)
#undef EMULATED_TO_INTEGER
inline float __int2float_rn(int x) { return x; }
inline float __uint2float_rn(unsigned x) { return x; }
inline float __ll2float_rn(long long x) { return x; }
inline float __ull2float_rn(unsigned long long x) { return x; }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return x; }
inline double __ull2double_rn(unsigned long long x) { return x; }
inline float __double2float_rn(double x) { return x; }
inline float __double2float_rz(double x) {
    float nearest = x;
    bool away = std::isfinite(x) && std::fabs(static_cast<double>(nearest)) > std::fabs(x);
    return away ? std::nextafterf(nearest, 0) : nearest;
}

// Not fused with what is around them, whatever the compiler may contract.
#define EMULATED_EXACT __attribute__((noinline, optimize("fp-contract=off")))
EMULATED_EXACT inline float __fadd_rn(float a, float b) { return a + b; }
EMULATED_EXACT inline float __fsub_rn(float a, float b) { return a - b; }
EMULATED_EXACT inline float __fmul_rn(float a, float b) { return a * b; }
EMULATED_EXACT inline double __dadd_rn(double a, double b) { return a + b; }
EMULATED_EXACT inline double __dsub_rn(double a, double b) { return a - b; }
EMULATED_EXACT inline double __dmul_rn(double a, double b) { return a * b; }
#undef EMULATED_EXACT
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __drcp_rn(double x) { return 1 / x; }

// The GPU's fast ones are less exact than these.
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline void __sincosf(float x, float *s, float *c) { *s = std::sin(x), *c = std::cos(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float rsqrtf(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float rcbrtf(float x) { return 1 / std::cbrt(x); }
inline float normcdff(float x) { return static_cast<float>(0.5 * std::erfc(-x * M_SQRT1_2)); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); }
inline float sinpif(float x) { return static_cast<float>(std::sin(M_PI * x)); }
inline float cospif(float x) { return static_cast<float>(std::cos(M_PI * x)); }
inline double sinpi(double x) { return std::sin(M_PI * x); }
inline double cospi(double x) { return std::cos(M_PI * x); }

template <class T> T __ldg(const T *address) { return *address; }
template <class T> T __ldcg(const T *address) { return *address; }
template <class T> T __ldca(const T *address) { return *address; }
template <class T> T __ldcs(const T *address) { return *address; }
template <class T> T __ldlu(const T *address) { return *address; }
template <class T> T __ldcv(const T *address) { return *address; }
template <class T> void __stcg(T *address, T value) { *address = value; }
template <class T> void __stcs(T *address, T value) { *address = value; }
template <class T> void __stwb(T *address, T value) { *address = value; }
template <class T> void __stwt(T *address, T value) { *address = value; }
