// CUDA's vectors, aligned as CUDA aligns them.
#pragma once

#define EMULATED_VECTOR(NAME, TYPE, ALIGN2, ALIGN4)                                                                    \
    struct NAME##1 { TYPE x; };                                                                                        \
    struct alignas(ALIGN2) NAME##2 { TYPE x, y; };                                                                     \
    EMULATED_VECTOR3(NAME, TYPE)                                                                                       \
    struct alignas(ALIGN4) NAME##4 { TYPE x, y, z, w; };                                                               \
    constexpr NAME##1 make_##NAME##1(TYPE x) { return {x}; }                                                           \
    constexpr NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                                                \
    constexpr NAME##3 make_##NAME##3(TYPE x, TYPE y, TYPE z) { return {x, y, z}; }                                     \
    constexpr NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }

#define EMULATED_VECTOR3(NAME, TYPE)                                                                                   \
    struct NAME##3 { TYPE x, y, z; };

EMULATED_VECTOR(char, signed char, 2, 4)
EMULATED_VECTOR(uchar, unsigned char, 2, 4)
EMULATED_VECTOR(short, short, 4, 8)
EMULATED_VECTOR(ushort, unsigned short, 4, 8)
EMULATED_VECTOR(int, int, 8, 16)
EMULATED_VECTOR(long, long, 16, 16)
EMULATED_VECTOR(ulong, unsigned long, 16, 16)
EMULATED_VECTOR(longlong, long long, 16, 16)
EMULATED_VECTOR(ulonglong, unsigned long long, 16, 16)
EMULATED_VECTOR(float, float, 8, 16)
EMULATED_VECTOR(double, double, 16, 16)

#undef EMULATED_VECTOR3
#define EMULATED_VECTOR3(NAME, TYPE) // uint3 is the indices' type
EMULATED_VECTOR(uint, unsigned, 8, 16)

#undef EMULATED_VECTOR3
#undef EMULATED_VECTOR
