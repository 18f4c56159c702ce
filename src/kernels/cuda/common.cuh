// What every kernel of candle-amp begins with. NVRTC compiles it without a single header, so that a
// machine with a driver alone will do: 16-bit numbers are their bits, converted here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(2) f16 { u16 bits; };
struct __align__(2) bf16 { u16 bits; };

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#if __CUDA_ARCH__ >= 800
#define AMPERE // instructions that there are from compute capability 8.0 on
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER // instructions that there are with compute capability 9.0 alone
#endif

// Arithmetic is F32, of F64 tensors F64.
template <class T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };
template <class T> using Acc = typename Wide<T>::type;

DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }

DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

DEVICE void narrow(float x, float &y) { y = x; }
DEVICE void narrow(double x, double &y) { y = x; }
DEVICE void narrow(double x, float &y) { y = (float)x; }
DEVICE void narrow(float x, double &y) { y = x; }

// To nearest, ties to even; what is too large is infinite; NaN stays NaN.
DEVICE void narrow(float x, f16 &y) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}

DEVICE void narrow(float x, bf16 &y) {
#ifdef AMPERE
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    y.bits = (u16)(x != x ? (bits >> 16) | 0x40 : rounded);
#endif
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

// To global memory, in one access, which an assignment is not where the compiler shares a part of it with
// another branch.
DEVICE void store_at_once(uint4 *to, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

DEVICE void store_at_once(uint2 *to, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y)
                 : "memory");
}

