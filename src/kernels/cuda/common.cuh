// What every kernel of candle-amp begins with. NVRTC compiles it without a single header, so that a
// machine with a driver alone will do: halves are their bits, converted here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(2) f16 { u16 bits; };
struct __align__(2) bf16 { u16 bits; };

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// Arithmetic is F32, of F64 tensors F64.
template <class T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };
template <class T> using Acc = typename Wide<T>::type;

DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }

DEVICE float widen(f16 x) {
#ifdef EMULATED_GPU
    return emulated_f16_to_f32(x.bits);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

DEVICE void narrow(float x, float &y) { y = x; }
DEVICE void narrow(double x, double &y) { y = x; }
DEVICE void narrow(double x, float &y) { y = (float)x; }
DEVICE void narrow(float x, double &y) { y = x; }

// To nearest, ties to even; what is too large is infinite; NaN stays NaN.
DEVICE void narrow(float x, f16 &y) {
#ifdef EMULATED_GPU
    y.bits = emulated_f32_to_f16(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}

DEVICE void narrow(float x, bf16 &y) {
    u32 bits = __float_as_uint(x);
    u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    y.bits = (u16)(x != x ? (bits >> 16) | 0x40 : rounded);
}

DEVICE void narrow(double x, f16 &y) { narrow((float)x, y); }
DEVICE void narrow(double x, bf16 &y) { narrow((float)x, y); }

template <class T, class A> DEVICE T as(A x) {
    T y;
    narrow(x, y);
    return y;
}

// 16 bytes of elements, one access. The address must be a multiple of 16.
template <class T> struct __align__(16) Pack {
    static constexpr int LEN = 16 / sizeof(T);
    T at[LEN];
};

template <class T> DEVICE Pack<T> load_pack(const T *from) {
    Pack<T> pack;
    *(uint4 *)&pack = *(const uint4 *)from;
    return pack;
}

template <class T> DEVICE void store_pack(T *to, const Pack<T> &pack) {
    *(uint4 *)to = *(const uint4 *)&pack;
}

DEVICE bool aligned(const void *p) { return ((size_t)p & 15) == 0; }

// The number of this thread and of all threads, of a grid in one dimension.
DEVICE size_t global_thread() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE size_t global_threads() { return (size_t)gridDim.x * blockDim.x; }

struct Sum {
    template <class A> static DEVICE A of(A a, A b) { return a + b; }
};

// NaN wins.
struct Max {
    template <class A> static DEVICE A of(A a, A b) { return a > b || a != a ? a : b; }
};

template <class Op, class A> DEVICE A warp_reduce(A x) {
    for (int offset = 16; offset > 0; offset /= 2) x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Over a block of whole warps, one dimension; all threads get the result, in the same order always.
// `none` is what changes no result.
template <class Op, class A> DEVICE A block_reduce(A x, A none) {
    __shared__ A parts[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_reduce<Op>(x);
    __syncthreads(); // whoever still reads the parts of the call before
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    x = lane < warps ? parts[lane] : none;
    return warp_reduce<Op>(x);
}
