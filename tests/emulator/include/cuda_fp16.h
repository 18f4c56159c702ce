// The names of CUDA's header for 16-bit floats, as far as kernels here use them.
#pragma once
#include "emulated_halves.hpp"

EMULATED_HALF(__half, __half_raw, half_bits, half_value)

using half = __half;
using half2 = __half2;

inline float __half2float(__half a) { return a; }
inline __half __float2half(float a) { return a; }
inline __half __float2half_rn(float a) { return a; }
inline __half __double2half(double a) { return a; }
inline __half __int2half_rn(int a) { return a; }
inline int __half2int_rz(__half a) { return static_cast<int>(float(a)); }
inline unsigned short __half_as_ushort(__half a) { return a.__x; }
inline short __half_as_short(__half a) { return static_cast<short>(a.__x); }
inline __half __ushort_as_half(unsigned short x) { return __half_raw{x}; }
inline __half __short_as_half(short x) { return __half_raw{static_cast<unsigned short>(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }
inline __half2 __float2half2_rn(float a) { return {a, a}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }
inline float __low2float(__half2 a) { return a.x; }
inline float __high2float(__half2 a) { return a.y; }
inline __half __low2half(__half2 a) { return a.x; }
inline __half __high2half(__half2 a) { return a.y; }