template <class T> DEVICE void store_pack(T *to, const Pack<T> &pack) {
    store_at_once((uint4 *)to, *(const uint4 *)&pack);
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

// A module has the kernels of one dtype: compile.rs defines away those of the others. What has several
// dtypes belongs to the first that is not F32; what has none is everywhere.
#ifndef OF_F32
#define OF_F32(...) __VA_ARGS__
#endif
#ifndef OF_F16
#define OF_F16(...) __VA_ARGS__
#endif
#ifndef OF_BF16
#define OF_BF16(...) __VA_ARGS__
#endif
#ifndef OF_F64
#define OF_F64(...) __VA_ARGS__
#endif

#define EACH_FLOAT(X) OF_F32(X(f32, float)) OF_F16(X(f16, f16)) OF_BF16(X(bf16, bf16)) OF_F64(X(f64, double))
// A dtype with itself, and a 16-bit one with F32.
#define EACH_PAIR(X)                                                                               \
    OF_F32(X(f32, float, f32, float)) OF_F16(X(f16, f16, f16, f16) X(f16, f16, f32, float))        \
    OF_BF16(X(bf16, bf16, bf16, bf16) X(bf16, bf16, f32, float)) OF_F64(X(f64, double, f64, double))
#define EACH_TRIPLE(X)                                                                             \
    OF_F32(X(f32, float, f32, float, f32, float)) OF_F64(X(f64, double, f64, double, f64, double)) \
    OF_F16(HALF_TRIPLES(X, f16)) OF_BF16(HALF_TRIPLES(X, bf16))
#define HALF_TRIPLES(X, t)                                                                         \
    X(t, t, t, t, t, t) X(t, t, t, t, f32, float) X(t, t, f32, float, t, t) X(t, t, f32, float, f32, float)

// Of kernels whose blocks may have 512 threads: registers for all of them.
#define ROW_KERNEL extern "C" __global__ void __launch_bounds__(512)

// Elements a thread takes at a time: 16 bytes of the narrower type.
template <class T, class O = T> constexpr int PACK = 16 / (sizeof(T) < sizeof(O) ? sizeof(T) : sizeof(O));

template <int N> struct Width {
    static constexpr int value = N;
};

// N elements that follow each other, in as few accesses as there can be: the address is a multiple
// of their size, or of 16 where that is less. The other end is a local array.
template <int N, class T> DEVICE void load_run(T *to, const T *from) {
    constexpr int bytes = N * sizeof(T);
    if constexpr (bytes % 16 == 0) {
        for (int i = 0; i < bytes / 16; i++) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    } else if constexpr (bytes % 8 == 0) {
        for (int i = 0; i < bytes / 8; i++) ((uint2 *)to)[i] = ((const uint2 *)from)[i];
    } else {
        for (int i = 0; i < N; i++) to[i] = from[i];
    }
}

template <int N, class T> DEVICE void store_run(T *to, const T *from) {
    constexpr int bytes = N * sizeof(T);
    if constexpr (bytes % 16 == 0) {
        for (int i = 0; i < bytes / 16; i++) store_at_once((uint4 *)to + i, ((const uint4 *)from)[i]);
    } else if constexpr (bytes % 8 == 0) {
        for (int i = 0; i < bytes / 8; i++) store_at_once((uint2 *)to + i, ((const uint2 *)from)[i]);
    } else {
        for (int i = 0; i < N; i++) to[i] = from[i];
    }
}

template <int N, class T> DEVICE void read(const T *from, Acc<T> (&x)[N]) {
    __align__(16) T raw[N];
    load_run<N>(raw, from);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = widen(raw[i]);
}

template <int N, class T, class A> DEVICE void write(T *to, const A (&x)[N]) {
    __align__(16) T raw[N];
#pragma unroll
    for (int i = 0; i < N; i++) narrow(x[i], raw[i]);
    store_run<N>(to, raw);
}

// Elements before the first that is at a multiple of 16 bytes.
template <class T> DEVICE size_t lead_of(const T *x) { return (-(size_t)x & 15) / sizeof(T); }

// Calls f(first, Width<N>) for the share of one of `size` threads in `count` elements: V at a time
// where `packed`, after the first `lead`; one by one before that, at the end and elsewhere.
template <int V, class F>
DEVICE void along(size_t count, bool packed, size_t rank, size_t size, const F &f, size_t lead = 0) {
    size_t packs = packed && lead < count ? (count - lead) / V : 0;
    for (size_t i = rank; i < packs; i += size) f(lead + i * V, Width<V>());
    for (size_t i = rank; i < count - packs * V; i += size) f(i < lead ? i : i + packs * V, Width<1>());
}

// How many neighbouring threads share a row of so many packs: no more than a warp, and not many idle.
DEVICE int lanes_of(size_t packs) { return packs > 16 ? 32 : packs > 8 ? 16 : 8; }

// The columns of a thread, V from `column` on, and its rows: the lines of a block, which are its threads
// that have the same lane, take turns at the rows of its part.
template <int V> struct Columns {
    int lanes, lane, line, lines;
    size_t column, part;

    DEVICE Columns(size_t columns, size_t tiles)
        : lanes(lanes_of(columns / V)), lane(threadIdx.x % lanes), line(threadIdx.x / lanes),
          lines(blockDim.x / lanes), column((blockIdx.x % tiles * lanes + lane) * V),
          part(blockIdx.x / tiles) {}
};

// K sums of each column over the rows of a part, for a block of 256 threads. `terms(row, column, t)`
// sets t[K][V]. At most 64 rows are added up in the type of the arithmetic, and those in F64, into
// y (parts, K, columns).
template <int K, int V, class A, class F>
DEVICE void column_sums(double *y, size_t rows, size_t columns, size_t parts, size_t tiles, const F &terms) {
    __shared__ double sums[256 * V];
    Columns<V> of(columns, tiles);
    size_t each = (rows + parts - 1) / parts, end = (of.part + 1) * each < rows ? (of.part + 1) * each : rows;
    double total[K][V] = {};
    if (of.column < columns) {
        A sum[K][V] = {};
        int held = 0;
        for (size_t row = of.part * each + of.line; row < end; row += of.lines) {
            A t[K][V];
            terms(row, of.column, t);
#pragma unroll
            for (int j = 0; j < K * V; j++) sum[j / V][j % V] += t[j / V][j % V];
            if (++held == 64) {
#pragma unroll
                for (int j = 0; j < K * V; j++) total[j / V][j % V] += sum[j / V][j % V], sum[j / V][j % V] = 0;
                held = 0;
            }
        }
#pragma unroll
        for (int j = 0; j < K * V; j++) total[j / V][j % V] += sum[j / V][j % V];
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        __syncthreads(); // whoever still reads the sums before
#pragma unroll
        for (int v = 0; v < V; v++) sums[(of.line * V + v) * of.lanes + of.lane] = total[k][v];
        __syncthreads();
        for (int at = threadIdx.x; at < of.lanes * V; at += 256) {
            double sum = 0;
            for (int line = 0; line < of.lines; line++) sum += sums[line * V * of.lanes + at];
            size_t column = (blockIdx.x % tiles * of.lanes + at % of.lanes) * V + at / of.lanes;
            if (column < columns) y[(of.part * K + k) * columns + column] = sum;
        }
    }
}

// The threads that have a row together: a block, or a warp of it.
struct Team {
    size_t row, teams;
    int rank, size;

    DEVICE Team(int size)
        : row((size_t)blockIdx.x * (blockDim.x / size) + threadIdx.x / size),
          teams((size_t)gridDim.x * (blockDim.x / size)), rank(threadIdx.x % size), size(size) {}

    // What a thread read before it, another may write after it: shuffles alone order no memory.
    template <class Op, class A> DEVICE A reduce(A x, A none) const {
        if (size != 32) return block_reduce<Op>(x, none);
        __syncwarp();
        return warp_reduce<Op>(x);
    }
};

DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float root(float x) { return sqrtf(x); }
DEVICE double root(double x) { return sqrt(x); }
DEVICE float tangent(float x) { return tanhf(x); }
DEVICE double tangent(double x) { return tanh(x); }
template <class A> DEVICE A sigmoid(A x) { return A(1) / (A(1) + exponential(-x)); }

template <class A> DEVICE A infinity();
template <> DEVICE float infinity<float>() { return __uint_as_float(0x7f800000u); }
template <> DEVICE double infinity<double>() { return (double)__uint_as_float(0x7f800000u); }

// Where the element `index` of a view of four dimensions is; d1 to d3 are its inner ones.
struct Place {
    size_t i0, i1, i2, i3;

    DEVICE Place(size_t index, size_t d1, size_t d2, size_t d3) {
        if (index >> 32 || d1 >> 32 || d2 >> 32 || d3 >> 32) {
            i3 = index % d3, index /= d3, i2 = index % d2, index /= d2, i1 = index % d1, i0 = index / d1;
        } else { // the division that processors have
            u32 at = (u32)index;
            i3 = at % (u32)d3, at /= (u32)d3, i2 = at % (u32)d2, at /= (u32)d2, i1 = at % (u32)d1, i0 = at / (u32)d1;
        }
    }

    DEVICE size_t of(size_t s0, size_t s1, size_t s2, size_t s3) const {
        return i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3;
    }
};

// N elements along the last dimension of a view: neighbours, or one of them N times.
template <int N, class T> DEVICE void read_strided(const T *from, size_t stride, Acc<T> (&x)[N]) {
    if (N == 1 || stride == 1) {
        read(from, x);
    } else {
        Acc<T> same = widen(*from);
        for (int i = 0; i < N; i++) x[i] = same;
    }
}

// The largest of some elements, and the sum of exp(x - largest).
template <class A> struct LargestAndSum {
    A largest = -infinity<A>(), sum = A(0);

    template <int N> DEVICE void add(const A (&x)[N]) {
        A most = largest, part = A(0);
#pragma unroll
        for (int k = 0; k < N; k++) most = x[k] > most ? x[k] : most;
        // Of negative infinities alone, nothing is there to sum; NaN is not passed over.
        A from = most == -infinity<A>() ? A(0) : most;
#pragma unroll
        for (int k = 0; k < N; k++) part += exponential(x[k] - from);
        sum = (most == largest ? sum : sum * exponential(largest - most)) + part;
        largest = most;
    }

    // Over all threads of the team. A row of negative infinities, or with a positive one, has a sum
    // that is NaN, or becomes so as soon as it is used.
    DEVICE void join(const Team &team) {
        A most = team.reduce<Max>(largest, -infinity<A>());
        A share = largest == most ? sum : sum * exponential(largest - most);
        sum = team.reduce<Sum>(share, A(0));
        largest = most;
    }
};
